"""Frames <-> messages, bounds checked, for both planes.

Owns the protocol prefix, the number and size of frames and what is said about a frame that is none of ours.
Must not know sockets, sessions or NumPy. What is decoded here has the right type and lies within its limits;
whether the sender may say it is for the session to judge.

    data plane       frame 0 = prefix + message     frame 1 = raw payload, of a Chunk and of nothing else
    control plane    frame 0 = prefix + Envelope    frame 1 = message

    >>> from rudra_zmq.wire.messages.data import Chunk, Ping
    >>> frames = encode_data(Chunk(key=7, offset=0), b"abcd")
    >>> message, payload = decode_to_node(frames)
    >>> message.key, bytes(payload)
    (7, b'abcd')
    >>> try:
    ...     decode_to_node([b"GET / HTTP/1.1"])
    ... except WireError as error:
    ...     print(error.reason, "|", error)
    prefix | prefix: not a frame of rudra-zmq
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec

from rudra_zmq import __version__
from rudra_zmq.errors import Rejected, RudraError, from_wire, one_line
from rudra_zmq.wire.messages.control import Control, Envelope, Error
from rudra_zmq.wire.messages.data import Chunk, FromNode, Message, Refused, ToNode
from rudra_zmq.wire.seal import Buffer as Buffer
from rudra_zmq.wire.seal import SealedPayload

Frame: TypeAlias = Buffer | SealedPayload  # as it is received

MAGIC = b"RZ"
PROTOCOL = 1
ACCEPTED = frozenset(
    {PROTOCOL - 1, PROTOCOL} - {0}
)  # versions that this release understands: its own and the one before
PREFIX = MAGIC + bytes([PROTOCOL])

CHUNK = 1 << 20  # payload bytes of a Chunk, at most
MAX_HEADER = CHUNK + 65536  # a whole message of the data plane (a model's signature is the longest)
MAX_CONTROL = 1 << 20  # one frame of the control plane

REASONS = ("prefix", "version", "frames", "size", "malformed", "field")


class WireError(ValueError):
    """Frames that are no message; ``reason`` is one of REASONS, so that it can be counted. ``version``: that the other
    side speaks, where that is the reason."""

    def __init__(self, reason: str, detail: str, version: int = 0) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.version = version


_encoder = msgspec.msgpack.Encoder()
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_node = msgspec.msgpack.Decoder(FromNode)
_control = msgspec.msgpack.Decoder(Control)
_envelope = msgspec.msgpack.Decoder(Envelope)

_T = TypeVar("_T")


def _pack(message: Message | Envelope) -> bytes:
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:  # what a terminal or a file name gave that is no UTF-8
        field = next(name for name in message.__struct_fields__ if not _is_text(getattr(message, name)))
        raise WireError("field", f"not UTF-8: {one_line(error.object[:80])} - at `$.{field}`") from None


def _is_text(value: object) -> bool:
    try:
        _encoder.encode(value)
    except UnicodeEncodeError:
        return False
    return True


def _unpack(decoder: msgspec.msgpack.Decoder[_T], body: Buffer) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise WireError("field", one_line(str(error))) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("malformed", one_line(str(error))) from None


def _body(frame: Buffer, limit: int) -> memoryview:
    """What follows the prefix; the version is looked at before the rest, so that a newer peer is named."""
    if len(frame) > limit:
        raise WireError("size", f"frame of {len(frame)} bytes, limit {limit}")
    head = bytes(frame[:3])
    if head[:2] != MAGIC or len(head) < 3:
        raise WireError("prefix", "not a frame of rudra-zmq")
    if head[2] not in ACCEPTED:
        raise WireError("version", f"protocol {head[2]}, this side speaks {PROTOCOL}", head[2])
    return memoryview(frame)[3:]


def version_of(frames: Sequence[Buffer]) -> int:
    """The protocol version of a message that could be decoded."""
    return int(bytes(frames[0][2:3])[0])


def in_version(frames: Sequence[Buffer], version: int) -> list[Buffer]:
    """A message of ours as a peer of the version before ours takes it: what it does not know it leaves alone."""
    return [MAGIC + bytes([version]) + bytes(frames[0][3:]), *frames[1:]]


def other_version(version: int, where: str) -> Rejected:
    """The error for a side whose version is none of those that this one understands."""
    spoken = " and ".join(map(str, sorted(ACCEPTED)))
    return Rejected(
        f"wire versions differ: it speaks {version}, this side (rudra-zmq {__version__}) speaks {spoken}",
        where=where,
        fix="install releases of rudra-zmq on both that are at most one version apart, the head's first",
    )


def encode_data(message: Message, payload: Buffer | None = None) -> list[Buffer]:
    """Frames of a message of the data plane; ``payload`` goes with a Chunk and with nothing else.

    Raises WireError where the other side would have to refuse the result (a field out of its limits).
    """
    header = PREFIX + _pack(message)
    if isinstance(message, Chunk):
        if payload is None or not 0 < memoryview(payload).nbytes <= CHUNK:
            raise WireError("size", f"a chunk carries 1 to {CHUNK} bytes")
        return [header, payload]
    if payload is not None:
        raise WireError("frames", "only a chunk has a payload")
    if type(message) in _TO_NODE:
        decode_to_node([header])
    else:
        decode_from_node([header])
    return [header]


def _data_message(decoder: msgspec.msgpack.Decoder[_T], frames: Sequence[Frame]) -> tuple[_T, Frame | None]:
    if not 1 <= len(frames) <= 2:
        raise WireError("frames", f"{len(frames)} frames, not 1 or 2")
    head = frames[0]
    assert not isinstance(head, SealedPayload)
    message = _unpack(decoder, _body(head, MAX_HEADER))
    if isinstance(message, Chunk):
        if len(frames) != 2:
            raise WireError("frames", "a chunk without a payload")
        if not 0 < len(frames[1]) <= CHUNK:
            raise WireError("size", f"payload of {len(frames[1])} bytes, limit {CHUNK}")
        return message, frames[1]
    if len(frames) != 1:
        raise WireError("frames", "a payload that belongs to no chunk")
    return message, None


def decode_to_node(frames: Sequence[Frame]) -> tuple[ToNode, Frame | None]:
    """What a learner, a pulse or an evaluator sent (identity frame taken off). Raises WireError alone."""
    return _data_message(_to_node, frames)


def decode_from_node(frames: Sequence[Frame]) -> tuple[FromNode, Frame | None]:
    """What a node sent. Raises WireError alone."""
    return _data_message(_from_node, frames)


def encode_control(envelope: Envelope, message: Message) -> list[Buffer]:
    """Frames of a message of the control plane. Raises WireError as encode_data does."""
    frames: list[Buffer] = [PREFIX + _pack(envelope), _pack(message)]
    decode_control(frames)
    return frames


def decode_control(frames: Sequence[Buffer]) -> tuple[Envelope, Control]:
    """Envelope and message (identity frame taken off). Raises WireError alone."""
    if len(frames) != 2:
        raise WireError("frames", f"{len(frames)} frames, not 2")
    envelope = _unpack(_envelope, _body(frames[0], MAX_CONTROL))
    if len(frames[1]) > MAX_CONTROL:
        raise WireError("size", f"frame of {len(frames[1])} bytes, limit {MAX_CONTROL}")
    return envelope, _unpack(_control, frames[1])


# ------------------------------------------------------------------------------------- errors as messages

MAX_TEXT = 4096


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """``text`` cut to ``limit`` characters, the cut marked: for texts of others that go into a field."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def error_message(error: RudraError) -> Error:
    """The reply that carries ``error`` on the control plane."""
    code, message, where, fix = error.to_wire()
    return Error(code=code, message=message, where=where, fix=fix)


def refusal(error: RudraError) -> Refused:
    """The message that carries ``error`` on the data plane."""
    code, message, where, fix = error.to_wire()
    return Refused(code=code, message=message, where=where, fix=fix)


def error_of(message: Error | Refused) -> RudraError:
    """The exception that an Error or a Refused stands for."""
    return from_wire(message.code, message.message, message.where, message.fix)


_TO_NODE: frozenset[type] = frozenset(ToNode.__args__)
