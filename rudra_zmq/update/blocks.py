"""The update with NumPy alone: blocks that stay in the cache, one ufunc with `out=` after the other.

Owns: the blocks, the scratch, the threads over them. Must not know: where gradients and weights live. Multiply and add
are apart, nothing is fused, and no vector is allocated once the object exists. The sum is built in the output, block by
block, and becomes the new weights in place: that spares an accumulator and its share of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rudra_zmq.update.cpu_kernels import KERNELS
from rudra_zmq.update.engine import F64, Setup
from rudra_zmq.update.rules import F32, NORM_BLOCK, RULES, Gradient, RuleSpec, Scalars, block_square_sums, constants
from rudra_zmq.update.team import Team

BLOCK, BLOCK_OF_THREADS = 65536, 131072
"""Elements per block for one thread and for several. One: the few vectors of a block (256 KiB each) stay near
the core. Several: each operation passes the interpreter's lock around, which larger blocks make rarer.
"""

MIN_PER_THREAD = 1 << 19
"""Below this many elements a thread costs more to wake than it saves."""


class _Block(NamedTuple):
    start: int
    stop: int
    spans: tuple[tuple[int, int, int], ...]  # (from, to, index of the group's kind), relative to start


class _Share:
    """The blocks of one thread and what it needs: a block of float32, a mask for the check, a norm's float64."""

    def __init__(self, size: int, clips: bool) -> None:
        self.blocks: Sequence[_Block] = ()
        self.t = np.zeros(size, np.float32)
        self.mask = np.zeros(size, np.bool_)
        self.wide = np.zeros(NORM_BLOCK if clips else 0)


class NumpyEngine:
    """See ``Engine``. block: elements, a multiple of NORM_BLOCK, None to choose; results do not depend on it."""

    def __init__(self, setup: Setup, block: int | None = None) -> None:
        spec, n = setup.spec, setup.n
        self._rule = RULES[spec.rule]
        self._kernel = KERNELS[spec.rule]
        self._constants = constants(spec)
        self._state = setup.state
        parts = min(setup.threads, max(1, n // MIN_PER_THREAD))
        self._size = block or (BLOCK if parts == 1 else BLOCK_OF_THREADS)
        parts = min(parts, -(-n // self._size))
        self._shares = [_Share(min(self._size, n), setup.clips) for _ in range(parts)]
        self.regroup(setup)
        self._team = Team(parts)

    def regroup(self, setup: Setup) -> None:
        """See ``Engine``."""
        blocks = _cut(setup.spec, setup.n, self._size, setup.kinds)
        cuts = [len(blocks) * i // self.threads for i in range(self.threads + 1)]
        for share, (lo, hi) in zip(self._shares, pairwise(cuts), strict=True):
            share.blocks = blocks[lo:hi]

    @property
    def threads(self) -> int:
        """Threads in use, the caller's included."""
        return len(self._shares)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def sum(self, b: Sequence[np.float32], gradients: Sequence[Gradient], out: F32) -> None:
        """See ``Engine``."""

        def part(share: _Share) -> bool:
            with np.errstate(all="ignore"):
                for start, stop, _ in share.blocks:
                    _sum(b, gradients, out[start:stop], start, stop, share.t)
            return True

        self._team.run(part, self._shares)

    def sum_squares(self, b: Sequence[np.float32], gradients: Sequence[Gradient], out: F32, squares: F64) -> None:
        """See ``Engine``."""

        def part(share: _Share) -> bool:
            with np.errstate(all="ignore"):
                for start, stop, _ in share.blocks:
                    acc = out[start:stop]
                    _sum(b, gradients, acc, start, stop, share.t)
                    block_square_sums(acc, squares[start // NORM_BLOCK : -(-stop // NORM_BLOCK)], share.wide)
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
        """See ``Engine``. Each block is checked before its state is touched; a hit ends the share."""

        def part(share: _Share) -> bool:
            with np.errstate(all="ignore"):
                for start, stop, spans in share.blocks:
                    acc = w_out[start:stop]
                    _sum(b, gradients, acc, start, stop, share.t)
                    if not np.isfinite(acc, out=share.mask[: acc.size]).all():
                        return False
                    for lo, hi, kind in spans:
                        w, g, t = w_in[start + lo : start + hi], acc[lo:hi], share.t[: hi - lo]
                        self._span(slice(start + lo, start + hi), scalars[kind], w, g, t)
            return True

        return self._team.run(part, self._shares)

    def _span(self, span: slice, p: Scalars, w: F32, g: F32, t: F32) -> None:
        if p.decay and not self._rule.decoupled_decay:
            np.multiply(w, p.decay, out=t)
            np.add(g, t, out=g)
        self._kernel(self._constants, p, [vector[span] for vector in self._state], w, g, t)


def _cut(spec: RuleSpec, n: int, size: int, kinds: list[tuple[float, float]]) -> list[_Block]:
    blocks = []
    first = 0
    for start in range(0, n, size):
        stop = min(start + size, n)
        while spec.groups[first].stop <= start:
            first += 1
        spans = []
        for group in spec.groups[first:]:
            if group.start >= stop:
                break
            kind = kinds.index((group.lr_scale, group.weight_decay))
            spans.append((max(group.start, start) - start, min(group.stop, stop) - start, kind))
        blocks.append(_Block(start, stop, tuple(spans)))
    return blocks


def _sum(b: Sequence[np.float32], gradients: Sequence[Gradient], acc: F32, start: int, stop: int, scratch: F32) -> None:
    t = scratch[: acc.size]
    for k, (b_k, gradient) in enumerate(zip(b, gradients, strict=True)):
        out = t if k else acc
        np.multiply(_decoded(gradient[start:stop], out), b_k, out=out)
        if k:
            np.add(acc, t, out=acc)


def _decoded(part: Gradient, room: F32) -> Gradient:
    """``rules.decode`` without an allocation."""
    if part.dtype == np.float32:
        return part
    if part.dtype == np.uint16:
        np.left_shift(part, np.uint32(16), out=room.view(np.uint32))
    else:
        np.copyto(room, part)
    return room
