"""A write to weights that can only be read: told as an error of the script, not as a bare SIGSEGV.

Owns: the handler of SIGSEGV, and which addresses are weights. Must not know: torch, why memory is mapped.

The process ends with the status of a failed learner, its last words are the parameter's name and the fix. A fault
anywhere else meets the handler that was there before. The handler is Python: a thread that faults while another one
keeps the interpreter waits for it, at worst until the node has found the learner silent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys

from rudra_zmq import log
from rudra_zmq.errors import EXIT_FAILED, RudraError
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout

LAST_WORDS_S = 5

_SA_SIGINFO = 4
_CODE, _ADDRESS = 8, 16  # bytes of a siginfo_t before si_code and si_addr, where pointers have 64 bits
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

_log = log.get()


class _Action(ctypes.Structure):
    """struct sigaction of Linux, where pointers have 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Guard:
    """Versions of one layout, mapped read-only; one guard in a process. ``close`` puts the old handler back."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int, Layout]] = []  # address, bytes, of one vector each
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._before = _Action()
        self._entry = _HANDLER(self._fault)
        self._installed = False

    def watch(self, versions: list[Vector], layout: Layout) -> None:
        """These vectors from here on, and no others."""
        self._places = [(vector.reals.ctypes.data, len(vector.data), layout) for vector in versions]
        if not self._installed:
            address = ctypes.cast(self._entry, ctypes.c_void_p).value
            self._set(_Action(handler=address, flags=_SA_SIGINFO), self._before)
            self._installed = True

    def close(self) -> None:
        """Watch nothing. A handler that somebody set meanwhile stays."""
        self._places = []
        if not self._installed:
            return
        now = _Action()
        self._libc.sigaction(int(signal.SIGSEGV), None, ctypes.byref(now))
        if now.handler == ctypes.cast(self._entry, ctypes.c_void_p).value:
            self._set(self._before, None)
            self._installed = False

    def _set(self, action: _Action, before: _Action | None) -> None:
        old = None if before is None else ctypes.byref(before)
        if self._libc.sigaction(int(signal.SIGSEGV), ctypes.byref(action), old) != 0:
            raise RudraError(f"sigaction: {os.strerror(ctypes.get_errno())}")

    def parameter(self, address: int) -> str | None:
        """The parameter, or what else of a version, that lies at an address; None where no version does."""
        for start, nbytes, layout in self._places:
            if start <= address < start + nbytes:
                at = (address - start) // 4
                found = (s.name for s in layout.params if s.start <= at < s.stop)
                return next((f"parameter {name}" for name in found), "a buffer of the servers")
        return None

    def _fault(self, number: int, info: int, context: int) -> None:
        code = ctypes.c_int.from_address(info + _CODE).value
        name = self.parameter(ctypes.c_size_t.from_address(info + _ADDRESS).value) if code > 0 else None
        if name is None:
            self._set(self._before, None)
            if code <= 0:  # kill(2): no instruction will be tried again
                os.kill(os.getpid(), number)
            return
        self._end(name)

    def _end(self, name: str) -> None:
        self._libc.sigaction(int(signal.SIGALRM), ctypes.byref(_Action()), None)
        signal.alarm(LAST_WORDS_S)
        error = written_in_place(name)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(2, all_threads=True)  # it may be a thread of torch that writes
        _log.error(str(error))
        with contextlib.suppress(OSError):
            os.write(2, f"rudra: {error}\n".encode())
        os._exit(EXIT_FAILED)


def written_in_place(name: str) -> RudraError:
    """What is said of it."""
    fix = (
        "clamp weights inside forward(), change them for an evaluation inside learner.frozen(); "
        'learners.weights = "copy" in the job file if they are as before when the step is made'
    )
    return RudraError(f"{name} was written in place: the weights are the servers' own, and shared", fix=fix)


guard = Guard()
"""Of this process. The handler is the process's, and must outlive whoever asked for it."""
