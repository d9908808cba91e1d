"""Frames and messages: what goes in comes out, and nothing but WireError comes of what is no message."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.errors import NotFound, RudraError, from_wire
from rudra_zmq.wire import codec
from rudra_zmq.wire.codec import (
    CHUNK,
    MAX_CONTROL,
    MAX_HEADER,
    PREFIX,
    REASONS,
    WireError,
    clip,
    decode_control,
    decode_from_node,
    decode_to_node,
    encode_control,
    encode_data,
    error_message,
    error_of,
    refusal,
)
from rudra_zmq.wire.messages import control, data
from rudra_zmq.wire.messages.data import Chunk, Grant, Group, Hello, Mapped, Message, Push

PUSH = Push(
    rank=3, incarnation=1, seq=7, generation=1, key=99, groups=[Group(41, 1, 32, [(0, 64, 96)])], nbytes=400,
    loss=0.5, rates=[0.1, 0.2],
)  # fmt: skip
GRANT = Grant(ack=7, verdict="accepted", generation=1, timestamp=42, leases=[[(0, 96, 128)]], slot=1, key=100)
HELLO = Hello(role="learner", job="a1b2c3", token="secret", rank=3, incarnation=1)


def samples(union: Any) -> st.SearchStrategy[Message]:
    """Instances of every message of a union, within the limits."""
    return st.one_of(*(struct(cls) for cls in get_args(union)))


def struct(cls: type) -> st.SearchStrategy[Any]:
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    return st.builds(cls, **{field.name: of(field.type) for field in info.fields})


def of(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.IntType(ge=ge, le=le):
            return st.integers(ge, le)
        case msgspec.inspect.FloatType(ge=ge, le=le):
            return st.floats(ge, le, allow_nan=False)
        case msgspec.inspect.StrType(pattern=pattern) if pattern:
            return st.from_regex(pattern.replace("$", r"\Z"))
        case msgspec.inspect.StrType(max_length=most):
            return st.text(max_size=min(most or 0, 20))
        case msgspec.inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=min(most or 50, 50))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case msgspec.inspect.ListType(item_type=item, min_length=least):
            return st.lists(of(item), min_size=least or 0, max_size=3)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of(key), of(value), max_size=3)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(of, items))
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(of, types))
        case msgspec.inspect.StructType(cls=cls):
            return struct(cls)
    raise AssertionError(f"no strategy for {info}")


class TestRoundTrip:
    @given(samples(data.ToNode))
    def test_to_node(self, message: Message) -> None:
        payload = b"x" * 9 if isinstance(message, Chunk) else None
        assert decode_to_node(encode_data(message, payload)) == (message, payload)

    @given(samples(data.FromNode))
    def test_from_node(self, message: Message) -> None:
        payload = b"x" * 9 if isinstance(message, Chunk) else None
        assert decode_from_node(encode_data(message, payload)) == (message, payload)

    @given(struct(control.Envelope), samples(control.Control))
    def test_control(self, envelope: control.Envelope, message: Message) -> None:
        assert decode_control(encode_control(envelope, message)) == (envelope, message)

    def test_frames_may_be_views(self) -> None:
        frames = [memoryview(bytearray(frame)) for frame in encode_data(Chunk(key=1, offset=0), b"abc")]
        message, payload = decode_to_node(frames)
        assert message == Chunk(key=1, offset=0)
        assert payload is not None and bytes(payload) == b"abc"

    def test_a_newer_sender_may_have_more_fields(self) -> None:
        body = msgspec.msgpack.encode({"m": "mapped", "nonce": 4, "colour": "red"})
        assert decode_to_node([PREFIX + body]) == (Mapped(nonce=4), None)

    def test_a_payload_of_any_item_size_is_measured_in_bytes(self) -> None:
        doubles = memoryview(bytearray(CHUNK + 8)).cast("d")
        with pytest.raises(WireError, match="size"):
            encode_data(Chunk(key=1, offset=0), doubles)


class TestRefused:
    @pytest.mark.parametrize(
        ("frames", "reason"),
        [
            ([], "frames"),
            ([b""], "prefix"),
            ([b"R"], "prefix"),
            ([b"RZ"], "prefix"),
            ([b"GET / HTTP/1.1"], "prefix"),
            ([PREFIX], "malformed"),
            ([b"RZ\x02" + msgspec.msgpack.encode({"m": "ping"})], "version"),
            ([b"RZ\x00" + msgspec.msgpack.encode({"m": "ping"})], "version"),
            ([PREFIX + msgspec.msgpack.encode({"m": "ping"}) + b"\0"], "malformed"),
            ([PREFIX + msgspec.msgpack.encode({"m": "grant"})], "field"),
            ([PREFIX + msgspec.msgpack.encode({"step": 1})], "field"),
            ([PREFIX + msgspec.msgpack.encode({"m": "mapped", "nonce": -1})], "field"),
            ([PREFIX + msgspec.msgpack.encode({"m": "mapped", "nonce": 2**53 + 1})], "field"),
            ([PREFIX + msgspec.msgpack.encode({"m": "mapped", "nonce": 1.5})], "field"),
            ([PREFIX + msgspec.msgpack.encode([1, 2])], "field"),
            ([PREFIX + b"\x91" * 200_000], "field"),
            ([PREFIX + b"\x82\xa1m\xa4ping\xa1z" + b"\x91" * 200_000], "malformed"),
            ([PREFIX + b"\x82\xa1m\xa3log\xa7metrics\xdf\xff\xff\xff\xff"], "field"),
            ([PREFIX + b"\x81\xa1m\xa4\xff\xff\xff\xff"], "malformed"),
            ([PREFIX + msgspec.msgpack.encode({"m": "chunk", "key": 1, "offset": 0})], "frames"),
            ([PREFIX + msgspec.msgpack.encode({"m": "chunk", "key": 1, "offset": 0}), b""], "size"),
            ([PREFIX + msgspec.msgpack.encode({"m": "chunk", "key": 1, "offset": 0}), b"x", b"y"], "frames"),
            ([PREFIX + msgspec.msgpack.encode({"m": "chunk", "key": 1, "offset": 0}), bytes(CHUNK + 1)], "size"),
            ([PREFIX + msgspec.msgpack.encode({"m": "ping"}), b"x"], "frames"),
            ([PREFIX + bytes(MAX_HEADER)], "size"),
        ],
    )
    def test_data(self, frames: list[bytes], reason: str) -> None:
        with pytest.raises(WireError) as caught:
            decode_to_node(frames)
        assert caught.value.reason == reason

    @pytest.mark.parametrize(
        ("frames", "reason"),
        [
            ([PREFIX + msgspec.msgpack.encode(["", False])], "frames"),
            ([PREFIX + msgspec.msgpack.encode(["x" * 65, False]), msgspec.msgpack.encode({"m": "ok"})], "field"),
            ([PREFIX + msgspec.msgpack.encode([""]), msgspec.msgpack.encode({"m": "ok"})], "field"),
            ([PREFIX + msgspec.msgpack.encode(["", False]), msgspec.msgpack.encode({"m": "hello"})], "field"),
            ([PREFIX + msgspec.msgpack.encode(["", False]), b""], "malformed"),
            ([PREFIX + msgspec.msgpack.encode(["", False]), bytes(MAX_CONTROL + 1)], "size"),
            ([msgspec.msgpack.encode(["", False]), msgspec.msgpack.encode({"m": "ok"})], "prefix"),
        ],
    )
    def test_control(self, frames: list[bytes], reason: str) -> None:
        with pytest.raises(WireError) as caught:
            decode_control(frames)
        assert caught.value.reason == reason

    def test_each_side_refuses_what_only_the_other_may_say(self) -> None:
        with pytest.raises(WireError):
            decode_to_node(encode_data(GRANT))
        with pytest.raises(WireError):
            decode_from_node(encode_data(PUSH))

    def test_what_breaks_a_limit_is_not_sent(self) -> None:
        with pytest.raises(WireError, match="field"):
            encode_data(Mapped(nonce=-1))
        with pytest.raises(WireError, match="field"):
            encode_data(msgspec.structs.replace(PUSH, rates=[float("nan")]))
        with pytest.raises(WireError, match="field"):
            encode_control(control.Envelope("", False), control.Ok(text="x" * 4097))
        with pytest.raises(WireError, match="frames"):
            encode_data(PUSH, b"payload")
        with pytest.raises(WireError, match="size"):
            encode_data(Chunk(key=1, offset=0))

    def test_a_detail_is_one_printable_line(self) -> None:
        body = msgspec.msgpack.encode({"m": "\n\x1b[2J"})
        with pytest.raises(WireError) as caught:
            decode_to_node([PREFIX + body])
        assert str(caught.value).isprintable()


def only_wire_error(decode: Any, frames: list[bytes]) -> None:
    try:
        decode(frames)
    except WireError as error:
        assert error.reason in REASONS


class TestFuzz:
    """Whatever the bytes are: a message, or WireError with a known reason."""

    @given(st.lists(st.binary(max_size=300), max_size=4))
    def test_random(self, frames: list[bytes]) -> None:
        for decode in (decode_to_node, decode_from_node, decode_control):
            only_wire_error(decode, frames)
            only_wire_error(decode, [PREFIX + frame for frame in frames])

    @given(st.sampled_from([PUSH, GRANT, HELLO]), st.data())
    def test_truncated(self, message: Message, draw: st.DataObject) -> None:
        (frame,) = encode_data(message)
        cut = bytes(frame)[: draw.draw(st.integers(0, len(frame) - 1))]
        for decode in (decode_to_node, decode_from_node):
            with pytest.raises(WireError):
                decode([cut])

    @given(st.sampled_from([PUSH, GRANT, HELLO]), st.data())
    def test_a_flipped_bit(self, message: Message, draw: st.DataObject) -> None:
        (frame,) = encode_data(message)
        flipped = bytearray(frame)
        bit = draw.draw(st.integers(0, 8 * len(frame) - 1))
        flipped[bit // 8] ^= 1 << bit % 8
        for decode in (decode_to_node, decode_from_node):
            only_wire_error(decode, [bytes(flipped)])

    @given(samples(control.Control), st.data())
    def test_control_flipped_and_cut(self, message: Message, draw: st.DataObject) -> None:
        frames = [bytearray(f) for f in encode_control(control.Envelope("id", False), message)]
        which = frames[draw.draw(st.integers(0, 1))]
        bit = draw.draw(st.integers(0, 8 * len(which) - 1))
        which[bit // 8] ^= 1 << bit % 8
        only_wire_error(decode_control, [bytes(f) for f in frames])
        del which[draw.draw(st.integers(0, len(which) - 1)) :]
        with pytest.raises(WireError):
            decode_control([bytes(f) for f in frames])


class TestErrors:
    def test_an_error_crosses_both_planes(self) -> None:
        error = NotFound("no such job", where="a1b2c3", fix="see rudra jobs")
        for message in (error_message(error), refusal(error)):
            back = error_of(message)
            assert type(back) is NotFound
            assert str(back) == str(error)

    def test_the_longest_error_fits(self) -> None:
        error = RudraError("x" * 10_000, where="y" * 10_000, fix="z" * 10_000)
        encode_control(control.Envelope("1", True), error_message(error))
        encode_data(refusal(error))

    def test_a_code_of_a_newer_version(self) -> None:
        assert "quota" in str(error_of(control.Error(code="quota", message="too much")))
        assert type(from_wire("quota", "too much")) is RudraError

    def test_clip(self) -> None:
        assert clip("abc", 3) == "abc"
        assert clip("abcdef", 5) == "ab..."
        assert len(clip("x" * 5000)) == codec.MAX_TEXT


def test_every_message_is_of_one_plane() -> None:
    """Each message class is in a union, or it could be neither sent nor understood."""
    on_data, on_control = {*get_args(data.ToNode), *get_args(data.FromNode)}, set(get_args(control.Control))
    assert not on_data & on_control
    classes = {
        value
        for module in (data, control)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }
    assert classes == on_data | on_control
