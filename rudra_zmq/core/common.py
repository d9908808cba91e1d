"""What the parts of one ``Sync`` share: parameters, the state of the job, the actions of the turn under way.

Owns the values and the few questions that every part asks of them. Must not decide anything: ``sync`` owns
updates, ``answers`` the grants, ``presence`` the members.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rudra_zmq.core.events import Action, Clock, Counters, Failed, Members, Waiting
from rudra_zmq.core.flow import Flow
from rudra_zmq.core.ledger import Ledger
from rudra_zmq.core.membership import Membership
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.pending import Pending
from rudra_zmq.core.rounds import Rounds


@dataclass(slots=True)
class Common:
    """State of one job; ``out`` collects the actions of the turn at time ``now`` (seconds)."""

    sync: SyncParams
    learners: LearnerParams
    data: DataParams
    ledger: Ledger
    crew: Membership
    pending: Pending
    policy: Flow | Rounds
    clock: Clock
    counters: Counters
    force: Members = field(default_factory=lambda: Members(0, 0, 0, 0, ""))
    minibatches: dict[int, int] = field(default_factory=dict)  # mu per counted rank
    waiting: Waiting | None = None  # what the job waits for, while it must
    stop: str = ""  # why no more is leased; "" while the job goes on
    finished: bool = False
    now: float = 0.0
    out: list[Action] = field(default_factory=list)

    @property
    def too_few(self) -> bool:
        """Whether the job is below learners.min."""
        return self.crew.began and len(self.minibatches) < self.learners.min

    @property
    def frozen(self) -> bool:
        """Whether nothing is leased: before Start, in a drain, below learners.min."""
        return not self.crew.began or bool(self.stop) or self.too_few

    @property
    def held_back(self) -> bool:
        """Whether an update is due that would make a gradient in the making too stale (on_stale = hold)."""
        bound = self.sync.max_staleness
        if self.policy.by_rank or bound is None or self.sync.on_stale != "hold":
            return False
        if not self.policy.due(len(self.pending), self.force.c):
            return False
        # A gradient is in the first update after its push, so this bounds the sigma of every one.
        oldest = self.clock.timestamp + 1 - bound
        return any(s.timestamp < oldest and not s.waits and self.policy.held(s) for s in self.crew.sessions)

    def drop(self, verdict: str) -> None:
        """Count a gradient that is not applied."""
        self.counters.dropped[verdict] = self.counters.dropped.get(verdict, 0) + 1

    def fail(self, reason: str) -> None:
        """The job cannot go on."""
        if not self.finished:
            self.finished = True
            self.waiting = None
            self.out.append(Failed(reason))
