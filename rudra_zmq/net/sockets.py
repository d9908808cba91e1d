"""The one place that makes ZeroMQ sockets: option table, allocator, owner thread, end of a context.

Owns every socket option, the bind of addresses and what a full queue or a vanished peer looks like. Must not know
what a message says. Daemons bind ROUTERs, everybody else connects DEALERs; a socket belongs to one thread.

    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = tempfile.TemporaryDirectory()
    >>> context = make_context("control")
    >>> router = context.router("psd")
    >>> address = router.bind_ipc(str(Path(folder.name) / "psd"))
    >>> dealer = context.dealer(address, "cli")
    >>> dealer.wait_connected(2.0), dealer.send([b"hello"])
    (True, True)
    >>> router.wait(2.0)
    True
    >>> peer, frames = router.recv()
    >>> frames, router.send(peer, [b"welcome"]), dealer.wait(2.0), dealer.recv()
    ([b'hello'], True, True, [b'welcome'])
    >>> dealer.close(); router.close(); context.close()
    True
    >>> folder.cleanup()
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import zmq

from rudra_zmq import log
from rudra_zmq.errors import EXIT_FORCED, AlreadyRunning, ConfigError, RudraError
from rudra_zmq.net.addresses import Address, PathLock, in_the_way, parse, port_owner, resolve
from rudra_zmq.net.auth import DOMAIN, Admit, Doorman, KeyPair
from rudra_zmq.net.handshake import Failure, Watch
from rudra_zmq.net.loop import Loop
from rudra_zmq.wire.codec import MAX_CONTROL, MAX_HEADER, Buffer
from rudra_zmq.wire.seal import OVERHEAD

journal = log.get()

Plane: TypeAlias = Literal["control", "data"]

WINDOW = 8  # chunks that a sender may have unacknowledged, per direction of a session
MAX_FRAMES = 4  # of a message, identity apart; the rest of a longer one is thrown away unread

# option, control plane, data plane, which sockets, why
OPTIONS: tuple[tuple[int, int, int, str, str], ...] = (
    (zmq.LINGER, 2000, 0, "both", "the default waits for ever at the end of the context"),
    (zmq.ROUTER_MANDATORY, 1, 1, "router", "the default drops silently what is for a full or an unknown peer"),
    (zmq.ROUTER_HANDOVER, 0, 0, "router", "identities are random: one that is known is a mistake or a theft"),
    (zmq.IMMEDIATE, 1, 1, "dealer", "the default queues for a dead end; so POLLOUT means connected"),
    (zmq.RECONNECT_IVL, -1, -1, "dealer", "a reconnect is a new socket, a new identity and a new greeting"),
    (zmq.SNDHWM, 1000, 256, "both", "whole messages per peer; chunks are bounded by credit long before"),
    (zmq.RCVHWM, 1000, 2 * WINDOW, "both", "the same; here a peer may send chunks without credit"),
    (zmq.MAXMSGSIZE, MAX_CONTROL, MAX_HEADER + OVERHEAD, "both", "bytes of a frame; who sends more is disconnected"),
    (zmq.HEARTBEAT_IVL, 0, 0, "both", "ZMTP heartbeats cut a peer that is slow to read, and lose its messages"),
    (zmq.TCP_KEEPALIVE, 1, 1, "both", "middleboxes forget idle connections"),
    (zmq.TCP_KEEPALIVE_IDLE, 30, 30, "both", "seconds"),
    (zmq.TCP_KEEPALIVE_INTVL, 10, 10, "both", "seconds"),
    (zmq.TCP_KEEPALIVE_CNT, 6, 6, "both", "probes"),
    (zmq.TCP_MAXRT, 20000, 20000, "both", "ms without an acknowledgement: bounds a host that lost its power"),
    (zmq.CONNECT_TIMEOUT, 5000, 5000, "dealer", "ms; the default is the kernel's, minutes"),
    (zmq.HANDSHAKE_IVL, 10000, 10000, "both", "ms; who connects and says nothing is cut"),
)
# Left at their defaults: SNDBUF and RCVBUF (the kernel's autotuning was never beaten), MAX_SOCKETS (connections
# do not count), ZAP of plain sockets (with a domain and no handler, every connection would be refused).


_CREDENTIALS = re.compile(r"[^:]*:(\d+):\d+:\d+")
"""The Peer-Address of an ipc peer: its user, group and process, as the kernel has them."""


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""


class PeerGone(Exception):
    """The ROUTER knows no such peer (any more): its session is over."""

    def __init__(self, peer: bytes) -> None:
        super().__init__(peer.hex())
        self.peer = peer


_tuned = False


def _tune_allocator() -> None:
    """Keeps freed megabytes in the process: fresh pages cost ten times the copy that fills them.

    glibc's malloc alone; an older one takes an mmap threshold of 32 MiB at most.
    """
    global _tuned
    if _tuned:
        return
    _tuned = True
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2
    if not mallopt(mmap_threshold, 1 << 30):
        mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 64 << 20)


def make_context(plane: Plane) -> Context:
    """The process's context for one plane. Make it after any fork, before the first big buffers."""
    return Context(plane)


class Context:
    """A ZeroMQ context that knows its open sockets. Thread safe; its sockets are not."""

    def __init__(self, plane: Plane) -> None:
        if plane == "data":
            _tune_allocator()
        self.plane: Plane = plane
        self._zmq = zmq.Context(io_threads=1)
        self._zmq.set(zmq.BLOCKY, 0)
        self._open: dict[int, str] = {}
        self._mutex = threading.Lock()

    def router(self, name: str, keys: KeyPair | None = None) -> Router:
        """An unbound ROUTER of the calling thread; ``name`` is for people. Under CURVE where it is given ``keys``:
        nobody comes in without a ``doorman``."""
        return Router(self, name, keys)

    def dealer(
        self, address: str, name: str, *, curve: tuple[KeyPair, str] | None = None, identity: bytes = b""
    ) -> Dealer:
        """A DEALER of the calling thread, connecting to ``address``.

        ``curve``: its own keys, and the server's public one. ``identity``: the one that the server asked for.
        Raises ConfigError (form of the address) and Unreachable (name not found).
        """
        return Dealer(self, address, name, curve, identity)

    def doorman(self, loop: Loop, admit: Admit | None = None) -> Doorman:
        """Who lets peers in under CURVE, all keys or those that ``admit`` takes; served by ``loop``."""
        return Doorman(self._zmq, loop) if admit is None else Doorman(self._zmq, loop, admit)

    def make(self, kind: int, name: str) -> zmq.Socket[bytes]:
        """A socket with the table's options; for this module's own use."""
        sock: zmq.Socket[bytes] = self._zmq.socket(kind)
        role = "router" if kind == zmq.ROUTER else "dealer"
        for option, control, data, which, _ in OPTIONS:
            if which in ("both", role):
                sock.setsockopt(option, control if self.plane == "control" else data)
        with self._mutex:
            self._open[id(sock)] = name
        return sock

    def forget(self, sock: zmq.Socket[bytes]) -> None:
        """A socket was closed."""
        with self._mutex:
            self._open.pop(id(sock), None)

    def close(self, timeout: float = 5.0, *, exit_if_stuck: bool = False) -> bool:
        """Ends the context once its sockets are closed, each in its own thread; False if that takes too long.

        What hangs is named in the log. ``exit_if_stuck`` ends the process with status 70 then: for daemons.
        """
        thread = threading.Thread(target=self._zmq.term, name="zmq-term", daemon=True)
        thread.start()
        thread.join(timeout)
        if not thread.is_alive():
            return True
        with self._mutex:
            names = ", ".join(sorted(self._open.values())) or "none: a peer takes no last words"
        journal.error("ZeroMQ does not end", after_s=timeout, open_sockets=names)
        if exit_if_stuck:
            os._exit(EXIT_FORCED)
        return False


class _Socket:
    """What ROUTER and DEALER share: one owner thread, receive without blocking, close once."""

    def __init__(self, context: Context, kind: int, name: str) -> None:
        self.name = name
        self._context = context
        self._owner = threading.get_ident()
        self.raw = context.make(kind, name)

    def check(self) -> None:
        """Raises RuntimeError in another thread than the owner's: there libzmq would abort the process."""
        if threading.get_ident() != self._owner:
            raise RuntimeError(f"socket {self.name} used by a thread that does not own it")

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return bool(self.raw.closed)

    def wait(self, timeout: float) -> bool:
        """Whether there is something to receive within ``timeout`` seconds."""
        self.check()
        return self._ready(timeout, zmq.POLLIN)

    def _ready(self, timeout: float, flag: int) -> bool:
        # Without the Poller that raw.poll makes for each call: a learner waits here once a mini-batch.
        return bool(zmq.zmq_poll([(self.raw, flag)], max(0, round(timeout * 1000))))

    def _frames(self, first: bytes | None) -> list[Buffer]:
        """The frames of the message at hand; from the second on without a copy (a view of libzmq's memory)."""
        frames: list[Buffer] = [] if first is None else [first]
        while self.raw.getsockopt(zmq.RCVMORE):
            if len(frames) > MAX_FRAMES:
                self.raw.recv(zmq.DONTWAIT, copy=False)
            elif frames:
                frames.append(self.raw.recv(zmq.DONTWAIT, copy=False).buffer)
            else:
                frames.append(self.raw.recv(zmq.DONTWAIT))
        return frames

    def _close(self, linger: float | None) -> None:
        if self.raw.closed:
            return
        self.check()
        self.raw.close(None if linger is None else round(linger * 1000))
        self._context.forget(self.raw)


class Router(_Socket):
    """A bound ROUTER. No call blocks; peers are told apart by the identity that they chose at random."""

    def __init__(self, context: Context, name: str, keys: KeyPair | None = None) -> None:
        super().__init__(context, zmq.ROUTER, name)
        self.addresses: list[str] = []
        self.user = ""
        self.uid = -1
        self._locks: list[PathLock] = []
        self._curve = False
        self._told = context.plane == "control"
        self._watch: Watch | None = None
        self._forget_watch: Callable[[], object] = lambda: None
        if keys is not None:
            self.secure(keys)

    def secure(self, keys: KeyPair) -> None:
        """What is bound from now on takes none but CURVE; what is bound already stays as it is."""
        self.check()
        self._curve = True
        self.raw.setsockopt(zmq.CURVE_SERVER, 1)
        self.raw.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
        self.raw.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self.raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def count_failures(self, loop: Loop, count: Callable[[Failure], object]) -> None:
        """Calls back in ``loop`` for each connection that ends before it has begun. To be called before ``bind``."""
        watch = self._watch = Watch(self.raw)

        def readable() -> None:
            while (failure := watch.next()) is not None:
                if failure != "cut":
                    count(failure)

        loop.on_readable(watch, readable)
        self._forget_watch = lambda: loop.forget(watch)

    def bind_ipc(self, path: str, mode: int = 0o600) -> str:
        """Binds ``path`` and returns its address. Raises AlreadyRunning naming the owner's PID."""
        self.check()
        address = parse(f"ipc://{path}")
        lock = PathLock(address.path)
        try:
            self.raw.bind(str(address))
            os.chmod(address.path, mode)
        except (zmq.ZMQError, OSError) as error:
            lock.release()
            raise in_the_way("cannot bind", error.errno, path) from None
        self._locks.append(lock)
        self.addresses.append(str(address))
        return str(address)

    def bind_tcp(self, host: str, first: int, last: int | None = None) -> str:
        """Binds the first free port of first..last (0: the kernel's choice) and returns the address.

        ``host`` is an IP of this machine (a name is resolved first). Raises AlreadyRunning where all are taken,
        naming who holds the first, and ConfigError where the address is not of this machine.
        """
        self.check()
        for port in range(first, (first if last is None else last) + 1):
            address = resolve(Address("tcp", host=host, port=port))
            if ":" in address.host:
                self.raw.setsockopt(zmq.IPV6, 1)
            try:
                self.raw.bind(str(address))
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                fix = "give an address of this machine, and a port that you may bind"
                raise ConfigError(f"cannot bind: {error}", where=str(address), fix=fix) from None
            endpoint = self.raw.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            bound = endpoint.rstrip(b"\0").decode()
            self.addresses.append(bound)
            return bound
        raise self._taken(host, first, last)

    @staticmethod
    def _taken(host: str, first: int, last: int | None) -> RudraError:
        pid = port_owner(first)
        holder = f"PID {pid}" if pid else "another process"
        if last is None or last == first:
            fix = f"use it, stop it (kill {pid}), or choose another port" if pid else "choose another port"
            return AlreadyRunning(f"the port is held by {holder}", where=f"tcp://{host}:{first}", fix=fix)
        where = f"tcp://{host}:{first}-{last}"
        return AlreadyRunning(f"no free port; the first is held by {holder}", where=where, fix="widen the range")

    def recv(self) -> tuple[bytes, list[Buffer]] | None:
        """Identity and frames of the next message, or None. A payload frame is a view: copy what must stay.

        ``user`` is then the public key that the message's sender proved to have, "" where it came in without one;
        on the control plane ``uid`` is its user id where it came over ipc, else -1.
        """
        self.check()
        try:
            if not self._curve and not self._told:
                return self.raw.recv(zmq.DONTWAIT), self._frames(None)
            peer = self.raw.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        self._who(peer)
        return peer.bytes, self._frames(None)

    def _who(self, peer: zmq.Frame) -> None:
        """Sets ``user`` and ``uid``.

        A peer may send properties of its own; they never replace what libzmq put there, so one of the two is true:
        a Peer-Address of an ipc peer, a User-Id of one under CURVE. Who has both has made one up.
        """
        local = _CREDENTIALS.fullmatch(_property(peer, "Peer-Address")) if self._told else None
        proved = _property(peer, "User-Id") if self._curve else ""
        if local is not None and proved:
            self.user, self.uid = "?", -1
        else:
            self.user, self.uid = proved, -1 if local is None else int(local[1])

    def send(self, peer: bytes, frames: Sequence[Buffer], *, copy: bool = True) -> bool:
        """Queues a message for ``peer``; False where its queue is full. Raises PeerGone.

        With ``copy`` false a frame of 64 KiB or more is read by libzmq's thread later: it must not change until
        the peer has acknowledged it.
        """
        self.check()
        try:
            self.raw.send(peer, zmq.DONTWAIT | zmq.SNDMORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                raise PeerGone(peer) from None
            raise
        for frame in frames[:-1]:
            self.raw.send(frame, zmq.DONTWAIT | zmq.SNDMORE, copy=copy)
        self.raw.send(frames[-1], zmq.DONTWAIT, copy=copy)
        return True

    def close(self, grace: float = 0.0) -> None:
        """Stops listening, waits ``grace`` seconds, closes, and removes the ipc files. Harmless twice.

        A DEALER drops what it has not read when its connection ends, so a server whose last replies matter gives
        its peers a ``grace`` of some tenths of a second to read them.
        """
        if self.raw.closed:
            return
        self.check()
        if grace > 0:
            time.sleep(grace)
        if self._watch is not None:
            self._forget_watch()
            self._watch.close()
        self._close(None)
        for lock in self._locks:
            lock.release()


class Dealer(_Socket):
    """A DEALER with one connection and a random identity. It never reconnects: make a new one."""

    def __init__(
        self,
        context: Context,
        address: str,
        name: str,
        curve: tuple[KeyPair, str] | None = None,
        identity: bytes = b"",
    ) -> None:
        target = resolve(parse(address))
        super().__init__(context, zmq.DEALER, name)
        self.address = address
        self.target = target
        random = f"{name[:80]}/{os.getpid()}/{secrets.token_hex(8)}".encode("ascii", "replace")
        self.identity = identity or random
        self.raw.setsockopt(zmq.ROUTING_ID, self.identity)
        if curve is not None:
            keys, server = curve
            self.raw.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode("ascii"))
            self.raw.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
            self.raw.setsockopt(zmq.CURVE_SERVERKEY, server.encode("ascii"))
        self.watch = Watch(self.raw) if context.plane == "control" else None
        if ":" in target.host:
            self.raw.setsockopt(zmq.IPV6, 1)
        self.raw.connect(str(target))

    def writable(self) -> bool:
        """Connected, and the queue not full. Once true, false means that the connection is lost."""
        self.check()
        return self._ready(0.0, zmq.POLLOUT)

    def wait_connected(self, timeout: float) -> bool:
        """Waits for the connection, ``timeout`` seconds at most; not for one that is known to have failed."""
        self.check()
        poller = zmq.Poller()
        poller.register(self.raw, zmq.POLLOUT)
        if self.watch is not None:
            poller.register(self.watch.raw, zmq.POLLIN)
        return self.raw in dict(poller.poll(max(0, round(timeout * 1000))))

    def failure(self) -> Failure | None:
        """Why there will be no connection, as far as the other side said."""
        self.check()
        return None if self.watch is None else self.watch.next()

    def recv(self) -> list[Buffer] | None:
        """Frames of the next message, or None. A payload frame is a view: copy what must stay."""
        self.check()
        try:
            first = self.raw.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None
        return self._frames(first)

    def send(self, frames: Sequence[Buffer], *, copy: bool = True) -> bool:
        """Queues a message; False where not connected or the queue is full. ``copy`` as in Router.send."""
        self.check()
        try:
            for frame in frames[:-1]:
                self.raw.send(frame, zmq.DONTWAIT | zmq.SNDMORE, copy=copy)
            self.raw.send(frames[-1], zmq.DONTWAIT, copy=copy)
        except zmq.Again:
            return False
        return True

    def close(self, linger: float | None = None) -> None:
        """Closes; last words are given ``linger`` seconds (default: 2 on the control plane, 0 on the other)."""
        if self.watch is not None and not self.raw.closed:
            self.check()
            self.watch.close()
        self._close(linger)
