"""The exchange: what a learner says to the servers and what comes back, whoever the servers are.

Owns: the interface between a training loop and its servers, and the values that cross it. Must not know: torch,
sockets, the core. `remote` speaks to a node, `local` is the same rules in this process.

Weights and gradients do not pass through calls: `attach` hands over two vectors once. When a call returns, the weights
are in `weights`: the first one or, where they are shared, a version of the servers, which can only be read and stays as
it is until the next call, or `keep`. A gradient is written into `gradient`, which is the second one or, where memory is
shared, a slot of the servers: another one after each call, with nothing of use in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rudra_zmq.core.events import Clock, Lease, Span
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, Rule


@dataclass(frozen=True, slots=True)
class Job:
    """What a learner needs to know of its job. ``minibatch`` 0: the servers divide ``global_batch``."""

    seed: int
    epochs: int
    minibatch: int
    global_batch: int
    count: int
    protocol: str


@dataclass(frozen=True, slots=True)
class Gradient:
    """One push. ``count`` 0 is a batch that was skipped: there is no tensor. Times in seconds.

    ``clock`` is that of the oldest weights that any of it was computed from. ``finite``: whether the tensor is, where
    that was seen as it was written; else None, and it is looked at again before it leaves.
    """

    clock: Clock
    spans: tuple[Span, ...]
    count: int
    loss: float | None = None
    rates: tuple[float, ...] | None = None
    compute_s: float = 0.0
    wait_s: float = 0.0
    finite: bool | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What an exchange gave. ``leases``: all that the learner holds. ``fresh``: the weights are new ones."""

    ack: int
    verdict: str
    clock: Clock
    leases: tuple[Lease, ...]
    lam: int
    chief: bool
    fresh: bool
    done: bool = False


class RuleVerdict(NamedTuple):
    """Whether the script's optimizer rules, and the rule in force."""

    accepted: bool
    rule: str


class Exchange(Protocol):
    """One learner's side of a job. Calls block until they are answered, and raise RudraError past a deadline."""

    rank: int
    incarnation: int
    job: Job

    @property
    def chief(self) -> bool:
        """Whether this learner has the lowest present rank, as far as it knows."""

    @property
    def lam(self) -> int:
        """lambda, as far as this learner knows."""

    @property
    def weights(self) -> Vector:
        """The newest weights that came."""

    @property
    def gradient(self) -> Vector:
        """Where the next push takes the gradient from."""

    @property
    def leaving(self) -> bool:
        """This learner was asked to finish its step and leave."""

    def attach(self, message: Attach, layout: Layout, weights: Vector, gradient: Vector) -> None:
        """Agree on the model. Returns with the job's weights in `weights`; raises Rejected with the difference."""

    def rule(self, rule: Rule | None) -> RuleVerdict:
        """Offer a script's optimizer (None: ask for the rule of the job file)."""

    def begin(self, samples: int, minibatch: int, accumulate: int, prefetch: int) -> Answer:
        """Say what the data is and get the first leases."""

    def push(self, gradient: Gradient) -> Answer:
        """Push what is in `gradient` (or a skipped batch) and pull."""

    def want(self) -> Answer:
        """Ask for one more lease without a push; nothing new in the answer: there is none to be had now."""

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Report figures of the script."""

    def keep(self) -> None:
        """From here on `weights` is the vector that `attach` handed over. Raises NodeLost where they are lost."""

    def leave(self, reason: str, text: str = "") -> None:
        """Say good-bye: done, drain or failed. Nothing may be called after it but `close`."""

    def close(self) -> None:
        """Let go of threads and sockets."""
