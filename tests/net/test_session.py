"""A learner's connection to a node: the exchange both ways, small and large, slow peers, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from rudra_zmq.errors import RefusedBySecurity, TimedOut, Unreachable
from rudra_zmq.net.bulk import BulkError, BulkInbox, BulkSender
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.session import ConnectionLost, DataSession
from rudra_zmq.net.sockets import WINDOW, PeerGone, make_context
from rudra_zmq.wire.codec import CHUNK, decode_to_node, encode_data, refusal
from rudra_zmq.wire.messages.data import (
    Chunk,
    Credit,
    Finish,
    Grant,
    Hello,
    Ping,
    Pong,
    Push,
    Ready,
    Welcome,
)
from tests.net.conftest import PATIENCE, Net, in_thread, until, wait_for

HELLO = Hello(role="learner", job="a1b2c3", token="t", rank=0, incarnation=1)
WELCOME = Welcome(
    generation=1, timestamp=0, job="", lam=1, chunk=CHUNK, credit=WINDOW, ping_s=1.0, liveness_s=5.0
)  # fmt: skip


class Node:
    """A node that takes gradients of ``nbytes`` under key 1 and answers each with itself as weights under key 2."""

    def __init__(self, loop: Loop, kind: str, path: str, nbytes: int) -> None:
        self.loop = loop
        self.context = make_context("data")
        self.router = self.context.router("node")
        self.address = self.router.bind_ipc(path) if kind == "ipc" else self.router.bind_tcp("127.0.0.1", 0)
        self.nbytes = nbytes
        self.slots: dict[bytes, bytearray] = {}
        self.senders: dict[bytes, BulkSender] = {}
        self.inboxes: dict[bytes, BulkInbox] = {}
        self.heard: list[str] = []
        self.refuse = False
        self.replies: dict[type, Callable[[bytes], None]] = {}
        loop.on_readable(self.router, self.readable)

    def readable(self) -> None:
        for _ in range(64):
            received = self.router.recv()
            if received is None:
                return
            peer, frames = received
            message, payload = decode_to_node(frames)
            self.heard.append(type(message).__name__)
            if payload is not None and isinstance(message, Chunk):
                self.inboxes[peer].chunk(message, payload)
            else:
                self.one(peer, message)

    def one(self, peer: bytes, message: Any) -> None:
        match message:
            case Hello():
                self.hello(peer)
            case Credit(chunks=chunks):
                self.senders[peer].credit(chunks)
            case Push(seq=seq):
                receiver = self.inboxes[peer].take(1)
                assert receiver is not None and receiver.complete
                weights = bytes(self.slots[peer])
                self.inboxes[peer].expect(1, self.slots[peer])
                self.senders[peer].message(grant(seq, nbytes=self.nbytes))
                self.senders[peer].vector(2, weights)
            case Ping():
                self.router.send(peer, encode_data(Pong()))
        if type(message) in self.replies:
            self.replies[type(message)](peer)

    def hello(self, peer: bytes) -> None:
        if self.refuse:
            error = RefusedBySecurity("the token is not this job's", fix="ask rudra status")
            self.router.send(peer, encode_data(refusal(error)))
            return
        self.slots[peer] = bytearray(self.nbytes)
        self.senders[peer] = BulkSender(lambda frames: self.router.send(peer, frames), WINDOW)
        self.inboxes[peer] = BulkInbox(self.senders[peer].message, WINDOW)
        self.inboxes[peer].expect(1, self.slots[peer])
        self.senders[peer].message(WELCOME)

    def close(self) -> None:
        self.loop.forget(self.router)
        self.router.close()
        assert self.context.close()


def grant(ack: int, nbytes: int = 0) -> Grant:
    leases = [[(0, 32, 64)]]
    return Grant(
        ack=ack,
        verdict="accepted",
        generation=1,
        timestamp=ack,
        leases=leases,
        slot=0,
        key=1,
        weights_key=2,
        nbytes=nbytes,
    )


def push(seq: int, nbytes: int) -> Push:
    return Push(
        rank=0,
        incarnation=1,
        seq=seq,
        generation=1,
        timestamp=seq - 1,
        key=1,
        spans=[(0, 0, 32)],
        count=32,
        nbytes=nbytes,
    )


def serving(
    net: Net, kind: str = "ipc", nbytes: int = 1000, prepare: Callable[[Node], object] = lambda node: None
) -> Callable[[Loop], tuple[Node, Callable[[], object]]]:
    path = net.path()

    def build(loop: Loop) -> tuple[Node, Callable[[], object]]:
        node = Node(loop, kind, path, nbytes)
        prepare(node)
        return node, node.close

    return build


def session(net: Net, **options: Any) -> DataSession:
    one = DataSession(net.context("data"), "learner-0", **options)
    net.close_at_end(one.close)
    return one


def exchange(one: DataSession, seq: int, gradient: bytes, weights: bytearray) -> Grant:
    one.send_vector(1, gradient)
    one.send(push(seq, len(gradient)))
    answer = one.receive(PATIENCE, Grant)
    one.fill(answer.weights_key, weights, PATIENCE)
    return answer


@pytest.mark.parametrize("nbytes", [1, 400_000, CHUNK, CHUNK + 1, 3 * CHUNK + 17, 20 * CHUNK])
def test_the_exchange(net: Net, kind: str, nbytes: int) -> None:
    with in_thread(serving(net, kind, nbytes)) as node:
        one = session(net)
        assert one.connect([node.address], HELLO, PATIENCE) == WELCOME
        weights = bytearray(nbytes)
        for seq in (1, 2, 3):
            gradient = os.urandom(nbytes)
            assert exchange(one, seq, gradient, weights).ack == seq
            assert weights == gradient
        one.close()


def test_one_chunk_costs_no_message_of_its_own(net: Net) -> None:
    with in_thread(serving(net, nbytes=1000)) as node:
        one = session(net)
        one.connect([node.address], HELLO, PATIENCE)
        weights = bytearray(1000)
        for seq in range(1, 13):
            exchange(one, seq, bytes(1000), weights)
    assert node.heard.count("Chunk") == node.heard.count("Push") == 12
    assert node.heard.count("Credit") == 12 // (WINDOW // 2)


def test_many_learners_at_once(net: Net, kind: str) -> None:
    nbytes = 5 * CHUNK + 3
    with in_thread(serving(net, kind, nbytes)) as node:
        ones = [session(net) for _ in range(4)]
        weights = [bytearray(nbytes) for _ in ones]
        for one in ones:
            one.connect([node.address], HELLO, PATIENCE)
        for seq in (1, 2):
            gradients = [os.urandom(nbytes) for _ in ones]
            for one, gradient in zip(ones, gradients, strict=True):
                one.send_vector(1, gradient)
                one.send(push(seq, nbytes))
            # Each has a window under way; none gets further before it is read, and none is lost.
            for one, mine in zip(ones, weights, strict=True):
                answer = one.receive(PATIENCE, Grant)
                one.fill(answer.weights_key, mine, PATIENCE)
            assert [bytes(mine) for mine in weights] == gradients


STOPPED_LEARNER = """
import sys
from rudra_zmq.net.session import DataSession
from rudra_zmq.net.sockets import make_context
from rudra_zmq.wire.messages.data import Hello
one = DataSession(make_context("data"), "stopped")
one.connect([sys.argv[1]], Hello(role="learner", job="a1b2c3", token="t", rank=1, incarnation=1), 10.0)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_stopped_learner_takes_a_window_and_no_more(net: Net, kind: str) -> None:
    """The node's memory stays flat, and the others do not notice."""
    nbytes = 64 * CHUNK
    source = bytes(nbytes)
    path = net.path()
    loop = net.loop()
    node = Node(loop, kind, path, 1000)
    net.close_at_end(node.close)
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED_LEARNER, node.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        until(loop, lambda: node.senders)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGSTOP)
        (stopped,) = node.senders
        emitted: list[int] = []
        node.senders[stopped]._send = lambda frames, send=node.senders[stopped]._send: (
            emitted.append(len(frames)) or send(frames)
        )
        begun = time.monotonic()
        node.senders[stopped].vector(2, source)
        node.senders[stopped].message(Finish())
        assert time.monotonic() - begun < 1.0
        assert len(emitted) == WINDOW
        assert not node.senders[stopped].idle
        # Meanwhile another one gets all that it asks for.
        other = net.dealer(node.address, "data")
        other.send(encode_data(HELLO))
        until(loop, lambda: len(node.senders) == 2)
        healthy = node.senders[other.identity]
        healthy.vector(2, source)
        got = 0

        def read() -> bool:
            nonlocal got
            while (frames := other.recv()) is not None:
                if len(frames) == 2:
                    got += len(frames[1])
                    if got // CHUNK % 4 == 0:
                        other.send(encode_data(Credit(chunks=4)))
            return got == nbytes

        until(loop, read)
        assert len(emitted) == WINDOW
        child.kill()

    def gone() -> bool:
        try:
            node.senders[stopped].credit(1)
        except PeerGone:
            return True
        except BulkError:
            raise AssertionError("the window grew by itself") from None
        return False

    until(loop, gone)


def test_refused(net: Net) -> None:
    def refuse(node: Node) -> None:
        node.refuse = True

    with in_thread(serving(net, prepare=refuse)) as node:
        one = session(net)
        with pytest.raises(RefusedBySecurity) as caught:
            one.connect([node.address], HELLO, PATIENCE)
        assert str(caught.value) == "the token is not this job's. Fix: ask rudra status"
        assert not one.connected


def test_the_second_address_where_the_first_is_dead(net: Net) -> None:
    with in_thread(serving(net)) as node:
        one = session(net)
        one.connect([f"ipc://{net.path()}", node.address], HELLO, PATIENCE)
        assert one.address == node.address


def test_nobody_there(net: Net) -> None:
    one = session(net)
    address = f"ipc://{net.path()}"
    with pytest.raises(Unreachable) as caught:
        one.connect([address, "tcp://127.0.0.1:1"], HELLO, 1.0)
    assert f"{address}: no such socket; tcp://127.0.0.1:1: refused" in str(caught.value)
    with pytest.raises(Unreachable, match="no address is known"):
        one.connect([], HELLO, 1.0)


def test_a_node_that_vanishes(net: Net, kind: str) -> None:
    one = session(net)
    with in_thread(serving(net, kind)) as node:
        one.connect([node.address], HELLO, PATIENCE)
    with pytest.raises(ConnectionLost, match="closed by the other side"):
        one.receive(PATIENCE, Grant)
    assert not one.connected
    with pytest.raises(ConnectionLost, match="not connected"):
        one.send(Ping())


def test_a_reconnect_is_a_new_session(net: Net) -> None:
    with in_thread(serving(net)) as node:
        one = session(net)
        weights = bytearray(1000)
        for _ in range(3):
            one.connect([node.address], HELLO, PATIENCE)
            exchange(one, 1, bytes(1000), weights)
        assert len(node.senders) == 3


def test_no_answer(net: Net) -> None:
    with in_thread(serving(net)) as node:
        one = session(net)
        one.connect([node.address], HELLO, PATIENCE)
        with pytest.raises(TimedOut, match=r"no answer from the node in 0\.2 s"):
            one.receive(0.2, Grant)
        assert one.connected
        one.send(Ping())
        assert one.receive(PATIENCE, Pong) == Pong()


def test_the_caller_may_give_up(net: Net) -> None:
    reasons = [""]
    one = session(net, give_up=lambda: reasons[-1])
    with in_thread(serving(net)) as node:
        one.connect([node.address], HELLO, PATIENCE)
        reasons.append("the node is silent")
        with pytest.raises(ConnectionLost, match="the node is silent"):
            one.receive(PATIENCE, Grant)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"junk"], "prefix"),
        ([b"RZ\x07"], "version"),
        (encode_data(Chunk(key=77, offset=0), b"x"), "key"),
        (encode_data(Credit(chunks=1)), "credit"),
        (encode_data(Ping()), "field"),
    ],
)
def test_a_node_that_breaks_the_rules_is_left(net: Net, frames: Any, reason: str) -> None:
    def prepare(node: Node) -> None:
        node.replies[Ping] = lambda peer: node.router.send(peer, frames)

    with in_thread(serving(net, prepare=prepare)) as node:
        one = session(net)
        one.connect([node.address], HELLO, PATIENCE)
        one.send(Ping())
        assert one.receive(PATIENCE, Pong) == Pong()
        with pytest.raises(ConnectionLost, match="sent what it must not"):
            one.receive(PATIENCE, Pong)
        assert one.drops == {reason: 1}
        assert not one.connected


def test_another_message_than_the_one_that_is_due(net: Net) -> None:
    with in_thread(serving(net)) as node:
        one = session(net)
        one.connect([node.address], HELLO, PATIENCE)
        one.send(Ping())
        with pytest.raises(ConnectionLost, match="Pong came where Ready was due"):
            one.receive(PATIENCE, Ready)


def test_last_words(net: Net) -> None:
    with in_thread(serving(net)) as node:
        one = session(net)
        one.connect([node.address], HELLO, PATIENCE)
        one.send(Ping())
        one.flush(PATIENCE)
        one.close(linger=2.0)
        wait_for(lambda: "Ping" in node.heard)
