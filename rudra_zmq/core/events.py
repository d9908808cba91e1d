"""What goes into and comes out of the synchronisation core.

Owns the values that the core, the lead node, the simulator and the lone learner share: clocks, gradient
ids, spans of samples, events (in) and actions (out). Knows no socket, no tensor and no clock on the wall:
time is an argument of ``Sync.handle`` in seconds.

Symbols are the paper's: a gradient's *timestamp* is that of the weights that it was computed from, update i
takes the weights from timestamp i-1 to i, and the *staleness* of gradient k in update i is (i-1) - i_k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Clock(NamedTuple):
    """A value of the job's one clock; generation grows at each restore, timestamp at each update."""

    generation: int
    timestamp: int


class GradientId(NamedTuple):
    """Names one gradient for ever; ``seq`` counts the pushes of one incarnation from 1."""

    rank: int
    incarnation: int
    seq: int


class Span(NamedTuple):
    """Positions [start, stop) of an epoch's permutation (not sample indices)."""

    epoch: int
    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override]  # hides tuple.count, which means nothing here
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Lease:
    """One mini-batch for one learner: all spans are of one epoch, in ascending order."""

    spans: tuple[Span, ...]

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(s.count for s in self.spans)

    @property
    def epoch(self) -> int:
        """The epoch that all spans belong to."""
        return self.spans[0].epoch


# --------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Join:
    """A learner is attached, knows its data and can begin; a higher incarnation replaces a lower one.

    ``minibatch`` is mu of this learner in samples (times its accumulation); ``prefetch`` is how many
    leases it wants beyond the one that it computes.
    """

    rank: int
    incarnation: int
    minibatch: int
    prefetch: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """Version 0 (or a restored one) is in place: lease to whoever is here."""


@dataclass(frozen=True, slots=True)
class Push:
    """One gradient is complete on every shard. ``count`` 0 is a batch that the learner skipped.

    All of it is from weights of one timestamp: a message with groups is taken apart before it comes here.

    ``spans`` are the samples of the gradient and must lie in what the learner holds. ``finite`` is false
    if any shard saw a NaN or an infinity. ``rates`` are the chief's learning rates, one per group.
    """

    id: GradientId
    clock: Clock
    spans: tuple[Span, ...]
    count: int
    finite: bool = True
    rates: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Want:
    """A learner has begun all its leases without a push in between and asks for another."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A session ended: ``bye`` (left by itself, or drained), ``lost`` (died, silent) or ``fenced``.

    The caller sends ``lost`` and ``fenced`` only once the process can no longer push.
    """

    rank: int
    incarnation: int
    kind: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Lease no more; finish when nothing is outstanding and what is pending was applied."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The job is over by the caller's word: what is outstanding or pending is applied no more, all are told so."""


Event: TypeAlias = Join | Start | Push | Want | Leave | Tick | Drain | End

# -------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a push, a join or a want; sent in the turn that decided it.

    ``ack`` is the last seq of this incarnation that has a verdict (0: none). ``leases`` is the whole list
    that the learner now holds, first to be begun first: what is not in it was revoked. ``slot`` is the
    slot that the learner writes its next gradient to. An empty list with ``done`` false never occurs.
    """

    rank: int
    incarnation: int
    ack: int
    verdict: str  # "" | accepted | skipped | stale | late | void | nonfinite | unheld
    clock: Clock
    leases: tuple[Lease, ...]
    slot: int
    done: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """A push that no honest learner sends (future timestamp, reused seq, ...): counted, not applied."""

    rank: int
    incarnation: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Sum slot ``slot`` of the session into the accumulator times ``scale`` (mu_k*s_k), then it is free.

    ``first`` says that the accumulator is empty: write instead of add.
    """

    id: GradientId
    slot: int
    scale: float
    first: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One gradient of an update; ``coefficient`` is a_k*s_k as float32 value (unused where folded)."""

    id: GradientId
    slot: int
    timestamp: int
    spans: tuple[Span, ...]
    count: int
    sigma: int
    scale: float
    coefficient: float
    folded: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """Update ``update`` (= i) in full: the order of ``entries`` is the order of summation.

    The sum is fold_coefficient * accumulator (where anything was folded) plus the sum over the entries
    that were not folded of coefficient * gradient. ``weight_sum`` is the sum of all a_k*s_k, ``s_bar`` the
    mean of the s_k. ``progress`` is samples applied before this update / N, for the schedule.
    """

    update: int
    generation: int
    entries: tuple[Entry, ...]
    fold_coefficient: float
    weight_sum: float
    s_bar: float
    mean_sigma: float
    progress: float
    samples: int
    c: int
    rates: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Apply the decision now: version i must be out before any later action is carried out."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class EpochDone:
    """The update just made applied the last samples of ``epoch``; its version is the epoch's weights."""

    epoch: int
    clock: Clock


@dataclass(frozen=True, slots=True)
class Members:
    """Membership changed (or began): what is in force from here on (S36). ``note`` says what was clamped."""

    lam: int
    n: int
    c: int
    global_batch: int
    protocol: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The job cannot go on without learners; ``missing`` ranks, until ``deadline`` (seconds, same clock)."""

    present: int
    needed: int
    missing: tuple[int, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Fence:
    """This incarnation must be killed (no progress, replaced): then a Leave of kind fenced is due."""

    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """No pending gradient needs the memory of this session any more."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Finished:
    """All epochs applied, a stop condition was met, or the drain ended. ``complete`` tells the first."""

    reason: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot go on (on_lost = fail, too few learners at the deadline)."""

    reason: str


Action: TypeAlias = Grant | Refuse | Fold | Update | EpochDone | Members | Waiting | Fence | Release | Finished | Failed


@dataclass
class Counters:
    """Gradients by fate; accepted = applied + pending: what is accepted is never dropped. ``dropped``: by verdict."""

    accepted: int = 0
    applied: int = 0
    skipped: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
