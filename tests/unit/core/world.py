"""Learners around one Sync, with an account of their own of every sample, slot and version.

The account is kept from events and actions alone and checked in every turn, so that a fault of Sync shows up as
a contradiction and not as a wrong final number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rudra_zmq.core.events import (
    Action,
    Clock,
    Decision,
    Drain,
    EpochDone,
    Event,
    Failed,
    Fence,
    Finished,
    Fold,
    GradientId,
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
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.sync import Sync

Position = tuple[int, int]


def positions(lease: Lease | tuple) -> list[Position]:
    spans = lease.spans if isinstance(lease, Lease) else lease
    return [(span.epoch, at) for span in spans for at in range(span.start, span.stop)]


@dataclass
class Learner:
    """One live incarnation as it sees itself. ``grant`` is what it computes; None while it waits."""

    rank: int
    incarnation: int
    mu: int
    seq: int = 0
    grant: Grant | None = None
    slot: int = 0
    last: Push | None = None
    answered: bool = True
    spans: list = field(default_factory=list)


class World:
    """``act`` methods send one event each and return its actions, checked."""

    def __init__(
        self,
        sync: SyncParams,
        learners: LearnerParams,
        data: DataParams,
        *,
        generation: int = 1,
        before: World | None = None,
    ) -> None:
        self.params, self.learners, self.data = sync, learners, data
        state = before.sync.state() if before else None
        self.sync = Sync(sync, learners, data, generation=generation, state=state)
        self.generation = generation
        self.now = before.now if before else 0.0
        self.live: dict[int, Learner] = {}
        self.newest: dict[int, int] = dict(before.newest) if before else {}
        self.applied: dict[Position, int] = dict(before.applied) if before else {}
        self.returned: set[Position] = set(before.returned) if before else set()
        self.skipped: set[Position] = set(before.skipped) if before else set()
        self.epochs_done: list[int] = list(before.epochs_done) if before else []
        self.timestamp = self.sync.clock.timestamp
        self.pending: dict[GradientId, Push] = {}
        self.folded: list[GradientId] = []
        self.memory: dict[tuple[int, int, int], GradientId] = {}
        self.released: set[tuple[int, int]] = set()
        self.gone: set[tuple[int, int]] = set()
        self.decisions: list[Decision] = []
        self.members: list[Members] = []
        self.fences: list[Fence] = []
        self.refusals: list[Refuse] = []
        self.waitings: list[Waiting] = []
        self.grants: list[Grant] = []
        self.finished: Finished | None = None
        self.failed: Failed | None = None

    # ------------------------------------------------------------------------------------------- acts

    def begin(self, mus: list[int] | None = None, prefetch: int = 1) -> list[Action]:
        for rank in range(self.learners.count):
            self.join(rank, mus[rank] if mus else 0, prefetch)
        return self.turn(Start())

    def join(self, rank: int, mu: int = 0, prefetch: int = 1, incarnation: int | None = None) -> list[Action]:
        if incarnation is None:
            incarnation = self.newest.get(rank, 0) + 1
        if incarnation > self.newest.get(rank, 0) and rank not in self.live:
            self.newest[rank] = incarnation
            self.live[rank] = Learner(rank, incarnation, mu)
        return self.turn(Join(rank, incarnation, mu, prefetch))

    def push(self, rank: int, *, skip: bool = False, finite: bool = True, spans: tuple | None = None) -> list[Action]:
        """The next gradient of a learner that computes: of its first lease, or of ``spans``."""
        learner = self.live[rank]
        assert learner.grant is not None
        spans = learner.grant.leases[0].spans if spans is None else spans
        count = 0 if skip else sum(span.count for span in spans)
        learner.seq += 1
        push = Push(GradientId(rank, learner.incarnation, learner.seq), learner.grant.clock, spans, count, finite)
        learner.last, learner.grant, learner.answered = push, None, False
        self.memory[rank, learner.incarnation, learner.slot] = push.id
        return self.turn(push)

    def repeat(self, rank: int) -> list[Action]:
        learner = self.live[rank]
        assert learner.last is not None
        return self.turn(learner.last)

    def want(self, rank: int) -> list[Action]:
        """Answered in its turn, unless the learner holds nothing any more: then it waits as after a push."""
        learner = self.live[rank]
        learner.grant, learner.answered = None, False
        session = self.sync._common.crew.session(rank, learner.incarnation)
        held = session is not None and self.sync._common.policy.held(session)
        actions = self.turn(Want(rank, learner.incarnation))
        assert learner.answered or not held
        return actions

    def leave(self, rank: int, kind: str = "lost") -> list[Action]:
        learner = self.live.pop(rank)
        self.gone.add((rank, learner.incarnation))
        return self.turn(Leave(rank, learner.incarnation, kind))

    def tick(self, to: float) -> list[Action]:
        self.now = max(self.now, to)
        return self.turn(Tick())

    def drain(self) -> list[Action]:
        return self.turn(Drain("stop"))

    def restart(self) -> World:
        """Everything dies; the next generation goes on from the state."""
        return World(self.params, self.learners, self.data, generation=self.generation + 1, before=self)

    @property
    def computing(self) -> list[int]:
        return [rank for rank, learner in self.live.items() if learner.grant is not None]

    @property
    def over(self) -> bool:
        return self.finished is not None or self.failed is not None

    def finish(self, limit: int = 10_000) -> None:
        """Live learners go on, one after the other, until the job is over."""
        turn = 0
        while not self.over:
            turn += 1
            assert turn < limit, "the job does not end"
            computing = self.computing
            if computing:
                self.push(computing[turn % len(computing)])
                continue
            deadline = self.sync.next_deadline()
            assert deadline is not None, f"deadlock: {self.sync.members()}, waiting {self.sync.waiting}"
            self.tick(deadline)

    # ------------------------------------------------------------------------------------------ checks

    def turn(self, event: Event) -> list[Action]:
        was_over = self.over
        counters = self.sync.counters
        before = counters.accepted, counters.skipped + counters.dropped.get("nonfinite", 0)
        actions = self.sync.handle(event, self.now)
        if isinstance(event, Push):
            if counters.accepted > before[0]:
                self.pending[event.id] = event
            if counters.skipped + counters.dropped.get("nonfinite", 0) > before[1]:
                again = set(positions(event.spans)) & self.returned
                self.returned |= set(positions(event.spans))
                self.skipped |= again
        for action in actions:
            getattr(self, "_on_" + type(action).__name__.lower())(action)
        assert not was_over or all(isinstance(a, Grant | Refuse | Release | Fence) for a in actions)
        self._check_books()
        return actions

    def _on_fold(self, fold: Fold) -> None:
        assert self.memory[fold.id.rank, fold.id.incarnation, fold.slot] == fold.id
        assert fold.id in self.pending and fold.id not in self.folded
        assert fold.first == (not self.folded)
        assert self.sync.protocol != "hardsync"
        self.folded.append(fold.id)

    def _on_update(self, update: Update) -> None:
        decision = update.decision
        assert decision.update == self.timestamp + 1
        assert {e.id for e in decision.entries} == set(self.pending)
        assert decision.c == len(decision.entries) == len(self.pending)
        for entry in decision.entries:
            push = self.pending[entry.id]
            assert (entry.timestamp, entry.spans, entry.count) == (push.clock.timestamp, push.spans, push.count)
            assert entry.timestamp < decision.update and entry.sigma == decision.update - 1 - entry.timestamp >= 0
            assert entry.folded == (entry.id in self.folded)
            assert entry.folded or self.memory[entry.id.rank, entry.id.incarnation, entry.slot] == entry.id
            for position in positions(entry.spans):
                assert position not in self.applied and position not in self.skipped
                self.applied[position] = decision.update
        stamps = [e.timestamp for e in decision.entries]
        assert abs(decision.mean_sigma - (decision.update - 1 - sum(stamps) / len(stamps))) < 1e-9
        assert abs(decision.weight_sum - sum(e.coefficient for e in decision.entries)) < 1e-6
        assert abs(decision.s_bar - sum(e.scale for e in decision.entries) / decision.c) < 1e-12
        self.decisions.append(decision)
        self.timestamp += 1
        self.pending, self.folded = {}, []

    def _on_epochdone(self, done: EpochDone) -> None:
        assert done.epoch == len(self.epochs_done)
        for at in range(self.data.samples):
            assert ((done.epoch, at) in self.applied) != ((done.epoch, at) in self.skipped)
        assert done.clock == Clock(self.generation, self.timestamp)
        self.epochs_done.append(done.epoch)

    def _on_grant(self, grant: Grant) -> None:
        learner = self.live[grant.rank]
        assert grant.incarnation == learner.incarnation and grant.clock == Clock(self.generation, self.timestamp)
        assert grant.done == self.over
        assert grant.ack == learner.seq
        self.grants.append(grant)
        learner.answered = True
        if grant.done:
            assert not grant.leases
            learner.grant = None
            return
        held = self.memory.get((grant.rank, grant.incarnation, grant.slot))
        assert held not in self.pending or held in self.folded, "the slot still holds a pending gradient"
        listed = [p for lease in grant.leases for p in positions(lease)]
        assert listed and len(set(listed)) == len(listed)
        assert not any(p in self.applied or p in self.skipped for p in listed)
        assert not set(listed) & {p for push in self.pending.values() for p in positions(push.spans)}
        for lease in grant.leases:
            assert len({span.epoch for span in lease.spans}) == 1 and list(lease.spans) == sorted(lease.spans)
        learner.grant, learner.slot = grant, grant.slot

    def _on_finished(self, finished: Finished) -> None:
        assert not self.over and not self.pending
        assert finished.complete == (len(self.epochs_done) == self.data.epochs)
        self.finished = finished

    def _on_failed(self, failed: Failed) -> None:
        assert not self.over
        self.failed = failed

    def _on_members(self, members: Members) -> None:
        assert 1 <= members.n <= members.lam and members.c >= 1
        assert (members.lam, members.n, members.c) == (self.sync.lam, self.sync.n, self.sync.c) or self.members
        self.members.append(members)

    def _on_release(self, release: Release) -> None:
        key = (release.rank, release.incarnation)
        assert key in self.gone and key not in self.released
        assert not any((i.rank, i.incarnation) == key and i not in self.folded for i in self.pending)
        self.released.add(key)

    def _on_fence(self, fence: Fence) -> None:
        self.fences.append(fence)

    def _on_refuse(self, refuse: Refuse) -> None:
        self.refusals.append(refuse)

    def _on_waiting(self, waiting: Waiting) -> None:
        self.waitings.append(waiting)

    def _check_books(self) -> None:
        counters = self.sync.counters
        assert counters.accepted == counters.applied + self.sync.pending
        assert self.sync.pending == len(self.pending)
        assert self.sync.clock == Clock(self.generation, self.timestamp)
        common = self.sync._common
        outside: list[Position] = [p for push in self.pending.values() for p in positions(push.spans)]
        for session in common.crew.sessions:
            outside += [p for lease in common.policy.held(session) for p in positions(lease)]
        assert len(set(outside)) == len(outside), "two learners hold one sample"
        for epoch in range(self.sync.epoch, min(self.sync.epoch + 2, self.data.epochs)):
            counts = common.ledger.counts(epoch)
            assert sum(counts.values()) == self.data.samples
            assert counts["out"] >= sum(p[0] == epoch for p in outside)
            assert counts["applied"] == sum(p[0] == epoch for p in self.applied)
            assert counts["skipped"] == sum(p[0] == epoch for p in self.skipped)


def make(
    protocol: str = "softsync",
    samples: int = 64,
    epochs: int = 1,
    *,
    n: int = 1,
    count: int = 4,
    mu: int = 4,
    max_updates: int = 0,
    sync: dict | None = None,
    **learners: object,
) -> World:
    """A world with the usual parameters; ``sync`` adds to SyncParams, the rest to LearnerParams."""
    return World(
        replace(SyncParams(protocol=protocol, n=n), **(sync or {})),
        replace(LearnerParams(count=count, minibatch=mu), **learners),  # type: ignore[arg-type]
        DataParams(samples, epochs, max_updates),
    )
