"""What topk holds back at the learners: asked for when a snapshot is made, kept for ranks that left, given back.

Owns: which residual is the truth, and for how long it is waited for. Must not know: how a snapshot is written, what a
gradient is.

The residual of a rank is with its learner once a gradient of this incarnation was accepted; before that, and while the
rank is away, it is here. It is named by the gradient after which it is as it is. A snapshot wants the one after the
last gradient that was applied: those that are pending will be computed anew. Under hardsync a learner has that one
until its round is over; else it may be one gradient or more ahead, and says what it has. A learner that leaves in
peace says it before it goes; with one that dies it is lost, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rudra_zmq.net.bulk import BulkReceiver
from rudra_zmq.node.post import Courier
from rudra_zmq.node.sessions import Session
from rudra_zmq.node.vectors import F32
from rudra_zmq.node.work import Work
from rudra_zmq.wire.messages.data import Residual, SendResidual

Found = Callable[[Mapping[int, F32]], None]


@dataclass(eq=False, slots=True)
class _Kept:
    """After gradient ``seq`` of an incarnation; both 0: of a snapshot."""

    incarnation: int
    seq: int
    values: F32


@dataclass(eq=False, slots=True)
class _Asked:
    """A rank's residual after gradient ``seq`` is wanted; ``peer``: the connection that heard so."""

    session: Session
    seq: int
    peer: bytes | None = None


class Residuals:
    """Those of one job; empty, and never asked for, under any encoding but topk."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._kept: dict[int, _Kept] = {}
        self._coming: dict[int, tuple[BulkReceiver, _Kept]] = {}
        self._asked: dict[int, _Asked] = {}
        self._found: dict[int, F32] = {}
        self._then: Found | None = None
        self._since = 0.0

    @property
    def exist(self) -> bool:
        """Whether the job has any."""
        model = self._work.model
        return model is not None and model.up.codec == "topk"

    # ------------------------------------------------------------------------------------------ snapshot

    @property
    def gathering(self) -> bool:
        """Whether some are waited for."""
        return self._then is not None

    def gather(self, then: Found) -> None:
        """``then`` gets all of them by rank, as they are now: at once where nobody has to be asked."""
        assert self._then is None
        self._then, self._since = then, self._work.clock()
        sessions = self._work.sessions.all if self.exist else []
        self._asked = {s.rank: _Asked(s, s.applied) for s in sessions if s.applied and not self._knows(s, s.applied)}
        self._found = {rank: kept.values for rank, kept in self._kept.items() if rank not in self._asked}
        self.look()

    def look(self) -> None:
        """Ask again who has a new connection; give up whoever takes too long."""
        if self._then is None:
            return
        patience = self._work.job.learners.step_timeout_s  # a learner hears of it at its next exchange
        overdue = self._work.clock() - self._since >= patience
        for rank, asked in list(self._asked.items()):
            session = asked.session
            if overdue or self._work.sessions.at(rank) is not session:
                del self._asked[rank]
                why = "it left" if not overdue else f"it did not answer in {patience:g} s"
                self._work.event("W", f"a snapshot is without what topk holds back at rank {rank}: {why}")
            elif session.peer is not None and session.peer != asked.peer and session.listens:
                asked.peer = session.peer
                self._work.send(session, SendResidual(seq=asked.seq))
        if not self._asked:
            then, self._then = self._then, None
            then(self._found)

    def _knows(self, session: Session, seq: int) -> bool:
        kept = self._kept.get(session.rank)
        return kept is not None and (kept.incarnation, kept.seq) == (session.incarnation, seq)

    # ------------------------------------------------------------------------------------------- learners

    def announced(self, session: Session, courier: Courier, message: Residual) -> None:
        """One follows in chunks. What was not asked for, and is not that of now, is dropped and counted."""
        model, asked = self._work.model, self._asked.get(session.rank)
        wanted = message.seq == session.accepted or (asked is not None and asked.seq <= message.seq)
        if model is None or not self.exist or not session.joined or not wanted or message.key == session.key:
            self._work.sessions.drop("foreign-residual")
            return
        before = self._coming.pop(session.rank, None)
        if before is not None:
            courier.inbox.take(before[0].key)
        values = np.empty(model.layout.P, np.float32)
        receiver = courier.inbox.expect(message.key, values)
        self._coming[session.rank] = receiver, _Kept(session.incarnation, message.seq, values)

    def chunk(self, session: Session, courier: Courier, receiver: BulkReceiver) -> None:
        """Part of a vector came: perhaps it was the last one of a residual."""
        coming = self._coming.get(session.rank)
        if coming is None or coming[0] is not receiver or not receiver.complete:
            return
        del self._coming[session.rank]
        courier.inbox.take(receiver.key)
        kept = coming[1]
        if not np.isfinite(kept.values).all():
            self._work.sessions.drop("foreign-residual")
            return
        if kept.seq == session.accepted:
            self._kept[session.rank] = kept
        asked = self._asked.get(session.rank)
        if asked is not None and asked.session is session and asked.seq <= kept.seq:
            del self._asked[session.rank]
            self._found[session.rank] = kept.values
            self.look()

    def applied(self, session: Session, seq: int) -> None:
        """A gradient of it is in the weights: what was here before it is of no more use."""
        session.applied = seq
        if not self._knows(session, seq):
            self._kept.pop(session.rank, None)

    def ended(self, session: Session) -> None:
        """A session is over; what was with its learner alone is lost."""
        self._coming.pop(session.rank, None)
        if self.exist and session.accepted and not self._knows(session, session.accepted):
            self._kept.pop(session.rank, None)
            if not self._work.over:
                self._work.event("W", f"what topk held back at rank {session.rank} is lost with its process")
        self.look()

    def due(self, session: Session) -> F32 | None:
        """What a learner that attaches has to go on from; None: nothing, or what it has itself."""
        kept = self._kept.get(session.rank)
        return kept.values if kept is not None and not session.accepted else None

    def restore(self, found: Mapping[int, F32]) -> None:
        """Those of a snapshot."""
        self._kept = {rank: _Kept(0, 0, values) for rank, values in found.items()}
