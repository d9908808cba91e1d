"""What a job has done, in numbers: per epoch, per learner and over all.

Owns: the rows of the epochs, samples as they are applied (apart from the ledger, so that one checks the other), loss,
overlap and rates. Must not know: how the numbers travel (report.py) or where they are kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rudra_zmq.core.events import Decision
from rudra_zmq.core.intervals import Intervals
from rudra_zmq.core.staleness import Histogram
from rudra_zmq.wire.messages.control import EpochRow

WINDOW_S = 10.0


@dataclass
class _Open:
    """An epoch that is not done: which positions were applied, and what its gradients said."""

    seen: Intervals = field(default_factory=Intervals)
    samples: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.loss_weight if self.loss_weight else None


@dataclass
class Share:
    """Seconds that learners computed, and that they waited for an exchange."""

    compute: float = 0.0
    wait: float = 0.0

    def add(self, compute: float, wait: float) -> None:
        """One exchange; what is no number of seconds is left out."""
        if math.isfinite(compute) and math.isfinite(wait) and compute >= 0 and wait >= 0:
            self.compute += compute
            self.wait += wait

    @property
    def overlap(self) -> float:
        """compute / (compute + communication that compute had to wait for); 0 where nothing was measured."""
        total = self.compute + self.wait
        return self.compute / total if total else 0.0


class Figures:
    """``samples`` is N. Epochs begin and end as their first and last gradients are applied."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.applied = 0
        self.updates = 0
        self.lr = 0.0
        self.loss: float | None = None
        self.accuracy: float | None = None
        self.share = Share()
        self.rows: list[EpochRow] = []
        self.ended = (-1, -1)  # the last epoch that is done, and the update that made its weights
        self.seconds = 0.0  # of running, kept by whoever knows whether the job runs
        self._open: dict[int, _Open] = {}
        self._epoch_share = Share()
        self._epoch_sigma = Histogram()
        self._epoch_updates = 0
        self._epoch_began = 0.0
        self._recent: deque[tuple[float, int, int]] = deque()

    def _page(self, epoch: int) -> _Open:
        page = self._open.get(epoch)
        if page is None:
            page = self._open[epoch] = _Open()
        return page

    def pushed(self, epoch: int, count: int, loss: float | None, compute: float, wait: float) -> None:
        """A gradient was accepted. ``loss`` is the mean over its ``count`` samples."""
        self.share.add(compute, wait)
        self._epoch_share.add(compute, wait)
        if loss is not None and math.isfinite(loss) and count:
            page = self._page(epoch)
            page.loss_sum += loss * count
            page.loss_weight += count
            # about the last hundred mini-batches: what people watch moves, and does not jump
            self.loss = loss if self.loss is None else 0.98 * self.loss + 0.02 * loss

    def updated(self, decision: Decision, lr: float) -> None:
        """An update was applied."""
        self.lr = lr
        self.updates = decision.update
        self.applied += decision.samples
        self._epoch_updates += 1
        for entry in decision.entries:
            self._epoch_sigma.add(entry.sigma)
            for epoch, start, stop in entry.spans:
                page = self._page(epoch)
                page.samples += stop - start
                _, new = page.seen.split(start, stop)
                for piece in new:
                    page.seen.add(*piece)

    def epoch_done(self, epoch: int, lam: int, global_batch: int) -> EpochRow:
        """Close an epoch: its row, still without a test result."""
        page = self._page(epoch)
        del self._open[epoch]
        row = EpochRow(
            epoch=epoch,
            samples=page.samples,
            distinct=page.seen.count,
            updates=self._epoch_updates,
            seconds=self.seconds - self._epoch_began,
            train_loss=page.loss,
            staleness_mean=self._epoch_sigma.mean,
            staleness_p95=float(self._epoch_sigma.p95),
            lr=self.lr,
            lam=lam,
            global_batch=global_batch,
            overlap=self._epoch_share.overlap,
        )
        self.rows.append(row)
        self.ended = (epoch, self.updates)
        self._epoch_share = Share()
        self._epoch_sigma = Histogram()
        self._epoch_updates = 0
        self._epoch_began = self.seconds
        if page.metrics:
            self.tested(epoch, page.metrics)
        return self.rows[-1]

    def tested(self, epoch: int, metrics: Mapping[str, float]) -> float | None:
        """A test result, of the evaluator or of the chief; the accuracy, if it has one (0..1).

        ``test_error`` alone says the accuracy too. Of an epoch that is not done it is kept until it is.
        """
        accuracy = share_of(metrics.get("accuracy"))
        error = share_of(metrics.get("test_error"))
        if accuracy is None and error is not None:
            accuracy = 1.0 - error
        if accuracy is None:
            return None
        error = 1.0 - accuracy if error is None else error
        self.accuracy = accuracy
        for at, row in enumerate(self.rows):
            if row.epoch == epoch:
                self.rows[at] = msgspec.structs.replace(row, accuracy=accuracy, test_error=error)
                break
        else:
            if epoch in self._open:
                self._open[epoch].metrics = dict(metrics)
        return accuracy

    @property
    def unfinished(self) -> list[int]:
        """Epochs that were begun and are not done."""
        return sorted(epoch for epoch, page in self._open.items() if page.samples)

    def untested(self, epoch: int) -> bool:
        """Whether an epoch is done and has no test result."""
        return any(row.epoch == epoch and row.accuracy is None for row in self.rows)

    # ------------------------------------------------------------------------------------------ rates

    def tick(self, now: float) -> None:
        """Once a second or so."""
        self._recent.append((now, self.applied, self.updates))
        while len(self._recent) > 2 and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()

    def rates(self) -> tuple[float, float]:
        """(samples, updates) per second of the clock over the last ten seconds."""
        if len(self._recent) < 2:
            return 0.0, 0.0
        (t0, s0, u0), (t1, s1, u1) = self._recent[0], self._recent[-1]
        return ((s1 - s0) / (t1 - t0), (u1 - u0) / (t1 - t0)) if t1 > t0 else (0.0, 0.0)

    # --------------------------------------------------------------------------------------- snapshot

    def state(self) -> dict[str, Any]:
        """JSON-able; positions of open epochs as runs [start, stop)."""
        return {
            "applied": self.applied,
            "updates": self.updates,
            "lr": self.lr,
            "loss": self.loss,
            "accuracy": self.accuracy,
            "seconds": self.seconds,
            "share": [self.share.compute, self.share.wait],
            "ended": list(self.ended),
            "rows": [msgspec.to_builtins(row) for row in self.rows],
            "epoch": {
                "began": self._epoch_began,
                "updates": self._epoch_updates,
                "share": [self._epoch_share.compute, self._epoch_share.wait],
                "sigma": self._epoch_sigma.to_json(),
            },
            "open": {
                str(epoch): {
                    "runs": [list(run) for run in page.seen],
                    "samples": page.samples,
                    "loss": [page.loss_sum, page.loss_weight],
                    "metrics": page.metrics,
                }
                for epoch, page in self._open.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state``. KeyError, TypeError, ValueError or msgspec's error where it is none."""
        self.applied, self.updates = int(state["applied"]), int(state["updates"])
        self.lr, self.loss, self.accuracy = float(state["lr"]), state["loss"], state["accuracy"]
        self.seconds = float(state["seconds"])
        self.share = Share(*state["share"])
        self.rows = [msgspec.convert(row, EpochRow) for row in state["rows"]]
        self.ended = (int(state["ended"][0]), int(state["ended"][1]))
        epoch = state["epoch"]
        self._epoch_began, self._epoch_updates = float(epoch["began"]), int(epoch["updates"])
        self._epoch_share = Share(*epoch["share"])
        self._epoch_sigma = Histogram(epoch["sigma"])
        self._open = {}
        for key, saved in state["open"].items():
            page = self._page(int(key))
            page.seen = Intervals((int(start), int(stop)) for start, stop in saved["runs"])
            page.samples = int(saved["samples"])
            page.loss_sum, page.loss_weight = saved["loss"]
            page.metrics = dict(saved["metrics"])


def share_of(value: float | None) -> float | None:
    """A share as such, None for what is none (percent, say): it may not end a job by ``stop.accuracy``."""
    return value if value is not None and 0.0 <= value <= 1.0 else None
