"""Hosts that cannot compile: NumPy takes over, and who insists is told why."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from rudra_zmq.update import compiled, jit
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.rules import GroupSpan, RuleSpec

SPEC = RuleSpec.of("sgd", [GroupSpan(0, 8, 1.0, 0.0)])


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process; what a test finds out is gone after it."""
    monkeypatch.setattr(jit, "_binding", jit._binding.__wrapped__)
    monkeypatch.setattr(compiled, "_code", compiled._code.__wrapped__)


def refused(reason: str) -> None:
    assert CpuUpdate(SPEC, 8).backend == "numpy"
    with pytest.raises(ValueError, match=rf"^no compiled update here: .*{reason}.*\. Fix: pip install") as caught:
        CpuUpdate(SPEC, 8, backend="compiled")
    assert "\n" not in str(caught.value)
    engine, out = CpuUpdate(SPEC, 8), np.empty(8, np.float32)
    engine.step(np.ones(8, np.float32), [(1.0, np.ones(8, np.float32))], None, 1.0, 1.0, 1.0, out)
    assert not out.any()


def test_without_llvmlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    refused("llvmlite cannot be imported")


def test_with_an_llvmlite_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    llvmlite = pytest.importorskip("llvmlite")
    monkeypatch.setattr(llvmlite, "__version__", "0.44.0")
    refused("llvmlite 0.44.0 is older than 0.45")


def test_where_memory_may_not_become_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(jit, "_may_make_code", lambda: False)
    refused("may not turn written memory into code")


def test_with_a_processor_that_does_not_convert_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    llvmlite = pytest.importorskip("llvmlite.binding")
    monkeypatch.setattr(jit.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(llvmlite, "get_host_cpu_features", lambda: {"sse2": True, "f16c": False})
    refused("does not convert float16")


def test_with_text_that_llvm_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(compiled.ir_step, "module_ir", lambda *_: "define nonsense\n")
    refused("LLVM IR parsing error")


def test_a_rule_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.undo()
    first, second = CpuUpdate(SPEC, 8), CpuUpdate(SPEC, 8)
    assert first.backend == "compiled"
    assert first.backend == second.backend == "compiled"
    assert compiled._code("sgd", "float32") is compiled._code("sgd", "float32")
