"""The memory of a vector: where its parts lie, and what counts as finite."""

from __future__ import annotations

import numpy as np
import pytest

from rudra_zmq.node.vectors import Vector, finite
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, TensorSpec


def _layout(params: int, floats: int, ints: int) -> Layout:
    return Layout.of(
        Attach(
            params=[TensorSpec("w", [params], "float32")],
            float_buffers=[TensorSpec("f", [floats], "float32")] if floats else [],
            int_buffers=[TensorSpec("i", [ints], "int64")] if ints else [],
        )
    )


@pytest.mark.parametrize(("params", "floats", "ints"), [(3, 0, 0), (3, 2, 0), (3, 2, 2), (2, 0, 1), (300_000, 1, 1)])
def test_the_parts_lie_where_the_wire_puts_them(params: int, floats: int, ints: int) -> None:
    vector = Vector(_layout(params, floats, ints))
    vector.params[:] = 1.5
    vector.floats[:] = -2.0
    vector.ints[:] = 9
    raw = bytes(vector.data)
    reals = 4 * (params + floats)
    assert raw[:reals] == np.full(params, 1.5, "<f4").tobytes() + np.full(floats, -2.0, "<f4").tobytes()
    if ints:
        assert raw[-8 * ints :] == np.full(ints, 9, "<i8").tobytes()
    else:
        assert len(raw) == reals
    assert vector.finite()
    other = Vector(_layout(params, floats, ints))
    other.copy_from(vector)
    assert bytes(other.data) == raw


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 262_143, 262_144, 300_000])
def test_one_bad_element_anywhere(bad: float, at: int) -> None:
    vector = Vector(_layout(300_000, 1, 1))
    vector.reals[at] = bad
    assert not vector.finite()


def test_infinities_that_cancel_and_sums_that_overflow() -> None:
    assert not finite(np.array([np.inf, -np.inf, 1.0], np.float32))
    assert finite(np.full(1000, 3e38, np.float32))
