"""A message at the limits of its fields goes through the codec, or is refused with a reason that is counted."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rudra_zmq.wire.codec import (
    REASONS,
    WireError,
    decode_control,
    decode_from_node,
    decode_to_node,
    encode_control,
    encode_data,
)
from rudra_zmq.wire.messages import control, data
from rudra_zmq.wire.messages.data import Chunk
from tests.unit.wire.extremes import extreme


@pytest.mark.parametrize("cls", get_args(data.ToNode), ids=lambda cls: cls.__name__)
@settings(max_examples=20)
@given(st.data())
def test_to_node(cls: type, draw: st.DataObject) -> None:
    message = draw.draw(extreme(cls))
    try:
        frames = encode_data(message, b"x" if cls is Chunk else None)
    except WireError as error:
        assert error.reason in REASONS
        return
    assert repr(decode_to_node(frames)[0]) == repr(message)  # a NaN is not equal to itself


@pytest.mark.parametrize("cls", get_args(data.FromNode), ids=lambda cls: cls.__name__)
@settings(max_examples=20)
@given(st.data())
def test_from_node(cls: type, draw: st.DataObject) -> None:
    message = draw.draw(extreme(cls))
    assert repr(decode_from_node(encode_data(message, b"x" if cls is Chunk else None))[0]) == repr(message)


@pytest.mark.parametrize("cls", get_args(control.Control), ids=lambda cls: cls.__name__)
@settings(max_examples=20)
@given(st.data())
def test_control(cls: type, draw: st.DataObject) -> None:
    message = draw.draw(extreme(cls))
    envelope = draw.draw(extreme(control.Envelope))
    try:
        frames = encode_control(envelope, message)
    except WireError as error:
        assert error.reason in REASONS
        return
    assert repr(decode_control(frames)) == repr((envelope, message))
