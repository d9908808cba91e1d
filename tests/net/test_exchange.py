"""Vectors over real sockets: both ways at once, small and large, many learners, one that has stopped reading."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rudra_zmq.net.bulk import BulkError, BulkInbox, BulkReceiver, BulkSender
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.sockets import WINDOW, PeerGone
from rudra_zmq.wire.codec import CHUNK, decode_from_node, decode_to_node, encode_data
from rudra_zmq.wire.messages.data import Chunk, Credit, Finish, Grant, InitDone, Ping, Pong
from tests.net.conftest import Net, until

UP, DOWN = 1, 2  # keys of what a learner and of what the node sends


class End:
    """One end of a session: what came and what is to be sent, over whatever ``send`` is."""

    def __init__(self, send: Callable[[Any], bool], nbytes: int, key: int) -> None:
        self.sender = BulkSender(send, WINDOW)
        self.inbox = BulkInbox(lambda credit: send(encode_data(credit)), WINDOW)
        self.into = bytearray(nbytes)
        self.key = key
        self.heard: list[Any] = []
        self.expect()

    def expect(self) -> BulkReceiver:
        return self.inbox.expect(self.key, self.into)

    def take(self, message: Any, payload: Any) -> None:
        self.heard.append(message)
        if isinstance(message, Chunk):
            self.inbox.chunk(message, payload)
        elif isinstance(message, Credit):
            self.sender.credit(message.chunks)

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.heard)


class Node:
    """Sends each gradient back as weights once its InitDone has come."""

    def __init__(self, net: Net, loop: Loop, kind: str, nbytes: int) -> None:
        self.router, self.address = net.bound(kind, "data")
        self.nbytes = nbytes
        self.ends: dict[bytes, End] = {}
        loop.on_readable(self.router, self.readable)

    def readable(self) -> None:
        for _ in range(64):
            received = self.router.recv()
            if received is None:
                return
            peer, frames = received
            if peer not in self.ends:
                self.ends[peer] = End(partial(self.router.send, peer), self.nbytes, UP)
            end = self.ends[peer]
            message, payload = decode_to_node(frames)
            end.take(message, payload)
            if isinstance(message, InitDone):
                receiver = end.inbox.take(UP)
                assert receiver is not None and receiver.complete
                end.sender.message(grant(message.key))
                end.sender.vector(DOWN, bytes(end.into))
                end.expect()


class Learner:
    """Pushes and pulls, in the test's own loop."""

    def __init__(self, net: Net, loop: Loop, address: str, nbytes: int) -> None:
        self.loop = loop
        self.dealer = net.dealer(address, "data")
        self.end = End(lambda frames: self.dealer.send(frames, copy=False), nbytes, DOWN)
        self.receiver: BulkReceiver | None = None
        loop.on_readable(self.dealer, self.readable)

    def readable(self) -> None:
        while (frames := self.dealer.recv()) is not None:
            self.end.take(*decode_from_node(frames))

    def push(self, seq: int, gradient: bytes) -> None:
        self.receiver = self.end.expect()
        self.end.sender.vector(UP, gradient)
        self.end.sender.message(InitDone(key=seq, nbytes=len(gradient)))

    @property
    def done(self) -> bool:
        return self.receiver is not None and self.receiver.complete


def grant(ack: int) -> Grant:
    return Grant(ack=ack, verdict="accepted", generation=1, timestamp=ack, leases=[], slot=0, key=UP, weights_key=DOWN)


@pytest.mark.parametrize("nbytes", [1, 400_000, CHUNK, CHUNK + 1, 3 * CHUNK + 17, 20 * CHUNK])
def test_push_and_pull(net: Net, kind: str, nbytes: int) -> None:
    loop = net.loop()
    node = Node(net, loop, kind, nbytes)
    learner = Learner(net, loop, node.address, nbytes)
    for seq in (1, 2, 3):
        gradient = os.urandom(nbytes)
        learner.push(seq, gradient)
        until(loop, lambda: learner.done)
        assert learner.end.into == gradient
    assert learner.end.count(Grant) == 3


def test_one_chunk_costs_no_message_of_its_own(net: Net) -> None:
    loop = net.loop()
    node = Node(net, loop, "ipc", 1000)
    learner = Learner(net, loop, node.address, 1000)
    for seq in range(1, 13):
        learner.push(seq, bytes(1000))
        until(loop, lambda: learner.done)
    (end,) = node.ends.values()
    for side, closing in ((end, InitDone), (learner.end, Grant)):
        assert side.count(Chunk) == side.count(closing) == 12
        assert side.count(Credit) <= 12 // (WINDOW // 2)


def test_many_learners_at_once(net: Net, kind: str) -> None:
    nbytes = 20 * CHUNK + 3
    loop = net.loop()
    node = Node(net, loop, kind, nbytes)
    learners = [Learner(net, loop, node.address, nbytes) for _ in range(4)]
    for seq in (1, 2):
        gradients = [os.urandom(nbytes) for _ in learners]
        for learner, gradient in zip(learners, gradients, strict=True):
            learner.push(seq, gradient)
        until(loop, lambda: all(learner.done for learner in learners))
        assert [bytes(learner.end.into) for learner in learners] == gradients


READER = """
import sys
from rudra_zmq.net.sockets import make_context
from rudra_zmq.wire.codec import decode_from_node, encode_data
from rudra_zmq.wire.messages.data import Chunk, Credit, Finish, Ping
dealer = make_context("data").dealer(sys.argv[1], "reader")
assert dealer.wait_connected(10.0)
dealer.send(encode_data(Ping()))
got = 0
while dealer.wait(60.0):
    message, payload = decode_from_node(dealer.recv())
    if isinstance(message, Chunk):
        got += len(payload)
        dealer.send(encode_data(Credit(chunks=1)))
    elif isinstance(message, Finish):
        print(got, flush=True)
    else:
        print("ready", flush=True)
"""


def test_a_stopped_learner_takes_a_window_and_no_more(net: Net, kind: str) -> None:
    """The node's memory stays flat, the others do not notice, and it goes on where it was when it wakes up."""
    nbytes = 64 * CHUNK
    loop = net.loop()
    node = Node(net, loop, kind, 1000)
    child = subprocess.Popen([sys.executable, "-c", READER, node.address], stdin=None, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        until(loop, lambda: node.ends)
        ((peer, stopped),) = node.ends.items()
        node.router.send(peer, encode_data(Pong()))
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGSTOP)
        emitted = 0

        def send(frames: Any) -> bool:
            nonlocal emitted
            emitted += 1
            return node.router.send(peer, frames)

        stopped.sender = BulkSender(send, WINDOW)
        begun = time.monotonic()
        stopped.sender.vector(DOWN, bytes(nbytes))
        stopped.sender.message(Finish())
        assert time.monotonic() - begun < 1.0
        healthy = Learner(net, loop, node.address, 1000)
        for seq in range(1, 51):
            healthy.push(seq, bytes(1000))
            until(loop, lambda: healthy.done)
        assert emitted == WINDOW
        child.send_signal(signal.SIGCONT)
        until(loop, lambda: stopped.sender.idle)
        assert child.stdout.readline() == f"{nbytes}\n".encode()
        assert emitted == 64 + 1
        child.kill()

    def gone() -> bool:
        try:
            stopped.sender.message(Pong())
        except PeerGone:
            return True
        return False

    until(loop, gone)


def test_a_peer_that_invents_credit_and_keys_is_refused(net: Net) -> None:
    loop = net.loop()
    node = Node(net, loop, "ipc", 1000)
    liar = net.dealer(node.address, "data")
    liar.send(encode_data(Ping()))
    until(loop, lambda: node.ends)
    (end,) = node.ends.values()
    loop.forget(node.router)
    for frames in (
        encode_data(Credit(chunks=1)),
        encode_data(Chunk(key=99, offset=0), b"x" * 1000),
        encode_data(Chunk(key=UP, offset=1), b"x" * 999),
        encode_data(Chunk(key=UP, offset=0), b"x" * 1001),
    ):
        liar.send(frames)
        assert node.router.wait(10.0)
        received = node.router.recv()
        assert received is not None
        with pytest.raises(BulkError):
            end.take(*decode_to_node(received[1]))
    assert end.into == bytes(1000)
