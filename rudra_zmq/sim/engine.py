"""The engine: learners in virtual time around the same ``Sync`` that the servers run.

Owns the heap of events and what becomes of actions, with real gradients through a callback or times only. Must
not know files, flags or processes. A learner computes for a drawn time, its push takes the link to the server,
is handled there in one turn, and the answer takes the link back.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rudra_zmq.core.events import (
    Action,
    Decision,
    EpochDone,
    Event,
    Failed,
    Fence,
    Finished,
    Fold,
    GradientId,
    Grant,
    Join,
    Leave,
    Push,
    Span,
    Start,
    Tick,
    Update,
)
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.staleness import Histogram
from rudra_zmq.core.sync import Sync
from rudra_zmq.sim.compute import Compute, Link


class Training(Protocol):
    """What the engine asks of real training; weights and gradients are opaque to it."""

    def weights(self) -> Any:
        """The newest version, which never changes afterwards."""

    def gradient(self, weights: Any, spans: tuple[Span, ...]) -> Any:
        """The mean gradient of these samples at these weights."""

    def fold(self, fold: Fold, gradient: Any) -> None:
        """Sum into the accumulator."""

    def update(self, decision: Decision, gradients: Sequence[Any]) -> None:
        """Make the next version; ``gradients`` are those of the entries that were not folded, in order."""


@dataclass(frozen=True)
class Change:
    """At ``time`` (seconds) ``rank`` joins (kind "join") or leaves ("lost", "bye")."""

    time: float
    rank: int
    kind: str


@dataclass(frozen=True)
class EpochTime:
    """``epoch`` ended at ``seconds`` of virtual time with ``samples`` applied in all."""

    epoch: int
    seconds: float
    samples: int


@dataclass
class Result:
    """What a run showed. ``staleness`` leaves out the gradients that were to be discarded.

    ``busy`` and ``waited`` are seconds of all learners: computing, and between a push and the next beginning.
    """

    seconds: float = 0.0
    updates: int = 0
    gradients: int = 0
    samples: int = 0
    busy: float = 0.0
    waited: float = 0.0
    staleness: Histogram = field(default_factory=Histogram)
    epochs: list[EpochTime] = field(default_factory=list)
    per_learner: dict[int, int] = field(default_factory=dict)
    ended: Finished | Failed | None = None

    @property
    def gradients_per_s(self) -> float:
        """Applied gradients per second of virtual time."""
        return self.gradients / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Applied samples per second of virtual time."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def overlap(self) -> float:
        """Compute time / (compute time + time that it waited)."""
        return self.busy / (self.busy + self.waited) if self.busy else 1.0


@dataclass
class _Learner:
    """One live incarnation. ``held`` is the timestamp of its weights."""

    rank: int
    incarnation: int
    seq: int = 0
    held: int = -1
    weights: Any = None
    pushed: float = 0.0


class Engine:
    """One job in virtual time; ``run`` may be called once.

    ``slowness`` is a factor per rank on the compute time, ``size`` the bytes of a vector on the ``link``. All
    declared learners join at time 0; ``changes`` come on top. A fenced learner dies and is back at once. ``seed``
    draws the times, one stream per rank.
    """

    def __init__(
        self,
        sync: SyncParams,
        learners: LearnerParams,
        data: DataParams,
        compute: Compute,
        *,
        slowness: Sequence[float] = (),
        link: Link | None = None,
        size: int = 0,
        changes: Sequence[Change] = (),
        training: Training | None = None,
        on_decision: Callable[[Decision], None] | None = None,
        prefetch: int = 1,
        seed: int = 1,
    ) -> None:
        self.sync = Sync(sync, learners, data)
        self._params = learners
        self._compute = compute
        self._slowness = slowness
        self._link = link
        self._size = size
        self._changes = changes
        self._training = training
        self._on_decision = on_decision
        self._prefetch = prefetch
        self._seed = seed
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._coming = 0  # entries of the heap that are more than a look at deadlines
        self._watched = 0.0
        self._learners: dict[int, _Learner] = {}
        self._incarnations: dict[int, int] = {}
        self._draws: dict[int, random.Random] = {}
        self._gradients: dict[GradientId, Any] = {}
        self._line_free = [0.0, 0.0]  # when the server's line is free, up and down
        self._discard = 0
        self._result = Result()

    def run(self, *, gradients: int = 0, discard: int = 0) -> Result:
        """Run until the job is over, nothing can happen any more, or ``gradients`` (if not 0) are applied.

        The staleness of the first ``discard`` gradients is left out.
        """
        self._discard = discard
        for rank in range(self._params.count):
            self._join(rank)
        for change in self._changes:
            self._at(change.time, self._change_of(change))
        self._turn(Start())
        self._watch()
        while not self.sync.finished and not 0 < gradients <= self._result.gradients:
            if not self._coming and self.sync.next_deadline() is None:
                break
            self._now, _, what = heapq.heappop(self._heap)
            what()
        self._result.seconds = self._now
        return self._result

    # ------------------------------------------------------------------------------------------- events

    def _at(self, time: float, what: Callable[[], None]) -> None:
        def come() -> None:
            self._coming -= 1
            what()

        self._coming += 1
        self._push_heap(time, come)

    def _push_heap(self, time: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (max(time, self._now), self._order, what))

    def _watch(self) -> None:
        """Have the deadlines looked at in time.

        A turn may set one that is nearer than those known, by a step that begins: never before the time of a
        whole step. Whatever sets a shorter one (a loss, a tick) comes by here.
        """
        deadline = self.sync.next_deadline()
        latest = self._now + self._params.step_timeout
        self._watched = watched = latest if deadline is None else min(deadline, latest)

        def look() -> None:
            if watched == self._watched:
                self._turn(Tick())
                self._watch()

        self._push_heap(watched, look)

    def _change_of(self, change: Change) -> Callable[[], None]:
        if change.kind == "join":
            return lambda: self._join(change.rank)
        return lambda: self._leave(change.rank, change.kind)

    def _join(self, rank: int) -> None:
        if rank in self._learners:
            return
        incarnation = self._incarnations[rank] = self._incarnations.get(rank, 0) + 1
        self._learners[rank] = _Learner(rank, incarnation)
        self._turn(Join(rank, incarnation, 0, self._prefetch))

    def _leave(self, rank: int, kind: str) -> None:
        learner = self._learners.pop(rank, None)
        if learner is not None:
            self._turn(Leave(rank, learner.incarnation, kind))
            self._watch()

    def _begin(self, learner: _Learner, grant: Grant) -> None:
        """The answer is here and complete: compute the first lease."""
        if self._learners.get(learner.rank) is not learner:
            return
        if learner.seq:
            self._result.waited += self._now - learner.pushed
        slow = self._slowness[learner.rank] if learner.rank < len(self._slowness) else 1.0
        if learner.rank not in self._draws:
            self._draws[learner.rank] = random.Random(f"{self._seed} {learner.rank}")
        seconds = slow * self._compute.draw(self._draws[learner.rank])
        self._at(self._now + seconds, lambda: self._computed(learner, grant, seconds))

    def _computed(self, learner: _Learner, grant: Grant, seconds: float) -> None:
        self._result.busy += seconds
        learner.pushed = self._now
        arrives = self._carried(0, self._size)
        if arrives == self._now:
            self._arrived(learner, grant)
        else:
            self._at(arrives, lambda: self._arrived(learner, grant))

    def _arrived(self, learner: _Learner, grant: Grant) -> None:
        if self._learners.get(learner.rank) is not learner:
            return
        learner.seq += 1
        lease = grant.leases[0]
        push = Push(GradientId(learner.rank, learner.incarnation, learner.seq), grant.clock, lease.spans, lease.count)
        if self._training is not None:
            self._gradients[push.id] = self._training.gradient(learner.weights, lease.spans)
        self._turn(push)

    def _carried(self, direction: int, size: int) -> float:
        """When ``size`` bytes that set out now are over; the server's line takes one vector at a time."""
        if self._link is None:
            return self._now
        self._line_free[direction] = max(self._line_free[direction], self._now) + size / self._link.rate
        return self._line_free[direction] + self._link.latency

    # ------------------------------------------------------------------------------------------ actions

    def _turn(self, event: Event) -> None:
        for action in self.sync.handle(event, self._now):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Grant():
                self._granted(action)
            case Update():
                self._updated(action.decision)
            case Fold() if self._training is not None:
                self._training.fold(action, self._gradients.pop(action.id))
            case EpochDone():
                self._result.epochs.append(EpochTime(action.epoch, self._now, self.sync.samples_applied))
            case Fence():
                self._at(self._now, lambda: self._fenced(action))
            case Finished() | Failed():
                self._result.ended = action
            case _:
                pass  # Members, Waiting, Release, Refuse: nobody to tell

    def _granted(self, grant: Grant) -> None:
        learner = self._learners[grant.rank]
        if grant.verdict not in ("", "accepted"):
            self._gradients.pop(GradientId(grant.rank, grant.incarnation, grant.ack), None)
        if grant.done:
            return
        size = self._size if grant.clock.timestamp != learner.held else 0
        learner.held = grant.clock.timestamp
        if self._training is not None:
            learner.weights = self._training.weights()
        begins = self._carried(1, size)
        if begins == self._now:
            self._begin(learner, grant)
        else:
            self._at(begins, lambda: self._begin(learner, grant))

    def _updated(self, decision: Decision) -> None:
        result = self._result
        for entry in decision.entries:
            result.gradients += 1
            result.per_learner[entry.id.rank] = result.per_learner.get(entry.id.rank, 0) + 1
            if result.gradients > self._discard:
                result.staleness.add(entry.sigma)
        result.updates += 1
        result.samples += decision.samples
        if self._training is not None:
            direct = [self._gradients.pop(entry.id) for entry in decision.entries if not entry.folded]
            self._training.update(decision, direct)
        if self._on_decision is not None:
            self._on_decision(decision)

    def _fenced(self, fence: Fence) -> None:
        learner = self._learners.get(fence.rank)
        if learner is not None and learner.incarnation == fence.incarnation:
            self._leave(fence.rank, "fenced")
            self._join(fence.rank)
