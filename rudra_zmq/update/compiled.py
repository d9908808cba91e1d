"""The update as compiled code: every vector is read once and written once, at the speed of the memory.

Owns: the tables that the code of ir_step.py reads, and the threads. Must not know: how code is made (jit.py), where
gradients and weights live.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Sequence
from itertools import pairwise, starmap
from pathlib import Path

import numpy as np

from rudra_zmq.update import ir_step, ir_sum
from rudra_zmq.update.engine import F64, Setup
from rudra_zmq.update.jit import Module, Unavailable, address_of, converts_float16
from rudra_zmq.update.rules import (
    ENCODINGS,
    F32,
    NORM_BLOCK,
    Gradient,
    Scalars,
    block_square_sums,
    constants,
)
from rudra_zmq.update.team import Team

MIN_PER_THREAD = 1 << 20
"""Below this many elements a thread costs more to wake than it saves."""

PAST_CACHE = 0.75
"""Of the last cache: a pass over more memory than this writes the new weights past it, so that their lines need not be
fetched first. Below it they stay where the next pass finds them.
"""

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SUM = (_P, _I64, _I32, _P, _I64, _I64)
_FUNCTIONS = {
    "step": (_P, _I64, _I32, _P, _P, _P, _P, _P, _I64, _P, _P, _I32),
    "sum": _SUM,
    "sum_squares": (*_SUM, _P),
}
_ROW = struct.Struct("=qif")
_TAGS = {np.dtype(name): tag for tag, name in enumerate(ENCODINGS)}


class _Share:
    """What one thread does: elements [start, stop), and the groups in them as rows (start, stop, kind)."""

    def __init__(self, setup: Setup, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        rows = [
            (max(g.start, start), min(g.stop, stop), setup.kinds.index((g.lr_scale, g.weight_decay)))
            for g in setup.spec.groups
            if g.start < stop and g.stop > start
        ]
        self._spans = np.array(rows, np.int64).reshape(-1, 3)
        self.spans = (address_of(self._spans), len(rows))


class _Code:
    """The functions of one rule, quickest for gradients in one encoding."""

    def __init__(self, rule: str, encoding: str) -> None:
        if not converts_float16():
            raise Unavailable("this processor does not convert float16")
        self._module = Module(ir_step.module_ir(rule, encoding), _FUNCTIONS)
        self.step, self.sum, self.sum_squares = (self._module.functions[name] for name in _FUNCTIONS)


@functools.cache
def _code(rule: str, encoding: str) -> _Code:
    return _Code(rule, encoding)


class _Terms:
    """b_k and gradients as code reads them: the code for them, and its arguments ir_sum.GRADIENTS."""

    def __init__(self, rule: str, b: Sequence[np.float32], gradients: Sequence[Gradient]) -> None:
        rows = [(address_of(g), _TAGS[g.dtype], b_k) for b_k, g in zip(b, gradients, strict=True)]
        tags = {tag for _, tag, _ in rows}
        self.code = _code(rule, ENCODINGS[tags.pop()] if len(tags) == 1 else "float32")
        plain = len(b) if len(b) in ir_sum.PLAIN and not tags else 0
        self.arguments = (b"".join(starmap(_ROW.pack, rows)), len(b), plain)


class CompiledEngine:
    """See ``Engine``. jit.Unavailable where this host cannot compile."""

    def __init__(self, setup: Setup) -> None:
        _code(setup.spec.rule, "float32")
        self._rule = setup.spec.rule
        self._state = setup.state
        self._pointers = [*(address_of(vector) for vector in setup.state), 0, 0][:2]
        self._constants = np.array([getattr(constants(setup.spec), c) for c in ir_step.CONSTANTS], np.float32)
        self._wide = np.zeros(NORM_BLOCK if setup.clips else 0)
        self._few = PAST_CACHE * _last_cache() - 4 * setup.n * (2 + len(setup.state))
        blocks = -(-setup.n // NORM_BLOCK)
        parts = min(setup.threads, max(1, setup.n // MIN_PER_THREAD), blocks)
        self._cuts = [min(setup.n, blocks * i // parts * NORM_BLOCK) for i in range(parts + 1)]
        self.regroup(setup)
        self._team = Team(parts)

    def regroup(self, setup: Setup) -> None:
        """See ``Engine``."""
        self._shares = [_Share(setup, lo, hi) for lo, hi in pairwise(self._cuts)]

    @property
    def threads(self) -> int:
        """Threads in use, the caller's included."""
        return len(self._shares)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def sum(self, b: Sequence[np.float32], gradients: Sequence[Gradient], out: F32) -> None:
        """See ``Engine``."""
        terms, target = _Terms(self._rule, b, gradients), address_of(out)

        def part(share: _Share) -> bool:
            return terms.code.sum(*terms.arguments, target, share.start, share.stop) == 0

        self._team.run(part, self._shares)

    def sum_squares(self, b: Sequence[np.float32], gradients: Sequence[Gradient], out: F32, squares: F64) -> None:
        """See ``Engine``. The squares of the last block, where it is not whole, are left to the reference."""
        terms, target, result = _Terms(self._rule, b, gradients), address_of(out), address_of(squares)

        def part(share: _Share) -> bool:
            whole = share.stop // NORM_BLOCK * NORM_BLOCK
            terms.code.sum_squares(*terms.arguments, target, share.start, whole, result)
            if whole < share.stop:
                terms.code.sum(*terms.arguments, target, whole, share.stop)
                with np.errstate(all="ignore"):
                    block_square_sums(out[whole:], squares[-1:], self._wide)
            return True

        self._team.run(part, self._shares)

    def apply(
        self,
        b: Sequence[np.float32],
        gradients: Sequence[Gradient],
        w_in: F32,
        w_out: F32,
        scalars: Sequence[Scalars],
    ) -> bool:
        """See ``Engine``. A sum that is not finite is noted, and told at the end."""
        terms = _Terms(self._rule, b, gradients)
        flat = [value for kind in scalars for value in kind]
        # Lines that this pass reads itself, as it does a clipped sum in w_out, are fetched anyway.
        past = gradients[0] is not w_out and sum(g.nbytes for g in gradients) > self._few
        before = (*terms.arguments, address_of(w_in), address_of(w_out), *self._pointers)
        after = (struct.pack(f"={len(flat)}f", *flat), address_of(self._constants), past)

        def part(share: _Share) -> bool:
            return terms.code.step(*before, *share.spans, *after) == 1

        return self._team.run(part, self._shares)


@functools.cache
def _last_cache() -> int:
    """Bytes of the last cache before memory; 32 MiB where the kernel does not say."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return sizes[0] if len(sizes) == 1 else max(sizes[1:])
