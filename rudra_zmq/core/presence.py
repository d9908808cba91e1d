"""What joining, leaving and the passing of time do to a job.

Owns lambda, n, c and the global batch in force, fencing, and when a job must wait for learners or has failed.
Must not know pushes or updates.
"""

from __future__ import annotations

import math

from rudra_zmq.core.answers import Answers
from rudra_zmq.core.common import Common
from rudra_zmq.core.events import Fence, Join, Leave, Members, Release, Waiting
from rudra_zmq.core.membership import Member, Session


class Presence:
    """The members of one job, as events change them."""

    def __init__(self, common: Common, answers: Answers) -> None:
        self._common = common
        self._answers = answers
        self._ended: set[tuple[int, int]] = set()  # sessions gone, with a gradient still in a slot
        self.reckon()

    def start(self) -> None:
        """Lambda is from now on the number of those who are here."""
        if not self._common.crew.began:
            self._common.crew.began = True
            self.reckon(say=True)
            self._review()

    def join(self, join: Join) -> None:
        """A learner can begin. It waits for its first grant, and for the death of its predecessor before that."""
        crew = self._common.crew
        member = crew.get(join.rank)
        if member is not None and member.session is not None and join.incarnation == member.incarnation:
            self._reconnect(member, member.session, join)
        elif member is not None and join.incarnation <= member.incarnation:
            reason = f"incarnation {member.incarnation} was here already"
            self._answers.refuse(join.rank, join.incarnation, 0, reason)
        elif member is not None and member.session is not None:
            # Its samples may be leased again only when it can push no more.
            if member.successor is None or join.incarnation > member.successor.incarnation:
                member.successor = join
            self._fence(member.session, f"replaced by incarnation {join.incarnation}")
        elif (member is None or not member.counted) and len(crew.counted) >= self._common.learners.most:
            reason = f"there is room for {self._common.learners.most} learners only"
            self._answers.refuse(join.rank, join.incarnation, 0, reason)
        else:
            self._answers.owe(crew.admit(join))
            self.reckon()
            self._review()

    def leave(self, leave: Leave) -> None:
        """A session ended; an incarnation that is not (or no more) present is none of our business."""
        common = self._common
        member = common.crew.get(leave.rank)
        if member is None:
            return
        if member.successor is not None and member.successor.incarnation == leave.incarnation:
            member.successor = None
        session = common.crew.session(leave.rank, leave.incarnation)
        if session is None:
            return
        self._answers.forget(session)
        if common.pending.slots_of(session.key):
            self._ended.add(session.key)
        else:
            common.out.append(Release(*session.key))
        common.crew.part(member, "left" if leave.kind == "bye" else "lost", common.now)
        if member.counted and not common.stop:
            common.policy.lose(member.rank)
        else:
            self._give_up(member)
        self.reckon()
        self._review()
        if member.successor is not None:
            successor, member.successor = member.successor, None
            self.join(successor)

    def tick(self) -> None:
        """Look at the deadlines of steps, of lost members and of waiting."""
        common = self._common
        if common.finished:
            return
        for session in common.crew.stuck(common.now):
            seconds = common.crew.patience(session)
            within = f"{seconds:g} s" if session.first_step else f"step_timeout = {seconds:g} s"
            self._fence(session, f"no {'first ' if session.first_step else ''}gradient within {within}")
        for member in common.crew.overdue(common.now):
            if common.learners.on_lost == "fail":
                seconds = common.learners.deadline
                common.fail(f"learner {member.rank} was lost and did not come back within {seconds:g} s")
            elif common.learners.on_lost == "shrink":
                self._give_up(member)
                self.reckon()
        self._review()
        waiting = common.waiting
        if waiting is not None and common.now >= waiting.deadline:
            common.fail(f"{waiting.present} learners are present, at least {waiting.needed} are needed")

    def drain(self, reason: str) -> None:
        """Lease no more, take back what was not begun, and wait for nobody who is not here."""
        common = self._common
        common.stop = common.stop or reason or "drained"
        common.waiting = None
        common.policy.revoke({s.rank: s.begun for s in common.crew.sessions if not s.waits})

    def release_ended(self) -> None:
        """Every pending gradient was applied: nobody needs the memory of sessions that are gone."""
        self._common.out.extend(Release(*key) for key in sorted(self._ended))
        self._ended.clear()

    def reckon(self, say: bool = False) -> None:
        """Work out lambda, n, c and the global batch anew, and say so if they changed (or ``say``)."""
        common = self._common
        lam = common.crew.lam
        protocol = "hardsync" if common.policy.by_rank else common.sync.protocol
        wanted = {"hardsync": 1, "async": lam}.get(protocol, common.sync.n)
        n = min(wanted, lam)
        force = Members(
            lam=lam,
            n=n,
            c=lam // n,
            global_batch=common.crew.global_batch,
            protocol=protocol,
            note=f"n = {wanted} is clamped to {n}, the number of learners" if n < wanted else "",
        )
        common.minibatches = common.crew.minibatches()
        if common.crew.began and not common.finished and (say or force != common.force):
            common.out.append(force)
        common.force = force

    def _reconnect(self, member: Member, session: Session, join: Join) -> None:
        # The same process, perhaps with other batches: it gets its answer once more, and repeats its push after
        # that. With nothing to begin (its round was closed without it) it is answered once there is something.
        member.minibatch = join.minibatch
        session.prefetch = join.prefetch
        self.reckon()
        if not session.waits:
            self._answers.again(session, session.verdict)

    def _give_up(self, member: Member) -> None:
        member.counted = False
        member.deadline = math.inf
        self._common.policy.withdraw(member.rank)

    def _review(self) -> None:
        """See whether the job must wait for learners, and say so once."""
        common = self._common
        if not common.crew.began or common.finished or common.stop:
            return
        overdue = [m for m in common.crew.counted if m.session is None and m.deadline == math.inf]
        if common.too_few:
            needed, deadline = common.learners.min, common.now + common.learners.deadline
        elif overdue and (common.policy.by_rank or not common.crew.sessions):
            needed, deadline = common.force.lam, math.inf
        else:
            common.waiting = None
            return
        if common.waiting is None or common.waiting.needed != needed:
            present = len(common.crew.sessions)
            common.waiting = Waiting(present, needed, common.crew.missing, deadline)
            common.out.append(common.waiting)

    def _fence(self, session: Session, reason: str) -> None:
        if not session.fenced:
            session.fenced = True
            session.step_deadline = math.inf
            self._common.out.append(Fence(*session.key, reason))
