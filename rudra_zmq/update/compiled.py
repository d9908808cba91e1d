"""The update as compiled code: every vector is read once and written once, at the speed of the memory.

Owns: the tables that the code of kernels_ir.py reads, and the threads. Must not know: how code is made (jit.py), where
gradients and weights live.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rudra_zmq.update import kernels_ir
from rudra_zmq.update.engine import F64, Setup
from rudra_zmq.update.jit import Module
from rudra_zmq.update.rules import (
    ENCODINGS,
    F32,
    NORM_BLOCK,
    RULES,
    Gradient,
    RuleSpec,
    Scalars,
    block_square_sums,
    constants,
)
from rudra_zmq.update.team import Team

MIN_PER_THREAD = 1 << 18
"""Below this many elements a thread costs more to wake than it saves."""

_P, _I = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "step": (_P, _P, _P, _P, _P, _I, _P, _I, _P, _P),
    "sum": (_P, _I, _P, _I, _I),
    "sum_squares": (_P, _I, _P, _I, _I, _P),
}
_TAGS = {np.dtype(name): tag for tag, name in enumerate(ENCODINGS)}


class _Share(NamedTuple):
    start: int
    stop: int
    spans: npt.NDArray[np.int64]  # rows (start, stop, kind)


@functools.cache
def _module(rule: str) -> Module:
    row = RULES[rule]
    return Module(kernels_ir.module_ir(rule, len(row.state), row.decoupled_decay), _FUNCTIONS)


class CompiledEngine:
    """See ``Engine``. jit.Unavailable where this host cannot compile."""

    def __init__(self, setup: Setup) -> None:
        self._module = _module(setup.spec.rule)
        self._n = setup.n
        self._state = setup.state
        self._pointers = [*(_address(vector) for vector in setup.state), 0, 0][:2]
        self._constants = np.array([getattr(constants(setup.spec), c) for c in kernels_ir.CONSTANTS], np.float32)
        self._scalars = np.zeros((len(setup.kinds), len(Scalars._fields)), np.float32)
        self._tables = (_address(self._scalars), _address(self._constants))
        self._wide = np.zeros(NORM_BLOCK if setup.clips else 0)
        blocks = -(-setup.n // NORM_BLOCK)
        parts = min(setup.threads, max(1, setup.n // MIN_PER_THREAD), blocks)
        cuts = [min(setup.n, blocks * i // parts * NORM_BLOCK) for i in range(parts + 1)]
        self._shares = [_Share(lo, hi, _spans(setup.spec, setup.kinds, lo, hi)) for lo, hi in pairwise(cuts)]
        self._team = Team(parts)

    @property
    def threads(self) -> int:
        """Threads in use, the caller's included."""
        return len(self._shares)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def sum(self, b: Sequence[np.float32], gradients: Sequence[Gradient], out: F32) -> None:
        """See ``Engine``. out may be any of the gradients."""
        rows, target, call = _rows(b, gradients), _address(out), self._module.functions["sum"]

        def part(share: _Share) -> bool:
            call(rows, len(b), target, share.start, share.stop)
            return True

        self._team.run(part, self._shares)

    def sum_squares(self, b: Sequence[np.float32], gradients: Sequence[Gradient], out: F32, squares: F64) -> None:
        """See ``Engine``. The last block, where it is not whole, is left to the reference."""
        rows, target, result = _rows(b, gradients), _address(out), _address(squares)
        call, call_sum = self._module.functions["sum_squares"], self._module.functions["sum"]

        def part(share: _Share) -> bool:
            whole = share.stop // NORM_BLOCK * NORM_BLOCK
            call(rows, len(b), target, share.start, whole, result)
            if whole < share.stop:
                call_sum(rows, len(b), target, whole, share.stop)
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
        self._scalars[:] = scalars
        rows, call = _rows(b, gradients), self._module.functions["step"]
        vectors = (_address(w_in), _address(w_out), *self._pointers, rows, len(b))

        def part(share: _Share) -> bool:
            return call(*vectors, _address(share.spans), len(share.spans), *self._tables) == 1

        return self._team.run(part, self._shares)


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def _rows(b: Sequence[np.float32], gradients: Sequence[Gradient]) -> bytes:
    """The table of gradients as kernels_ir.ROW has it."""
    return b"".join(
        struct.pack("=qif", _address(gradient), _TAGS[gradient.dtype], coefficient)
        for coefficient, gradient in zip(b, gradients, strict=True)
    )


def _spans(spec: RuleSpec, kinds: list[tuple[float, float]], start: int, stop: int) -> npt.NDArray[np.int64]:
    rows = [
        (max(g.start, start), min(g.stop, stop), kinds.index((g.lr_scale, g.weight_decay)))
        for g in spec.groups
        if g.start < stop and g.stop > start
    ]
    return np.array(rows, np.int64).reshape(-1, 3)
