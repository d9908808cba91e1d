"""Sealed frames: opened once, in order, by whom they are for, and otherwise refused without a trace."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.wire import seal
from rudra_zmq.wire.codec import CHUNK, decode_to_node, encode_data
from rudra_zmq.wire.messages.data import Chunk, Credit
from rudra_zmq.wire.seal import DOWN, REASONS, TAG, UP, Opener, SealedPayload, Sealer, SealError

KEY, OTHER = bytes(range(16)), bytes(range(1, 17))
CHUNK_FRAMES = encode_data(Chunk(key=7, offset=0), b"payload" * 9)


def pair(connection: int = 5, direction: int = UP) -> tuple[Sealer, Opener]:
    return Sealer(KEY, connection, direction), Opener(KEY, connection, direction)


def sealed(sealer: Sealer, frames: Any) -> list[bytes]:
    """As it would be on the wire: copied, since the buffer is used again."""
    return [bytes(frame) for frame in sealer.seal(frames, bytearray(CHUNK + TAG))]


def read(opener: Opener, frames: list[bytes]) -> list[bytes]:
    """All that was sealed, in clear. Raises SealError."""
    message, *payload = opener.open(frames)
    assert not isinstance(message, SealedPayload)
    found = [bytes(message)]
    for one in payload:
        assert isinstance(one, SealedPayload)
        into = bytearray(len(one))
        one.open_into(into)
        found.append(bytes(into))
    return found


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=100), st.none() | st.binary(min_size=1, max_size=3000))))
def test_what_goes_in_comes_out_and_no_nonce_comes_twice(messages: list[tuple[bytes, bytes | None]]) -> None:
    sealer, opener = pair()
    counters = []
    for message, payload in messages:
        frames = [message] if payload is None else [message, payload]
        out = sealed(sealer, frames)
        number, counter = struct.unpack_from(">IQ", out[0])
        assert number == 5
        counters += range(counter, counter + len(frames))
        assert sum(map(len, out)) == sum(map(len, frames)) + 12 + TAG * len(frames)
        assert read(opener, out) == frames
    assert counters == sorted(set(counters))


def test_the_nonces_that_the_cipher_gets_are_all_different(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bytes] = []

    class Cipher:
        def encrypt(self, nonce: bytes, data: bytes, more: object) -> bytes:
            used.append(nonce)
            return data + bytes(TAG)

        def encrypt_into(self, nonce: bytes, data: bytes, more: object, into: memoryview) -> None:
            used.append(nonce)
            raise ValueError("in the middle of a message")

    monkeypatch.setattr(seal, "_cipher", lambda key: Cipher())
    for connection in (1, 2):
        for direction in (UP, DOWN):
            sealer = Sealer(KEY, connection, direction)
            for _ in range(3):
                sealer.seal([b"m"])
                with pytest.raises(ValueError, match="in the middle"):
                    sealer.seal([b"m", b"p"], bytearray(100))
    assert len(used) == len(set(used)) == 4 * 3 * 3


@pytest.mark.parametrize("frames", [[b"message"], CHUNK_FRAMES], ids=["message", "chunk"])
@given(data=st.data())
def test_any_bit_that_changes_is_found(frames: list[bytes], data: st.DataObject) -> None:
    sealer, opener = pair()
    good = sealed(sealer, frames)
    bits = 8 * sum(map(len, good))
    at = data.draw(st.integers(0, bits - 1))
    bad, byte = [bytearray(frame) for frame in good], at // 8
    which = 0 if byte < len(good[0]) else 1
    bad[which][byte - which * len(good[0])] ^= 1 << at % 8
    with pytest.raises(SealError) as caught:
        read(opener, [bytes(frame) for frame in bad])
    assert caught.value.reason in REASONS
    if which == 0:  # nothing is left of it
        assert read(opener, good) == frames


@pytest.mark.parametrize("frames", [[b"message"], CHUNK_FRAMES], ids=["message", "chunk"])
@given(data=st.data())
def test_what_is_cut_off_is_found(frames: list[bytes], data: st.DataObject) -> None:
    sealer, opener = pair()
    good = sealed(sealer, frames)
    which = data.draw(st.integers(0, len(good) - 1))
    left = data.draw(st.integers(0, len(good[which]) - 1))
    bad = [frame[:left] if i == which else frame for i, frame in enumerate(good)]
    with pytest.raises(SealError):
        read(opener, bad)


@given(st.lists(st.integers(0, 9), max_size=30))
def test_nothing_is_opened_twice_nor_out_of_order(order: list[int]) -> None:
    sealer, opener = pair()
    messages = [sealed(sealer, CHUNK_FRAMES if i % 3 == 0 else [b"%d" % i]) for i in range(10)]
    highest = -1
    for i in order:
        if i > highest:
            read(opener, messages[i])
            highest = i
        else:
            with pytest.raises(SealError) as caught:
                opener.open(messages[i])
            assert caught.value.reason == "bulk-replay"


@pytest.mark.parametrize(
    ("sealer", "reason"),
    [
        (Sealer(OTHER, 5, UP), "bulk-forged"),
        (Sealer(KEY, 6, UP), "bulk-foreign"),
        (Sealer(KEY, 5, DOWN), "bulk-foreign"),
    ],
    ids=["another key", "another connection", "the other direction"],
)
def test_what_is_not_for_this_end(sealer: Sealer, reason: str) -> None:
    ours, opener = pair()
    for frames in ([b"message"], CHUNK_FRAMES):
        with pytest.raises(SealError) as caught:
            read(opener, sealed(sealer, frames))
        assert caught.value.reason == reason
    assert read(opener, sealed(ours, [b"message"])) == [b"message"]


def test_a_number_that_says_otherwise_is_part_of_what_is_sealed() -> None:
    _, opener = pair()
    moved = bytearray(sealed(Sealer(KEY, 6, UP), [b"message"])[0])
    moved[:12] = struct.pack(">IQ", 5, 1)
    with pytest.raises(SealError) as caught:
        opener.open([bytes(moved)])
    assert caught.value.reason == "bulk-forged"


@pytest.mark.parametrize("count", [0, 3])
def test_other_numbers_of_frames(count: int) -> None:
    _, opener = pair()
    with pytest.raises(SealError) as caught:
        opener.open([bytes(100)] * count)
    assert caught.value.reason == "bulk-cut"


def test_a_payload_belongs_to_its_message() -> None:
    """Two chunks whose payloads change places, a payload that is left out, one that is put behind a message."""
    sealer, opener = pair()
    one, two, alone = sealed(sealer, CHUNK_FRAMES), sealed(sealer, CHUNK_FRAMES), sealed(sealer, [b"message"])
    for mixed in ([one[0], two[1]], [two[0], one[1]], [alone[0], one[1]]):
        with pytest.raises(SealError) as caught:
            read(opener, mixed)
        assert caught.value.reason == "bulk-forged"
    sealer, opener = pair()
    ((message),) = opener.open(sealed(sealer, CHUNK_FRAMES)[:1])
    with pytest.raises(ValueError, match="without a payload"):
        decode_to_node([message])


def test_the_codec_takes_what_is_opened() -> None:
    sealer, opener = pair()
    message, payload = decode_to_node(opener.open(sealed(sealer, CHUNK_FRAMES)))
    assert message == Chunk(key=7, offset=0) and payload is not None and len(payload) == 63
    assert decode_to_node(opener.open(sealed(sealer, encode_data(Credit(chunks=3))))) == (Credit(chunks=3), None)


def test_keys_wear_out(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = 4
    monkeypatch.setattr(seal, "WORN", messages * (12 + 1 + TAG + 60 + TAG) - 1)
    sealer, opener = pair()
    for _ in range(messages):
        assert not sealer.worn and not opener.worn
        read(opener, sealed(sealer, [b"m", bytes(60)]))
    assert sealer.worn and opener.worn


@pytest.mark.parametrize(("connection", "direction"), [(0, UP), (1 << 31, UP), (1, 2)])
def test_numbers_that_do_not_fit_into_a_nonce(connection: int, direction: int) -> None:
    for kind in (Sealer, Opener):
        with pytest.raises(ValueError, match="connection"):
            kind(KEY, connection, direction)
