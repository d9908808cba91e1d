"""The state machine of a job: events in, actions out, in one turn each.

Owns the clock, the verdict on every push, when an update is made, what a grant says and when the job is over.
Must not know sockets, tensors or the time of day. Who holds which samples is in ``flow`` (softsync, async) and
``rounds`` (hardsync), which gradient weighs what in ``pending``, who takes part in ``membership``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rudra_zmq.core.events import (
    Action,
    Clock,
    Counters,
    Drain,
    EpochDone,
    Event,
    Failed,
    Fence,
    Finished,
    Grant,
    Join,
    Lease,
    Leave,
    Members,
    Push,
    Refuse,
    Release,
    Start,
    Tick,
    Update,
    Waiting,
    Want,
)
from rudra_zmq.core.flow import Flow
from rudra_zmq.core.ledger import Ledger
from rudra_zmq.core.membership import Member, Membership, Session
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.pending import Gradient, Pending
from rudra_zmq.core.rounds import Rounds
from rudra_zmq.core.staleness import Histogram

ALL_APPLIED = "all epochs are applied"


class Sync:
    """The rules of one job. ``handle`` is the only way in; nothing happens between two calls.

    Raises ValueError, one line, for parameters that contradict one another or a state of other data.
    """

    def __init__(
        self,
        sync: SyncParams,
        learners: LearnerParams,
        data: DataParams,
        *,
        generation: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        learners.validate()
        sync.validate(learners.count)
        data.validate()
        saved = state or {}
        self._sync = sync
        self._learners = learners
        self._data = data
        self._ledger = Ledger(data.samples, data.epochs, saved.get("ledger"))
        self._crew = Membership(learners)
        modulation = "none" if sync.protocol == "hardsync" else "staleness"
        self._pending = Pending(modulation if sync.modulation == "auto" else sync.modulation)
        self.clock = Clock(generation, int(saved.get("timestamp", 0)))
        self.counters = Counters(**saved.get("counters", {}))
        self.staleness = Histogram(saved.get("staleness"))
        self.samples_applied = int(saved.get("samples_applied", 0))
        self.finished = False
        self.waiting: Waiting | None = None
        self._policy: Flow | Rounds = self._choose_policy()
        self._force = Members(0, 0, 0, 0, "")
        self._mu: dict[int, int] = {}
        self._queue: dict[int, Session] = {}  # who waits for a grant, in order of arrival
        self._ended: set[tuple[int, int]] = set()  # gone, with a gradient still in a slot
        self._stop = ""  # why no more is leased; "" while the job goes on
        self._now = 0.0
        self._out: list[Action] = []
        self._reckon()

    # ------------------------------------------------------------------------------- what is in force

    @property
    def lam(self) -> int:
        """lambda in force: the declared number before Start, then members (lost ones until given up)."""
        return self._force.lam

    @property
    def n(self) -> int:
        """The splitting parameter in force, within [1, lambda]; 1 under hardsync, lambda under async."""
        return self._force.n

    @property
    def c(self) -> int:
        """Gradients per update: floor(lambda/n), lambda under hardsync."""
        return self._force.c

    @property
    def protocol(self) -> str:
        """hardsync, softsync or async; hardsync during warm-up."""
        return self._force.protocol

    @property
    def global_batch(self) -> int:
        """Samples of one gradient from each of lambda learners."""
        return self._force.global_batch

    @property
    def epoch(self) -> int:
        """The lowest unfinished epoch; the number of epochs once all are applied."""
        return self._ledger.epoch

    @property
    def pending(self) -> int:
        """Gradients accepted and not applied yet."""
        return len(self._pending)

    def members(self) -> list[tuple[int, int, str, int]]:
        """(rank, newest incarnation, state, accepted gradients) of every rank seen; present, lost or left."""
        return [(m.rank, m.incarnation, m.state, m.gradients) for m in self._crew.all]

    def state(self) -> dict[str, Any]:
        """JSON-able, all that is needed to go on; what is leased or pending counts as not applied."""
        return {
            "timestamp": self.clock.timestamp,
            "samples_applied": self.samples_applied,
            "ledger": self._ledger.state(),
            "staleness": self.staleness.to_json(),
            "counters": {
                "accepted": self.counters.accepted - len(self._pending),
                "applied": self.counters.applied,
                "skipped": self.counters.skipped,
                "dropped": dict(self.counters.dropped),
            },
        }

    def next_deadline(self) -> float | None:
        """When the next Tick is due, on the clock of ``now``; None if nothing is timed."""
        if self.finished:
            return None
        waiting = math.inf if self.waiting is None else self.waiting.deadline
        deadline = min(self._crew.next_deadline(), waiting)
        return None if deadline == math.inf else deadline

    # ------------------------------------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> list[Action]:
        """One turn at time ``now`` (seconds, never going back). The actions are to be carried out in order."""
        self._now = now
        self._out = []
        match event:
            case Push():
                self._push(event)
            case Want():
                self._want(event)
            case Join():
                self._join(event)
            case Leave():
                self._leave(event)
            case Tick():
                self._tick()
            case Start():
                self._start()
            case Drain():
                self._drain(event.reason)
        self._settle()
        return self._out

    def _start(self) -> None:
        if not self._crew.began:
            self._crew.began = True
            self._reckon(said=True)
            self._review()

    def _join(self, join: Join) -> None:
        member = self._crew.get(join.rank)
        if member is not None and member.session is not None and join.incarnation == member.incarnation:
            self._join_again(member, member.session, join)
            return
        if member is not None and join.incarnation <= member.incarnation:
            self._refuse(join.rank, join.incarnation, 0, f"incarnation {member.incarnation} was here already")
            return
        if member is not None and member.session is not None:
            # Its samples may be leased again only when it can push no more.
            if member.successor is None or join.incarnation > member.successor.incarnation:
                member.successor = join
            self._fence(member.session, f"replaced by incarnation {join.incarnation}")
            return
        if (member is None or not member.counted) and len(self._crew.counted) >= self._learners.most:
            self._refuse(join.rank, join.incarnation, 0, f"there is room for {self._learners.most} learners only")
            return
        session = self._crew.admit(join).session
        assert session is not None
        self._queue[join.rank] = session
        self._reckon()
        self._review()

    def _join_again(self, member: Member, session: Session, join: Join) -> None:
        # The same process after a reconnect, perhaps with other batches: it gets its answer once more.
        member.minibatch = join.minibatch
        session.prefetch = join.prefetch
        self._reckon()
        if not session.waits:
            self._grant_again(session, session.verdict)

    def _leave(self, leave: Leave) -> None:
        member = self._crew.get(leave.rank)
        if member is not None and member.successor is not None and (
            member.successor.incarnation == leave.incarnation
        ):
            member.successor = None
        session = self._crew.session(leave.rank, leave.incarnation)
        if member is None or session is None:
            return
        self._queue.pop(leave.rank, None)
        if self._pending.slots_of(session.key):
            self._ended.add(session.key)
        else:
            self._out.append(Release(*session.key))
        self._crew.part(member, "left" if leave.kind == "bye" else "lost", self._now)
        if member.counted and not self._stop:
            self._policy.lose(member.rank)
        else:
            self._drop(member)
        self._reckon()
        self._review()
        if member.successor is not None:
            successor, member.successor = member.successor, None
            self._join(successor)

    def _tick(self) -> None:
        if self.finished:
            return
        for session in self._crew.stuck(self._now):
            seconds = self._learners.step_timeout
            self._out.append(Fence(*session.key, f"no gradient within step_timeout = {seconds:g} s"))
        for member in self._crew.overdue(self._now):
            if self._learners.on_lost == "fail":
                seconds = self._learners.deadline
                self._fail(f"learner {member.rank} was lost and did not come back within {seconds:g} s")
            elif self._learners.on_lost == "shrink":
                self._drop(member)
                self._reckon()
            self._review()
        if self.waiting is not None and self._now >= self.waiting.deadline:
            self._fail(f"{self.waiting.present} of at least {self.waiting.needed} learners present")

    def _drain(self, reason: str) -> None:
        self._stop = self._stop or reason or "drained"
        self.waiting = None
        self._policy.revoke({s.rank: s.begun for s in self._crew.sessions if not s.waits})

    def _want(self, want: Want) -> None:
        session = self._crew.session(want.rank, want.incarnation)
        if session is None:
            self._refuse(want.rank, want.incarnation, 0, "this incarnation is not present")
            return
        if session.waits:
            return
        session.begun = len(self._policy.held(session))
        session.extra = max(0, session.begun - session.prefetch)
        if not self._frozen:
            self._policy.supply([session], self._mu)
        # Nothing more to lease is an answer too: the learner pushes what it has.
        self._grant_again(session, "")
        self._crew.begin_step(session, self._now)

    # ------------------------------------------------------------------------------------------- pushes

    def _push(self, push: Push) -> None:
        rank, incarnation, seq = push.id
        session = self._crew.session(rank, incarnation)
        if session is None:
            self._refuse(rank, incarnation, seq, "this incarnation is not present")
        elif seq == session.seq and seq > 0:
            if not session.waits:
                self._grant_again(session, session.verdict)
        elif fault := self._fault(session, push):
            self._refuse(rank, incarnation, seq, fault)
        else:
            session.verdict = self._judge(session, push)
            session.seq = seq
            session.begun = session.extra = 0
            session.first_step = False
            session.step_deadline = math.inf
            session.waits = True
            self._queue[rank] = session

    def _fault(self, session: Session, push: Push) -> str:
        """Why no honest learner sends this; "" if one may."""
        seq = push.id.seq
        # The first push that is heard may have any number: the learner may have pushed before a restore.
        if seq < 1 or (session.seq and seq != session.seq + 1):
            return f"push {seq} does not follow {session.seq}"
        if push.clock.generation != self.clock.generation:
            return ""
        if session.waits:
            return "the push before was not answered yet"
        if push.clock.timestamp > self.clock.timestamp:
            return f"timestamp {push.clock.timestamp} is of the future, it is {self.clock.timestamp}"
        if not 0 <= push.count <= sum(span.count for span in push.spans):
            return f"{push.count} samples are not in the spans"
        return ""

    def _judge(self, session: Session, push: Push) -> str:
        """Decide what becomes of a push and do it; the verdict."""
        verdict = self._verdict(session, push)
        if verdict in ("skipped", "nonfinite"):
            self._ledger.skip(push.spans)
        elif verdict == "stale":
            self._ledger.give_back(push.spans)
        if verdict == "accepted":
            slot = session.slots.hold()
            timestamp = push.clock.timestamp
            self._pending.add(Gradient(push.id, slot, timestamp, push.spans, push.count, push.rates))
            self.counters.accepted += 1
            self._crew.count_gradient(session.rank)
        elif verdict == "skipped":
            self.counters.skipped += 1
        else:
            self._count_drop(verdict)
        return verdict

    def _verdict(self, session: Session, push: Push) -> str:
        sigma = self.clock.timestamp - push.clock.timestamp
        if push.clock.generation != self.clock.generation:
            return "void"
        if self.finished or (self._policy.by_rank and sigma > 0):
            return "late"
        if not self._policy.surrender(session.rank, push.spans):
            return "unheld"
        if push.count == 0:
            return "skipped"
        if not push.finite:
            return "nonfinite"
        bound = self._sync.max_staleness
        if bound is not None and self._sync.on_stale == "drop" and sigma > bound:
            return "stale"
        return "accepted"

    # ------------------------------------------------------------------------------ updates and grants

    @property
    def _frozen(self) -> bool:
        """Whether nothing is leased: before Start, in a drain, below learners.min."""
        return not self._crew.began or bool(self._stop) or self._too_few

    @property
    def _too_few(self) -> bool:
        return self._crew.began and len(self._crew.counted) < self._learners.min

    @property
    def _held_back(self) -> bool:
        """Whether an update is due that would make a gradient in the making too stale (on_stale = hold)."""
        if self._policy.by_rank or self._sync.max_staleness is None or self._sync.on_stale != "hold":
            return False
        if not self._policy.due(len(self._pending), self.c):
            return False
        # A gradient is in the first update after its push, so this bounds the sigma of every one.
        oldest = self.clock.timestamp + 1 - self._sync.max_staleness
        return any(
            s.timestamp < oldest and not s.waits and self._policy.held(s) for s in self._crew.sessions
        )

    def _settle(self) -> None:
        """Make every update that is due, end what is over, lease, and answer those who wait."""
        while not self.finished:
            if self._data.max_updates and self.clock.timestamp >= self._data.max_updates and self._crew.began:
                self._finish(f"{self.clock.timestamp} updates are made")
            elif self._policy.due(len(self._pending), self.c) and not self._held_back:
                self._update(flush=False)
            elif self._over():
                self._finish(ALL_APPLIED if self._ledger.finished else self._stop)
            else:
                if not self._frozen:
                    self._policy.supply(list(self._queue.values()), self._mu)
                if not self._must_flush():
                    break
                self._update(flush=True)
        if self.finished or not (self._too_few or self._held_back):
            self._answer()

    def _over(self) -> bool:
        self._close_epochs()
        ended = bool(self._stop) or (self._crew.began and self._ledger.finished)
        return ended and self._policy.idle and not self._pending

    def _must_flush(self) -> bool:
        """Whether fewer than c gradients are pending and no other can come before they are applied."""
        if not self._pending or not self._policy.idle:
            return False
        return bool(self._stop) or self._ledger.leasable(self._data.epochs) is None

    def _update(self, *, flush: bool) -> None:
        exact = self._policy.by_rank or self.lam == 1 or flush
        decision = self._pending.decide(
            update=self.clock.timestamp + 1,
            generation=self.clock.generation,
            n=self.n,
            mu_bar=None if exact else self.global_batch / self.lam,
            by_rank=self._policy.by_rank,
            progress=self.samples_applied / self._data.samples,
        )
        self._out.append(Update(decision))
        self.clock = Clock(self.clock.generation, decision.update)
        for entry in decision.entries:
            self._ledger.apply(entry.spans)
            self.staleness.add(entry.sigma)
            session = self._crew.session(entry.id.rank, entry.id.incarnation)
            if session is not None and not entry.folded:
                session.slots.release(entry.slot)
        self.counters.applied += decision.c
        self.samples_applied += decision.samples
        self._out.extend(Release(*key) for key in sorted(self._ended))
        self._ended.clear()
        self._policy.close()
        self._close_epochs()

    def _close_epochs(self) -> None:
        self._out.extend(EpochDone(epoch, self.clock) for epoch in self._ledger.advance())
        policy = self._choose_policy()
        if policy.by_rank != self._policy.by_rank:
            self._policy.revoke({})
            self._policy = policy
            self._reckon()

    def _choose_policy(self) -> Flow | Rounds:
        hardsync = self._sync.protocol == "hardsync"
        limit = self._data.epochs if hardsync else min(self._sync.warmup_epochs, self._data.epochs)
        if hardsync or self._ledger.epoch < limit:
            return Rounds(self._ledger, limit, self._sync.backup)
        return Flow(self._ledger)

    def _answer(self) -> None:
        waiting = list(self._queue.values())
        for session in sorted(waiting, key=lambda s: s.rank) if self._policy.by_rank else waiting:
            leases = () if self.finished else self._policy.held(session)
            if leases or self.finished:
                self._grant(session, leases)

    def _grant(self, session: Session, leases: tuple[Lease, ...]) -> None:
        slot = session.slots.free
        if slot is None and not self.finished:
            fold = self._pending.fold_oldest(session.key, self.clock.timestamp, self.n)
            self._out.append(fold)
            session.slots.release(fold.slot)
            slot = fold.slot
        if slot is not None:
            session.slots.writing = slot
        session.waits = False
        session.begun = 1
        session.timestamp = self.clock.timestamp
        self._crew.begin_step(session, self._now)
        del self._queue[session.rank]
        self._say_grant(session, session.verdict, leases)

    def _grant_again(self, session: Session, verdict: str) -> None:
        # The verdict is the recorded one, clock and leases are those of now: a learner that lost its
        # connection has lost the weights of then, and another's leaving may have revoked leases.
        leases = () if self.finished else self._policy.held(session)
        if leases or self.finished:
            self._say_grant(session, verdict, leases)
        else:
            session.waits = True
            self._queue[session.rank] = session

    def _say_grant(self, session: Session, verdict: str, leases: tuple[Lease, ...]) -> None:
        self._out.append(
            Grant(
                rank=session.rank,
                incarnation=session.incarnation,
                ack=session.seq,
                verdict=verdict,
                clock=self.clock,
                leases=leases,
                slot=session.slots.writing,
                done=self.finished,
            )
        )

    # ---------------------------------------------------------------------------------------- membership

    def _drop(self, member: Member) -> None:
        """``member`` is no part of lambda any more, its samples return to the pool."""
        member.counted = False
        member.deadline = math.inf
        self._policy.withdraw(member.rank)

    def _reckon(self, said: bool = False) -> None:
        """Work out lambda, n, c and the global batch anew, and say so if they changed (or ``said``)."""
        lam = self._crew.lam
        hardsync = self._policy.by_rank
        wanted = {"hardsync": 1, "async": lam}.get("hardsync" if hardsync else self._sync.protocol, self._sync.n)
        n = min(wanted, lam)
        force = Members(
            lam=lam,
            n=n,
            c=lam if hardsync else lam // n,
            global_batch=self._crew.global_batch,
            protocol="hardsync" if hardsync else self._sync.protocol,
            note=f"n = {wanted} is clamped to {n}, the number of learners" if n < wanted else "",
        )
        self._mu = self._crew.minibatches()
        if self._crew.began and not self.finished and (said or force != self._force):
            self._out.append(force)
        self._force = force

    def _review(self) -> None:
        """See whether the job must wait for learners, and say so once."""
        if not self._crew.began or self.finished or self._stop:
            return
        given_up = [m for m in self._crew.counted if m.session is None and m.deadline == math.inf]
        if self._too_few:
            needed, deadline = self._learners.min, self._now + self._learners.deadline
        elif given_up and (self._policy.by_rank or not self._crew.sessions):
            needed, deadline = self.lam, math.inf
        else:
            self.waiting = None
            return
        if self.waiting is None or self.waiting.needed != needed:
            self.waiting = Waiting(len(self._crew.sessions), needed, self._crew.missing, deadline)
            self._out.append(self.waiting)

    def _fence(self, session: Session, reason: str) -> None:
        if not session.fenced:
            session.fenced = True
            session.step_deadline = math.inf
            self._out.append(Fence(*session.key, reason))

    def _finish(self, reason: str) -> None:
        self.finished = True
        self.waiting = None
        self._out.append(Finished(reason, complete=self._ledger.finished))

    def _fail(self, reason: str) -> None:
        if not self.finished:
            self.finished = True
            self.waiting = None
            self._out.append(Failed(reason))

    def _refuse(self, rank: int, incarnation: int, seq: int, reason: str) -> None:
        self._count_drop("refused")
        self._out.append(Refuse(rank, incarnation, seq, reason))

    def _count_drop(self, verdict: str) -> None:
        self.counters.dropped[verdict] = self.counters.dropped.get(verdict, 0) + 1
