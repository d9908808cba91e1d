"""Who gets the node's memory: the learner whose session it is, in the process that said so.

Owns: the checks of somebody who asks, and the nonces. Must not know: sockets, descriptors' way, what is in a vector.
"""

from __future__ import annotations

from rudra_zmq.errors import RefusedBySecurity, Rejected
from rudra_zmq.net.shm import Offer
from rudra_zmq.node.memory import OURS, THEIRS
from rudra_zmq.node.sessions import Session, Turned
from rudra_zmq.node.work import Work, new_key
from rudra_zmq.wire.messages.data import Hello, Mapped, Segments


class Sharing:
    """Called in the loop's thread."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def offer(self, hello: Hello, pid: int) -> Offer:
        """The segments for one who said Hello on the socket; ``pid`` is what the kernel says. Raises RudraError."""
        session = self._session(hello, pid)
        model = self._work.model
        slots = None if model is None else model.slots.segment(*session.who)
        versions = None if model is None else model.versions.segment
        if model is None or slots is None or versions is None or not session.ready:
            raise Rejected("there is no memory to share", fix="use chunks")
        for segment in (slots, versions):
            if not segment.noted(OURS):  # others may be reading it just now
                segment.note(OURS, new_key())
        message = Segments(
            slot_nbytes=model.up.nbytes,
            slots=model.slots.each,
            version_nbytes=model.down.nbytes,
            versions=model.versions.count,
            slots_nonce=slots.noted(OURS),
            versions_nonce=versions.noted(OURS),
        )
        peer = session.peer

        def confirm(mapped: Mapped) -> Mapped:
            if session.peer is None or session.peer != peer or slots.fd < 0:
                raise Rejected("the session has moved on", fix="ask again")
            if slots.noted(THEIRS) != mapped.nonce:
                raise Rejected("what was written cannot be read here", fix="use chunks")
            session.mapped = True
            return mapped

        return Offer(message, (slots.fd, versions.fd), confirm)

    def _session(self, hello: Hello, pid: int) -> Session:
        work = self._work
        try:
            work.sessions.check(hello)
        except Turned as turned:
            work.sessions.drop(turned.reason)
            raise turned.error from None
        session = work.sessions.session(hello.rank, hello.incarnation)
        if session is None or hello.role != "learner":
            work.sessions.drop("shm-stranger")
            raise Rejected("no session of this learner", fix="say hello to the node first")
        if session.pid != pid:
            work.sessions.drop("shm-stranger")
            raise RefusedBySecurity(f"process {pid} is not the learner's, {session.pid}", fix="use chunks")
        return session
