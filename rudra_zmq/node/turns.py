"""Turns of the core: an event in, its actions carried out in order, then what follows from the whole.

Owns: the one place where actions are carried out. Must not know: messages, sockets, how a part does its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rudra_zmq.core.events import (
    Action,
    Decision,
    EpochDone,
    Event,
    Failed,
    Fence,
    Finished,
    Fold,
    Grant,
    Members,
    Refuse,
    Release,
    Update,
    Waiting,
)
from rudra_zmq.errors import RudraError
from rudra_zmq.node.apply import NotFinite
from rudra_zmq.node.saving import Saving
from rudra_zmq.node.versions import Unsendable
from rudra_zmq.node.work import Diverged, Exhausted, Work

if TYPE_CHECKING:
    from rudra_zmq.node.lead import Lead


STALE = 2.0  # times the mean staleness that lambda and c make, and at least so much, is worth a warning

Seen = Callable[[list[Action]], None]


class Turns:
    """Made before the parts that carry actions out: ``connect`` makes them known."""

    def __init__(self, work: Work, saving: Saving) -> None:
        self.work = work
        self.saving = saving
        self._turning = False
        self._later: list[tuple[Event, Seen | None]] = []

    def connect(self, lead: Lead) -> None:
        """The parts of the node."""
        self.exchange, self.testing, self.watch = lead.exchange, lead.testing, lead.watch
        self.ending, self.report, self.residuals = lead.ending, lead.report, lead.residuals

    def turn(self, event: Event, seen: Seen | None = None) -> None:
        """Give one event to the core and carry out what it decided, in order.

        An event that carrying out another one brings about waits until that turn is over. Raises NodeEnds.
        """
        self._later.append((event, seen))
        if self._turning:
            return
        self._turning = True
        try:
            while self._later:
                self._one_turn(*self._later.pop(0))
        except MemoryError as error:  # half of a turn is none: the core has gone on, the weights may not have
            raise Exhausted(error) from None
        finally:
            self._turning = False

    def _one_turn(self, event: Event, seen: Seen | None) -> None:
        work = self.work
        assert work.sync is not None
        epoch_done = False
        work.account()  # the event may end a pause, or begin one
        actions = work.sync.handle(event, work.clock())
        if seen is not None:
            seen(actions)
        for action in actions:
            self._carry_out(action)
            epoch_done = epoch_done or isinstance(action, EpochDone)
        work.decisions.flush()
        if work.started and not self.ending.over:
            self.saving.consider(epoch_done)
        self.ending.advance()

    def _carry_out(self, action: Action) -> None:
        work = self.work
        assert work.model is not None and work.model.applier is not None
        match action:
            case Grant():
                self.exchange.grant(action)
            case Update():
                self._update(action.decision)
            case Fold():
                work.model.applier.fold(action)
            case Release():
                work.model.slots.release(action.rank, action.incarnation)
            case EpochDone():
                self._epoch_done(action)
            case Members():
                self._members(action)
            case Refuse():
                self._refused(action)
            case Fence():
                session = work.sessions.session(action.rank, action.incarnation)
                if session is not None:
                    self.watch.fence(session, action.reason, hard=True)
            case Waiting():
                work.event("W", f"waits: {self.report.state[1]}")
            case Finished():
                self.ending.finished(action)
            case Failed():
                work.event("E", action.reason)
                self.ending.failed(action)

    def _update(self, decision: Decision) -> None:
        work = self.work
        assert work.model is not None and work.model.applier is not None
        assert work.sync is not None and work.figures is not None
        try:
            # Where everyone left after the push, what came is all that there is of a global batch.
            batch = work.sync.global_batch or decision.samples
            lr = work.model.applier.update(decision, work.job.sync.protocol, batch)
        except NotFinite:
            raise Diverged(decision.update) from None
        except Unsendable as error:
            raise Diverged(decision.update, str(error)) from None
        for entry in decision.entries:
            session = work.sessions.session(entry.id.rank, entry.id.incarnation)
            if session is not None:
                self.residuals.applied(session, entry.id.seq)
        work.decisions.add(decision, lr)
        work.figures.updated(decision, lr)

    def _epoch_done(self, action: EpochDone) -> None:
        work = self.work
        assert work.sync is not None and work.figures is not None
        work.account()
        row = work.figures.epoch_done(action.epoch, work.sync.lam, work.sync.global_batch)
        work.event(
            "I",
            f"epoch {action.epoch + 1}: {row.samples:,} samples ({row.distinct:,} distinct), {row.updates:,} updates",
        )
        limit = max(STALE, STALE * (work.sync.lam - 1) / work.sync.c)
        if row.staleness_mean > limit:
            work.event(
                "W",
                f"mean staleness of epoch {action.epoch + 1} is {row.staleness_mean:.1f}, above {limit:.1f}: "
                "a learner is much slower than the others, or accumulates; sync.max_staleness would bound it",
            )
        self.testing.epoch_done(action.epoch, action.clock)

    def _members(self, action: Members) -> None:
        work = self.work
        assert work.model is not None
        if not action.global_batch:
            return  # nobody is left; Waiting says so
        rate = work.model.rate(work.job.sync.protocol, action.global_batch)
        note = f" ({action.note})" if action.note else ""
        work.event(
            "W" if action.note else "I",
            f"{action.protocol}: lambda {action.lam}, n {action.n}, c {action.c}; "
            f"global batch {action.global_batch}, rate {rate:g}{note}",
        )

    def _refused(self, action: Refuse) -> None:
        work = self.work
        work.sessions.drop("refused")
        work.seldom(f"refused {action.rank}", "W", f"rank {action.rank} is refused: {action.reason}")
        session = work.sessions.session(action.rank, action.incarnation)
        if action.seq == 0 and session is not None and session.peer is not None:
            session.joined = False
            work.refuse(session.peer, RudraError(action.reason, fix="raise learners.max"))
