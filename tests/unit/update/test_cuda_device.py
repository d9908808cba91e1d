"""A host without CuPy, without a driver, without that GPU, with one that is busy or full: one clear line each.

CuPy's stand-in gives the answers that CUDA gives (the first two were seen from CuPy 14 itself, on a host without a
driver); the real twins, on a host that has a GPU, are in tests/gpu/test_device.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rudra_zmq.errors import RudraError
from rudra_zmq.update.cuda import Device, compiled, text_of
from tests.cuda import fake_cupy

NO_DRIVER = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"


def refusal(monkeypatch: pytest.MonkeyPatch, cupy: Any, index: int = 0) -> str:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(RudraError) as raised:
        Device(index)
    text = str(raised.value)
    assert "\n" not in text and ". Fix: " in text
    return text


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(monkeypatch, None)
    assert text.startswith("this Python has no CuPy, which works on a GPU (cuda:0). Fix: pip install 'rudra-zmq[gpu]'")


def test_a_cupy_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(
        RudraError, match=r"^CuPy cannot be imported: libcudart.so.13: cannot open.* \(cuda:0\)\. Fix: pip"
    ):
        Device(0)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(monkeypatch, fake_cupy.module(count_error=NO_DRIVER))
    assert text.startswith(
        f"CuPy 14.2.0 finds no NVIDIA driver with a GPU: {NO_DRIVER} (cuda:0). Fix: see that nvidia-smi"
    )


@pytest.mark.parametrize("answer", [{"devices": 0}, {"count_error": "cudaErrorNoDevice: no CUDA-capable device"}])
def test_a_driver_without_a_device(answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(monkeypatch, fake_cupy.module(**answer))
    assert "finds no NVIDIA driver with a GPU" in text and "CUDA_VISIBLE_DEVICES" in text


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, fake_cupy.module(), 3) == "there is no cuda:3: CuPy sees 1 GPU. Fix: name cuda:0"


def test_a_device_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable"
    text = refusal(monkeypatch, fake_cupy.module(use_error=busy))
    assert text.startswith(f"the GPU is busy: {busy} (cuda:0). Fix: see with nvidia-smi who holds it")


def test_a_device_whose_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    full = "cudaErrorMemoryAllocation: out of memory"
    assert refusal(monkeypatch, fake_cupy.module(use_error=full)).startswith(
        f"the GPU's memory is taken: {full} (cuda:0)"
    )
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.module(memory=(1_500_000_000, 80_000_000_000)))
    device = Device(0)
    device.need(1_400_000_000)
    with pytest.raises(RudraError) as raised:
        device.need(2_000_000_000)
    assert str(raised.value).startswith(
        "the GPU's memory is taken: 2.00 GB are needed, 1.50 of 80.00 GB are free (cuda:0)"
    )


def test_memory_that_runs_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.module())
    with (
        pytest.raises(RudraError, match=r"^the GPU's memory is taken: Out of memory allocating 512 bytes \(cuda:0\)"),
        Device(0).errors(),
    ):
        raise fake_cupy.OutOfMemoryError("Out of memory allocating 512 bytes")
    with pytest.raises(RudraError, match=r"^the GPU cannot be used: cudaErrorLaunchFailure"), Device(0).errors():
        raise fake_cupy.CUDARuntimeError("cudaErrorLaunchFailure: unspecified launch failure")
    with pytest.raises(RudraError, match=r"^the GPU's memory is taken: CUDA_ERROR_OUT_OF_MEMORY"), Device(0).errors():
        raise fake_cupy.CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")


def test_the_stand_in_has_nothing_that_cupy_lacks() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not here to be held against its stand-in")

    def names(fake: Any, real: Any, path: str) -> Iterator[str]:
        for name in vars(fake):
            if not name.startswith("_"):
                yield from [] if hasattr(real, name) else [f"{path}.{name}"]
                if isinstance(getattr(fake, name), SimpleNamespace):
                    yield from names(getattr(fake, name), getattr(real, name), f"{path}.{name}")

    assert list(names(fake_cupy.module(), cupy, "cupy")) == []
    array = fake_cupy.zeros(3)
    for fake, real in ((array, cupy.ndarray), (fake_cupy.RawKernel, cupy.RawKernel), (fake_cupy.Array, cupy.ndarray)):
        assert [name for name in vars(fake) if not name.startswith("_") and not hasattr(real, name)] == []


class Nvrtc:
    """What `compiled` asks of CuPy's NVRTC, and what it was asked for."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self, fails: bool = False) -> None:
        self.options: tuple[str, ...] = ()
        self.alive = 0
        self.fails = fails

    def getSupportedArchs(self) -> tuple[int, ...]:
        return (75, 80, 90)

    def createProgram(self, *args: Any) -> int:
        self.alive += 1
        return 7

    def destroyProgram(self, program: int) -> None:
        self.alive -= 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.options = options
        if self.fails:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, program: int) -> str:
        return 'x.cu(1): error:\n identifier "b" is undefined'

    def getCUBIN(self, program: int) -> bytes:
        return b"cubin"

    def getPTX(self, program: int) -> bytes:
        return b"ptx"


def test_a_device_newer_than_the_compiler_gets_code_that_the_driver_translates() -> None:
    nvrtc = Nvrtc()
    text, options = text_of("codecs")
    assert compiled(nvrtc, text, options, "codecs", 90) == (b"cubin", ".cubin")
    assert nvrtc.options == (*options, "-arch=sm_90")
    assert compiled(nvrtc, text, options, "codecs", 120) == (b"ptx", ".ptx")
    assert nvrtc.options == (*options, "-arch=compute_90") and nvrtc.alive == 0


def test_a_device_older_than_the_compiler_is_refused() -> None:
    with pytest.raises(
        RudraError, match=r"^a GPU of compute capability 6\.1 is older than NVRTC makes code for \(7\.5\)"
    ):
        compiled(Nvrtc(), "", (), "codecs", 61)


def test_what_the_compiler_says_is_one_line() -> None:
    nvrtc = Nvrtc(fails=True)
    with pytest.raises(
        RudraError, match=r'^step.cu does not compile for sm_80: .*\(6\): x.cu\(1\): error: identifier "b"'
    ):
        compiled(nvrtc, "", (), "step", 80)
    assert nvrtc.alive == 0


def test_modules_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if fake_cupy.COMPILER is None:
        pytest.skip("no g++ here, which makes the kernels into functions of the CPU")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.module())
    device = Device(0)
    first = device.module("codecs", "", ["encode_int8"])
    assert device.module("codecs", "", ["encode_int8"]) is first
    with pytest.raises(RudraError, match=r"^step\.cu does not compile for sm_90"):
        device.module("step", "no-such-rule", ["step"])


def test_a_cpu_needs_no_cupy() -> None:
    """Neither the package, the node nor the update on a CPU imports it, where it is installed too."""
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import rudra_zmq, rudra_zmq.node.main, rudra_zmq.update.cpu, rudra_zmq.update.gpu, rudra_zmq.bench.__main__\n"
        "import numpy as np; from rudra_zmq.update.rules import GroupSpan, RuleSpec\n"
        "from rudra_zmq.update.cpu import CpuUpdate; CpuUpdate(RuleSpec.of('sgd', [GroupSpan(0, 4, 1.0, 0.0)]), 4)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_arguments_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float that a kernel was to get would be passed as a double; addresses and counts alone are."""
    for name in ("step", "codecs"):
        for line in text_of(name, "sgd")[0].split("__global__ void ")[1:]:
            for parameter in line[line.index("(") + 1 : line.index(")")].split(","):
                assert "*" in parameter or parameter.strip().startswith("long long "), parameter
    assert np.int64(0).nbytes == 8
