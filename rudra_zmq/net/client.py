"""Blocking requests of the command line. See net.rpc for an example.

Owns the repetition of a request whose connection was lost, and the reasons of an unreachable psd. Must not know
what a message says.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import TypeVar, overload

from rudra_zmq import log
from rudra_zmq.errors import RudraError, TimedOut, UsageError
from rudra_zmq.net.addresses import is_here, parse, probe, unreachable
from rudra_zmq.net.handshake import Curve, explain
from rudra_zmq.net.sockets import Context, Dealer, make_context
from rudra_zmq.wire.codec import WireError, decode_control, encode_control, error_of, other_version
from rudra_zmq.wire.messages.control import Control, Envelope, Error
from rudra_zmq.wire.messages.data import Message
from rudra_zmq.wire.seal import Buffer

journal = log.get()

_M = TypeVar("_M", bound=Message)
_FIELD = re.compile(r"^field: (.*?)(?: - at `\$\.?(.*)`)?$")


def frames_of(id: str, message: Message) -> list[Buffer]:
    """A request of ours. UsageError, with the field, where what it was given cannot be said on the wire."""
    try:
        return encode_control(Envelope(id, False), message)
    except WireError as error:
        found = _FIELD.match(str(error))
        why, field = (found[1], found[2]) if found else (str(error), None)
        what = f"its {field} cannot be sent" if field else "it cannot be sent"
        asked = type(message).__name__
        raise UsageError(f"{asked}: {what}: {why}", fix="see to what was given, shorter or in UTF-8") from None


class RpcClient:
    """Blocking requests, one at a time. A request whose connection is lost is repeated under the same id."""

    _SLICE = 0.1  # seconds between looks at the connection
    _PATIENCE = 5.0  # seconds of silence after which a request is repeated on a new connection

    def __init__(
        self,
        address: str,
        *,
        whoami: Message | None = None,
        curve: Curve = None,
        context: Context | None = None,
        patience: float = 1.0,
    ) -> None:
        """Connects at the first ``call``; ``whoami`` is sent first on each connection. ``curve``: its own keys, and
        the public one that the server has to have.

        ``patience``: seconds that the first contact may take where nobody listens. A later one has the call's
        whole time: a daemon that restarts comes back.
        """
        parse(address)
        self.address = address
        self.patience = patience
        self._whoami = whoami
        self._curve = curve
        self._own = context is None
        self._context = context or make_context("control")
        self._dealer: Dealer | None = None
        self._introduced = ""
        self._met = False

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def call(self, message: Message, timeout: float = ..., *, expect: type[_M], id: str = ...) -> _M: ...
    @overload
    def call(self, message: Message, timeout: float = ..., *, id: str = ...) -> Control: ...

    def call(
        self, message: Message, timeout: float = 10.0, *, expect: type[_M] | None = None, id: str = ""
    ) -> _M | Control:
        """The answer, of type ``expect`` where it is given, within ``timeout`` seconds.

        Raises what the other side raised (a RudraError by its code), Unreachable with the reason, or TimedOut.
        A call that is to be repeated by the caller itself after a failure gives its own ``id``.
        """
        id = id or secrets.token_hex(16)
        deadline = time.monotonic() + timeout
        frames = frames_of(id, message)
        answer = None
        while answer is None:
            answer = self._try(id, message, frames, deadline)
        if isinstance(answer, Error):
            raise error_of(answer)
        if expect is not None and not isinstance(answer, expect):
            what = f"{type(answer).__name__} came as the answer to {type(message).__name__}"
            raise RudraError(what, where=self.address, fix="use the same version on both sides")
        return answer

    def close(self) -> None:
        """Closes the connection, and the context if it is its own."""
        self._drop()
        if self._own:
            self._context.close(3.0)

    # ---------------------------------------------------------------------------------------------- parts

    def _try(self, id: str, message: Message, frames: list[Buffer], deadline: float) -> Control | None:
        """One sending and the wait for its answer; None: again, on a new connection."""
        self._connect(deadline)
        dealer = self._dealer
        assert dealer is not None
        if not dealer.send(frames):
            self._drop()
            return None
        repeat = time.monotonic() + self._PATIENCE
        while True:
            now = time.monotonic()
            if now >= deadline:
                self._drop()
                what = f"no answer to {type(message).__name__} in time"
                raise TimedOut(what, where=self.address, fix="look at its log")
            if dealer.wait(min(self._SLICE, deadline - now)):
                answer = self._take(id)
                if answer is not None:
                    return answer
            elif not dealer.writable() or (now > repeat and not self._patient(message)):
                self._drop()
                return None

    @staticmethod
    def _patient(message: Message) -> bool:
        """A request that the other side holds by design (its field ``wait``) is not repeated meanwhile."""
        return float(getattr(message, "wait", 0.0)) > 0

    def _take(self, id: str) -> Control | None:
        dealer = self._dealer
        while dealer is not None and (frames := dealer.recv()) is not None:
            try:
                envelope, answer = decode_control(frames)
            except WireError as error:
                if error.reason == "version":
                    raise other_version(error.version, self.address) from None
                journal.warning("an answer is no message", at=self.address, detail=str(error))
                continue
            if envelope.reply and envelope.id == id:
                return answer
            if not envelope.reply and isinstance(answer, Error):  # about what it could not read
                raise error_of(answer)
            if envelope.reply and envelope.id == self._introduced and isinstance(answer, Error):
                raise error_of(answer)
        return None

    def _connect(self, deadline: float) -> None:
        if self._dealer is not None:
            return
        address = parse(self.address)
        last = deadline if self._met else min(deadline, time.monotonic() + self.patience)
        while True:
            dealer = self._context.dealer(self.address, "cli", curve=self._curve)
            now, listens = time.monotonic(), not probe(address, 0.5)
            if dealer.wait_connected(min(0.5, max(0.05, deadline - now)) if listens else 0.0):
                break
            failure = dealer.failure()
            dealer.close(0.0)
            if failure is not None and (refused := explain(address, failure, self._curve)) is not None:
                raise refused
            if time.monotonic() >= (deadline if listens else last):
                if (other := explain(address, None, self._curve)) is not None:
                    raise other
                fix = "start it with: rudra up" if is_here(address) else "start psd there, or correct the address"
                raise unreachable(address, "psd cannot be reached", fix=fix, timeout=0.5)
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
        self._dealer = dealer
        self._met = True
        if self._whoami is not None:
            self._introduced = secrets.token_hex(16)
            dealer.send(frames_of(self._introduced, self._whoami))

    def _drop(self) -> None:
        if self._dealer is not None:
            self._dealer.close(0.0)
            self._dealer = None
