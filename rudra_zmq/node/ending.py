"""The end of a job: what is still outstanding, the last snapshot, the weights as a file, the last test, the report.

Owns: how a job ends and in which order; every wait here has a limit. Must not know: how any of these things is done.

    drained (or complete) -> snapshot -> weights.safetensors -> last test result -> learners have left -> report
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from rudra_zmq.core.events import Drain, End, Event, Failed, Finished, Members
from rudra_zmq.node import export
from rudra_zmq.node.evaluate import Parcel
from rudra_zmq.node.saving import Saving
from rudra_zmq.node.snapshot import Writer
from rudra_zmq.node.testing import Testing
from rudra_zmq.node.work import Diverged, Work
from rudra_zmq.wire.codec import clip
from rudra_zmq.wire.messages.control import JobState, NodeDone, NodeStop, Progress, WaitRow
from rudra_zmq.wire.messages.data import Finish

DRAIN_S = 30.0
STOP_DRAIN_S = 20.0  # the head kills a node that was asked to stop after 30 s: its snapshot has to fit in as well
STOP_TEST_S = 25.0  # and the test that is under way
NOW_S = 1.0  # a node that is to end at once is killed after two seconds
LEAVE_S = 5.0
WRITE_S = 60.0


class Ending:
    """``progress`` makes the figures, ``testing`` is the evaluator's side. ``state`` is None until then."""

    def __init__(
        self,
        work: Work,
        saving: Saving,
        turn: Callable[[Event], None],
        progress: Callable[[], Progress],
        testing: Testing,
    ) -> None:
        self._work = work
        self._saving = saving
        self._turn = turn
        self._progress = progress
        self._testing = testing
        self._asked: NodeStop | None = None
        self._asked_at = 0.0
        self._condition = ""
        self._patience = DRAIN_S
        self._limit = 0.0
        self._at_once: float | None = None  # until when a snapshot that is under way is waited for, and nothing else
        self._since = 0.0
        self._saved = False
        self._exporter = Writer(lambda result: work.off_loop(lambda: self._exported(*result)))
        self._export_begun = False
        self._export_over = False
        self._export_at = 0.0
        self._told = False  # the evaluator, that nothing more comes
        self._waits = False  # for a test: said
        self.force: Members | None = None  # what was in force at the end of training
        self.state: JobState | None = None
        self.reason = ""
        self.weights = ""
        self.reported = False

    @property
    def over(self) -> bool:
        """Whether training is over, for whatever reason."""
        return self.state is not None

    @property
    def draining(self) -> bool:
        """Whether an end was asked for."""
        return self._asked is not None or bool(self._condition)

    # -------------------------------------------------------------------------------------------- causes

    def stop(self, stop: NodeStop) -> None:
        """Somebody asks for an end. A second one, or ``now``, ends at once."""
        if stop.now or self._asked is not None:
            self._end_now(stop)
            return
        self._asked, self._asked_at = stop, self._work.clock()
        self._patience = STOP_DRAIN_S
        self._limit = self._asked_at + self._patience
        if not self.over:
            self._work.event("I", f"stops: {stop.reason or 'asked to'}; waits for the steps that are under way")
            self._drain(stop.reason)

    def condition(self, reason: str) -> None:
        """A stop condition of the job file is met."""
        if not self.over and not self.draining:
            self._condition = reason
            self._limit = self._work.clock() + DRAIN_S
            self._work.event("I", f"ends: {reason}")
            self._drain(reason)

    def _drain(self, reason: str) -> None:
        self._work.stopping = True
        if self._work.sync is None:
            self.finished(Finished(reason, complete=False))
            self.advance()
        else:
            self._turn(Drain(reason))

    def finished(self, action: Finished) -> None:
        """The core has nothing left to do."""
        model, sync = self._work.model, self._work.sync
        if model is not None and sync is not None and model.exists and not model.versions.current.finite():
            self._saved = True  # the snapshots before are better than one of these weights
            self._close("FAILED", str(Diverged(sync.clock.timestamp)))
        elif self._asked is not None and not action.complete:
            self._close(self._asked.state, self._asked.reason)
        else:
            self._close("DONE", "" if action.complete else action.reason)

    def failed(self, action: Failed) -> None:
        """The job cannot go on."""
        self._close("FAILED", action.reason)

    def restored(self, reason: str) -> None:
        """The snapshot that the node goes on from was the last: nothing is left to train."""
        self._saved = True
        self._last_epoch()
        self._close("DONE", "" if reason == "complete" else reason)

    def _close(self, state: JobState, reason: str) -> None:
        if self.over:
            return
        self._work.account()
        self.state, self.reason = state, reason
        self._since = self._work.clock()
        self._work.over = self._work.stopping = True
        sync = self._work.sync
        if sync is not None:  # who leaves from here on is no change of the job's
            self.force = Members(sync.lam, sync.n, sync.c, sync.global_batch, sync.protocol)
            if not sync.finished:  # what comes late may not change the weights while they are written
                self._turn(End())

    def _end_now(self, stop: NodeStop) -> None:
        """No drain, no snapshot: one that is under way is worth its second, and nothing else is waited for."""
        if self._at_once is None:
            self._at_once = self._work.clock() + NOW_S
        self._close(stop.state, stop.reason)  # what is over already keeps its state

    # -------------------------------------------------------------------------------------------- steps

    def advance(self) -> None:
        """Go as far as can be gone now; to be called after each turn and each second."""
        if not self.over:
            if not self.draining or self._work.clock() < self._limit:
                return
            self._work.event("W", f"a step takes longer than {self._patience:.0f} s: its samples are given back")
            self.finished(Finished(self._condition, complete=False))
        if self._at_once is not None and not self.reported:
            if not self._saving.busy or self._work.clock() >= self._at_once:
                self._report()
            return
        if self.reported or not (self._snapshot_done() and self._export_done()):
            return
        if self._test_done() and self._learners_left():
            self._report()

    def _snapshot_done(self) -> bool:
        if not self._saved:
            if self._saving.busy:
                return self._work.clock() >= self._since + WRITE_S
            self._saved = True
            with contextlib.suppress(Diverged):  # the job ends all the same, and older snapshots are better
                self._saving.save(finished=(self.reason or "complete") if self.state == "DONE" else "")
            if self.state == "DONE":
                self._last_epoch()
        return not self._saving.busy or self._work.clock() >= self._since + WRITE_S

    def _last_epoch(self) -> None:
        """An epoch that was cut short has a row too, and the weights of the end are tested."""
        work = self._work
        if work.figures is None or work.sync is None or work.model is None:
            return
        for epoch in work.figures.unfinished:
            work.figures.epoch_done(epoch, work.sync.lam, work.sync.global_batch)
            if work.mailbox is not None and not work.evaluator_lost:
                work.mailbox.put(epoch, work.sync.clock, work.model.versions.current, work.clock())
                self._testing.next()

    def _export_done(self) -> bool:
        work = self._work
        model, sync = work.model, work.sync
        if not self._export_begun:
            self._export_begun = True
            if model is None or sync is None or not model.exists:
                self._export_over = True
                return True
            path = work.folder / "weights.safetensors"
            metadata = {"job": work.spec.job, "update": str(sync.clock.timestamp), "epoch": str(sync.epoch)}
            vector = model.versions.current
            work.decisions.flush()

            def write() -> tuple[str, str]:
                work.decisions.sync()
                try:
                    export.write(path, model.attach, model.layout, vector, metadata)
                except OSError as error:
                    return "", f"cannot write {path}: {error.strerror}. Fix: make room, then resume the job"
                except Exception as error:  # the loop must hear of it
                    return "", f"cannot write {path}: {error!r}"
                return str(path), ""

            self._export_at = work.clock()
            self._exporter.start(write)
        limit = max(WRITE_S, work.job.learners.step_timeout_s)
        if not self._export_over and work.clock() >= self._export_at + limit:
            self._export_over = True
            fix = "see to the disk, then resume the job"
            self._unsaved(f"the weights were not written within {limit:.0f} s: the disk does not answer. Fix: {fix}")
        return self._export_over  # the thread is idle a moment before its result is here

    def _exported(self, path: str, error: str) -> None:
        if self._export_over:
            return
        self.weights = path
        self._export_over = True
        if error:
            self._unsaved(error)
        self.advance()

    def _unsaved(self, error: str) -> None:
        """Training is over and its result is nowhere: the job is not DONE, for then it could not be resumed."""
        self._work.event("E", error)
        if self.state == "DONE":
            self.state, self.reason = "FAILED", error

    def _test_done(self) -> bool:
        """Whether the last epoch's result is in, or will never be; at a stop, that of the test under way."""
        work = self._work
        box = work.mailbox
        if box is None or self.state == "FAILED":
            return True
        awaited = box.due if self.state == "DONE" else box.testing
        if awaited is not None and not work.evaluator_lost:
            if self._asked is None or work.clock() < self._asked_at + STOP_TEST_S:
                self._say_test(awaited)
                return False
            work.event("W", f"no test result of epoch {awaited.epoch + 1}: the job stops, its test is discarded")
            work.evaluator_lost = True
        if self.state == "DONE" and work.sessions.evaluator is not None and not self._told:
            self._told = True
            work.post.to(work.sessions.evaluator).message(Finish())
        return True

    def _say_test(self, parcel: Parcel) -> None:
        if not self._waits and self._work.clock() >= self._since + LEAVE_S:
            self._waits = True
            self._work.event("I", f"waits for the test of epoch {parcel.epoch + 1}")

    @property
    def waits(self) -> str:
        """What the end waits for, for people; "" where it is nothing that takes long."""
        box = self._work.mailbox
        if not self._waits or box is None or box.due is None or self.reported or self._work.evaluator_lost:
            return ""
        epoch = (box.testing or box.due).epoch + 1
        return f"epoch {epoch} is tested, {self._testing.taken:.0f} s of at most {self._testing.patience:.0f} s"

    def waiting(self) -> list[WaitRow]:
        """The same, and the rest of the end, a row each."""
        work, now = self._work, self._work.clock()
        box, rows = work.mailbox, []
        if not self.reported and not self._export_over:
            what, most = "writes the last snapshot and the weights", max(WRITE_S, work.job.learners.step_timeout_s)
            since = now - self._since
            rows.append(WaitRow(who="node", what=what, since=since, left=max(0.0, most - since), then="the job fails"))
        if box is not None and box.due is not None and not self.reported and not work.evaluator_lost:
            what = f"tests the weights of epoch {(box.testing or box.due).epoch + 1}"
            since, left = self._testing.taken, max(0.0, self._testing.patience - self._testing.taken)
            row = WaitRow(who="the evaluator", what=what, since=since, left=left, then="the job ends without this test")
            rows.append(row)
        if not self._learners_left():
            left = max(0.0, self._since + LEAVE_S - now)
            rows.append(WaitRow(who="node", what="for the good-byes of the learners", left=left, then="it ends"))
        return rows

    def _learners_left(self) -> bool:
        """Whether every learner has said good-bye, or had the time to."""
        return not self._work.sessions.all or self._work.clock() >= self._since + LEAVE_S

    def _report(self) -> None:
        work = self._work
        self.reported = True
        if work.figures is not None:
            work.metrics.settle(max((row.epoch for row in work.figures.rows), default=-1), work.figures.rows)
        work.decisions.flush()
        assert self.state is not None
        done = NodeDone(job=work.spec.job, state=self.state, reason=clip(self.reason), progress=self._progress())
        work.head.done(done)
