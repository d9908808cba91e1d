"""Requests, replies and notices of the control plane: the server's end. ``RpcPeer`` (net.peer) is a daemon's end
and ``RpcClient`` (net.client) the command line's; both can be imported from here.

Owns request ids, replies on record, and what becomes of bad input (counted by reason, never raised). Must not know
what a message asks for, nor who may ask: handlers judge tokens.

Server (psd), in a Loop:

    def handle(peer, request_id, message):       # peer: identity of the connection
        if isinstance(message, ListJobs):
            return Jobs(rows=[])                 # the reply, at once; or raise a RudraError
        return None                              # later: server.reply(peer, request_id, ...); or it was a notice
    server = RpcServer(loop, router, handle, on_gone=forget)

Daemon (learnerd, node), in a Loop:

    peer = RpcPeer(loop, context, address, "learnerd", on_connect=register, on_message=notice, on_lost=lost,
                   ping=lambda: HostPing())
    peer.request(Register(...), on_reply)        # on_reply(message); an Error message too

Command line, blocking:

    with RpcClient(address, whoami=Whoami(token=token)) as client:
        jobs = client.call(ListJobs(), expect=Jobs)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rudra_zmq import log
from rudra_zmq.errors import RudraError
from rudra_zmq.net.client import RpcClient
from rudra_zmq.net.drops import Drops
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.peer import RpcPeer
from rudra_zmq.net.sockets import PeerGone, Router
from rudra_zmq.wire.codec import (
    PROTOCOL,
    Buffer,
    WireError,
    clip,
    decode_control,
    encode_control,
    error_message,
    in_version,
    other_version,
    version_of,
)
from rudra_zmq.wire.messages.control import Control, Envelope
from rudra_zmq.wire.messages.data import Message

__all__ = ["Handler", "RpcClient", "RpcPeer", "RpcServer"]

journal = log.get()

Handler: TypeAlias = Callable[[bytes, str, Control], Message | None]

_BATCH = 64  # messages that one turn takes from one socket, so that timers and others have theirs
_RECORD = 1000  # replies kept for requests that are repeated
_RECORD_BYTES = 8 << 20
_RECORD_LARGEST = 65536  # a longer reply is made anew: what is long is only ever read


class RpcServer:
    """Answers requests that come in on a ROUTER. A reply is kept, so that a repeated request runs once."""

    def __init__(
        self,
        loop: Loop,
        router: Router,
        handler: Handler,
        *,
        on_reply: Callable[[bytes, str, Control], object] | None = None,
        on_gone: Callable[[bytes], object] | None = None,
    ) -> None:
        """``handler(peer, id, message)``: a request, or a notice (id ""). ``on_reply``: the same for the answer
        to a request that ``send`` made. ``on_gone(peer)``: a message found its peer gone (called in the next turn,
        maybe more than once)."""
        self.drops = Drops(router.name)
        self._router = router
        self._handler = handler
        self._on_reply = on_reply
        self._on_gone = on_gone
        self._loop = loop
        self._asked: OrderedDict[str, bytes] = OrderedDict()  # request id without a reply yet -> who asked last
        self._record: OrderedDict[str, list[Buffer]] = OrderedDict()
        self._record_bytes = 0
        self._older: OrderedDict[bytes, int] = OrderedDict()  # peer -> its version, where that is not ours
        loop.on_readable(router, self._readable)

    def send(self, peer: bytes, message: Message, *, id: str = "", reply: bool = False) -> bool:
        """A notice (or, with ``id``, a request) of ours; with ``reply``, as ``reply``. False if it did not go out.

        That is: the peer's queue is full or the message breaks a limit (both counted), or it is gone.
        """
        if reply:
            return self.reply(peer, id, message)
        try:
            return self._send(peer, encode_control(Envelope(id, False), message))
        except WireError as error:
            self._unsendable(message, error)
            return False

    def reply(self, peer: bytes, id: str, message: Message) -> bool:
        """The answer to a request that the handler returned None for; goes to whoever repeated it last."""
        if not id:
            return False
        try:
            frames = encode_control(Envelope(id, True), message)
        except WireError as error:
            frames = encode_control(Envelope(id, True), self._unsendable(message, error))
        peer = self._asked.pop(id, peer)
        self._keep(id, frames)
        return self._send(peer, frames)

    def _unsendable(self, message: Message, error: WireError) -> Message:
        """A message of ours that breaks a limit (too many rows, ...) ends nothing but itself."""
        what = f"{type(message).__name__} cannot be sent: {error}"
        self.drops.count("unsendable", what)
        return error_message(RudraError(what, fix="ask for less"))

    def close(self) -> None:
        """Stops reading; the ROUTER is its owner's to close."""
        self._loop.forget(self._router)

    def _note_version(self, peer: bytes, version: int) -> None:
        """Who speaks the version before ours is answered in it."""
        if version != PROTOCOL:
            self._older[peer] = version
            if len(self._older) > 10 * _RECORD:
                self._older.popitem(last=False)

    def _send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        if peer in self._older:
            frames = in_version(frames, self._older[peer])
        try:
            if self._router.send(peer, frames):
                return True
        except PeerGone:
            if self._on_gone is not None:
                on_gone = self._on_gone
                self._loop.call_soon_threadsafe(lambda: on_gone(peer))
            return False
        self.drops.count("full", f"{peer!r} does not read")
        return False

    def _keep(self, id: str, frames: list[Buffer]) -> None:
        size = sum(len(frame) for frame in frames)
        if size > _RECORD_LARGEST or id in self._record:
            return
        self._record[id] = frames
        self._record_bytes += size
        while len(self._record) > _RECORD or self._record_bytes > _RECORD_BYTES:
            _, old = self._record.popitem(last=False)
            self._record_bytes -= sum(len(frame) for frame in old)

    def _readable(self) -> None:
        for _ in range(_BATCH):
            received = self._router.recv()
            if received is None:
                return
            peer, frames = received
            try:
                envelope, message = decode_control(frames)
            except WireError as error:
                self.drops.count(error.reason, str(error))
                if error.reason == "version":
                    self.send(peer, error_message(other_version(error.version, "")))
                continue
            self._note_version(peer, version_of(frames))
            if not envelope.reply:
                self._request(peer, envelope.id, message)
            elif self._on_reply is not None:
                self._guarded(self._on_reply, peer, envelope.id, message)
            else:
                self.drops.count("reply", "nothing was asked")

    def _request(self, peer: bytes, id: str, message: Control) -> None:
        if id:
            if id in self._record:
                self._send(peer, self._record[id])
                return
            again = id in self._asked
            self._asked[id] = peer
            if again:  # it runs; the answer goes to the new connection
                return
            if len(self._asked) > 10 * _RECORD:
                self._asked.popitem(last=False)
        answer = self._guarded(self._handler, peer, id, message)
        if isinstance(answer, Message) and id:
            self.reply(peer, id, answer)

    def _guarded(
        self, handler: Callable[[bytes, str, Control], object], peer: bytes, id: str, message: Control
    ) -> object:
        try:
            return handler(peer, id, message)
        except RudraError as error:
            return error_message(error)
        except Exception as error:  # a mistake of ours must not end the daemon for everybody
            what = type(message).__name__
            journal.exception("a message could not be handled", error, message=what)
            self.drops.count("internal", what)
            return error_message(RudraError(clip(f"internal error: {error!r}", 500), fix="see the daemon's log"))
