"""The figures that psd is told every second.

Owns: how the state of a job becomes a Progress, and what limits its speed. Must not know: when it is sent.
"""

from __future__ import annotations

import os
from collections import Counter

from rudra_zmq.core.events import Members
from rudra_zmq.core.sync import Sync
from rudra_zmq.node.ending import Ending
from rudra_zmq.node.figures import Figures
from rudra_zmq.node.opening import Opening
from rudra_zmq.node.saving import Saving
from rudra_zmq.node.sessions import Session
from rudra_zmq.node.waits import waits
from rudra_zmq.node.watch import slow_start
from rudra_zmq.node.work import Work
from rudra_zmq.wire.codec import clip
from rudra_zmq.wire.messages.control import JobState, LearnerRow, Progress

_PAGE = os.sysconf("SC_PAGE_SIZE")
WAITING_AFTER_S = 5.0
_MOST_BINS = 4096
_MOST_ROWS = 1000  # a report has to fit into one message


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


class Report:
    """``busy`` is the share of the last second that the loop worked (0..1), kept by whoever runs the loop."""

    def __init__(self, work: Work, opening: Opening, saving: Saving, ending: Ending) -> None:
        self._work = work
        self._opening = opening
        self._saving = saving
        self._ending = ending
        self._born = work.clock()
        self.busy = 0.0

    @property
    def state(self) -> tuple[JobState, str]:
        """The job's state as the node sees it, and why."""
        work, ending = self._work, self._ending
        if ending.state is not None and ending.reported:
            return ending.state, ending.reason
        if not work.started and not ending.over:
            late = work.clock() - self._born > WAITING_AFTER_S
            return ("WAITING" if late else "STARTING"), self._opening.reason()
        waiting = None if work.sync is None else work.sync.waiting
        if waiting is not None:
            ranks = ", ".join(str(rank) for rank in waiting.missing[:8])
            text = f"{waiting.present}/{waiting.needed} learners (rank {ranks} missing"
            left = waiting.deadline - work.clock()
            return "WAITING", text + (f", {max(0.0, left):.0f} s left)" if left < 1e9 else ")")
        return "RUNNING", ending.waits or self._slow_start()

    def _slow_start(self) -> str:
        sync = self._work.sync
        slow = [] if sync is None else sync.slow_starters(self._work.clock())
        return slow_start(*slow[0]) if slow else ""

    def progress(self) -> Progress:
        """All figures of now."""
        work = self._work
        work.account()
        sync, figures, learners = work.sync, work.figures, work.job.learners
        state, reason = self.state
        applier = None if work.model is None else work.model.applier
        fields = self._of_core(sync) if sync is not None else {}
        fields |= self._of_figures(figures) if figures is not None else {}
        return Progress(
            state=state,
            reason=clip(reason),
            rule="" if applier is None else applier.spec.rule,
            declared=learners.count,
            generation=work.spec.generation,
            epochs=work.job.job.epochs,
            drops=self.drops(),
            learners=self.learners(),
            snapshot_age=None if self._saving.saved is None else work.clock() - self._saving.at,
            memory=resident(),
            budget=0 if work.model is None else work.model.budget.nbytes,
            parameters=0 if work.model is None else work.model.layout.P,
            weights=self._ending.weights,
            limited_by=self.limited_by(),
            versions=work.sessions.versions(),
            waits=waits(work, self._opening, self._ending),
            **fields,  # type: ignore[arg-type]
        )

    def _of_core(self, sync: Sync) -> dict[str, object]:
        force = self._ending.force or Members(sync.lam, sync.n, sync.c, sync.global_batch, sync.protocol)
        return {
            "protocol": force.protocol,
            "n": force.n,
            "lam": force.lam,
            "c": force.c,
            "global_batch": force.global_batch,
            "mu": round(force.global_batch / force.lam),
            "epoch": sync.epoch,
            "updates": sync.clock.timestamp,
            "samples": sync.samples_applied,
            "staleness_mean": sync.staleness.mean,
            "staleness_p95": float(sync.staleness.p95),
            "staleness_max": sync.staleness.max,
            "histogram": dict(list(sync.staleness.to_json().items())[:_MOST_BINS]),
            "accepted": sync.counters.accepted,
            "applied": sync.counters.applied,
            "pending": sync.pending,
            "skipped": sync.counters.skipped,
        }

    def _of_figures(self, figures: Figures) -> dict[str, object]:
        samples_per_s, updates_per_s = self._rates(figures)
        return {
            "samples_per_epoch": figures.samples,
            "seconds": figures.seconds,
            "samples_per_s": samples_per_s,
            "updates_per_s": updates_per_s,
            "lr": figures.lr,
            "loss": figures.loss,
            "accuracy": figures.accuracy,
            "overlap": figures.share.overlap,
            "rows": figures.rows[-_MOST_ROWS:],
        }

    def _rates(self, figures: Figures) -> tuple[float, float]:
        """Of the last seconds while the job runs, then of all of it."""
        if not self._ending.over or figures.seconds <= 0:
            return figures.rates()
        return figures.applied / figures.seconds, figures.updates / figures.seconds

    def drops(self) -> dict[str, int]:
        """What was dropped, by reason: gradients by verdict, and messages that were none."""
        drops = Counter(self._work.sessions.drops)
        if self._work.sync is not None:
            verdicts = dict(self._work.sync.counters.dropped)
            verdicts.pop("refused", None)  # counted by their own reasons already
            drops.update(verdicts)
        return dict(sorted(drops.items()))

    def learners(self) -> list[LearnerRow]:
        """Every rank that was declared or seen."""
        work = self._work
        seen = {} if work.sync is None else {row[0]: row for row in work.sync.members()}
        ranks = set(range(work.job.learners.count)) | set(seen) | {s.rank for s in work.sessions.all}
        rows = []
        for rank in sorted(ranks):
            session = work.sessions.at(rank)
            _, incarnation, state, gradients = seen.get(rank, (rank, 0, "absent", 0))
            if session is None:
                rows.append(LearnerRow(rank=rank, incarnation=incarnation, state=state, gradients=gradients))
            else:
                rows.append(self._row(session, gradients))
        return rows

    def _row(self, session: Session, gradients: int) -> LearnerRow:
        return LearnerRow(
            rank=session.rank,
            incarnation=session.incarnation,
            state="torpid" if session.torpid else "present",
            host=session.host,
            pid=session.pid,
            gradients=gradients,
            samples_per_s=session.rate,
            silent=max(0.0, self._work.clock() - session.heard),
        )

    def limited_by(self) -> str:
        """The one thing that a faster job would need."""
        figures, sync = self._work.figures, self._work.sync
        if figures is None or sync is None or not self._work.started or not figures.share.compute:
            return ""
        waits = 1.0 - figures.share.overlap
        if waits < 0.1:
            return f"compute (learners wait {waits:.0%} of their time for an exchange)"
        if self.busy > 0.7:
            return f"server (its loop is busy {self.busy:.0%} of the time)"
        if sync.protocol == "hardsync" and sync.lam > 1:
            slowest = max(((s.compute, s.rank) for s in self._work.sessions.all), default=(0.0, 0))[1]
            return f"the slowest learner of each round (rank {slowest}; others wait {waits:.0%} of their time)"
        return f"exchange (learners wait {waits:.0%} of their time for it)"
