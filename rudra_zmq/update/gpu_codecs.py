"""The encodings on a GPU: vectors of CuPy into and out of what travels, with the bits of codecs.py.

Owns: the order of kernels and their scratch. Must not know: rules, who sends what. Encoded vectors are the classes of
codecs.py with arrays of CuPy in them. What is queued runs on the current stream; a method that says whether all was
finite has waited for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rudra_zmq.update.codecs import Quantised, Sparse
from rudra_zmq.update.cuda import THREADS, TILE, Device, address
from rudra_zmq.wire.compress import BLOCK

KERNELS = (
    "encode_halves", "encode_int8", "decode_topk", "topk_add", "topk_count", "topk_pick", "topk_tiles", "topk_places",
    "topk_take",
)  # fmt: skip

MOST_BLOCKS = 1024
"""Blocks of threads that walk over a vector where each adds up something of its own."""

_FIRST_DIGIT, _DIGIT, _BINS = 11, 10, 2048
_HALVES = {"float16": 1, "uint16": 2}


class GpuCodecs:
    """Encoders of vectors of n float32 elements, contiguous. One caller at a time."""

    def __init__(self, device: Device, n: int) -> None:
        self.device = device
        self.n = n
        self._kernels = device.module("codecs", "", KERNELS)
        with device.errors():
            self._flag = device.xp.zeros(1, np.int32)
        self._topk: _TopkScratch | None = None

    def encode_halves(self, x: Any, out: Any) -> bool:
        """out, float16 or uint16 (bfloat16), shape (n,). Whether all of it is finite."""
        blocks = min(-(-self.n // THREADS), 8 * MOST_BLOCKS)
        args = (address(x), address(out), np.int64(self.n), np.int64(_HALVES[str(out.dtype)]), address(self._flag))
        return self._finite(lambda: self._kernels["encode_halves"]((blocks,), (THREADS,), args))

    def encode_int8(self, x: Any, out: Quantised) -> bool:
        """Scales and quotients. Whether every value that they can give is finite."""
        args = (address(x), address(out.scales), address(out.q), np.int64(self.n), address(self._flag))
        blocks = -(-self.n // BLOCK)
        return self._finite(lambda: self._kernels["encode_int8"]((blocks,), (THREADS,), args))

    def encode_topk(self, x: Any, residual: Any, rest: Any, out: Sparse) -> bool:
        """The k largest of x + residual; ``rest`` is the next residual. False, and all of it void, if not finite."""
        if self._topk is None:
            with self.device.errors():
                self._topk = _TopkScratch(self.device.xp, self.n)
        scratch, k = self._topk, self._kernels
        n, bins, search = np.int64(self.n), address(scratch.bins), address(scratch.search)
        above, equal = address(scratch.above), address(scratch.equal)
        walkers, tiles = min(scratch.tiles, MOST_BLOCKS), scratch.tiles
        one, block = (1,), (THREADS,)
        scratch.search.set(np.array([0, out.indices.size], np.uint32))

        def queue() -> None:
            added = (address(x), address(residual), address(rest), n, bins, address(self._flag))
            k["topk_add"]((walkers,), block, added)
            k["topk_pick"](one, block, (search, bins, np.int64(_FIRST_DIGIT)))
            for shift in (_DIGIT, 0):
                k["topk_count"]((walkers,), block, (address(rest), n, search, np.int64(shift), bins))
                k["topk_pick"](one, block, (search, bins, np.int64(_DIGIT)))
            k["topk_tiles"]((tiles,), block, (address(rest), n, search, above, equal))
            k["topk_places"](one, block, (above, equal, np.int64(tiles)))
            entries = (address(out.indices), address(out.values))
            k["topk_take"]((tiles,), block, (address(rest), n, search, above, equal, *entries))

        return self._finite(queue)

    def decode_topk(self, given: Sparse, out: Any) -> None:
        """All of out, shape (n,): zeros but for the entries."""
        k = given.indices.size
        args = (address(given.indices), address(given.values), np.int64(k), address(out), np.int64(self.n))
        with self.device.errors():
            out.fill(0)
            self._kernels["decode_topk"]((-(-k // THREADS),), (THREADS,), args)

    def _finite(self, queue: Any) -> bool:
        with self.device.errors():
            self._flag.fill(0)
            queue()
            return not int(self._flag.get()[0])


class _TopkScratch:
    """bins: how often a digit occurs; search: {prefix, wanted} of codecs.cu; above, equal: counts of each tile."""

    def __init__(self, xp: Any, n: int) -> None:
        self.tiles = -(-n // TILE)
        self.bins = xp.zeros(_BINS, np.uint32)
        self.search = xp.zeros(2, np.uint32)
        self.above = xp.zeros(self.tiles, np.uint32)
        self.equal = xp.zeros(self.tiles, np.uint32)
