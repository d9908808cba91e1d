"""The evaluator's side of a job: its weights, its results, what it means that it is gone, silent or does not end.

Owns: the conversation with the evaluator, and how long a result is waited for: as long as its process lives, by its
pulse or as far as /proc shows it at work, up to step_timeout or ten of the longest tests. Must not know: which weights
wait (evaluate.py), how a job ends.
"""

from __future__ import annotations

from collections.abc import Callable

from rudra_zmq.core.events import Clock
from rudra_zmq.node.life import Process
from rudra_zmq.node.work import Work, new_key
from rudra_zmq.wire.messages.data import Evaluate, Hello, TestResult

SILENT_S = 30.0
TESTS = 10.0


class Testing:
    """``reached`` is called with each accuracy that became known."""

    def __init__(self, work: Work, reached: Callable[[float], None]) -> None:
        self._work = work
        self._reached = reached
        self._heard = work.clock()
        self._process: Process | None = None
        self._silent = False  # given up for its silence: one word, and it is awaited again

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

    # ------------------------------------------------------------------------------------------ its life

    def met(self, hello: Hello) -> None:
        """An evaluator said hello."""
        here = self._work.is_here(hello.host, hello.pid, hello.space)
        self._process = Process(hello.pid) if here else None
        self.heard()

    def heard(self) -> None:
        """A word of the evaluator's, or of its pulse's."""
        self._heard = self._work.clock()
        if self._process is not None:
            self._process.heard()
        if self._silent:
            self._silent = self._work.evaluator_lost = False
            self._work.event("I", "the evaluator is heard again")

    @property
    def patience(self) -> float:
        """Seconds that a test may take."""
        box = self._work.mailbox
        return max(self._work.job.learners.step_timeout_s, TESTS * (0.0 if box is None else box.longest))

    @property
    def taken(self) -> float:
        """Seconds of the test that is under way, or for which one is due."""
        box = self._work.mailbox
        return 0.0 if box is None else self._work.clock() - box.since

    def look(self) -> None:
        """Each second: is what is under way, or due at the end of training, still worth waiting for?"""
        work, box = self._work, self._work.mailbox
        if box is None or box.due is None or work.evaluator_lost or (box.testing is None and not work.over):
            return
        now = work.clock()
        silent = now - self._heard
        idle = silent if self._process is None else self._process.idle(silent, now)
        if min(idle, self.taken) > SILENT_S:
            self._silent = True
            self._lose(f"the evaluator is silent for {silent:.0f} s")
        elif self.taken > self.patience:
            self._lose(f"its test takes longer than {self.patience:.0f} s")

    def _lose(self, why: str) -> None:
        box = self._work.mailbox
        assert box is not None and box.due is not None
        epoch = box.due if box.testing is None else box.testing
        self._work.evaluator_lost = True
        self._work.event("W", f"no test result of epoch {epoch.epoch + 1}: {why}")

    def attached(self) -> None:
        """An evaluator is here, with the job's model; what another one had is due again."""
        work = self._work
        work.evaluator_lost = False
        work.evaluator_free = True
        if work.mailbox is not None:
            work.mailbox.gone(work.clock())
        self.next()

    def gone(self, for_good: bool) -> None:
        """The evaluator's connection or process ended."""
        work = self._work
        work.evaluator_free = False
        if work.mailbox is not None:
            work.mailbox.gone(work.clock())
        if for_good and not work.evaluator_lost:
            work.evaluator_lost = True
            work.event("W", "the evaluator is gone for good: epochs have no test result from here on")

    # ------------------------------------------------------------------------------------------ its work

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
        if not work.mailbox.result(message.epoch, clock, message.seconds):
            work.sessions.drop("foreign-result")
            return
        work.evaluator_lost = False
        work.evaluator_free = True
        accuracy = work.figures.tested(message.epoch, message.metrics)
        self._settle(message.epoch)
        self.next()
        if accuracy is not None:
            self._reached(accuracy)
