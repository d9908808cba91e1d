"""The parts of an encoded vector: where they lie, and that nothing overlaps."""

from __future__ import annotations

import doctest

import pytest

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
