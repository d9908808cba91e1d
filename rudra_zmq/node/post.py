"""What goes to each peer and comes from it, without ever waiting: one courier a connection.

Owns: which connection has which queue, that a queue is bounded, and that a vector is let go when its peer is. Must
not know: sockets (a function takes the frames of one message, or says that it cannot now), what a vector is.

A peer that stops reading costs its own queue alone: the vectors in it are read in place, messages are few and small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rudra_zmq.net.bulk import BulkInbox, BulkSender
from rudra_zmq.net.sockets import WINDOW
from rudra_zmq.wire.codec import Buffer, encode_data
from rudra_zmq.wire.messages.data import Credit, Message

MAX_QUEUE = 64

Send: TypeAlias = Callable[[bytes, Sequence[Buffer]], bool]


class Courier:
    """Everything for one connection, in the order in which it was given; ``inbox`` is for its chunks."""

    def __init__(self, send: Send, peer: bytes) -> None:
        self._send = send
        self.peer = peer
        self.closed = False
        self.sender = BulkSender(lambda frames: send(peer, frames), WINDOW)
        self.inbox = BulkInbox(self._credit, WINDOW)
        self._owed = 0
        self._waiting = 0  # messages given since the queue was last empty
        self._reading: dict[int, Callable[[], None]] = {}

    def _credit(self, credit: Credit) -> None:
        """At once: behind a vector that waits for the peer's own credit it might never be heard."""
        self._owed += credit.chunks
        self._pay()

    def _pay(self) -> None:
        if self._owed and not self.closed and self._send(self.peer, encode_data(Credit(chunks=self._owed))):
            self._owed = 0

    @property
    def blocked(self) -> bool:
        """Whether the socket had no room at the last attempt."""
        return self.sender.blocked or bool(self._owed)

    def pump(self) -> None:
        """Try again."""
        self._pay()
        self.sender.pump()

    def message(self, message: Message) -> None:
        """Send a message after all that is queued. A peer that reads nothing at all loses it."""
        if self.closed:
            return
        if self.sender.idle:
            self._waiting = 0
        if self._waiting < MAX_QUEUE:
            self._waiting += 1
            self.sender.message(message)

    def vector(self, key: int, data: memoryview, done: Callable[[], None]) -> None:
        """Send a vector; ``done`` is called when it is no longer read (also because the peer is gone)."""
        if self.closed:
            done()
            return
        self._reading[key] = done
        self.sender.vector(key, data, lambda: self._read(key))

    def _read(self, key: int) -> None:
        done = self._reading.pop(key, None)
        if done is not None:
            done()

    def close(self) -> None:
        """The peer is gone: nothing is read any more."""
        self.closed = True
        for key in list(self._reading):
            self._read(key)


class Post:
    """The couriers of all connections."""

    def __init__(self, send: Send, gone: Callable[[bytes], object] = lambda _: None) -> None:
        """``gone``: a peer will be sent nothing more."""
        self._send = send
        self._gone = gone
        self._couriers: dict[bytes, Courier] = {}

    def to(self, peer: bytes) -> Courier:
        """The courier of a peer, made when it is first needed."""
        courier = self._couriers.get(peer)
        if courier is None:
            courier = self._couriers[peer] = Courier(self._send, peer)
        return courier

    def drop(self, peer: bytes) -> None:
        """A peer is gone, or no longer listened to."""
        courier = self._couriers.pop(peer, None)
        if courier is not None:
            courier.close()
        self._gone(peer)

    def pump(self) -> None:
        """Try again what the socket had no room for."""
        for courier in list(self._couriers.values()):
            if courier.blocked:
                courier.pump()

    @property
    def blocked(self) -> bool:
        """Whether a socket had no room at the last attempt."""
        return any(courier.blocked for courier in self._couriers.values())

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send to anybody."""
        return all(courier.sender.idle for courier in self._couriers.values())

    def __len__(self) -> int:
        return len(self._couriers)
