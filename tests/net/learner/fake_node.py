"""A node that says what a test tells it to, in a thread of its own.

It keeps what a real one keeps over a lost connection (the version, recorded pushes); `drop` and `come_back` are its
death and its restart. Its answers are scripted by replacing its `on_*` functions.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rudra_zmq.net.bulk import BulkInbox, BulkSender
from rudra_zmq.net.sockets import WINDOW, Context, PeerGone, Router, make_context
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.codec import CHUNK, WireError, decode_to_node, encode_data
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import (
    Attach,
    Bye,
    Chunk,
    Credit,
    Data,
    Grant,
    Hello,
    InitDone,
    Log,
    Message,
    Ping,
    Pong,
    Push,
    Ready,
    Rule,
    RuleReply,
    SendInit,
    Want,
    Welcome,
)

TOML = """[job]
epochs = 2
seed = 7
[run]
script = "train.py"
[learners]
count = 1
minibatch = 4
"""
PATIENCE = 20.0


class Peer:
    """One connection."""

    def __init__(self, node: FakeNode, identity: bytes) -> None:
        self.identity = identity
        self.hello: Hello | None = None
        self.out = BulkSender(lambda frames: node.router.send(identity, frames), WINDOW)
        self.inbox = BulkInbox(lambda credit: node.router.send(identity, encode_data(credit)), WINDOW)


class FakeNode:
    """`heard` has every message but chunks, credit and pings, in order, of all its lives."""

    def __init__(
        self, folder: Path, *, generation: int = 1, ping_s: float = 0.05, liveness_s: float = 3.0, toml: str = TOML
    ) -> None:
        self.folder = folder
        self.generation = generation
        self.timestamp = 0
        self.ping_s, self.liveness_s, self.toml = ping_s, liveness_s, toml
        self.heard: list[Message] = []
        self.pings = 0
        self.stop = False
        self.mute = False
        self.weights: Vector | None = None
        self.has_version = False
        self.layout: Layout | None = None
        self.recorded = 0
        self.granted: Grant | None = None
        self.leases: list[list[tuple[int, int, int]]] = [[(e, a, a + 4)] for e in range(2) for a in (0, 4)]
        self.on_hello: Callable[[Peer, Hello], Message | None] = lambda peer, hello: self.welcome()
        self.on_push: Callable[[Peer, Push], None] = self.apply
        self.failures: list[BaseException] = []
        self.soon: list[Callable[[], object]] = []  # to be done in the node's thread
        self._lives = 0
        self._reviver: threading.Thread | None = None
        self._slot: Vector | None = None
        self._keys = 100
        self._changed = threading.Condition()
        self.come_back()

    # ---- life

    def come_back(self, generation: int | None = None, announce: bool = True) -> None:
        """A new life at a new address, announced in the node's file."""
        self.generation = generation or self.generation
        self._lives += 1
        path = self.folder / f"n{self._lives}"
        self._ending = threading.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(path, ready), name="fake-node")
        self._thread.start()
        assert ready.wait(PATIENCE)
        if announce:
            self.announce()

    def announce(self, addresses: list[str] | None = None) -> None:
        """Replace the node's file."""
        file = self.folder / "node.json"
        temporary = file.with_suffix(".new")
        here = [f"ipc://{self.folder / f'n{self._lives}'}"]
        temporary.write_text(json.dumps({"addresses": addresses or here, "generation": self.generation}))
        os.replace(temporary, file)

    def drop(self) -> None:
        """Die: every connection ends."""
        self._ending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(PATIENCE)

    def fall(self, generation: int | None = None, restored: Callable[[], None] = lambda: None) -> None:
        """From a handler: die now, be as `restored` leaves it, come back."""

        def again() -> None:
            self.drop()
            restored()
            self.come_back(generation)

        self._ending.set()
        self._reviver = threading.Thread(target=again, name="reviver")
        self._reviver.start()

    def close(self) -> None:
        """The end of the test."""
        if self._reviver is not None:
            self._reviver.join(PATIENCE)
        self.drop()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Until `what` is so; fails past the test's patience."""
        with self._changed:
            assert self._changed.wait_for(what, PATIENCE), "the learner did not do it in time"

    def of(self, kind: type[Any]) -> list[Any]:
        """What was heard of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def _run(self, path: Path, ready: threading.Event) -> None:
        context: Context = make_context("data")
        self.router: Router = context.router("node")
        try:
            self.router.bind_ipc(str(path))
            ready.set()
            self._peers: dict[bytes, Peer] = {}
            while not self._ending.is_set():
                if self.router.wait(0.02):
                    self._one()
                while self.soon:
                    self.soon.pop()()
                for peer in self._peers.values():
                    peer.out.pump()
        except BaseException as error:  # shown by the test
            self.failures.append(error)
        finally:
            self.router.close()
            context.close()

    def _one(self) -> None:
        received = self.router.recv()
        if received is None:
            return
        identity, frames = received
        peer = self._peers.setdefault(identity, Peer(self, identity))
        try:
            message, payload = decode_to_node(frames)
        except WireError as error:
            self.failures.append(error)
            return
        if self.mute:
            return
        with self._changed:
            try:
                self._take(peer, message, payload)
            except PeerGone:
                del self._peers[identity]
            self._changed.notify_all()

    # ---- conversation

    def _take(self, peer: Peer, message: Message, payload: Any) -> None:
        if isinstance(message, Chunk):
            peer.inbox.chunk(message, payload)
        elif isinstance(message, Credit):
            peer.out.credit(message.chunks)
        elif isinstance(message, Ping):
            self.pings += 1
            peer.out.message(Pong(stop=self.stop))
        else:
            self.heard.append(message)
            self._answer(peer, message)

    def _answer(self, peer: Peer, message: Message) -> None:
        match message:
            case Hello():
                peer.hello = message
                answer = self.on_hello(peer, message)
                if answer is not None:
                    peer.out.message(answer)
            case Attach():
                self._attach(peer, message)
            case InitDone():
                receiver = peer.inbox.take(message.key)
                assert receiver is not None and receiver.complete and message.nbytes == receiver.nbytes
                self.has_version = True
                self.send_ready(peer)
            case Rule():
                peer.out.message(RuleReply(accepted=True, rule=message.rule))
            case Data():
                self.grant(peer, ack=self.recorded)
            case Push():
                self.on_push(peer, message)
            case Want():
                self.grant(peer, ack=self.recorded, verdict="")
            case Log() | Bye():
                pass

    def welcome(self, **other: Any) -> Welcome:
        """The greeting."""
        fields: dict[str, Any] = {
            "generation": self.generation, "job": self.toml, "lam": 1, "chunk": CHUNK,
            "credit": WINDOW, "ping_s": self.ping_s, "liveness_s": self.liveness_s, "chief": True,
        }  # fmt: skip
        return Welcome(**{**fields, **other})

    def _attach(self, peer: Peer, message: Attach) -> None:
        if self.layout is None:
            self.layout = Layout.of(message)
            self.weights = Vector(self.layout)
        if self.has_version:
            self.send_ready(peer)
            return
        assert self.weights is not None
        key = self._key()
        peer.inbox.expect(key, self.weights.data)
        peer.out.message(SendInit(key=key))

    def send_ready(self, peer: Peer) -> None:
        """The version that there is."""
        assert self.weights is not None
        key = self._key()
        nbytes = len(self.weights.data)
        peer.out.message(Ready(generation=self.generation, timestamp=self.timestamp, key=key, nbytes=nbytes))
        peer.out.vector(key, self.weights.data)

    def grant(self, peer: Peer, *, ack: int, verdict: str = "accepted", weights: bool = False, **other: Any) -> None:
        """Grant what is left of the leases."""
        assert self.layout is not None and self.weights is not None
        self._slot = Vector(self.layout)
        key, weights_key = self._key(), self._key()
        peer.inbox.expect(key, self._slot.data)
        fields: dict[str, Any] = {
            "ack": ack, "verdict": verdict, "generation": self.generation, "timestamp": self.timestamp,
            "leases": self.leases[:2], "slot": 0, "key": key, "lam": 1, "chief": True, "done": not self.leases,
            "weights_key": weights_key if weights else 0, "nbytes": len(self.weights.data) if weights else 0,
        }  # fmt: skip
        self.granted = Grant(**{**fields, **other})
        peer.out.message(self.granted)
        if weights:
            peer.out.vector(weights_key, self.weights.data)

    def record(self, push: Push) -> None:
        """Apply a gradient, as SGD of rate 1 does."""
        assert self.weights is not None and self._slot is not None
        if push.groups[0].samples:
            self.weights.params -= self._slot.params
            self.weights.reals[self.weights.params.size :] = self._slot.floats
            self.timestamp += 1
        self.recorded = push.seq
        del self.leases[0]

    def apply(self, peer: Peer, push: Push) -> None:
        """The ordinary answer to a push."""
        self.record(push)
        self.grant(peer, ack=push.seq, weights=push.groups[0].samples > 0)

    def _key(self) -> int:
        self._keys += 1
        return self._keys


def settle(condition: Callable[[], bool]) -> None:
    """Until `condition` is so; for what has no event of its own."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def ramp(layout: Layout) -> np.ndarray:
    """Weights that differ in every element."""
    return np.arange(layout.P, dtype=np.float32) / 8
