"""The encodings of a vector as formulas: a NumPy reference that reads like them, and the same in one pass.

Owns: what an encoding makes of the values. Must not know: where encoded values lie, who sends them. Every back end
gives these bits.

float16, bfloat16   rounded to nearest, ties to even; subnormals are kept. What rounds past the largest finite value
                    becomes infinite, and an infinity is not finite in here either: such a gradient is refused.
int8                blocks of 1024: scale = fl(max|x| / 127), q = rint(fl(x / scale)) with ties to even, cut to
                    -127..127; x' = fl(q * scale). Where the scale is 0, so are q and x'. A block of which scale * 128
                    is not finite, which a value from 2^128 * 127/128 on makes it, is not finite.
topk                the k entries with the largest |x|, of equal ones those with the lower index, by rising index.
                    |x| is compared as it is: the encoder sees to it that all are finite.

Error feedback of topk: x = fl(gradient + residual) is what entries are taken from; the next residual is x with those
set to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rudra_zmq.wire.compress import BLOCK

F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I8 = npt.NDArray[np.int8]

STEP = 1 << 16
"""Elements at a time of what is encoded: they stay in the cache, and scratch is small. A multiple of BLOCK."""

LEVELS = np.float32(127)

SAMPLE = 1 << 15
"""Elements of the sample that tells topk where about to cut."""


# ---- the reference


def to_float16(x: F32) -> F16:
    """As the formula has it."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def to_bfloat16(x: F32) -> U16:
    """The upper halves of float32; a NaN stays one."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    halves: U16 = np.where(np.isnan(x), quiet, rounded).astype(np.uint16)
    return halves


def to_int8(x: F32) -> tuple[F32, I8]:
    """Scales and quotients. All of x is finite."""
    scales = np.zeros(-(-x.size // BLOCK), np.float32)
    q = np.zeros(x.size, np.int8)
    for i in range(scales.size):
        block = x[i * BLOCK : (i + 1) * BLOCK]
        scales[i] = np.abs(block).max() / LEVELS
        if scales[i] > 0:
            q[i * BLOCK : (i + 1) * BLOCK] = np.clip(np.rint(block / scales[i]), -LEVELS, LEVELS)
    return scales, q


def from_int8(scales: F32, q: I8) -> F32:
    """q * scale of its block."""
    x: F32 = q.astype(np.float32) * np.repeat(scales, BLOCK)[: q.size]
    return x


def largest(x: F32, k: int) -> U32:
    """Indices of the k entries with the largest magnitude, rising; of equal ones the lower index wins."""
    order = np.argsort(-np.abs(x), kind="stable")
    indices: U32 = np.sort(order[:k]).astype(np.uint32)
    return indices


# ---- the same without an allocation


class Scratch:
    """What encoders need besides their result; one for each thread that encodes vectors of n elements."""

    def __init__(self, n: int) -> None:
        n = min(n, STEP)
        self.a = np.zeros(n, np.float32)
        self.b = np.zeros(n, np.float32)


def encode_float16(x: F32, out: F16) -> bool:
    """Whether all of out is finite."""
    finite = True
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, x.size, STEP):
            part = out[at : at + STEP]
            np.copyto(part, x[at : at + STEP], casting="same_kind")
            finite = finite_halves(part.view(np.uint16), FLOAT16_INFINITY) and finite
    return finite


def encode_bfloat16(x: F32, out: U16, scratch: Scratch) -> bool:
    """Whether all of out is finite; what is not is NaN or infinite as it was, but for a NaN's payload."""
    finite = True
    bits = x.view(np.uint32)
    for at in range(0, x.size, STEP):
        part = bits[at : at + STEP]
        t = scratch.a.view(np.uint32)[: part.size]
        np.right_shift(part, np.uint32(16), out=t)
        np.bitwise_and(t, np.uint32(1), out=t)
        np.add(t, np.uint32(0x7FFF), out=t)
        np.add(t, part, out=t)
        np.right_shift(t, np.uint32(16), out=t)
        halves = out[at : at + STEP]
        np.copyto(halves, t, casting="same_kind")
        if not finite_halves(halves, BFLOAT16_INFINITY) or not _adds_up(x[at : at + STEP]):
            halves[:] = to_bfloat16(x[at : at + STEP])  # the sum above may have carried a NaN's payload over its sign
            finite = finite_halves(halves, BFLOAT16_INFINITY) and finite
    return finite


def decode_bfloat16(halves: U16, out: F32) -> None:
    """Exact."""
    for at in range(0, out.size, STEP):
        np.left_shift(halves[at : at + STEP], np.uint32(16), out=out[at : at + STEP].view(np.uint32))


def _adds_up(x: F32) -> bool:
    """False where an element is not finite, and rarely where all are."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.add.reduce(x)))


FLOAT16_INFINITY, BFLOAT16_INFINITY = 0x7C00, 0x7F80


def finite_halves(bits: U16, infinity: int) -> bool:
    """Whether no half is NaN or infinite: those are the largest patterns of either sign."""
    if not bits.size:
        return True
    return bool(bits.view(np.int16).max() < infinity and bits.max() < (infinity | 0x8000))


def encode_int8(x: F32, scales: F32, q: I8, scratch: Scratch) -> bool:
    """Whether all blocks are finite; those that are not have a scale that says so."""
    finite = True
    with np.errstate(all="ignore"):
        for at in range(0, x.size, STEP):
            part = x[at : at + STEP]
            s = scales[at // BLOCK : -(-(at + part.size) // BLOCK)]
            whole = part.size // BLOCK * BLOCK
            for lo, hi, first in ((0, whole, 0), (whole, part.size, whole // BLOCK)):
                if lo < hi:
                    _encode_blocks(part[lo:hi], s[first : -(-hi // BLOCK)], q[at + lo : at + hi], scratch)
            finite = finite_scales(s) and finite
    return finite


def _encode_blocks(x: F32, scales: F32, q: I8, scratch: Scratch) -> None:
    """Whole blocks, or one short one."""
    rows = x.reshape(scales.size, -1)
    t = scratch.a[: x.size].reshape(rows.shape)
    np.absolute(rows, out=t)
    np.maximum.reduce(t, axis=1, out=scales)
    np.divide(scales, LEVELS, out=scales)
    by = scratch.b[: scales.size]
    by.fill(np.inf)  # for a scale of 0: every quotient is 0
    np.copyto(by, scales, where=scales != 0)
    np.divide(rows, by[:, None], out=t)
    np.rint(t, out=t)
    np.minimum(t, LEVELS, out=t)
    np.maximum(t, -LEVELS, out=t)
    np.copyto(q.reshape(rows.shape), t, casting="unsafe")


def finite_scales(scales: F32) -> bool:
    """Whether every value that these scales can give is finite."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(scales * np.float32(128)).all())


def encode_topk(x: F32, residual: F32, rest: F32, indices: U32, values: F32) -> bool:
    """The largest of x + residual; ``rest`` becomes the next residual. False, and all of it void, if not finite."""
    with np.errstate(all="ignore"):
        for at in range(0, x.size, STEP):
            part = rest[at : at + STEP]
            np.add(x[at : at + STEP], residual[at : at + STEP], out=part)
            if not _adds_up(part) and not np.isfinite(part).all():
                return False
    found = select(rest, indices.size)
    indices[:] = found
    np.take(rest, found, out=values)
    rest[found] = 0.0
    return True


def select(x: F32, k: int) -> npt.NDArray[np.intp]:
    """``largest`` without a sort of everything: a sample says where the k-th may lie, and only those above are ranked.

    Magnitudes are compared as bits, which rise with them.
    """
    bits = x.view(np.uint32)
    stride = max(1, x.size // SAMPLE)
    sample = np.sort(bits[::stride] & np.uint32(0x7FFFFFFF))
    wanted = k * sample.size / x.size
    place = sample.size - 1 - int(wanted + 4 * wanted**0.5 + 8)
    floor = max(sample[place], np.uint32(1)) if place > 0 and stride > 1 else np.uint32(0)
    while True:
        candidates = _above(bits, floor)
        if candidates.size >= k or not floor:
            break
        floor = np.uint32(0)
    if candidates.size == k:
        return candidates
    found = bits[candidates] & np.uint32(0x7FFFFFFF)
    cut = np.partition(found, found.size - k)[found.size - k]
    chosen = found > cut
    equal = np.flatnonzero(found == cut)[: k - int(np.count_nonzero(chosen))]
    chosen[equal] = True
    result: npt.NDArray[np.intp] = candidates[chosen]
    return result


def _above(bits: U32, floor: np.uint32) -> npt.NDArray[np.intp]:
    """Where the magnitude is at least ``floor``."""
    if not floor:
        return np.arange(bits.size)
    parts = []
    for at in range(0, bits.size, STEP):
        hits = np.flatnonzero((bits[at : at + STEP] & np.uint32(0x7FFFFFFF)) >= floor)
        hits += at
        parts.append(hits)
    return np.concatenate(parts)


# ---- encoded vectors, as an update takes them


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """int8: float32 scales of shape (ceil(n/1024),), int8 of shape (n,)."""

    scales: F32
    q: I8

    @property
    def size(self) -> int:
        """n, elements of the decoded vector."""
        return self.q.size

    def decode(self, out: F32) -> None:
        """All of out, shape (n,)."""
        whole = out.size // BLOCK
        rows = self.q[: whole * BLOCK].reshape(whole, BLOCK)
        with np.errstate(all="ignore"):
            np.multiply(rows, self.scales[:whole, None], out=out[: whole * BLOCK].reshape(whole, BLOCK))
            if whole * BLOCK < out.size:
                np.multiply(self.q[whole * BLOCK :], self.scales[whole], out=out[whole * BLOCK :])


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """topk: uint32 indices and float32 values of shape (k,), of a vector of ``size`` elements."""

    indices: U32
    values: F32
    size: int

    def sound(self) -> bool:
        """Whether the indices rise and none is past the end."""
        rising = bool((self.indices[1:] > self.indices[:-1]).all())
        return rising and int(self.indices[-1]) < self.size

    def decode(self, out: F32) -> None:
        """All of out, shape (n,): zeros but for the entries. An index past the end names the last element."""
        out.fill(0.0)
        np.put(out, self.indices.astype(np.intp), self.values, mode="clip")


Coded: TypeAlias = Quantised | Sparse


def decode_into(given: npt.NDArray[Any] | Coded, out: F32) -> None:
    """A vector in any encoding as float32; exact, but for int8 (see above)."""
    if isinstance(given, (Quantised, Sparse)):
        given.decode(out)
    elif given.dtype == np.uint16:
        decode_bfloat16(given, out)
    else:
        np.copyto(out, given)


def arrays(given: npt.NDArray[Any] | Coded) -> tuple[npt.NDArray[Any], ...]:
    """What a vector consists of."""
    if isinstance(given, Quantised):
        return given.scales, given.q
    return (given.indices, given.values) if isinstance(given, Sparse) else (given,)
