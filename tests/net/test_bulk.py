"""Vectors in chunks: every byte once and in place, credit kept, nothing of a stranger's taken."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.net.bulk import BulkError, BulkInbox, BulkReceiver, BulkSender
from rudra_zmq.net.sockets import WINDOW, PeerGone
from rudra_zmq.wire.codec import CHUNK, Buffer, decode_to_node
from rudra_zmq.wire.messages.data import Chunk, Credit, Mapped


class Wire:
    """What a socket would carry; ``room`` is how many messages its queue takes."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.frames: deque[list[bytes]] = deque()

    def send(self, frames: Any) -> bool:
        if len(self.frames) >= self.room:
            return False
        self.frames.append([bytes(frame) for frame in frames])
        return True

    def next(self) -> tuple[Any, Buffer | None]:
        return decode_to_node(self.frames.popleft())


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 16),
    st.integers(1, 4),
    st.randoms(),
)
def test_any_sizes_any_window_any_queue(sizes: list[int], window: int, chunk: int, room: int, random: Any) -> None:
    wire = Wire(room)
    back: deque[Credit] = deque()
    sender = BulkSender(wire.send, window, chunk=chunk)
    inbox = BulkInbox(back.append, window)
    sources = [os.urandom(size) for size in sizes]
    targets = [bytearray(size) for size in sizes]
    sent: list[int] = []
    several = {key for key, size in enumerate(sizes) if size > chunk}
    for key, source in enumerate(sources):
        inbox.expect(key, targets[key], chunk=chunk)
        sender.vector(key, source, lambda key=key: sent.append(key))
        sender.message(Mapped(nonce=key))
    outstanding = chunks = 0
    closed: list[int] = []
    while len(closed) < len(sizes):
        if wire.frames and random.random() < 0.7:
            message, payload = wire.next()
            if isinstance(message, Chunk):
                assert payload is not None
                chunks += 1
                inbox.chunk(message, payload)
            else:
                receiver = inbox.take(message.nonce)
                assert receiver is not None and receiver.complete
                closed.append(message.nonce)
        elif back and random.random() < 0.7:
            sender.credit(back.popleft().chunks)
            assert all(targets[key] == sources[key] for key in sent if key in several)
        else:
            sender.pump()
        outstanding = sum(len(frames) == 2 for frames in wire.frames)
        assert outstanding <= window
    assert closed == list(range(len(sizes)))
    while back:
        sender.credit(back.popleft().chunks)
    assert sorted(sent) == closed  # of one chunk a copy was sent
    assert targets == sources
    assert chunks == sum(-(-size // chunk) for size in sizes)
    assert sender.idle


class TestSender:
    def test_no_more_than_the_window(self) -> None:
        wire = Wire()
        sender = BulkSender(wire.send, 3, chunk=10)
        assert sender.vector(1, bytes(100)) is False
        assert len(wire.frames) == 3
        assert not sender.blocked
        assert sender.credit(2) is False
        assert len(wire.frames) == 5

    def test_messages_wait_their_turn(self) -> None:
        wire = Wire()
        sender = BulkSender(wire.send, 1, chunk=10)
        assert sender.message(Mapped(nonce=1)) is True
        sender.vector(1, bytes(20))
        assert sender.message(Mapped(nonce=2)) is False
        assert [type(wire.next()[0]) for _ in range(2)] == [Mapped, Chunk]
        assert not wire.frames
        assert sender.credit(1) is True
        assert [type(wire.next()[0]) for _ in range(2)] == [Chunk, Mapped]

    def test_a_full_queue_loses_nothing(self) -> None:
        wire = Wire(room=2)
        sender = BulkSender(wire.send, 8, chunk=10)
        sender.vector(1, bytes(range(40)))
        assert sender.blocked and not sender.idle
        got = bytearray()
        while not sender.idle or wire.frames:
            message, payload = wire.next()
            assert message == Chunk(key=1, offset=len(got)) and payload is not None
            got += payload
            sender.pump()
        assert got == bytes(range(40))
        assert not sender.blocked

    @pytest.mark.parametrize("chunks", [1, 5])
    def test_credit_that_was_never_used(self, chunks: int) -> None:
        sender = BulkSender(Wire().send, 4, chunk=10)
        with pytest.raises(BulkError) as caught:
            sender.credit(chunks)
        assert caught.value.reason == "credit"

    def test_the_peers_end_passes_through(self) -> None:
        def gone(frames: Any) -> bool:
            raise PeerGone(b"x")

        with pytest.raises(PeerGone):
            BulkSender(gone, 4).vector(1, b"abc")

    def test_any_contiguous_buffer_is_a_source(self) -> None:
        wire = Wire()
        BulkSender(wire.send, 4).vector(1, memoryview(bytearray(range(16))).cast("f"))
        assert wire.next()[1] == bytes(range(16))
        with pytest.raises(ValueError, match="empty"):
            BulkSender(wire.send, 4).vector(1, b"")


class TestReceiver:
    @pytest.mark.parametrize(
        ("chunk", "size", "reason"),
        [
            (Chunk(key=8, offset=10), 10, "key"),
            (Chunk(key=7, offset=0), 10, "duplicate"),
            (Chunk(key=7, offset=20), 5, "gap"),
            (Chunk(key=7, offset=10), 9, "size"),
            (Chunk(key=7, offset=10), 11, "size"),
            (Chunk(key=7, offset=10), 16, "range"),
            (Chunk(key=7, offset=25), 1, "range"),
            (Chunk(key=7, offset=2**53), 10, "range"),
        ],
    )
    def test_refused_chunks_change_nothing(self, chunk: Chunk, size: int, reason: str) -> None:
        into = bytearray(25)
        receiver = BulkReceiver(into, 7, chunk=10)
        receiver.accept(Chunk(key=7, offset=0), b"a" * 10)
        with pytest.raises(BulkError) as caught:
            receiver.accept(chunk, b"x" * size)
        assert caught.value.reason == reason
        assert into == b"a" * 10 + bytes(15)
        assert receiver.received == 10 and not receiver.complete
        receiver.accept(Chunk(key=7, offset=10), b"b" * 10)
        receiver.accept(Chunk(key=7, offset=20), b"c" * 5)
        assert receiver.complete
        assert into == b"a" * 10 + b"b" * 10 + b"c" * 5

    def test_a_buffer_that_cannot_be_written(self) -> None:
        with pytest.raises(ValueError, match="read-only"):
            BulkReceiver(b"abc", 1)

    def test_views_of_any_item_size(self) -> None:
        into = memoryview(bytearray(16)).cast("d")
        receiver = BulkReceiver(into, 1)
        receiver.accept(Chunk(key=1, offset=0), bytes(range(16)))
        assert receiver.complete and into.tobytes() == bytes(range(16))


class TestInbox:
    def test_a_strangers_key_costs_credit_and_gives_it_back(self) -> None:
        back: list[Credit] = []
        inbox = BulkInbox(back.append, 4)
        for _ in range(20):
            with pytest.raises(BulkError, match="key"):
                inbox.chunk(Chunk(key=9, offset=0), b"x")
        assert sum(credit.chunks for credit in back) == 20

    def test_a_vector_of_one_chunk_needs_no_credit_of_its_own(self) -> None:
        back: list[Credit] = []
        inbox = BulkInbox(back.append, WINDOW)
        for key in range(12):
            inbox.expect(key, bytearray(5))
            inbox.chunk(Chunk(key=key, offset=0), b"hello")
            assert inbox.take(key) is not None
        assert len(back) == 12 // (WINDOW // 2)

    def test_unknown(self) -> None:
        inbox = BulkInbox(lambda credit: None, 4)
        assert inbox.take(5) is None
        inbox.expect(5, bytearray(3))
        incomplete = inbox.take(5)
        assert incomplete is not None and not incomplete.complete
        assert inbox.take(5) is None


def test_chunks_are_a_mebibyte() -> None:
    wire = Wire()
    BulkSender(wire.send, 4).vector(1, bytes(2 * CHUNK + 5))
    assert [len(frames[1]) for frames in wire.frames] == [CHUNK, CHUNK, 5]
