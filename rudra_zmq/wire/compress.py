"""How the vectors of a layout lie in memory and travel under each encoding: sizes and places of their parts.

Owns the arithmetic of the encodings alone. Must not know NumPy, the values, or who encodes (update/codecs.py does).

    float32    [float32 * P]                              rest
    float16    [float16 * P]                              rest
    bfloat16   [upper halves of float32 * P]              rest
    int8       [float32 scale * ceil(P/1024)][int8 * P]   rest
    topk       [uint32 index * k][float32 value * k]      rest

The rest is never encoded: [pad to 4][float32 * BF][pad to 8][int64 * BI], the model's buffers.

    >>> from rudra_zmq.wire.messages.data import Attach, TensorSpec
    >>> w, n = TensorSpec("w", [1500], "float32"), TensorSpec("n", [], "int64")
    >>> layout = Layout.of(Attach(params=[w], int_buffers=[n]))
    >>> [Form.of(layout, codec).nbytes for codec in ("float32", "float16", "int8")]
    [6008, 3008, 1520]
    >>> form = Form.of(layout, "topk", Fraction("0.01"))
    >>> form.count, form.nbytes
    (15, 128)
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rudra_zmq.config.job import WireSection
from rudra_zmq.errors import Rejected
from rudra_zmq.wire.layout import Layout

CODECS = ("float32", "float16", "bfloat16", "int8", "topk")

BLOCK = 1024
"""Elements of int8 that share a scale; the last block of a vector may be shorter."""

MAX_INDEX = 1 << 32


@dataclass(frozen=True, slots=True)
class Form:
    """A layout under one encoding. ``count``: scales of int8, entries of topk, else 0; offsets and sizes in bytes."""

    layout: Layout
    codec: str
    count: int
    values_offset: int
    floats_offset: int
    ints_offset: int
    nbytes: int

    @classmethod
    def of(cls, layout: Layout, codec: str, fraction: Fraction = Fraction(1)) -> Form:
        """``fraction``: of the parameters, that topk sends. Rejected for a model that has more than it can index."""
        count = values = 0
        if codec == "int8":
            count = -(-layout.P // BLOCK)
            values = 4 * count
            head = values + layout.P
        elif codec == "topk":
            if layout.P > MAX_INDEX:
                text = f"the model has {layout.P} parameters, topk can name {MAX_INDEX}"
                raise Rejected(text, where="wire.compress", fix="use float16, bfloat16 or int8")
            count = most(fraction, layout.P)
            values = 4 * count
            head = 8 * count
        else:
            head = {"float32": 4, "float16": 2, "bfloat16": 2}[codec] * layout.P
        floats = (head + 3) // 4 * 4
        end = floats + 4 * layout.BF
        ints = (end + 7) // 8 * 8
        last = ints + 8 * layout.BI if layout.BI else end if layout.BF else head
        return cls(layout, codec, count, values, floats, ints, last)


def forms(wire: WireSection, layout: Layout) -> tuple[Form, Form]:
    """How gradients go up and weights down. Rejected for a model that an encoding cannot carry."""
    codec, fraction = wire.up
    return Form.of(layout, codec, fraction), Form.of(layout, wire.down)


def most(fraction: Fraction, elements: int) -> int:
    """Entries that topk keeps of so many elements: ceil(fraction * elements), exactly."""
    return min(elements, -(-fraction.numerator * elements // fraction.denominator))
