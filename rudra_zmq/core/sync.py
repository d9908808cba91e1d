"""The state machine of a job: events in, actions out, in one turn each.

Owns the verdict on every push, when an update is made and when the job is over. Must not know sockets, tensors
or the time of day. Who holds which samples is in ``flow`` (softsync, async) and ``rounds`` (hardsync), which
gradient weighs what in ``pending``, who takes part in ``presence``, what a grant says in ``answers``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rudra_zmq.core.answers import Answers
from rudra_zmq.core.common import Common
from rudra_zmq.core.events import (
    Action,
    Clock,
    Counters,
    Decision,
    End,
    EpochDone,
    Event,
    Finished,
    Join,
    Leave,
    Members,
    Push,
    Start,
    Tick,
    Update,
    Waiting,
    Want,
)
from rudra_zmq.core.flow import Flow
from rudra_zmq.core.ledger import Ledger
from rudra_zmq.core.membership import Membership, Session
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.pending import Gradient, Pending
from rudra_zmq.core.presence import Presence
from rudra_zmq.core.rounds import Rounds
from rudra_zmq.core.slots import slots_needed
from rudra_zmq.core.staleness import Histogram


class Sync:
    """The rules of one job. ``handle`` is the only way in; nothing happens between two calls.

    ``state`` is what ``state()`` returned in an earlier generation. Raises ValueError, one line, for parameters
    that contradict one another and for a state of other data.
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
        ledger = Ledger(data.samples, data.epochs, saved.get("ledger"))
        by_default = "none" if sync.protocol == "hardsync" else "staleness"
        self._common = Common(
            sync=sync,
            learners=learners,
            data=data,
            ledger=ledger,
            crew=Membership(learners, slots_needed(sync.protocol, learners.most, sync.n)),
            pending=Pending(by_default if sync.modulation == "auto" else sync.modulation),
            policy=_policy(sync, ledger),
            clock=Clock(generation, int(saved.get("timestamp", 0))),
            counters=Counters(**saved.get("counters", {})),
        )
        self._answers = Answers(self._common)
        self._presence = Presence(self._common, self._answers)
        self.staleness = Histogram(saved.get("staleness"))
        self.samples_applied = int(saved.get("samples_applied", 0))

    # ----------------------------------------------------------------------------------------- figures

    @property
    def clock(self) -> Clock:
        """(generation, timestamp) of the newest version."""
        return self._common.clock

    @property
    def lam(self) -> int:
        """lambda in force: the declared number before Start, then members (lost ones until given up)."""
        return self._common.force.lam

    @property
    def n(self) -> int:
        """The splitting parameter in force, within [1, lambda]; 1 under hardsync, lambda under async."""
        return self._common.force.n

    @property
    def c(self) -> int:
        """Gradients per update: floor(lambda/n), lambda under hardsync."""
        return self._common.force.c

    @property
    def protocol(self) -> str:
        """hardsync, softsync or async; hardsync during warm-up."""
        return self._common.force.protocol

    @property
    def global_batch(self) -> int:
        """Samples of one gradient from each of lambda learners."""
        return self._common.force.global_batch

    @property
    def force(self) -> Members:
        """lambda, n, c, global batch and protocol in force, at once."""
        return self._common.force

    @property
    def epoch(self) -> int:
        """The lowest unfinished epoch; the number of epochs once all are applied."""
        return self._common.ledger.epoch

    @property
    def pending(self) -> int:
        """Gradients accepted and not applied yet."""
        return len(self._common.pending)

    @property
    def counters(self) -> Counters:
        """Gradients by fate."""
        return self._common.counters

    @property
    def finished(self) -> bool:
        """Whether the job is over (complete, stopped or failed)."""
        return self._common.finished

    @property
    def waiting(self) -> Waiting | None:
        """What the job waits for while it cannot go on, else None."""
        return self._common.waiting

    @property
    def crew(self) -> Membership:
        """Who takes part; to be read."""
        return self._common.crew

    def members(self) -> list[tuple[int, int, str, int]]:
        """(rank, newest incarnation, state, accepted gradients) of every rank seen; present, lost or left."""
        return [(m.rank, m.incarnation, m.state, m.gradients) for m in self._common.crew.all]

    @property
    def counted(self) -> list[int]:
        """The ranks that make lambda; none before Start."""
        return [m.rank for m in self._common.crew.counted] if self._common.crew.began else []

    def slow_starters(self, now: float) -> list[tuple[int, float, float]]:
        """(rank, seconds so far, seconds at most) of each first mini-batch that takes longer than step_timeout."""
        return [] if self.finished else self._common.crew.slow_starters(now)

    def next_deadline(self) -> float | None:
        """When the next Tick is due, on the clock of ``now``; None if nothing is timed."""
        if self.finished:
            return None
        waiting = math.inf if self.waiting is None else self.waiting.deadline
        deadline = min(self._common.crew.next_deadline(), waiting)
        return None if deadline == math.inf else deadline

    def state(self) -> dict[str, Any]:
        """JSON-able, all that is needed to go on; what is leased or pending counts as not applied."""
        counters = self.counters
        return {
            "timestamp": self.clock.timestamp,
            "samples_applied": self.samples_applied,
            "ledger": self._common.ledger.state(),
            "staleness": self.staleness.to_json(),
            "counters": {
                "accepted": counters.accepted - self.pending,
                "applied": counters.applied,
                "skipped": counters.skipped,
                "dropped": dict(counters.dropped),
            },
        }

    # ------------------------------------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> list[Action]:
        """One turn at time ``now`` (seconds, never going back). The actions are to be carried out in order."""
        self._common.now = now
        self._common.out = []
        match event:
            case Push():
                self._push(event)
            case Want():
                self._answers.want(event)
            case Join():
                self._presence.join(event)
            case Leave():
                self._presence.leave(event)
            case Tick():
                self._presence.tick()
            case Start():
                self._presence.start()
            case End():
                self._common.finished = True
                self._common.waiting = None
            case _:
                self._presence.drain(event.reason)
        self._settle()
        return self._common.out

    def _push(self, push: Push) -> None:
        rank, incarnation, seq = push.id
        session = self._common.crew.session(rank, incarnation)
        if session is None:
            self._answers.refuse(rank, incarnation, seq, "this incarnation is not present")
        elif seq == session.seq and seq > 0:
            if not session.waits:
                self._answers.again(session, session.verdict)
        elif fault := self._fault(session, push):
            self._answers.refuse(rank, incarnation, seq, fault)
        else:
            session.verdict = self._judge(session, push)
            session.pushed(seq)
            self._answers.owe(session)

    def _fault(self, session: Session, push: Push) -> str:
        """Why no honest learner sends this; "" if one may."""
        seq, clock = push.id.seq, self.clock
        # The first push that is heard may have any number: the learner may have pushed before a restore.
        if seq < 1 or (session.seq and seq != session.seq + 1):
            return f"push {seq} does not follow {session.seq}"
        if push.clock.generation != clock.generation:
            return ""
        if session.waits:
            return "the push before was not answered yet"
        if push.clock.timestamp > clock.timestamp:
            return f"timestamp {push.clock.timestamp} is of the future, it is {clock.timestamp}"
        if not 0 <= push.count <= sum(span.count for span in push.spans):
            return f"{push.count} samples are not in the spans"
        return ""

    def _judge(self, session: Session, push: Push) -> str:
        """Decide what becomes of a push and do it; the verdict."""
        common = self._common
        verdict = self._verdict(session, push)
        if verdict in ("skipped", "nonfinite"):
            common.ledger.skip(push.spans)
        elif verdict == "stale":
            common.ledger.give_back(push.spans)
        if verdict == "accepted":
            slot = session.slots.hold()
            gradient = Gradient(push.id, slot, push.clock.timestamp, push.spans, push.count, push.rates)
            common.pending.add(gradient)
            common.counters.accepted += 1
            common.crew.count_gradient(session.rank)
        elif verdict == "skipped":
            common.counters.skipped += 1
        else:
            common.drop(verdict)
        return verdict

    def _verdict(self, session: Session, push: Push) -> str:
        common = self._common
        sigma = self.clock.timestamp - push.clock.timestamp
        if push.clock.generation != self.clock.generation:
            return "void"
        if common.finished or (common.policy.by_rank and sigma > 0):
            return "late"
        if not common.policy.surrender(session.rank, push.spans):
            return "unheld"
        if push.count == 0:
            return "skipped"
        if not push.finite:
            return "nonfinite"
        bound = common.sync.max_staleness
        if bound is not None and common.sync.on_stale == "drop" and sigma > bound:
            return "stale"
        return "accepted"

    # ----------------------------------------------------------------------------------------- updates

    def _settle(self) -> None:
        """Make every update that is due, end what is over, lease, and answer those who wait."""
        common = self._common
        while not common.finished:
            if self._at_max_updates():
                self._finish(f"{self.clock.timestamp} updates are made")
            elif common.policy.due(self.pending, self.c) and not common.held_back:
                self._update(flush=False)
            elif self._over():
                self._finish("all epochs are applied" if common.ledger.finished else common.stop)
            elif not common.finished:
                self._answers.supply()
                if not self._must_flush():
                    break
                self._update(flush=True)
        self._answers.answer()

    def _at_max_updates(self) -> bool:
        limit = self._common.data.max_updates
        return limit > 0 and self.clock.timestamp >= limit and self._common.crew.began

    def _over(self) -> bool:
        common = self._common
        self._close_epochs()  # skipped samples may have ended one without an update
        ended = bool(common.stop) or (common.crew.began and common.ledger.finished)
        return ended and common.policy.idle and not self.pending and not common.finished

    def _must_flush(self) -> bool:
        """Whether fewer than c gradients are pending and no other can come before they are applied."""
        common = self._common
        if not self.pending or not common.policy.idle:
            return False
        return bool(common.stop) or common.ledger.leasable(common.data.epochs) is None

    def _update(self, *, flush: bool) -> None:
        common = self._common
        exact = common.policy.by_rank or self.lam == 1 or flush
        decision = common.pending.decide(
            update=self.clock.timestamp + 1,
            generation=self.clock.generation,
            n=self.n,
            mu_bar=None if exact else self.global_batch / self.lam,
            by_rank=common.policy.by_rank,
            progress=self.samples_applied / common.data.samples,
        )
        common.out.append(Update(decision))
        common.clock = Clock(self.clock.generation, decision.update)
        self._book(decision)
        self._presence.release_ended()
        common.policy.close()
        self._close_epochs()

    def _book(self, decision: Decision) -> None:
        """Count what an update applied, and free its slots."""
        common = self._common
        for entry in decision.entries:
            common.ledger.apply(entry.spans)
            self.staleness.add(entry.sigma)
            session = common.crew.session(entry.id.rank, entry.id.incarnation)
            if session is not None and not entry.folded:
                session.slots.release(entry.slot)
        common.counters.applied += decision.c
        self.samples_applied += decision.samples

    def _close_epochs(self) -> None:
        """Say which epochs ended; at the end of the warm-up the protocol changes.

        An epoch that skipped more than it applied trained nothing, whoever it was that would not have the gradients.
        """
        common = self._common
        closed = common.ledger.advance()
        if not closed:
            return
        common.out.extend(EpochDone(page.epoch, self.clock) for page in closed)
        barren = next((page for page in closed if page.applied < page.skipped), None)
        if barren is not None:
            common.fail(
                f"epoch {barren.epoch + 1} applied {barren.applied:,} samples and skipped {barren.skipped:,}: their "
                "gradients are NaN or infinite, or their batches had no step. "
                "Fix: lower the learning rate, or clip the gradients"
            )
            return
        policy = _policy(common.sync, common.ledger)
        if policy.by_rank != common.policy.by_rank:
            common.policy.revoke({})
            common.policy = policy
            self._presence.reckon()

    def _finish(self, reason: str) -> None:
        common = self._common
        common.finished = True
        common.waiting = None
        common.out.append(Finished(reason, complete=common.ledger.finished))


def _policy(sync: SyncParams, ledger: Ledger) -> Flow | Rounds:
    """What holds in the lowest unfinished epoch: hardsync in the warm-up, then the protocol."""
    limit = ledger.epochs if sync.protocol == "hardsync" else min(sync.warmup_epochs, ledger.epochs)
    if ledger.epoch < limit or sync.protocol == "hardsync":
        return Rounds(ledger, limit, sync.backup)
    return Flow(ledger)
