"""A learner's blocking connection to a node: messages with deadlines, vectors into buffers of the caller.

Owns the socket of one connection, credit, and how its loss is noticed. Must not know what a learner does next. Used
by one thread: the main thread has the data session, the pulse's thread another one.

    session = DataSession(context, "learner-3")
    welcome = session.connect(addresses, Hello(role="learner", ...), timeout=10.0)
    session.send(Attach(...))
    ready = session.receive(60.0, Ready)
    session.fill(ready.key, weights, 60.0)              # any writable buffer of ready.nbytes
    session.send_vector(grant.key, gradient)            # not copied: leave it alone until the answer is here
    session.send(Push(...))
    grant = session.receive(600.0, Grant)
    if grant.nbytes:
        session.fill(grant.weights_key, weights, 60.0)
    session.close(linger=1.0)

A lost connection raises ConnectionLost, and the session is closed then: ``connect`` again, as often as
net.retry.Backoff says.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rudra_zmq.errors import TimedOut, Unreachable
from rudra_zmq.net.addresses import parse, probe
from rudra_zmq.net.bulk import BulkError, BulkInbox, BulkReceiver, BulkSender
from rudra_zmq.net.drops import Drops
from rudra_zmq.net.sockets import Context, Dealer
from rudra_zmq.wire.codec import CHUNK, Buffer, WireError, decode_from_node, encode_data, error_of
from rudra_zmq.wire.messages.data import Chunk, Credit, FromNode, Hello, Message, Refused, Welcome

_M = TypeVar("_M", bound=Message)

_SLICE = 0.1  # seconds between looks at the connection


class ConnectionLost(Unreachable):
    """The connection ended, or the caller's ``give_up`` said that it is of no use; the session is closed."""


class DataSession:
    """One connection to a node. Every wait has a deadline; what comes out of bounds ends the session."""

    def __init__(self, context: Context, name: str, *, give_up: Callable[[], str] | None = None) -> None:
        """``give_up`` is asked ten times a second of waiting for a reason to end it ("" : none)."""
        self.drops = Drops(name)
        self.address = ""
        self._context = context
        self._name = name
        self._give_up = give_up
        self._dealer: Dealer | None = None
        self._sender: BulkSender | None = None
        self._inbox: BulkInbox | None = None
        self._ready: deque[FromNode] = deque()
        self._chunk = CHUNK

    @property
    def connected(self) -> bool:
        """A Welcome came, and the loss of the connection was not noticed yet."""
        return self._sender is not None

    # ------------------------------------------------------------------------------------- the connection

    def connect(self, addresses: Sequence[str], hello: Hello, timeout: float) -> Welcome:
        """Tries the addresses in order, once each, says ``hello`` and waits for the Welcome.

        Raises Unreachable with the reason of each address, or what a Refused stands for.
        """
        self.close()
        deadline = time.monotonic() + timeout
        reasons = []
        for address in addresses:
            reason = self._dial(address, min(5.0, max(0.1, deadline - time.monotonic())))
            if not reason:
                return self._greet(hello, deadline)
            reasons.append(f"{address}: {reason}")
        where = "; ".join(reasons) or "no address is known"
        raise Unreachable("the job's node cannot be reached", where=where, fix="see rudra status and its log")

    def _dial(self, address: str, timeout: float) -> str:
        reason = probe(parse(address), min(timeout, 2.0))
        if reason:
            return reason
        dealer = self._context.dealer(address, self._name)
        if not dealer.wait_connected(timeout):
            dealer.close(0.0)
            return f"connected, and no greeting in {timeout:.1f} s"
        self.address, self._dealer = address, dealer
        return ""

    def _greet(self, hello: Hello, deadline: float) -> Welcome:
        dealer = self._dealer
        assert dealer is not None
        dealer.send(encode_data(hello))
        welcome = self.receive(max(0.1, deadline - time.monotonic()), Welcome)
        self._sender = BulkSender(self._put, welcome.credit, chunk=welcome.chunk)
        self._inbox = BulkInbox(self._hand_back, welcome.credit)
        self._chunk = welcome.chunk
        return welcome

    def close(self, linger: float = 0.0) -> None:
        """Ends the connection; last words (Bye) are given ``linger`` seconds. Harmless twice."""
        dealer, self._dealer = self._dealer, None
        self._sender = self._inbox = None
        self._ready.clear()
        if dealer is not None:
            dealer.close(linger)

    def _lose(self, reason: str) -> ConnectionLost:
        where = self.address
        self.close()
        return ConnectionLost(f"connection to the node lost: {reason}", where=where, fix="see the node's log")

    # ------------------------------------------------------------------------------------------ sending

    def send(self, message: Message) -> None:
        """Sends after what is queued. Does not wait: the rest leaves during ``receive``, ``fill`` or ``flush``."""
        self._out().message(message)

    def send_vector(self, key: int, source: Any) -> None:
        """Sends the bytes of ``source`` under ``key``; it must stay as it is until the node has answered."""
        self._out().vector(key, source)

    def flush(self, timeout: float) -> None:
        """Waits until everything was handed over. Raises TimedOut, ConnectionLost."""
        self._until(lambda: self._out().idle, timeout, "the node takes no more")

    def _out(self) -> BulkSender:
        if self._sender is None:
            raise ConnectionLost("not connected", where=self.address, fix="connect again")
        return self._sender

    def _put(self, frames: Sequence[Buffer]) -> bool:
        return self._dealer is not None and self._dealer.send(frames, copy=False)

    def _hand_back(self, credit: Credit) -> None:
        # Ahead of a vector that waits for credit itself, or both sides would wait for each other.
        if self._dealer is None or not self._dealer.send(encode_data(credit)):
            raise self._lose("it takes no more messages")

    # ---------------------------------------------------------------------------------------- receiving

    def receive(self, timeout: float, expect: type[_M]) -> _M:
        """The next message (chunks and credit apart), which must be an ``expect``.

        Raises TimedOut, ConnectionLost, or what a Refused stands for (the session is closed then).
        """
        message = self.receive_any(timeout)
        if not isinstance(message, expect):
            raise self._lose(f"{type(message).__name__} came where {expect.__name__} was due")
        return message

    def receive_any(self, timeout: float) -> FromNode:
        """The next message of any type but Chunk, Credit and Refused. Raises as ``receive``."""
        self._until(lambda: bool(self._ready), timeout, "no answer from the node")
        message = self._ready.popleft()
        if isinstance(message, Refused):
            self.close()
            raise error_of(message)
        return message

    def expect(self, key: int, into: Any) -> BulkReceiver:
        """Chunks under ``key`` go into ``into`` from here on, during whatever call comes next."""
        if self._inbox is None:
            raise ConnectionLost("not connected", where=self.address, fix="connect again")
        return self._inbox.expect(key, into, chunk=self._chunk)

    def fill(self, key: int, into: Any, timeout: float) -> None:
        """Receives the vector ``key`` into ``into`` (a writable buffer of just its size).

        Raises TimedOut and ConnectionLost; ``into`` is part old, part new then.
        """
        receiver = self.expect(key, into)
        self._until(lambda: receiver.complete, timeout, f"{receiver.nbytes} bytes of weights did not come")
        if self._inbox is not None:
            self._inbox.take(key)

    def _until(self, done: Callable[[], bool], timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            dealer = self._dealer
            if dealer is None:
                raise ConnectionLost("not connected", where=self.address, fix="connect again")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"{what} in {timeout:g} s", where=self.address, fix="see the node's log")
            if dealer.wait(min(_SLICE, left)):
                self._one(dealer)
            else:
                self._look(dealer)

    def _look(self, dealer: Dealer) -> None:
        reason = self._give_up() if self._give_up is not None else ""
        if reason or not dealer.writable():
            raise self._lose(reason or "closed by the other side")
        if self._sender is not None:
            self._sender.pump()

    def _one(self, dealer: Dealer) -> None:
        """One message off the socket, and no more: the chunks behind a message need the caller's ``expect``."""
        frames = dealer.recv()
        if frames is None:
            return
        try:
            message, payload = decode_from_node(frames)
            if isinstance(message, Chunk) and payload is not None and self._inbox is not None:
                self._inbox.chunk(message, payload)
            elif isinstance(message, Credit) and self._sender is not None:
                self._sender.credit(message.chunks)
            else:
                self._ready.append(message)
        except (WireError, BulkError) as error:
            self.drops.count(error.reason, str(error))
            raise self._lose(f"the node sent what it must not: {error}") from None
