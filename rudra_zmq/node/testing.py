"""The evaluator's side of a job: its weights, its results, what it means that it is gone.

Owns: the conversation with the evaluator. Must not know: which weights wait (evaluate.py), how a job ends.
"""

from __future__ import annotations

from collections.abc import Callable

from rudra_zmq.core.events import Clock
from rudra_zmq.node.work import Work, new_key
from rudra_zmq.wire.messages.data import Evaluate, TestResult


class Testing:
    """``reached`` is called with each accuracy that became known."""

    def __init__(self, work: Work, reached: Callable[[float], None]) -> None:
        self._work = work
        self._reached = reached

    def epoch_done(self, epoch: int, clock: Clock) -> None:
        """The current version is an epoch's weights."""
        work = self._work
        if work.mailbox is None or work.model is None or work.evaluator_lost:
            self._settle(epoch - 1)
            return
        work.mailbox.put(epoch, clock, work.model.versions.current, work.clock())
        self.next()

    def restored(self) -> None:
        """The version that the job goes on from may be an epoch's weights whose result never came."""
        figures, sync = self._work.figures, self._work.sync
        if figures is None or sync is None:
            return
        epoch, update = figures.ended
        if update == sync.clock.timestamp and figures.untested(epoch):
            self.epoch_done(epoch, sync.clock)

    def _settle(self, epoch: int) -> None:
        if self._work.figures is not None:
            self._work.metrics.settle(epoch, self._work.figures.rows)

    def attached(self) -> None:
        """An evaluator is here, with the job's model; what another one had is due again."""
        work = self._work
        work.evaluator_lost = False
        work.evaluator_free = True
        if work.mailbox is not None:
            work.mailbox.gone()
        self.next()

    def gone(self, for_good: bool) -> None:
        """The evaluator's connection or process ended."""
        work = self._work
        work.evaluator_free = False
        if work.mailbox is not None:
            work.mailbox.gone()
        if for_good and not work.evaluator_lost:
            work.evaluator_lost = True
            work.event("W", "the evaluator is gone for good: epochs have no test result from here on")

    def next(self) -> None:
        """Send what waits, if the evaluator is free."""
        work = self._work
        peer = work.sessions.evaluator
        if not work.evaluator_free or peer is None or work.mailbox is None:
            return
        parcel = work.mailbox.take(work.clock())
        if parcel is None:
            return
        work.evaluator_free = False
        key = new_key()
        courier = work.post.to(peer)
        courier.message(
            Evaluate(
                epoch=parcel.epoch,
                generation=parcel.clock.generation,
                timestamp=parcel.clock.timestamp,
                key=key,
                nbytes=len(parcel.vector.data),
            )
        )
        # The mailbox keeps the buffer until the result is in, or another evaluator has come.
        courier.vector(key, parcel.vector.data, lambda: None)

    def result(self, message: TestResult) -> None:
        """A verdict of the evaluator; one of anything else than what it has is dropped."""
        work = self._work
        clock = Clock(message.generation, message.timestamp)
        if work.mailbox is None or work.figures is None:
            return
        if not work.mailbox.result(message.epoch, clock, message.seconds, work.clock()):
            work.sessions.drop("foreign-result")
            return
        work.evaluator_free = True
        accuracy = work.figures.tested(message.epoch, message.metrics)
        self._settle(message.epoch)
        self.next()
        if accuracy is not None:
            self._reached(accuracy)
