"""Who takes part: ranks, their incarnations and sessions, lambda and mu.

Owns the states of a rank (present, lost, left), when a lost one is given up, when a step has taken too long,
and how many samples each rank gets. Must not know leases or gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rudra_zmq.core.events import Join
from rudra_zmq.core.params import LearnerParams
from rudra_zmq.core.slots import Slots

FIRST_STEP_S = 3600.0
FIRST_STEPS = 6.0
"""The first mini-batch of an incarnation (it compiles, it warms up) is exempt from step_timeout, not from any end: it
may take so many of them, and an hour at least."""


@dataclass(slots=True, eq=False)
class Session:
    """One incarnation that is present. It *waits* from its push (or join) to the grant that answers it."""

    rank: int
    incarnation: int
    prefetch: int
    slots: Slots = field(default_factory=Slots)
    seq: int = 0  # of the last push that has a verdict
    verdict: str = ""
    waits: bool = True
    timestamp: int = 0  # of the oldest weights that it may be computing from
    begun: int = 0  # leases that it has begun, from the front of its list
    extra: int = 0  # leases asked for beyond the prefetch, until its next push
    step_deadline: float = math.inf
    first_step: bool = True
    fenced: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """(rank, incarnation)."""
        return self.rank, self.incarnation

    @property
    def depth(self) -> int:
        """How many leases it may hold beyond the first."""
        return self.prefetch + self.extra

    def pushed(self, seq: int) -> None:
        """Push ``seq`` has its verdict: the step is over, nothing is begun until the grant."""
        self.seq = seq
        self.begun = self.extra = 0
        self.first_step = False
        self.step_deadline = math.inf


@dataclass(slots=True, eq=False)
class Member:
    """One rank, whatever its incarnation; ``counted`` says that it is part of lambda."""

    rank: int
    incarnation: int
    minibatch: int
    session: Session | None = None
    state: str = "present"  # present | lost | left
    counted: bool = True
    deadline: float = math.inf  # of a lost one
    successor: Join | None = None  # came before its predecessor had gone
    gradients: int = 0


class Membership:
    """All ranks seen. Before ``began`` lambda is the declared count, then the number of counted members."""

    def __init__(self, params: LearnerParams, slots: int = 2) -> None:
        """``slots``: how many each incarnation has."""
        self._params = params
        self._slots = slots
        self._members: dict[int, Member] = {}
        self.began = False

    @property
    def all(self) -> list[Member]:
        """Every rank ever seen, ascending."""
        return list(self._members.values())

    @property
    def counted(self) -> list[Member]:
        """The members that make lambda, in rank order."""
        return [member for member in self.all if member.counted]

    @property
    def sessions(self) -> list[Session]:
        """Every session that is present, in rank order."""
        return [member.session for member in self.all if member.session is not None]

    @property
    def lam(self) -> int:
        """lambda in force, at least 1."""
        return max(1, len(self.counted)) if self.began else self._params.count

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are declared or part of lambda, and not present."""
        expected = {*range(self._params.count), *(member.rank for member in self.counted)}
        return tuple(sorted(expected - {session.rank for session in self.sessions}))

    @property
    def global_batch(self) -> int:
        """Samples of one gradient from each of lambda learners; the declared number before it began."""
        if not self.began:
            return self._params.global_batch or self._params.minibatch * self.lam
        return sum(self.minibatches().values())

    def get(self, rank: int) -> Member | None:
        """The member of a rank that was seen."""
        return self._members.get(rank)

    def session(self, rank: int, incarnation: int) -> Session | None:
        """The session of exactly this incarnation, if it is present."""
        member = self._members.get(rank)
        if member is None or member.session is None or member.session.incarnation != incarnation:
            return None
        return member.session

    def minibatches(self) -> dict[int, int]:
        """mu per counted rank: its own, else the job's, else its share of the global batch."""
        share, rest = divmod(self._params.global_batch, self.lam)
        return {
            member.rank: member.minibatch or self._params.minibatch or max(1, share + (index < rest))
            for index, member in enumerate(self.counted)
        }

    def admit(self, join: Join) -> Session:
        """Open a session for a rank that has none."""
        member = self._members.get(join.rank)
        if member is None:
            member = self._members[join.rank] = Member(join.rank, join.incarnation, join.minibatch)
            self._members = dict(sorted(self._members.items()))
        member.incarnation = join.incarnation
        member.minibatch = join.minibatch
        member.session = session = Session(join.rank, join.incarnation, join.prefetch, Slots(self._slots))
        member.state = "present"
        member.counted = True
        member.deadline = math.inf
        return session

    def part(self, member: Member, state: str, now: float) -> None:
        """End the session of ``member``. A lost one stays counted until its deadline, one that left does not."""
        member.session = None
        member.state = state
        member.counted = state == "lost" and self.began
        member.deadline = now + self._params.deadline

    def overdue(self, now: float) -> list[Member]:
        """Lost members whose deadline has passed, once each."""
        late = [member for member in self.all if member.deadline <= now]
        for member in late:
            member.deadline = math.inf
        return late

    def stuck(self, now: float) -> list[Session]:
        """Sessions whose mini-batch takes too long."""
        return [session for session in self.sessions if session.step_deadline <= now]

    def next_deadline(self) -> float:
        """The earliest deadline of a lost member or of a step; infinity if there is none."""
        times = [member.deadline for member in self._members.values()]
        times += [session.step_deadline for session in self.sessions]
        return min(times, default=math.inf)

    def begin_step(self, session: Session, now: float) -> None:
        """``session`` begins a mini-batch now."""
        session.step_deadline = now + self.patience(session)

    def patience(self, session: Session) -> float:
        """Seconds that the mini-batch which ``session`` computes may take."""
        timeout = self._params.step_timeout
        return max(FIRST_STEP_S, FIRST_STEPS * timeout) if session.first_step else timeout

    def steps(self, now: float) -> list[tuple[int, bool, float, float]]:
        """(rank, whether it is its first, seconds so far, seconds at most) of each mini-batch that is computed."""
        return [
            (s.rank, s.first_step, now - s.step_deadline + self.patience(s), self.patience(s))
            for s in self.sessions
            if s.step_deadline < math.inf
        ]

    @property
    def idle(self) -> list[int]:
        """The ranks that wait for a grant."""
        return [session.rank for session in self.sessions if session.waits]

    def lost(self, now: float) -> list[tuple[int, float]]:
        """(rank, seconds until it is given up) of each lost member that may still come back."""
        return [(m.rank, m.deadline - now) for m in self.counted if m.session is None and m.deadline < math.inf]

    def slow_starters(self, now: float) -> list[tuple[int, float, float]]:
        """(rank, seconds so far, seconds at most) of each first mini-batch that takes longer than step_timeout."""
        first = [s for s in self.sessions if s.first_step]  # who has not begun it has a deadline of infinity
        taken = [(s.rank, now - s.step_deadline + self.patience(s), self.patience(s)) for s in first]
        return [entry for entry in taken if entry[1] > self._params.step_timeout]

    def count_gradient(self, rank: int) -> None:
        """A gradient of ``rank`` was accepted."""
        self._members[rank].gradients += 1
