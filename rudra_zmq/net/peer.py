"""A daemon's lasting connection to a psd. See net.rpc for an example.

Owns reconnects, liveness and the requests that wait for an answer. Must not know what a message says.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from rudra_zmq import log
from rudra_zmq.errors import RudraError, TimedOut, Unreachable
from rudra_zmq.net.addresses import Address, parse, probe
from rudra_zmq.net.drops import Drops
from rudra_zmq.net.handshake import Curve, explain
from rudra_zmq.net.loop import Loop, Timer
from rudra_zmq.net.retry import Backoff
from rudra_zmq.net.sockets import Context, Dealer
from rudra_zmq.wire.codec import WireError, decode_control, encode_control, error_message, error_of, other_version
from rudra_zmq.wire.messages.control import Control, Envelope, Error
from rudra_zmq.wire.messages.data import Message

journal = log.get()

REFUSED_S = 2.0  # between attempts of who was refused
_BATCH = 64  # messages that one turn takes, so that timers and others have theirs


class RpcPeer:
    """A daemon's lasting connection to a server, inside a Loop.

    A new socket and identity for each attempt, several a second for 5 s, then backed off to 5 s, with jitter.
    ``on_connect`` is called for each new connection, and registers; requests that are unanswered when the
    connection is lost end with ``on_reply(Error)`` of code unreachable. Any message counts as life.
    """

    def __init__(
        self,
        loop: Loop,
        context: Context,
        address: str,
        name: str,
        *,
        on_connect: Callable[[], object],
        on_message: Callable[[str, Control], Message | None],
        on_lost: Callable[[str], object] | None = None,
        ping: Callable[[], Message] | None = None,
        ping_s: float = 2.0,
        liveness_s: float = 10.0,
        curve: Callable[[], Curve] = lambda: None,
    ) -> None:
        """``on_message(id, message)``: what the server sends by itself; the return value answers a request.

        ``on_lost(reason)`` is called when a connection ends, when the first attempt has failed, and when a later one
        fails for another reason; ``problem`` is then the error of an attempt that was refused, else None.
        ``curve`` gives the keys of each attempt; it may raise a RudraError.
        ``ping`` makes the message that asks for a sign of life; ``ping_s`` and ``liveness_s`` may be changed later.
        """
        self.address = address
        self.reached = ""  # the IP that the present or last connection goes to; "" over ipc
        self.drops = Drops(name)
        self.ping_s = ping_s
        self.liveness_s = liveness_s
        self.connected = False
        self.problem: RudraError | None = None
        self._curve = curve
        self._loop = loop
        self._context = context
        self._name = name
        self._on_connect = on_connect
        self._on_message = on_message
        self._on_lost = on_lost
        self._ping = ping
        self._dealer: Dealer | None = None
        self._keys: Curve = None
        self._waiting: dict[str, tuple[Callable[[Control], object], Timer]] = {}
        self._backoff = Backoff()
        self._delay = 0.0
        self._told = False
        self._heard = self._pinged = loop.now()
        self._timer: Timer | None = loop.after(0.0, self._open)
        self._watch = loop.every(0.2, self._look)
        self._closed = False

    # ------------------------------------------------------------------------------------------ sending

    def request(
        self, message: Message, on_reply: Callable[[Control], object], *, timeout: float = 10.0, id: str = ""
    ) -> str:
        """Asks; ``on_reply`` is called once, with the answer or with an Error (unreachable, timed-out)."""
        id = id or secrets.token_hex(16)
        timer = self._loop.after(timeout, lambda: self._fail(id, TimedOut("no answer", where=self.address)))
        self._waiting[id] = (on_reply, timer)
        error: RudraError | None = None
        try:
            if not self._send(Envelope(id, False), message):
                error = Unreachable("not connected", where=self.address)
        except WireError as bad:
            error = self._unsendable(message, bad)
        if error is not None:
            failed = error
            self._loop.call_soon_threadsafe(lambda: self._fail(id, failed))
        return id

    def notify(self, message: Message) -> bool:
        """A message without an answer; false where it could not be sent."""
        return self._say("", False, message)

    def reply(self, id: str, message: Message) -> bool:
        """The answer to a request of the server's that ``on_message`` returned None for."""
        return self._say(id, True, message)

    def _say(self, id: str, reply: bool, message: Message) -> bool:
        try:
            return self._send(Envelope(id, reply), message)
        except WireError as error:
            self._unsendable(message, error)
            return False

    def _unsendable(self, message: Message, error: WireError) -> RudraError:
        """A message of ours that breaks a limit (too many rows, ...) ends nothing but itself."""
        what = f"{type(message).__name__} cannot be sent: {error}"
        self.drops.count("unsendable", what)
        return RudraError(what, where=self.address)

    def reconnect(self, address: str = "") -> None:
        """Drops the connection and begins anew, at ``address`` where one is given."""
        if address and address != self.address:
            self.address, self.reached = address, ""
        self._lost("asked to reconnect")

    def close(self, linger: float = 2.0) -> None:
        """Ends it; last words are given ``linger`` seconds."""
        self._closed = True
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._drop_socket(linger)
        for _, timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    def _send(self, envelope: Envelope, message: Message) -> bool:
        frames = encode_control(envelope, message)
        return self._dealer is not None and self.connected and self._dealer.send(frames)

    # ------------------------------------------------------------------------------------- the connection

    def _open(self) -> None:
        self._timer = None
        if self._closed:
            return
        try:
            self._keys = self._curve()
            self._dealer = self._context.dealer(self.address, self._name, curve=self._keys)
            self._went_to(self._dealer.target)
        except RudraError as error:  # a name that does not resolve now may do so later
            self._refused(error)
            return
        self._loop.on_readable(self._dealer, self._readable)
        if self._dealer.watch is not None:
            self._loop.on_readable(self._dealer.watch, self._failed)
        self._loop.on_writable(self._dealer, self._up)
        # A refused attempt looks like a slow one; a slow one gets longer as time goes by.
        patience = 0.2 if self._delay < 0.2 else min(5.0, 5 * self._delay)
        self._timer = self._loop.after(patience, self._slow)

    def _failed(self) -> None:
        """The other side does not take us, or broke off."""
        failure = self._dealer.failure() if self._dealer is not None else None
        if failure is not None and not self.connected:
            self._refused(explain(parse(self.address), failure, self._keys))

    def _slow(self) -> None:
        """No connection in time, and nothing said."""
        known = explain(parse(self.address), None, self._keys) if not self._told else None
        if known is None:
            self.problem = None
        self._refused(known)

    def _refused(self, error: RudraError | None) -> None:
        """An attempt failed, and the reason is known: asking at once again would not mend it."""
        if error is None:
            self._retry("")
            return
        if self.problem is None or str(self.problem) != str(error):
            self._told = False
        self.problem = error
        self._retry(error.message, REFUSED_S)

    def _went_to(self, target: Address) -> None:
        """A name is looked up for each attempt, here, where it is dialled."""
        if self.reached and target.host and target.host != self.reached:
            name = parse(self.address).host or self.address
            journal.info(f"{name} moved {self.reached} -> {target.host}")
        self.reached = target.host

    def _up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.connected = True
        self.problem = None
        self._backoff.reset()
        self._delay = 0.0
        self._heard = self._pinged = self._loop.now()
        self._on_connect()

    def _look(self) -> None:
        """Five times a second: is it still connected, was anything heard, is a ping due?"""
        if self._dealer is None or not self.connected:
            return
        now = self._loop.now()
        if not self._dealer.writable():
            self._lost("connection closed by the other side")
        elif now - self._heard > self.liveness_s:
            self._lost(f"silent for {now - self._heard:.1f} s")
        elif self._ping is not None and now - self._pinged >= self.ping_s:
            self._pinged = now
            self.request(self._ping(), lambda _: None, timeout=self.liveness_s)

    def _lost(self, reason: str) -> None:
        if self._closed:
            return
        was = self.connected
        self._drop_socket(0.0)
        if was:
            self._told = True
            journal.warning("connection lost", to=self.address, reason=reason)
            self._fail_all(Unreachable(f"connection lost: {reason}", where=self.address))
            if self._on_lost is not None:
                self._on_lost(reason)
        self._again()

    def _retry(self, reason: str, least: float = 0.0) -> None:
        """An attempt failed; the next one is ``least`` seconds away."""
        self._drop_socket(0.0)
        if not self._told:
            self._told = True
            if self._on_lost is not None:
                self._on_lost(reason or probe(parse(self.address), 0.2) or "it does not answer")
        self._again(least)

    def _again(self, least: float = 0.0) -> None:
        if self._closed:  # by a callback
            return
        if self._timer is not None:
            self._timer.cancel()
        self._delay = max(least, self._backoff.next(self._loop.now()))
        self._timer = self._loop.after(self._delay, self._open)

    def _drop_socket(self, linger: float) -> None:
        self.connected = False
        if self._dealer is not None:
            self._loop.forget(self._dealer)
            if self._dealer.watch is not None:
                self._loop.forget(self._dealer.watch)
            self._dealer.close(linger)
            self._dealer = None

    # ---------------------------------------------------------------------------------------- receiving

    def _readable(self) -> None:
        for _ in range(_BATCH):
            frames = self._dealer.recv() if self._dealer is not None else None
            if frames is None:
                return
            self._heard = self._loop.now()
            self._told = False
            try:
                envelope, message = decode_control(frames)
            except WireError as error:
                self.drops.count(error.reason, str(error))
                if error.reason == "version":
                    self._fail_all(other_version(error.version, self.address))
                continue
            if envelope.reply:
                waiting = self._waiting.pop(envelope.id, None)
                if waiting is None:
                    self.drops.count("late reply")
                    continue
                waiting[1].cancel()
                waiting[0](message)
            elif isinstance(message, Error):  # about what it could not read
                self._fail_all(error_of(message))
            else:
                answer = self._on_message(envelope.id, message)
                if answer is not None and envelope.id:
                    self.reply(envelope.id, answer)

    def _fail(self, id: str, error: RudraError) -> None:
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            waiting[1].cancel()
            waiting[0](error_message(error))

    def _fail_all(self, error: RudraError) -> None:
        for id in list(self._waiting):
            self._fail(id, error)
