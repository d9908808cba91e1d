"""Who waits for a grant, and what it says.

Owns the queue of sessions that wait and the slots that grants name. Must not know when an update is due, nor why
somebody waits.
"""

from __future__ import annotations

from rudra_zmq.core.common import Common
from rudra_zmq.core.events import Grant, Lease, Refuse, Want
from rudra_zmq.core.membership import Session


class Answers:
    """The grants of one job. A session in the queue has pushed or joined and was not answered yet."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._queue: dict[int, Session] = {}  # by rank, in order of arrival

    def owe(self, session: Session) -> None:
        """``session`` waits for a grant from now on."""
        session.waits = True
        self._queue[session.rank] = session

    def forget(self, session: Session) -> None:
        """``session`` has ended: it waits no more."""
        self._queue.pop(session.rank, None)

    def refuse(self, rank: int, incarnation: int, seq: int, reason: str) -> None:
        """Say no to what no honest learner sends."""
        self._common.drop("refused")
        self._common.out.append(Refuse(rank, incarnation, seq, reason))

    def supply(self) -> None:
        """Lease to those who wait."""
        if not self._common.frozen:
            self._common.policy.supply(self._queue, self._common.minibatches)

    def answer(self) -> None:
        """Grant to everyone who waits and has something to begin; to all, once the job is over."""
        common = self._common
        if common.finished:
            for session in list(self._queue.values()):
                self._grant(session)
        elif not common.too_few and not common.held_back:
            for session in common.policy.answerable(self._queue):
                self._grant(session)

    def again(self, session: Session, verdict: str) -> None:
        """Answer a session that does not wait once more (a repeated push, a reconnect, a want).

        Clock and leases are those of now: a learner that lost its connection has lost the weights of then,
        and another's leaving may have revoked leases. If none are left it is answered once there are some,
        and may push before that: its slot is free.
        """
        leases = self._leases(session)
        if leases or self._common.finished:
            self._say(session, verdict, leases)
        else:
            self._queue[session.rank] = session

    def want(self, want: Want) -> None:
        """Lease one more to a learner that has begun all of its leases without a push.

        It is answered at once in any case: if nothing was added, the learner pushes what it has.
        """
        common = self._common
        session = common.crew.session(want.rank, want.incarnation)
        if session is None:
            self.refuse(want.rank, want.incarnation, 0, "this incarnation is not present")
            return
        if session.waits:
            return
        begun = len(common.policy.held(session))
        session.extra = max(0, begun - session.prefetch)
        if not common.frozen:
            common.policy.supply({session.rank: session}, common.minibatches)
        session.begun = min(begun + 1, len(common.policy.held(session)))
        self.again(session, "")
        common.crew.begin_step(session, common.now)

    def _leases(self, session: Session) -> tuple[Lease, ...]:
        return () if self._common.finished else self._common.policy.held(session)

    def _grant(self, session: Session) -> None:
        common = self._common
        free = session.slots.free
        if free is None and not common.finished:
            fold = common.pending.fold_oldest(session.key, common.clock.timestamp, common.force.n)
            common.out.append(fold)
            session.slots.release(fold.slot)
            free = fold.slot
        if free is not None:
            session.slots.writing = free
        session.waits = False
        session.begun = 1
        session.timestamp = common.clock.timestamp
        common.crew.begin_step(session, common.now)
        del self._queue[session.rank]
        self._say(session, session.verdict, self._leases(session))

    def _say(self, session: Session, verdict: str, leases: tuple[Lease, ...]) -> None:
        self._common.out.append(
            Grant(
                rank=session.rank,
                incarnation=session.incarnation,
                ack=session.seq,
                verdict=verdict,
                clock=self._common.clock,
                leases=leases,
                slot=session.slots.writing,
                done=self._common.finished,
            )
        )
