"""Where a node is reached: a ROUTER for this host, one for others, and who is at the other end of each.

Owns the ports and keys of the data plane's server side, and the sealed channels of its peers. Must not know what a
message says: a peer is one name, the identity that it said hello under, whichever way its messages come and go.

    ipc               a ROUTER of its own, plain: nothing of it is ever bound to a port
    plain tcp         a ROUTER for everything
    encrypted tcp     a ROUTER under CURVE for Hello, Welcome and the pulse;
                      a plain one that takes and sends nothing but sealed frames (wire.seal), of peers that were
                      given a channel in their Welcome

A peer that has a channel is spoken to through it from the first frame on that came in through it and opened.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from rudra_zmq.errors import RudraError
from rudra_zmq.net.addresses import parse
from rudra_zmq.net.auth import Doorman, KeyPair
from rudra_zmq.net.channel import Channel
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.sockets import WINDOW, Context, PeerGone, Router
from rudra_zmq.wire.codec import Buffer, Frame
from rudra_zmq.wire.messages.data import Bulk
from rudra_zmq.wire.seal import KEY, SealError

IDENTITY = 16  # bytes
LOCAL = b"\0local/"
"""Before the identity of who came over ipc: nobody elsewhere can take the name of one, as no identity that is chosen
begins with a zero."""

Deliver: TypeAlias = Callable[[bytes, list[Frame], str], object]


@dataclass(eq=False)
class _Sealed:
    """The bulk connection of one peer."""

    peer: bytes
    identity: bytes
    channel: Channel
    used: bool = False  # the peer was heard through it


class Entrance:
    """All calls in the loop's thread. ``drop(reason)`` counts frames of the bulk port that are none of a peer's."""

    def __init__(self, context: Context, loop: Loop, name: str, drop: Callable[[str], object]) -> None:
        self.keys: KeyPair | None = None
        self._context = context
        self._loop = loop
        self._name = name
        self._drop = drop
        self._local: Router | None = None
        self._control: Router | None = None
        self._bulk: Router | None = None
        self._doorman: Doorman | None = None
        self._of: dict[bytes, _Sealed] = {}  # by peer
        self._at: dict[bytes, _Sealed] = {}  # by identity
        self._connections = count(1)

    # ------------------------------------------------------------------------------------------ binding

    def bind_ipc(self, path: str, mode: int = 0o600) -> None:
        """Raises AlreadyRunning, ConfigError."""
        if self._local is None:
            self._local = self._context.router(f"{self._name}-local")
        self._local.bind_ipc(path, mode)

    def bind_tcp(self, host: str, first: int, last: int, *, encrypted: bool, previous: Sequence[str] = ()) -> None:
        """A free port of first..last (0: the kernel's choice), better one of ``previous``; two where ``encrypted``.

        Raises AlreadyRunning, ConfigError.
        """
        if encrypted:
            self.keys = KeyPair.new()
            self._doorman = self._context.doorman(self._loop)
            self._bulk = self._context.router(f"{self._name}-bulk")
        if not self._bind_again(host, previous):
            self._door().bind_tcp(host, first, last)
        if self._bulk is not None:
            self._bulk.bind_tcp(host, first, last)

    def _bind_again(self, host: str, previous: Sequence[str]) -> str:
        for text in previous:
            with contextlib.suppress(RudraError):
                address = parse(text)
                if address.kind == "tcp" and address.host == host:
                    return self._door().bind_tcp(address.host, address.port)
        return ""

    def _door(self) -> Router:
        if self._control is None:
            self._control = self._context.router(self._name, self.keys)
        return self._control

    @property
    def addresses(self) -> list[str]:
        """Where Hello is said."""
        return [address for router in (self._local, self._control) if router for address in router.addresses]

    @property
    def key(self) -> str:
        """The public key that a peer has to know; empty where nothing is encrypted."""
        return "" if self.keys is None else self.keys.public

    # ------------------------------------------------------------------------------------------- peers

    def channel(self, peer: bytes) -> Bulk | None:
        """A channel for a peer that says hello, in place of the one that it had; None where nothing is encrypted."""
        self.forget(peer)
        if self._bulk is None or peer.startswith(LOCAL):
            return None
        bulk = Bulk(
            port=parse(self._bulk.addresses[0]).port,
            connection=next(self._connections),
            # A ROUTER makes up its own with a leading zero.
            identity=b"b" + secrets.token_bytes(IDENTITY - 1),
            up=secrets.token_bytes(KEY),
            down=secrets.token_bytes(KEY),
        )
        self._of[peer] = self._at[bulk.identity] = _Sealed(peer, bulk.identity, Channel(bulk, WINDOW, node=True))
        return bulk

    def forget(self, peer: bytes) -> None:
        """What comes through a peer's channel is a stranger's from here on."""
        sealed = self._of.pop(peer, None)
        if sealed is not None:
            del self._at[sealed.identity]

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Queues a message; False where the peer's queue is full. Raises PeerGone.

        A payload may be read where it lies until the peer has acknowledged it.
        """
        if self._local is not None and peer.startswith(LOCAL):
            try:
                return self._local.send(peer[len(LOCAL) :], frames, copy=len(frames) == 1)
            except PeerGone:
                raise PeerGone(peer) from None
        sealed = self._of.get(peer)
        if sealed is None or not sealed.used:
            return self._door().send(peer, frames, copy=len(frames) == 1)
        bulk, identity = self._bulk, sealed.identity
        assert bulk is not None
        try:
            return sealed.channel.send(lambda out, copy: bulk.send(identity, out, copy=copy), frames)
        except PeerGone:
            raise PeerGone(peer) from None

    # --------------------------------------------------------------------------------------- receiving

    def listen(self, readable: Callable[[], object]) -> None:
        """Calls back in each turn of the loop in which there is something to ``receive``."""
        for router in (self._local, self._control, self._bulk):
            if router is not None:
                self._loop.on_readable(router, readable)

    def receive(self, deliver: Deliver, most: int) -> None:
        """Gives out up to ``most`` messages of each port: the peer, its frames, and the key that it proved to have.

        The key is empty where nothing was proved: on ipc and plain tcp, and for what came through a channel.
        """
        for _ in range(most):
            local = self._receive_local(deliver)
            control = self._receive_control(deliver)
            bulk = self._receive_bulk(deliver)
            if not local and not control and not bulk:
                return

    def _receive_local(self, deliver: Deliver) -> bool:
        received = None if self._local is None else self._local.recv()
        if received is None:
            return False
        deliver(LOCAL + received[0], list(received[1]), "")
        return True

    def _receive_control(self, deliver: Deliver) -> bool:
        received = None if self._control is None else self._control.recv()
        if received is None or self._control is None:
            return False
        peer, frames = received
        deliver(peer, list(frames), self._control.user)
        return True

    def _receive_bulk(self, deliver: Deliver) -> bool:
        received = None if self._bulk is None else self._bulk.recv()
        if received is None:
            return False
        identity, frames = received
        sealed = self._at.get(identity)
        if sealed is None:
            self._drop("bulk-unknown")
            return True
        try:
            opened = sealed.channel.open(frames)
        except SealError as error:
            self._drop(error.reason)
            return True
        sealed.used = True
        deliver(sealed.peer, opened, "")
        return True

    def close(self, grace: float = 0.0) -> None:
        """Ends listening; peers have ``grace`` seconds to read what was said last."""
        for router in (self._bulk, self._control, self._local):
            if router is not None:
                self._loop.forget(router)
                router.close(grace)
                grace = 0.0
        if self._doorman is not None:
            self._doorman.close()
