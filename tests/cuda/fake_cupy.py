"""As much of CuPy's surface as update/cuda.py and update/gpu*.py touch, on the CPU: no GPU is needed, and none is proved.

Arrays are NumPy's, "NVRTC" is g++ with shim.h, a kernel runs when it is launched. It stands in where there is no GPU;
the real twin of every test that uses it is in tests/gpu. What this has and CuPy lacks would be a fault here: it is kept
to the names that CuPy 14 documents.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-shared", "-fPIC", "-w")
ALIGNMENT = 512
MOST_ARGUMENTS = 16


class CUDARuntimeError(RuntimeError):
    """As CuPy's: the text begins with CUDA's name for it."""


class CUDADriverError(RuntimeError):
    """As CuPy's."""


class OutOfMemoryError(MemoryError):
    """As cupy.cuda.memory's."""


class NVRTCError(RuntimeError):
    """As cupy.cuda.nvrtc's."""


class Array:
    """cupy.ndarray: memory that the host cannot touch but through `get` and `set`."""

    def __init__(self, host: np.ndarray) -> None:
        self._host = host
        self.shape, self.dtype, self.size, self.nbytes = host.shape, host.dtype, host.size, host.nbytes
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous)
        self.data = SimpleNamespace(ptr=host.ctypes.data)

    def __len__(self) -> int:
        return len(self._host)

    def __getitem__(self, key: Any) -> Array:
        return Array(self._host[key])

    def fill(self, value: float) -> None:
        self._host.fill(value)

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            return self._host.copy()
        assert out.flags.c_contiguous and out.dtype == self.dtype and out.shape == self.shape
        np.copyto(out, self._host)
        return out

    def set(self, given: np.ndarray) -> None:
        assert given.flags.c_contiguous and given.dtype == self.dtype and given.shape == self.shape
        np.copyto(self._host, given)


def zeros(shape: Any, dtype: Any = np.float32) -> Array:
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = np.zeros(count * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return Array(raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape))


def asarray(given: np.ndarray) -> Array:
    array = zeros(given.shape, given.dtype)
    array.set(np.ascontiguousarray(given))
    return array


# ---- kernels


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="shim"))


@functools.cache
def build(text: str, options: tuple[str, ...]) -> Path:
    """The text as a shared object for this machine. NVRTCError with the compiler's words."""
    name = hashlib.sha256(repr((text, options)).encode()).hexdigest()[:16]
    source, made = _folder() / f"{name}.cc", _folder() / f"{name}.so"
    source.write_text(text)
    defines = [option for option in options if option.startswith("-D")]
    command = [COMPILER or "g++", *FLAGS, *defines, "-include", str(HERE / "shim.h"), str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise NVRTCError(done.stderr)
    return made


class Program:
    def __init__(self, text: str) -> None:
        self.text = text
        self.made = b""
        self.log = ""


def compile_program(program: Program, options: tuple[str, ...]) -> None:
    try:
        made = build(program.text, tuple(option for option in options if not option.startswith("-arch")))
    except NVRTCError as error:
        program.log = str(error)
        raise NVRTCError("NVRTC_ERROR_COMPILATION (6)") from None
    # dlopen knows a file by what it is: a copy would be loaded anew for every object that uses it
    counts = {name: args.count(",") + 1 for name, args in re.findall(r"__global__ void (\w+)\(([^)]*)\)", program.text)}
    program.made = repr((str(made), counts)).encode()


class RawModule:
    def __init__(self, *, path: str) -> None:
        place, self._counts = ast.literal_eval(Path(path).read_text())
        self._library = ctypes.CDLL(place)

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self._library, name, self._counts[name])


class RawKernel:
    def __init__(self, library: ctypes.CDLL, name: str, count: int) -> None:
        self._launch = library.launch
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p]
        self._function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        self._name, self._count = name, count
        self._ready = False

    def compile(self) -> None:
        self._ready = True

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[np.int64, ...]) -> None:
        assert self._ready and len(args) == self._count, self._name
        assert all(type(arg) is np.int64 for arg in args), "CuPy passes anything else by its own width"
        assert 0 < grid[0] < 2**31 and 0 < block[0] <= 1024
        words = np.zeros(MOST_ARGUMENTS, np.int64)
        words[: len(args)] = args
        status = self._launch(self._function, grid[0], block[0], words.ctypes.data)
        assert status == 0, f"{self._name}: threads of a block wait in different places"


# ---- the module


def module(
    devices: int = 1, memory: tuple[int, int] = (8 << 30, 8 << 30), count_error: str = "", use_error: str = ""
) -> Any:
    """cupy, on a host with so many devices; memory: (free, total) bytes; errors: what CUDA answers."""

    def get_device_count() -> int:
        if count_error:
            raise CUDARuntimeError(count_error)
        return devices

    def mem_get_info() -> tuple[int, int]:
        if use_error:
            raise CUDARuntimeError(use_error)
        return memory

    class Device:
        def __init__(self, index: int) -> None:
            self.compute_capability = "90"

        def use(self) -> None:
            pass

    stream = SimpleNamespace(synchronize=lambda: None)
    cupy: Any = ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    cupy.zeros, cupy.asarray, cupy.RawModule = zeros, asarray, RawModule
    cupy.copyto = lambda to, given: np.copyto(to._host, given._host)
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None)
    cupy.cuda = SimpleNamespace(
        Device=Device,
        get_current_stream=lambda: stream,
        driver=SimpleNamespace(CUDADriverError=CUDADriverError),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError, getDeviceCount=get_device_count, memGetInfo=mem_get_info
        ),
        nvrtc=SimpleNamespace(
            NVRTCError=NVRTCError,
            getSupportedArchs=lambda: (75, 80, 90, 100),
            createProgram=lambda text, name, headers, names: Program(text),
            compileProgram=compile_program,
            getCUBIN=lambda program: program.made,
            getPTX=lambda program: program.made,
            getProgramLog=lambda program: program.log,
            destroyProgram=lambda program: None,
        ),
    )
    return cupy
