"""A CUDA device made ready: what it takes to have one, and kernels as functions. The one module that touches CuPy.

Owns: the line that says why there is no device, compiling for it, memory that is free. Must not know: what kernels do.
CuPy has no types, and is imported when a device is first asked for.

Kernels are compiled here with NVRTC, as CuPy's own binding offers it, and are handed to CuPy as finished code. CuPy's
way from the text adds ``-ftz=true`` at the end: subnormals would be flushed, and bits differ from those of a CPU. It
takes a few tenths of a second for each rule; nothing is kept on disk.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rudra_zmq.errors import RudraError, UsageError
from rudra_zmq.update.rules import NORM_BLOCK
from rudra_zmq.wire.compress import BLOCK

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Of NVRTC: each operation rounded once, none fused, subnormals kept."""

TILE = 4096
"""Elements that a block of threads does."""

THREADS = 256

Kernel = Callable[..., None]

Word: TypeAlias = np.int64
"""What kernels take: CuPy passes each argument by the width that it has."""

_HERE = Path(__file__).parent
_INSTALL = "pip install 'rudra-zmq[gpu]' ('rudra-zmq[gpu-cuda12]' for a driver of CUDA 12)"


def text_of(name: str, rule: str = "") -> tuple[str, tuple[str, ...]]:
    """The text of step.cu (for one rule) or codecs.cu, and the options that it is to be compiled with."""
    text = "\n".join((_HERE / part).read_text(encoding="utf-8") for part in ("rules.cuh", f"{name}.cu"))
    defines: dict[str, object] = {"NORM_BLOCK": NORM_BLOCK, "INT8_BLOCK": BLOCK, "TILE": TILE}
    if rule:
        defines["RULE"] = rule.replace("-", "_")
    return text, (*OPTIONS, *(f"-D{key}={value}" for key, value in defines.items()))


class Device:
    """A device that answers, current for the calling thread. RudraError, in one line, where there is none.

    ``xp`` is CuPy; ``name``: cuda:N. Work is queued on CuPy's current stream.
    """

    def __init__(self, index: int = 0) -> None:
        self.name = f"cuda:{index}"
        self.index = index
        self.xp = _cupy(self.name)
        self._check_present()
        with self.errors():
            self._device = self.xp.cuda.Device(index)
            self._device.use()
            self.free, self.total = self.xp.cuda.runtime.memGetInfo()  # the first call that needs the device itself
            self.capability = int(self._device.compute_capability)
        self._modules: dict[tuple[str, str], Mapping[str, Kernel]] = {}

    def _check_present(self) -> None:
        runtime = self.xp.cuda.runtime
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            count, why = 0, f": {error}"
        else:
            why = ""
        if not count:
            fix = "see that nvidia-smi shows a GPU, /dev/nvidia* is there and CUDA_VISIBLE_DEVICES does not hide it"
            text = f"CuPy {self.xp.__version__} finds no NVIDIA driver with a GPU{why}"
            raise RudraError(text, where=self.name, fix=fix)
        if not 0 <= self.index < count:
            raise UsageError(
                f"there is no {self.name}: CuPy sees {count} GPU{'s' if count > 1 else ''}", fix="name cuda:0"
            )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What CUDA refuses inside, as one line."""
        try:
            yield
        except self.xp.cuda.memory.OutOfMemoryError as error:
            raise RudraError(f"the GPU's memory is taken: {error}", where=self.name, fix=_WHO) from None
        except (self.xp.cuda.runtime.CUDARuntimeError, self.xp.cuda.driver.CUDADriverError) as error:
            code = str(error).strip()  # cudaErrorNoDevice and its like, with CUDA's words
            full = "MemoryAllocation" in code or "OUT_OF_MEMORY" in code
            text = "the GPU's memory is taken" if full else "the GPU cannot be used"
            text = "the GPU is busy" if "Unavailable" in code else text
            raise RudraError(f"{text}: {code}", where=self.name, fix=_WHO) from None

    def need(self, nbytes: int) -> None:
        """RudraError unless so many bytes are free now."""
        with self.errors():
            self.free, self.total = self.xp.cuda.runtime.memGetInfo()
        free = self.free + self.xp.get_default_memory_pool().free_bytes()
        if nbytes > free:
            sizes = f"{nbytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} of {self.total / 1e9:.2f} GB are free"
            raise RudraError(f"the GPU's memory is taken: {sizes}", where=self.name, fix=_WHO)

    def module(self, name: str, rule: str, kernels: Sequence[str]) -> Mapping[str, Kernel]:
        """Kernels by name, compiled once for this object. RudraError with the compiler's first words."""
        if (name, rule) not in self._modules:
            code, suffix = compiled(self.xp.cuda.nvrtc, *text_of(name, rule), name, self.capability)
            with tempfile.TemporaryDirectory(prefix="rudra-cuda-") as folder, self.errors():
                place = Path(folder) / f"{name}{suffix}"
                place.write_bytes(code)
                module = self.xp.RawModule(path=str(place))
                functions = {kernel: module.get_function(kernel) for kernel in kernels}
                for function in functions.values():
                    function.compile()  # loads it, and so the file may go
            self._modules[name, rule] = functions
        return self._modules[name, rule]

    def synchronize(self) -> None:
        """Wait for the current stream."""
        with self.errors():
            self.xp.cuda.get_current_stream().synchronize()


_WHO = "see with nvidia-smi who holds it, and its compute mode"


def _cupy(where: str) -> Any:
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise RudraError(f"CuPy cannot be imported: {error}", where=where, fix=_INSTALL) from None
        raise RudraError("this Python has no CuPy, which works on a GPU", where=where, fix=_INSTALL) from None
    except (ImportError, OSError) as error:
        raise RudraError(f"CuPy cannot be imported: {error}", where=where, fix=_INSTALL) from None


def compiled(nvrtc: Any, text: str, options: Sequence[str], name: str, capability: int) -> tuple[bytes, str]:
    """Code for devices of this capability (90: 9.0), and the suffix of its file.

    A device newer than the compiler gets code for the newest that it knows, which the driver translates.
    """
    known = sorted(int(arch) for arch in nvrtc.getSupportedArchs())
    if capability < known[0]:
        text = f"a GPU of compute capability {capability / 10} is older than NVRTC makes code for ({known[0] / 10})"
        raise RudraError(text, where="NVRTC", fix="install rudra-zmq[gpu-cuda12], or use a newer GPU")
    exact = capability in known
    arch = f"sm_{capability}" if exact else f"compute_{max(a for a in known if a < capability)}"
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-arch={arch}"))
        return (nvrtc.getCUBIN(program), ".cubin") if exact else (nvrtc.getPTX(program), ".ptx")
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RudraError(f"{name}.cu does not compile for {arch}: {error}: {log}", where="NVRTC") from None
    finally:
        nvrtc.destroyProgram(program)


def address(array: Any) -> Word:
    """Where an array of CuPy begins, or 0 for None: what kernels take. 8 bytes, as every argument of ours."""
    place: Word = np.int64(0 if array is None else array.data.ptr)
    return place
