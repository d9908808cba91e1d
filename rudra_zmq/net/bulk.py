"""Vectors in chunks under credit, for both sides of a session of the data plane.

Owns the order of what is sent, credit, and the bounds of what is received. Must not know what a vector means, nor
which socket carries it: ``send`` takes the frames of one message and says whether the queue took them.

    sender    BulkSender.message / .vector / .message ...     everything leaves in this order
              BulkSender.credit(message.chunks)               for each Credit that comes
    receiver  BulkInbox.expect(key, buffer)                   before the first chunk under ``key`` comes
              BulkInbox.chunk(message, payload)               for each Chunk that comes
              BulkInbox.take(key).complete                    when the closing message comes

Ownership: a source must stay as it is until ``on_read`` is called: ``send`` may read it where it lies until then.

    >>> from rudra_zmq.wire.codec import decode_to_node
    >>> from rudra_zmq.wire.messages.data import Credit
    >>> wire, out, into = [], [], bytearray(10)
    >>> sender = BulkSender(lambda frames: wire.append(frames) or True, window=2, chunk=4)
    >>> sender.vector(7, b"0123456789")
    False
    >>> inbox = BulkInbox(lambda credit: out.append(credit.chunks), window=2)
    >>> _ = inbox.expect(7, into, chunk=4)
    >>> while wire:
    ...     _ = inbox.chunk(*decode_to_node(wire.pop(0)))
    ...     if out:
    ...         _ = sender.credit(out.pop())
    >>> inbox.take(7).complete, into, sender.idle
    (True, bytearray(b'0123456789'), True)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from rudra_zmq.core.credit import ReceiveWindow, SendWindow
from rudra_zmq.wire.codec import CHUNK, Buffer, Frame, encode_data
from rudra_zmq.wire.messages.data import Chunk, Credit, Message
from rudra_zmq.wire.seal import SealedPayload, SealError

Send: TypeAlias = Callable[[Sequence[Buffer]], bool]


class BulkError(ValueError):
    """A chunk or a credit that no honest peer sends; ``reason`` is a word to count it by."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class _Vector:
    """A vector that is being sent."""

    __slots__ = ("at", "copied", "key", "on_read", "source")

    def __init__(self, key: int, source: memoryview, on_read: Callable[[], object] | None, copied: bool) -> None:
        self.key = key
        self.source = source
        self.on_read = on_read
        self.copied = copied
        self.at = 0


class BulkSender:
    """Sends messages and vectors of one session, in order; never more chunks than there is credit for.

    Nothing blocks: what a full queue refused, or what waits for credit, goes out with the next ``pump`` or
    ``credit``. The owner calls ``pump`` now and then while ``blocked``. PeerGone of ``send`` passes through.
    """

    def __init__(self, send: Send, window: int, *, chunk: int = CHUNK) -> None:
        self._send = send
        self._window = SendWindow(window)
        self._chunk = chunk
        self._queue: deque[list[Buffer] | _Vector] = deque()
        self._unread: deque[tuple[int, Callable[[], object]]] = deque()  # chunks up to its last one, on_read
        self._sent = self._acknowledged = 0  # chunks
        self.blocked = False  # the socket's queue was full at the last attempt

    @property
    def idle(self) -> bool:
        """Everything was handed over."""
        return not self._queue

    def message(self, message: Message) -> bool:
        """Sends ``message`` after what is queued; whether all is out."""
        self._queue.append(encode_data(message))
        return self.pump()

    def vector(self, key: int, source: Any, on_read: Callable[[], object] | None = None) -> bool:
        """Sends the bytes of ``source`` (any contiguous buffer) under ``key``; whether all is out.

        ``on_read`` is called once nobody reads ``source`` any more: the receiver has acknowledged the last chunk, or
        it was a single one, of which a copy is sent, for its acknowledgement would wait for others.
        """
        view = memoryview(source).cast("B")
        if not view.nbytes:
            raise ValueError("an empty vector")
        self._queue.append(_Vector(key, view, on_read, copied=view.nbytes <= self._chunk))
        return self.pump()

    def credit(self, chunks: int) -> bool:
        """The receiver has room for so many chunks more; whether all is out. Raises BulkError."""
        try:
            self._window.earn(chunks)
        except ValueError as error:
            raise BulkError("credit", str(error)) from None
        self._acknowledged += chunks
        while self._unread and self._unread[0][0] <= self._acknowledged:
            self._unread.popleft()[1]()
        return self.pump()

    def pump(self) -> bool:
        """Sends what may be sent now; whether all is out."""
        self.blocked = False
        while self._queue:
            item = self._queue[0]
            if isinstance(item, _Vector):
                if not self._chunks(item):
                    return False
                self._queue.popleft()
                if item.on_read is not None and item.copied:
                    item.on_read()
                elif item.on_read is not None:
                    self._unread.append((self._sent, item.on_read))
            elif self._send(item):
                self._queue.popleft()
            else:
                self.blocked = True
                return False
        return True

    def _chunks(self, vector: _Vector) -> bool:
        while vector.at < vector.source.nbytes:
            if not self._window.available:
                return False
            payload = vector.source[vector.at : vector.at + self._chunk]
            if vector.copied:
                payload = memoryview(bytes(payload))
            if not self._send(encode_data(Chunk(key=vector.key, offset=vector.at), payload)):
                self.blocked = True
                return False
            self._window.spend()
            self._sent += 1
            vector.at += payload.nbytes
        return True


class BulkReceiver:
    """One vector that is being received into ``into``, whose size is the vector's."""

    __slots__ = ("_chunk", "_into", "key", "nbytes", "received")

    def __init__(self, into: Any, key: int, *, chunk: int = CHUNK) -> None:
        """``into``: any writable contiguous buffer; it belongs to this vector until ``complete``."""
        self._into = memoryview(into).cast("B")
        if self._into.readonly:
            raise ValueError("a vector cannot be received into a read-only buffer")
        self._chunk = chunk
        self.key = key
        self.nbytes = self._into.nbytes
        self.received = 0

    @property
    def large(self) -> bool:
        """More than one chunk: worth a message that says that all of it came."""
        return self.nbytes > self._chunk

    @property
    def complete(self) -> bool:
        """Every byte came."""
        return self.received == self.nbytes

    def accept(self, message: Chunk, payload: Frame) -> None:
        """Takes one chunk. Raises BulkError (key, duplicate, range, gap, size, forged); what had come stays as it is.

        A session delivers in order, so each offset is known beforehand.
        """
        size = len(payload)
        if message.key != self.key:
            raise BulkError("key", f"chunk under key {message.key}")
        if message.offset + size > self.nbytes:
            raise BulkError("range", f"bytes {message.offset} to {message.offset + size} of {self.nbytes}")
        if message.offset < self.received:
            raise BulkError("duplicate", f"offset {message.offset} again")
        if message.offset > self.received:
            raise BulkError("gap", f"offset {message.offset} after {self.received} bytes")
        if size != min(self._chunk, self.nbytes - self.received):
            raise BulkError("size", f"chunk of {size} bytes at {message.offset} of {self.nbytes}")
        into = self._into[self.received : self.received + size]
        if isinstance(payload, SealedPayload):
            try:
                payload.open_into(into)
            except SealError as error:
                raise BulkError("forged", str(error)) from None
        else:
            into[:] = payload
        self.received += size


class BulkInbox:
    """The receiving end of one session: vectors by key, and credit handed back."""

    def __init__(self, send_credit: Callable[[Credit], object], window: int) -> None:
        """``send_credit`` sends the message; half a window is handed back at a time, and what is left at the end of
        a vector of several chunks."""
        self._send_credit = send_credit
        self._window = ReceiveWindow(window)
        self._expected: dict[int, BulkReceiver] = {}

    def expect(self, key: int, into: Any, *, chunk: int = CHUNK) -> BulkReceiver:
        """From here on chunks under ``key`` go into ``into``."""
        receiver = self._expected[key] = BulkReceiver(into, key, chunk=chunk)
        return receiver

    def take(self, key: int) -> BulkReceiver | None:
        """Ends a vector: its receiver (see ``complete``), or None where ``key`` is not expected."""
        return self._expected.pop(key, None)

    def chunk(self, message: Chunk, payload: Frame) -> BulkReceiver:
        """Takes one chunk, and returns its vector's receiver. Raises BulkError.

        A chunk that is refused has used up credit all the same, and it is handed back. A sender that ignores
        its credit fills the socket's queue (RCVHWM) and no more: what is taken here is never kept.
        """
        self._window.receive()
        receiver = self._expected.get(message.key)
        try:
            if receiver is None:
                raise BulkError("key", f"chunk under key {message.key}")
            receiver.accept(message, payload)
        finally:
            due = self._window.due(flush=receiver is not None and receiver.large and receiver.complete)
            if due:
                self._send_credit(Credit(chunks=due))
        return receiver
