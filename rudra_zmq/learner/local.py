"""Alone, without a job: the same rules in this process, with lambda = 1.

Owns: one core.Sync and one Applier in the place of the servers, and the carrying out of what they decide. Must not
know: torch, sockets, training loops.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rudra_zmq.core.events import (
    Clock,
    Decision,
    Failed,
    Fold,
    GradientId,
    Grant,
    Join,
    Push,
    Refuse,
    Start,
    Update,
    Want,
)
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.sync import Sync
from rudra_zmq.core.versions import LONE_RING
from rudra_zmq.errors import RudraError, UsageError
from rudra_zmq.learner.exchange import Answer, Gradient, Job, RuleVerdict
from rudra_zmq.node.apply import Applier, NotFinite
from rudra_zmq.node.rule import script_spec
from rudra_zmq.node.slots import SlotTable
from rudra_zmq.node.vectors import Vector
from rudra_zmq.node.versions import Versions
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, Rule


class LocalExchange:
    """An `Exchange` with no process behind it; rank 0 of 1, always chief, never asked to leave."""

    rank = 0
    incarnation = 1
    chief = True
    lam = 1
    leaving = False

    def __init__(self, job: Job) -> None:
        self.job = job
        self._clock = Clock(1, 0)
        self._seq = 0
        self._sync: Sync | None = None
        self._applier: Applier | None = None

    def attach(self, message: Attach, layout: Layout, weights: Vector, gradient: Vector) -> None:
        """The model's own weights are version 0."""
        self._layout, self._weights, self._gradient = layout, weights, gradient
        self._slots = SlotTable(layout, 1)
        self._slots.open(self.rank, self.incarnation)
        self._versions = Versions(layout, LONE_RING)
        self._versions.begin().copy_from(weights)
        self._versions.publish()

    @property
    def weights(self) -> Vector:
        """The model's own."""
        return self._weights

    @property
    def gradient(self) -> Vector:
        """The model's own."""
        return self._gradient

    def rule(self, rule: Rule | None) -> RuleVerdict:
        """A rule is needed: there is no job file that could have one."""
        if rule is None:
            fix = "learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.03)) before learner.batches()"
            raise UsageError("there is no rule for the updates", fix=fix)
        spec, rates = script_spec(rule, self._layout)
        self._applier = Applier(self._layout, spec, self._versions, self._slots, rates=None, script_rates=rates)
        return RuleVerdict(True, spec.rule)

    def begin(self, samples: int, minibatch: int, accumulate: int, prefetch: int) -> Answer:
        """Version 0 and the only learner are here: it starts at once."""
        mu = (minibatch or self.job.minibatch) * accumulate
        self._sync = Sync(
            SyncParams(protocol="softsync", n=1),
            LearnerParams(count=1, minibatch=mu),
            DataParams(samples, self.job.epochs),
            generation=self._clock.generation,
        )
        self._sync.handle(Join(self.rank, self.incarnation, mu, prefetch), time.monotonic())
        return self._turn(Start())

    def push(self, gradient: Gradient) -> Answer:
        """The update is made before this returns."""
        self._seq += 1
        finite = True
        if gradient.count:
            assert self._sync is not None
            slot = self._slots.slot(self.rank, self.incarnation, self._writing)
            assert isinstance(slot.vector, Vector)
            slot.vector.copy_from(self._gradient)
            slot.count = gradient.count
            finite = slot.vector.finite() if gradient.finite is None else gradient.finite
        push = Push(
            GradientId(self.rank, self.incarnation, self._seq),
            gradient.clock,
            gradient.spans,
            gradient.count,
            finite,
            gradient.rates,
        )
        answer = self._turn(push)
        if answer.done or not finite:
            self._check_weights()
        return answer

    def want(self) -> Answer:
        """Answered at once."""
        return self._turn(Want(self.rank, self.incarnation))

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Nobody is there to hear it."""

    def keep(self) -> None:
        """They are."""

    def leave(self, reason: str, text: str = "") -> None:
        """Nobody is there to hear it."""

    def close(self) -> None:
        """End the threads of the update."""
        if self._applier is not None:
            self._applier.close()

    def _turn(self, event: Push | Want | Start) -> Answer:
        assert self._sync is not None
        answer = None
        before = self._clock
        for action in self._sync.handle(event, time.monotonic()):
            if isinstance(action, Update):
                self._update(action.decision)
            elif isinstance(action, Grant):
                answer = action
            elif isinstance(action, Failed):
                raise RudraError(action.reason)
            elif isinstance(action, (Fold, Refuse)):
                raise RuntimeError(f"a lone learner was answered with {action}")
        if answer is None:
            raise RuntimeError("a lone learner was left without an answer")
        self._clock, self._writing = answer.clock, answer.slot
        return Answer(
            ack=answer.ack,
            verdict=answer.verdict,
            clock=answer.clock,
            leases=answer.leases,
            lam=1,
            chief=True,
            fresh=answer.clock != before,
            done=answer.done,
        )

    def _update(self, decision: Decision) -> None:
        assert self._applier is not None and self._sync is not None
        try:
            self._applier.update(decision, self._sync.protocol, self._sync.global_batch)
        except NotFinite:
            raise _diverged(decision.update) from None
        self._weights.data[:] = self._versions.current.data

    def _check_weights(self) -> None:
        """As the servers do: where weights are not finite, every gradient that follows is refused."""
        if not self._versions.current.finite():
            raise _diverged(self._clock.timestamp)


def _diverged(update: int) -> RudraError:
    fix = "lower the learning rate, or clip the gradients"
    return RudraError(f"update {update} gave weights that are not finite", fix=fix)
