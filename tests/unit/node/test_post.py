"""Queues of peers: order, sockets without room, peers that read nothing, peers that are gone."""

from __future__ import annotations

from collections.abc import Sequence

from rudra_zmq.net.sockets import WINDOW
from rudra_zmq.node.post import MAX_QUEUE, Courier, Post
from rudra_zmq.wire.codec import CHUNK, Buffer, decode_from_node
from rudra_zmq.wire.messages.data import Chunk, Credit, Finish, Pong


class _Socket:
    """Takes ``room`` messages, then says that it is full."""

    def __init__(self, room: int = 10**9) -> None:
        self.room = room
        self.sent: list[tuple[object, bytes | None]] = []

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        message, payload = decode_from_node(frames)
        self.sent.append((message, None if payload is None else bytes(payload)))
        return True

    def kinds(self) -> str:
        return "".join(type(message).__name__[0] for message, _ in self.sent)


def test_order_is_kept_under_credit_and_a_full_socket() -> None:
    socket = _Socket()
    post = Post(socket.send)
    courier = post.to(b"p")
    data = memoryview(bytes(range(256)) * (CHUNK * (WINDOW + 2) // 256) + b"tail")
    done: list[str] = []
    courier.message(Pong())
    courier.vector(7, data, lambda: done.append("first"))
    courier.message(Finish())
    courier.vector(8, memoryview(b"x"), lambda: done.append("second"))
    assert socket.kinds() == "P" + "C" * WINDOW and not done and not post.idle
    socket.room = 1
    courier.sender.credit(3)  # credit for three, room for one
    assert socket.kinds() == "P" + "C" * (WINDOW + 1) and not done
    socket.room = 10**9
    post.pump()
    assert socket.kinds() == "P" + "C" * (WINDOW + 3) + "F" and not done
    courier.sender.credit(1)
    assert post.idle and done == ["second"]  # a copy of a small one was sent; the first has not been read
    courier.sender.credit(WINDOW - 1)
    assert done == ["second", "first"]  # all of it was acknowledged, and not before
    chunks = [(m, p) for m, p in socket.sent if isinstance(m, Chunk)]
    assert b"".join(p for m, p in chunks if p and m.key == 7) == bytes(data)


def test_a_peer_that_is_gone_reads_nothing_any_more() -> None:
    courier = Courier(_Socket(room=0).send, b"p")
    done: list[int] = []
    courier.vector(1, memoryview(b"abc"), lambda: done.append(1))
    assert not done
    courier.close()
    assert done == [1]
    courier.vector(2, memoryview(b"abc"), lambda: done.append(2))
    courier.message(Pong())
    assert done == [1, 2]


def test_the_queue_of_a_peer_that_reads_nothing_is_bounded_and_recovers() -> None:
    socket = _Socket(room=0)
    courier = Courier(socket.send, b"p")
    for _ in range(10 * MAX_QUEUE):
        courier.message(Pong())
    socket.room = 10**9
    courier.sender.pump()
    assert len(socket.sent) == MAX_QUEUE
    courier.message(Finish())
    assert socket.kinds()[-1] == "F"


def test_credit_overtakes_a_vector_that_waits_for_credit() -> None:
    socket = _Socket()
    courier = Courier(socket.send, b"p")
    courier.vector(7, memoryview(bytes(CHUNK * (WINDOW + 1))), lambda: None)
    into = bytearray(CHUNK * WINDOW)
    courier.inbox.expect(5, into)
    socket.room = 0
    for i in range(WINDOW // 2):
        courier.inbox.chunk(Chunk(key=5, offset=i * CHUNK), bytes(CHUNK))
    assert courier.blocked
    socket.room = 1
    courier.pump()
    assert not courier.blocked and socket.sent[-1][0] == Credit(chunks=WINDOW // 2)


def test_the_post_forgets_who_is_gone() -> None:
    post = Post(_Socket().send)
    for i in range(100):
        post.to(b"%d" % i).message(Pong())
        post.drop(b"%d" % i)
        post.drop(b"%d" % i)
    assert len(post) == 0 and post.idle
