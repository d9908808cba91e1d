"""The memory of a vector: where its parts lie, and what counts as finite."""

from __future__ import annotations

import numpy as np
import pytest

from rudra_zmq.node.vectors import Packed, Vector, carrier, finite
from rudra_zmq.node.versions import Unsendable, Versions
from rudra_zmq.update.codecs import Scratch, to_float16
from rudra_zmq.update.rules import decode
from rudra_zmq.wire.compress import Form
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


# ---- encoded ones

CODED = ["float16", "bfloat16", "int8"]


def packed(codec: str, params: int = 300_000) -> Packed:
    return Packed(Form.of(_layout(params, 3, 2), codec))


def filled(params: int = 300_000) -> Vector:
    vector = Vector(_layout(params, 3, 2))
    vector.params[:] = np.random.default_rng(1).standard_normal(params, dtype=np.float32)
    vector.floats[:] = [1.0, 2.5, 1e-30]
    vector.ints[:] = [7, -(2**60)]
    return vector


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("params", [1, 1025, 300_000])
def test_what_is_encoded_comes_back_and_buffers_as_they_were(codec: str, params: int) -> None:
    vector, into, back = filled(params), packed(codec, params), filled(params)
    assert into.encode(vector, Scratch(params)) and into.finite() and into.sound()
    copied = Packed(into.form, memoryview(bytes(into.data)))  # as it is after a way
    back.clear()
    copied.decode(back)
    assert back.params.tobytes() == decode(into.gradient).tobytes()
    assert np.abs(back.params - vector.params).max() < 0.05
    assert back.floats.tobytes() == vector.floats.tobytes()
    assert back.ints.tobytes() == vector.ints.tobytes()


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 299_999, 300_001])
def test_one_bad_element_of_an_encoded_one(codec: str, bad: float, at: int) -> None:
    vector, into = filled(), packed(codec)
    vector.reals[at] = bad
    assert not into.encode(vector, Scratch(vector.params.size))
    assert not into.finite()
    chunk = 1 << 16
    pieces = [into.finite_between(a, min(a + chunk, into.form.nbytes)) for a in range(0, into.form.nbytes, chunk)]
    assert pieces.count(False) == 1


@pytest.mark.parametrize("codec", ["float32", *CODED])
def test_each_byte_is_looked_at_whatever_the_pieces(codec: str) -> None:
    """Pieces that cut elements: one that is cut is looked at once it is whole."""
    form = Form.of(_layout(9, 3, 2), codec)
    step = 3
    for at in range(12):
        vector = Vector(form.layout)
        vector.reals[at] = np.nan
        into = carrier(form)
        if isinstance(into, Packed):
            into.encode(vector, Scratch(9))
        else:
            into.copy_from(vector)
        whole = [into.finite_between(a, min(a + step, form.nbytes)) for a in range(0, form.nbytes, step)]
        assert not all(whole)
        assert into.finite_between(form.ints_offset, form.nbytes)


# ---- versions


def test_a_version_is_encoded_once_and_its_master_stays_float32() -> None:
    layout = _layout(100, 3, 2)
    versions = Versions(layout, 4, form=Form.of(layout, "float16"))
    first = filled(100)
    versions.begin().copy_from(first)
    versions.publish()
    sent = versions.hold("a", False)
    assert versions.current.data.tobytes() == first.data.tobytes()
    assert isinstance(sent, Packed) and versions.hold("b", False) is sent
    seen = bytes(sent.data)
    for k in range(5):
        new = versions.begin()
        assert new is not versions.current
        new.copy_from(first)
        new.params += k
        versions.publish()
        assert decode(versions.hold("b", False).gradient).tobytes() == decode(to_float16(first.params + k)).tobytes()
    assert bytes(sent.data) == seen  # a still reads it


def test_a_weight_that_cannot_be_sent_makes_no_version() -> None:
    layout = _layout(100, 3, 2)
    versions = Versions(layout, 4, form=Form.of(layout, "float16"))
    versions.begin()
    versions.publish()
    versions.begin().params[5] = 70000.0
    with pytest.raises(Unsendable):
        versions.publish()
    assert not versions.current.params.any()
    versions.begin().params[5] = np.nan  # is not told here: whoever looks for such weights does
    versions.publish()
