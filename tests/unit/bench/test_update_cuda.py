"""`rudra bench update --device cuda` without a GPU: its rows, what it counts as traffic, what it refuses.

CuPy's stand-in runs the kernels on the CPU: its times mean nothing. The real twin is tests/gpu/test_device.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rudra_zmq.bench import update_cuda
from rudra_zmq.bench.__main__ import main
from rudra_zmq.bench.update_cuda import CudaCase, CudaRow, measure, torch_contenders
from rudra_zmq.errors import RudraError
from rudra_zmq.update.cuda import Device
from rudra_zmq.update.rules import RULES
from tests.cuda import fake_cupy

NAMES = {
    "what", "rule", "c", "size", "device", "backend", "encoding", "clip", "sent", "median_ms", "gb_per_s", "floor_ms",
    "against", "ratio",
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    if fake_cupy.COMPILER is None:
        pytest.skip("no g++ here, which makes the kernels into functions of the CPU")
    cupy = fake_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def test_rows_as_json(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--size", "40kB", "--rule", "sgd", "--rule", "adam", "--turns", "1", "--json"]
    assert main(["update", "--device", "cuda:0", *args]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["schema_version"] == 1
    assert [(row["c"], row["rule"]) for row in told["rows"]] == [(c, rule) for c in (1, 4) for rule in ("sgd", "adam")]
    for row in told["rows"]:
        assert set(row) == NAMES
        assert (row["device"], row["backend"], row["against"]) == ("cuda:0", "cuda", "device copy")
        moved = {"sgd": 0, "adam": 4}[row["rule"]] + 2 + row["c"]
        assert row["gb_per_s"] == pytest.approx(moved * row["size"] / row["median_ms"] / 1e6)
        assert row["floor_ms"] > 0 and row["ratio"] > 0
    assert "nothing is held against torch.optim" in err


@pytest.mark.parametrize("encoding", update_cuda.ENCODINGS)
@pytest.mark.parametrize("sent", update_cuda.SENT)
def test_every_encoding_up_and_down(encoding: str, sent: str, gpu: Any) -> None:
    case = CudaCase("momentum", 2, 40_960, encoding, encoding == "topk", sent)
    (row,) = measure(case, 1, Device(0))
    assert (row.encoding, row.sent, row.clip) == (encoding, sent, encoding == "topk")
    n = 10_240
    up = {"float32": 4 * n, "float16": 2 * n, "bfloat16": 2 * n, "int8": n + 40, "topk": 8 * 103}[encoding]
    down = {"float32": 0, "float16": 2 * n, "bfloat16": 2 * n, "int8": n + 40}[sent]
    assert case.traffic == 4 * 4 * n + 2 * up + down


def test_what_is_needed_of_the_device() -> None:
    """Versions, gradients, state, and a copy of the traffic; torch: gradients, two parameters with all that is theirs."""
    case = CudaCase("momentum", 4, 4000)
    ours = 2 + 4 + 1 + (2 + 2 + 4)
    assert case.device_bytes(False) == ours * 4000
    assert case.device_bytes(True) == (ours + 4 + 2 * (1 + 2)) * 4000


def test_torch_without_memory_is_one_line() -> None:
    torch = pytest.importorskip("torch")

    class Full(torch.optim.SGD):  # type: ignore[name-defined, misc]
        def step(self) -> None:  # type: ignore[override]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RudraError, match=r"^the GPU's memory is taken: torch"):
        patch.setattr(torch.optim, "SGD", Full)
        torch_contenders(torch, CudaCase("sgd", 1, 4096), "cpu")


def test_memory_is_looked_at_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.module(memory=(1_000_000, 8 << 30)))
    assert main(["update", "--device", "cuda", "--size", "25MB"]) == 1
    text = capsys.readouterr().err
    assert "the GPU's memory is taken: 0.15 GB are needed" in text and ". Fix: " in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (["--device", "gpu"], 2, "--device gpu is no device (bench update). Fix: give cpu, cuda or cuda:N"),
        (["--device", "cuda:"], 2, "--device cuda: is no device"),
        (["--device", "cuda", "--threads", "2"], 2, "--threads and --backend are of a CPU"),
        (["--device", "cuda", "--backend", "numpy"], 2, "--threads and --backend are of a CPU"),
        (["--encoding", "topk"], 2, "--encoding topk is timed on a GPU alone"),
        (["--sent", "int8"], 2, "--sent int8 is timed on a GPU alone"),
        (["--device", "cuda"], 1, "this Python has no CuPy, which works on a GPU (cuda:0). Fix: pip install"),
    ],
)
def test_refusals(
    args: list[str], status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["update", *args]) == status
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("c", [1, 3])
def test_what_torch_does_is_the_same_update(rule: str, c: int) -> None:
    """On the CPU: c gradients of ones are added and applied, in every way that this torch has."""
    torch = pytest.importorskip("torch")
    made = torch_contenders(torch, CudaCase(rule, c, 4096, "bfloat16"), "cpu")
    if rule == "rudra-adagrad":
        assert not made
        return
    assert "torch foreach" in made
    for work in made.values():
        parameter = _parameter(work)
        before = parameter.detach().clone()
        work()
        assert (parameter.detach() < before).all() and (parameter.grad == c).all()


def _parameter(work: Callable[[], object]) -> Any:
    names = work.__code__.co_freevars  # type: ignore[attr-defined]
    return work.__closure__[names.index("parameter")].cell_contents  # type: ignore[attr-defined]


def test_a_table_and_advice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        CudaRow("update", "momentum", 4, 289_000_000, "cuda:0", "cuda", "float32", False, "float32", 1.0, 2000.0, 0.8, against, ratio)
        for against, ratio in (("device copy", 0.8), ("torch fused", 1.7))
    ]  # fmt: skip
    monkeypatch.setattr(update_cuda, "measure", lambda case, turns, device: rows)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.module())
    assert main(["update", "--device", "cuda", "--quick", "--rule", "momentum", "--c", "4"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and out.startswith("RULE")
    assert "1 of 1 cases below 0.9 of what a copy on the device gives" in err
