"""One connection to a node: messages one by one, vectors in chunks, and the loss of it noticed.

Owns: a DEALER of the calling thread with its credit, and the channel that takes its place where the node says so.
Must not know: what is said over it, reconnecting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from rudra_zmq.net.addresses import parse
from rudra_zmq.net.auth import KeyPair
from rudra_zmq.net.bulk import BulkError, BulkInbox, BulkReceiver, BulkSender
from rudra_zmq.net.channel import Channel
from rudra_zmq.net.sockets import WINDOW, Context
from rudra_zmq.wire.codec import CHUNK, Buffer, WireError, decode_from_node, encode_data
from rudra_zmq.wire.messages.data import Bulk, Chunk, Credit, FromNode, Message
from rudra_zmq.wire.seal import SealError

SLICE = 0.1
"""Seconds between two looks at everything that is not a message."""

M = TypeVar("M", bound=Message)


class Bytes(Protocol):
    """What travels in chunks: a vector, or an array."""

    @property
    def data(self) -> memoryview:
        """Its bytes."""


class LinkLost(Exception):
    """The connection is of no more use; the text says why."""


class Link:
    """Connects at once. ``look`` is called every 0.1 s while a call waits, and may raise to end it."""

    def __init__(
        self,
        context: Context,
        address: str,
        name: str,
        look: Callable[[], None],
        curve: tuple[KeyPair, str] | None = None,
    ) -> None:
        """``curve``: own keys and the node's public one, where the connection is encrypted."""
        self.address = address
        self.heard = time.monotonic()
        self.announced: Callable[[FromNode], object] = lambda message: None
        """Called with what is heard while a vector is on its way out: what follows it may have to be expected."""
        self._look = look
        self._context = context
        self._name = name
        self._dealer = context.dealer(address, name, curve=curve)
        self._channel: Channel | None = None
        self._was_connected = False
        self._chunk = CHUNK
        self._out = BulkSender(self._send, WINDOW)
        self._in = BulkInbox(self._send_credit, WINDOW)
        self._early: deque[FromNode] = deque()  # heard while a vector was on its way
        self._coming: dict[int, BulkReceiver] = {}

    def wait_connected(self, seconds: float) -> None:
        """Raises LinkLost if nobody takes the connection in time."""
        end = time.monotonic() + seconds
        while not self._dealer.wait_connected(SLICE):
            self._look()
            if time.monotonic() > end:
                raise LinkLost("no connection")
        self._was_connected = True

    def size(self, window: int, chunk: int) -> None:
        """What the node granted: chunks in flight, and bytes of a chunk. Before the first vector."""
        self._out = BulkSender(self._send, window, chunk=min(chunk, CHUNK))
        self._in = BulkInbox(self._send_credit, window)
        self._chunk = min(chunk, CHUNK)

    def move(self, bulk: Bulk, window: int, seconds: float) -> None:
        """Everything from here on goes through the node's other port, sealed. Raises LinkLost."""
        address = replace(parse(self.address), port=bulk.port)
        self._dealer.close()
        self._was_connected = False
        self._dealer = self._context.dealer(str(address), self._name, identity=bulk.identity)
        self._channel = Channel(bulk, window, node=False)
        self.wait_connected(seconds)

    def send(self, message: Message) -> None:
        """A message after all before it. Raises LinkLost."""
        self._out.message(message)
        self._flush()

    def post(self, message: Message) -> None:
        """A message that nobody waits for: it leaves now, or with the next one."""
        self._out.message(message)

    def send_vector(self, key: int, vector: Bytes) -> None:
        """A vector in chunks; it must stay as it is until the node has answered. Raises LinkLost."""
        self._out.vector(key, vector.data)
        self._flush()

    def expect(self, key: int, vector: Bytes) -> BulkReceiver:
        """Chunks under `key` go into `vector`, or where they go already; see `complete` of what is returned."""
        if key not in self._coming:
            self._coming[key] = self._in.expect(key, vector.data, chunk=self._chunk)
        return self._coming[key]

    def finish(self, receiver: BulkReceiver) -> None:
        """Wait for the rest of a vector. Raises LinkLost."""
        while not receiver.complete:
            self._keep(self._step(SLICE))
        self._in.take(receiver.key)
        del self._coming[receiver.key]

    def receive(self, *kinds: type[M], seconds: float | None = None) -> M:
        """The next message of these kinds; others are nobody's any more. Raises LinkLost (past `seconds`, too)."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            message = self._early.popleft() if self._early else self._step(SLICE)
            if isinstance(message, kinds):
                return message
            if end is not None and time.monotonic() > end:
                raise LinkLost(f"no answer in {seconds:g} s")

    def close(self, linger: float = 0.0) -> None:
        """Last words are given `linger` seconds."""
        self._dealer.close(linger)

    def _flush(self) -> None:
        while not self._out.pump():
            self._keep(self._step(SLICE / 10 if self._out.blocked else SLICE))

    def _keep(self, message: FromNode | None) -> None:
        if message is not None:
            self._early.append(message)
            self.announced(message)

    def _step(self, seconds: float) -> FromNode | None:
        """One message, if one comes: chunks and credit are dealt with here."""
        if not self._dealer.wait(seconds):
            self._look()
            if self._was_connected and not self._dealer.writable() and not self._dealer.wait(0):
                raise LinkLost("the connection ended")
            return None
        frames = self._dealer.recv()
        if frames is None:
            return None
        self.heard = time.monotonic()
        try:
            message, payload = decode_from_node(frames if self._channel is None else self._channel.open(frames))
            if isinstance(message, Chunk):
                assert payload is not None
                self._in.chunk(message, payload)
                return None
            if isinstance(message, Credit):
                self._out.credit(message.chunks)
                return None
        except (WireError, BulkError, SealError) as error:
            raise LinkLost(f"the node said what it may not ({error})") from None
        return message

    def _send_credit(self, credit: Credit) -> None:
        # Credit must not queue behind a vector that waits for credit itself.
        if not self._send(encode_data(credit)):
            raise LinkLost("the node takes no message")

    def _send(self, frames: Sequence[Buffer]) -> bool:
        channel = self._channel
        if channel is None:
            return self._dealer.send(frames, copy=False)
        if channel.worn:
            raise LinkLost("its keys have been used long enough")
        if not self._dealer.writable():  # sealed for nothing
            return False
        return channel.send(lambda sealed, copy: self._dealer.send(sealed, copy=copy), frames)
