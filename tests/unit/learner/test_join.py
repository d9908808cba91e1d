"""Joining: alone, in a process that is no learner, and what a worker sees of a script."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

import rudra_zmq as rudra
from rudra_zmq.errors import RudraError, UsageError
from rudra_zmq.learner import join, workers
from tests.unit.learner.world import Numbered, data, net, train


def test_alone_the_arguments_are_the_job() -> None:
    with rudra.join(epochs=2, minibatch=16, seed=3) as learner:
        assert (learner.rank, learner.incarnation, learner.size, learner.is_chief, learner.seq) == (0, 1, 1, True, 0)
        assert learner.output == Path.cwd()
        model = learner.attach(net())
        learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert train(learner, model, data()) == 6
        assert learner.epoch == 1
    torch.manual_seed(3)
    first = net()
    with rudra.join(seed=3):
        again = net()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_the_public_names_are_those_of_the_package() -> None:
    assert rudra.Learner is join.Learner and rudra.join is join.join


def test_a_launcher_s_leftovers_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "3")
    with rudra.join() as learner:
        assert (learner.rank, learner.size) == (0, 1)


def test_a_file_of_the_job_that_is_not_there_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(join, "_has_joined", False)
    monkeypatch.setenv("RUDRA_LEARNER", "/nowhere/spec.json")
    with pytest.raises(SystemExit) as error, rudra.join():
        pass
    text = capsys.readouterr().err
    assert error.value.code == 2 and "/nowhere/spec.json" in text and "Fix: " in text and text.count("\n") == 1
    with pytest.raises(UsageError, match="joined its job already"), rudra.join():
        pass


def test_joining_in_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "in_worker", lambda: True)
    with pytest.raises(UsageError, match="__main__"), rudra.join():
        pass


SCRIPT = """
import rudra_zmq as rudra

class Mine:
    value = 7

with rudra.join() as learner:
    raise SystemExit("a worker went too far")
"""


def test_a_worker_reads_the_script_up_to_join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in ("__main__", workers.MAIN):
        monkeypatch.setitem(sys.modules, name, sys.modules["__main__"])
    monkeypatch.setattr(workers, "_read", False)
    workers.read_script(str(tmp_path / "train.py"), "")
    main = sys.modules["__main__"]
    assert main.Mine.value == 7 and main.__name__ == "__mp_main__" and sys.modules["__mp_main__"] is main
    assert not hasattr(main, "learner")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_the_script_travels_before_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(workers, "in_worker", lambda: True)
    monkeypatch.setattr(workers, "read_script", lambda path, package: read.append(path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/x/train.py", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    arrived = pickle.loads(pickle.dumps(workers.Carried(Numbered(5))))  # noqa: S301 (its own bytes)
    assert read == ["/x/train.py"] and arrived.value.samples == 5


@pytest.mark.parametrize(
    ("minibatch", "factor", "why"),
    [
        (8, float("nan"), "epoch 1 applied 0 samples and skipped 40"),
        (8, 1e30, "update 1 gave weights that are not finite"),
        (40, 1e30, "update 1 gave weights that are not finite"),  # no gradient follows that could be refused
    ],
)
def test_a_training_alone_that_came_to_nothing_is_no_success(minibatch: int, factor: float, why: str) -> None:
    def train_it() -> None:
        with rudra.join(minibatch=minibatch) as learner:
            model = learner.attach(net())
            learner.optimizer(torch.optim.SGD(model.parameters(), lr=1e30))
            for _ in learner.epochs():
                for x, _ in learner.batches(data()):
                    learner.step(model(x).sum() * factor)

    with pytest.raises(RudraError, match=why):
        train_it()
