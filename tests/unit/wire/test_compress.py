"""The parts of an encoded vector: where they lie, and that nothing overlaps."""

from __future__ import annotations

import doctest
from fractions import Fraction

import pytest

from rudra_zmq.errors import Rejected
from rudra_zmq.wire import compress
from rudra_zmq.wire.compress import CODECS, Form
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, TensorSpec


def layout(params: int, floats: int, ints: int) -> Layout:
    return Layout.of(
        Attach(
            params=[TensorSpec("w", [params], "float32")],
            float_buffers=[TensorSpec("f", [floats], "float32")] if floats else [],
            int_buffers=[TensorSpec("i", [ints], "int64")] if ints else [],
        )
    )


@pytest.mark.parametrize("codec", [c for c in CODECS if c != "topk"])
@pytest.mark.parametrize("params", [1, 2, 3, 1023, 1024, 1025])
@pytest.mark.parametrize(("floats", "ints"), [(0, 0), (1, 0), (0, 1), (2, 3)])
def test_parts_are_aligned_and_apart(codec: str, params: int, floats: int, ints: int) -> None:
    form = Form.of(layout(params, floats, ints), codec)
    head = {
        "float32": 4 * params, "float16": 2 * params, "bfloat16": 2 * params, "int8": params + 4 * (-(-params // 1024)),
    }[codec]  # fmt: skip
    assert form.floats_offset % 4 == 0 and head <= form.floats_offset < head + 4
    assert form.ints_offset % 8 == 0
    assert form.floats_offset + 4 * floats <= form.ints_offset < form.floats_offset + 4 * floats + 8
    ends = [head, form.floats_offset + 4 * floats if floats else 0, form.ints_offset + 8 * ints if ints else 0]
    assert form.nbytes == max(ends)
    if codec == "float32":
        assert form.nbytes == form.layout.nbytes


def test_the_examples_of_the_page() -> None:
    assert doctest.testmod(compress).failed == 0


@pytest.mark.parametrize(
    ("share", "params", "count"),
    [("0.01", 100, 1), ("0.01", 101, 2), ("0.07", 100, 7), ("1", 5, 5), ("0.0001", 3, 1), ("0.29", 100, 29)],
)
def test_topk_counts_exactly(share: str, params: int, count: int) -> None:
    """ceil(0.07 * 100) in floating point would be 8."""
    form = Form.of(layout(params, 1, 1), "topk", Fraction(share))
    assert (form.count, form.values_offset, form.floats_offset) == (count, 4 * count, 8 * count)


def test_topk_of_more_than_it_can_name() -> None:
    with pytest.raises(Rejected, match="topk can name 4294967296"):
        Form.of(layout(2**32 + 1, 0, 0), "topk", Fraction(1, 100))
