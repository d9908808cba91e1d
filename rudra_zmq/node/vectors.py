"""The memory of one vector: a gradient, or a version of the weights, with its buffers behind it.

Owns: allocation (pages touched once, so that no update pays for it), the views of a vector's parts, their
encoding, and the check for NaN and infinity. Must not know: whose vector it is. The arithmetic of the parts is wire's,
what an encoding makes of the values is update's.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra_zmq.update import codecs
from rudra_zmq.update.codecs import BFLOAT16_INFINITY, FLOAT16_INFINITY, Quantised, Scratch, Sparse
from rudra_zmq.update.rules import Given
from rudra_zmq.wire.compress import Form
from rudra_zmq.wire.layout import Layout

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

_CHECK = 1 << 18  # elements per step of a check: 1 MiB stays in the cache


class _Reals(NamedTuple):
    """A part that may hold what is not finite: its first byte, its elements, and how to look at some of them."""

    at: int
    values: npt.NDArray[Any]
    finite: Callable[[Any], bool]


class Carrier(abc.ABC):
    """``data``: the bytes as they travel; ``floats``, ``ints``: the buffers; ``gradient``: the rest, for an update."""

    __slots__ = ("_reals", "data", "floats", "form", "gradient", "ints")

    def __init__(self, form: Form, memory: memoryview | None = None, *, touch: bool = True) -> None:
        """Zeros in memory of its own; or over ``memory`` as it is, of which the vector is the beginning.

        ``touch`` False: its pages come when they are first written, for a vector that may never be.
        """
        if memory is None:
            whole = np.zeros(form.nbytes, np.uint8)
            if touch:
                whole.fill(0)
        else:
            whole = np.frombuffer(memory, np.uint8, form.nbytes)
        layout = form.layout
        self.form = form
        self.data: memoryview = whole.data
        self.floats: F32 = _view(whole, form.floats_offset, layout.BF, np.float32)
        self.ints: I64 = _view(whole, form.ints_offset, layout.BI, np.int64)
        self.gradient: Given
        self._reals: tuple[_Reals, ...]

    def clear(self) -> None:
        """Zeros; every page is there afterwards."""
        np.frombuffer(self.data, np.uint8).fill(0)

    def finite(self) -> bool:
        """Whether no parameter and no floating buffer is NaN or infinite."""
        steps = ((part, at) for part in self._reals for at in range(0, part.values.size, _CHECK))
        return all(part.finite(part.values[at : at + _CHECK]) for part, at in steps)

    def finite_between(self, start: int, stop: int) -> bool:
        """The same for bytes [start, stop); an element that is cut by stop is left out, one cut by start is not."""
        for part in self._reals:
            low, high = ((max(0, byte - part.at)) // part.values.itemsize for byte in (start, stop))
            some = part.values[low:high]
            if some.size and not part.finite(some):
                return False
        return True

    def sound(self) -> bool:
        """Whether it can be decoded: whatever its values are, they have their places."""
        return True

    @abc.abstractmethod
    def decode(self, weights: Vector) -> None:
        """Parameters and buffers as float32 and int64."""


class Vector(Carrier):
    """Nothing is encoded. ``params``: the parameters; ``reals``: these and the floating buffers behind them."""

    __slots__ = ("params", "reals")

    def __init__(self, layout: Layout, memory: memoryview | None = None, *, touch: bool = True) -> None:
        super().__init__(Form.of(layout, "float32"), memory, touch=touch)
        self.reals: F32 = np.frombuffer(self.data, np.float32, layout.P + layout.BF)
        self.params: F32 = self.reals[: layout.P]
        self.gradient = self.params
        self._reals = (_Reals(0, self.reals, finite),)

    def copy_from(self, other: Vector) -> None:
        """All of another vector of the same layout."""
        self.data[:] = other.data

    def decode(self, weights: Vector) -> None:
        """See ``Carrier``."""
        weights.copy_from(self)


class Packed(Carrier):
    """The parameters are encoded, the buffers behind them are not."""

    __slots__ = ()

    def __init__(self, form: Form, memory: memoryview | None = None) -> None:
        super().__init__(form, memory)
        whole = np.frombuffer(self.data, np.uint8)
        P, count, values = form.layout.P, form.count, form.values_offset
        part: _Reals
        match form.codec:
            case "float16":
                self.gradient = _view(whole, 0, P, np.float16)
                part = _Reals(0, self.gradient.view(np.uint16), _finite_float16)
            case "bfloat16":
                self.gradient = _view(whole, 0, P, np.uint16)
                part = _Reals(0, self.gradient, _finite_bfloat16)
            case "int8":
                scales = _view(whole, 0, count, np.float32)
                self.gradient = Quantised(scales, _view(whole, values, P, np.int8))
                part = _Reals(0, scales, codecs.finite_scales)
            case _:
                found = _view(whole, values, count, np.float32)
                self.gradient = Sparse(_view(whole, 0, count, np.uint32), found, P)
                part = _Reals(values, found, finite)
        self._reals = (part, _Reals(form.floats_offset, self.floats, finite))

    def sound(self) -> bool:
        """See ``Carrier``."""
        return self.gradient.sound() if isinstance(self.gradient, Sparse) else True

    def encode(self, source: Vector, scratch: Scratch) -> bool:
        """All of a vector, with any encoding but topk; whether what came of it is finite."""
        g, x = self.gradient, source.params
        if isinstance(g, Quantised):
            good = codecs.encode_int8(x, g.scales, g.q, scratch)
        elif isinstance(g, Sparse):
            raise TypeError("topk takes a residual along")
        elif g.dtype == np.float16:
            good = codecs.encode_float16(x, g)
        else:
            good = codecs.encode_bfloat16(x, g, scratch)
        return self._buffers(source) and good

    def encode_largest(self, source: Vector, residual: F32, rest: F32) -> bool:
        """The same with topk: ``rest`` becomes the residual that is left; void where it is not finite."""
        assert isinstance(self.gradient, Sparse)
        good = codecs.encode_topk(source.params, residual, rest, self.gradient.indices, self.gradient.values)
        return self._buffers(source) and good

    def _buffers(self, source: Vector) -> bool:
        np.copyto(self.floats, source.floats)
        np.copyto(self.ints, source.ints)
        return finite(self.floats)

    def decode(self, weights: Vector) -> None:
        """See ``Carrier``."""
        codecs.decode_into(self.gradient, weights.params)
        np.copyto(weights.floats, self.floats)
        np.copyto(weights.ints, self.ints)


def carrier(form: Form, memory: memoryview | None = None) -> Vector | Packed:
    """Memory for vectors in this form."""
    return Vector(form.layout, memory) if form.codec == "float32" else Packed(form, memory)


def _view(whole: npt.NDArray[np.uint8], at: int, count: int, dtype: Any) -> npt.NDArray[Any]:
    return np.frombuffer(whole.data, dtype, count, at) if count else np.empty(0, dtype)


def finite(values: F32) -> bool:
    """Whether every element is finite. The squares of finite ones may overflow; only then each is looked at.

    A product with itself goes over memory twice as fast as a sum does, and keeps every NaN and infinity.
    """
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(values, values)) or np.isfinite(values).all())


def _finite_float16(values: npt.NDArray[np.uint16]) -> bool:
    return codecs.finite_halves(values, FLOAT16_INFINITY)


def _finite_bfloat16(values: npt.NDArray[np.uint16]) -> bool:
    return codecs.finite_halves(values, BFLOAT16_INFINITY)
