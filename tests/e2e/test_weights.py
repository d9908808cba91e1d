"""learners.weights: the same bits whether weights are shared or copied; a write to shared ones fails the job at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from .harness import Rudra, job_file
from .test_hardsync import LAM, arguments, plain_loop, same, weights

CLAMPS = """
import torch
class task:
    batches = 0
    def model(self): return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    def dataset(self, split): return torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randint(0, 2, (256,)))
    def loss(self, model, batch):
        self.batches += 1
        if self.batches == 3:  # the first weights came in chunks
            model[2].weight.data.clamp_(-0.01, 0.01)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch): return {"correct": 0.0, "count": len(batch[0]), "loss_sum": 0.0}
"""


def said(done: dict[str, Any], words: str) -> int:
    """How many learners say so in their logs."""
    return sum(words in log.read_text() for log in (Path(done["folder"]) / "logs").glob("learner-*.log"))


@pytest.mark.parametrize(
    ("data", "asked", "used"), [("shm", "shared", "shared"), ("shm", "copy", "copy"), ("tcp", "shared", "chunks")]
)
def test_the_bits_are_those_of_the_plain_loop(rudra: Rudra, data: str, asked: str, used: str) -> None:
    rudra.env["RUDRA_PSD_DATA"] = data
    first, *rest = arguments(epochs=2)
    done = rudra(first, "-s", f"learners.weights={asked}", *rest).json
    same(weights(done), plain_loop(epochs=2))
    assert said(done, f"weights={used}") == (0 if used == "chunks" else LAM)
    assert said(done, "the weights are copied, not shared") == (LAM if used == "chunks" else 0)


def test_a_script_has_a_copy_unless_it_asks(rudra: Rudra) -> None:
    assert said(rudra(*arguments(epochs=1)).json, "weights=copy") == LAM


@pytest.mark.parametrize("kind", ["auto", "copy"])
def test_a_task_that_writes_to_its_weights_fails_at_once(rudra: Rudra, tmp_path: Path, kind: str) -> None:
    """Not after as many restarts as learners.restarts allows."""
    (tmp_path / "clamps.py").write_text(CLAMPS)
    text = f'[job]\ntask = "clamps:task"\n[learners]\ncount = 2\nweights = "{kind}"\n'
    result = rudra("run", job_file(tmp_path, text), status=8, cwd=tmp_path)
    words = "was changed outside the optimizer" if kind == "copy" else "was written in place"
    reason = [line for line in result.err.splitlines() if f"parameter 2.weight {words}" in line and "failed" in line]
    assert reason and "Fix: " in reason[-1] and "inside forward()" in reason[-1], result.err
    assert "it is started again" not in result.err and "SIGSEGV" not in result.err
