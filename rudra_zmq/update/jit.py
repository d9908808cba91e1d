"""Text for LLVM made into functions of this process. The one module that touches llvmlite, which has no types.

Owns: whether the host can do it, compiling for its processor, the lifetime of the code. Must not know: what the text
does. llvmlite is imported when it is first asked for; nothing is written to disk.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

Native = Callable[..., int]

_OLDEST = (0, 45)  # LLVM 20: pointers without a type


class Unavailable(Exception):
    """This host cannot compile; the text says why, in one line."""


class Module:
    """Compiled text. Its functions release the interpreter's lock, and work while the module lives."""

    def __init__(self, text: str, functions: Mapping[str, Sequence[Any]]) -> None:
        """``functions``: argument types (of ctypes) by name; each returns an int32. Unavailable where it cannot be."""
        binding = _binding()
        try:
            target = binding.Target.from_default_triple()
            module = binding.parse_assembly(text)
            module.verify()
            machine = target.create_target_machine(
                cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
            )
            self._engine = binding.create_mcjit_compiler(module, machine)
            self._engine.finalize_object()
        except RuntimeError as error:
            raise Unavailable(str(error).partition("\n")[0]) from None
        self.functions: dict[str, Native] = {
            name: ctypes.CFUNCTYPE(ctypes.c_int32, *arguments)(self._engine.get_function_address(name))
            for name, arguments in functions.items()
        }


def address_of(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array begins, for a function to work on; hold the array until it has returned."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except TypeError:  # read-only; NumPy's own way always works, and takes five times as long
        return int(array.ctypes.data)


@functools.cache
def _binding() -> Any:
    """llvmlite's binding, ready for this host; Unavailable."""
    try:
        llvmlite = importlib.import_module("llvmlite")
        binding = importlib.import_module("llvmlite.binding")
    except (ImportError, OSError) as error:
        raise Unavailable(f"llvmlite cannot be imported: {error}") from None
    version = tuple(int(part) for part in llvmlite.__version__.split(".")[:2])
    if version < _OLDEST:
        raise Unavailable(f"llvmlite {llvmlite.__version__} is older than {_OLDEST[0]}.{_OLDEST[1]}")
    if not _may_make_code():
        raise Unavailable("this process may not turn written memory into code")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


def converts_float16() -> bool:
    """Whether the processor converts float16 to float32: if not, LLVM calls a function that is not there."""
    return platform.machine() == "aarch64" or bool(_binding().get_host_cpu_features().get("f16c"))


def _may_make_code() -> bool:
    """Whether pages that were written may be executed: a service may be forbidden it, and LLVM then crashes."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        hold = ctypes.c_char.from_buffer(page)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        allowed: bool = protect(ctypes.addressof(hold), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0
        del hold
    return allowed
