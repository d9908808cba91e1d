"""metrics.csv: one line per epoch, written once its test result is in or is known never to come.

Owns: the columns and their form, and which epochs are settled. Must not know: where the figures come from. Epochs are
numbered from 0, as in decisions.jsonl; ``time`` is seconds of running since the job began, ``updates`` and
``samples`` are the epoch's own. The loop writes the file, once an epoch: 1 ms at a hundred epochs, 5 ms at a thousand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rudra_zmq.wire.messages.control import EpochRow

COLUMNS = "epoch,time,train_loss,test_error,staleness_mean,staleness_p95,updates,samples,lr,lambda,global_batch,overlap"


def line(row: EpochRow, time: float) -> str:
    """One row; what is not known is an empty field."""
    fields = [
        str(row.epoch),
        f"{time:.3f}",
        "" if row.train_loss is None else f"{row.train_loss:.6g}",
        "" if row.test_error is None else f"{row.test_error:.6g}",
        f"{row.staleness_mean:.6g}",
        f"{row.staleness_p95:.6g}",
        str(row.updates),
        str(row.samples),
        f"{row.lr:.6g}",
        str(row.lam),
        str(row.global_batch),
        f"{row.overlap:.4f}",
    ]
    return ",".join(fields)


class MetricsCsv:
    """Epochs up to ``settled`` are in the file. Nothing raises: a disk that is full is told once through ``warn``."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._said = False
        self.settled = -1

    def results(self) -> dict[int, float]:
        """Test errors by epoch in the file as it is: results may have come after the snapshot that is gone on from."""
        found: dict[int, float] = {}
        try:
            for text in self._path.read_text(encoding="ascii").splitlines()[1:]:
                fields = text.split(",")
                if fields[3]:
                    found[int(fields[0])] = float(fields[3])
        except (OSError, ValueError, IndexError):
            return {}
        return found

    def settle(self, epoch: int, rows: Sequence[EpochRow]) -> None:
        """No result of ``epoch`` or one before it is awaited any more: their lines are due."""
        if epoch <= self.settled:
            return
        self.settled = epoch
        self.rewrite(rows)

    def rewrite(self, rows: Sequence[EpochRow]) -> None:
        """The whole file, replaced at once: nobody reads half a line, and what a restore made void is gone."""
        lines = [COLUMNS]
        time = 0.0
        for row in rows:
            time += row.seconds
            if row.epoch <= self.settled:
                lines.append(line(row, time))
        temp = self._path.with_name(f".{self._path.name}.new")
        try:
            temp.write_text("\n".join(lines) + "\n", encoding="ascii")
            os.replace(temp, self._path)
            self._said = False
        except OSError as error:
            if not self._said:
                self._said = True
                self._warn(f"cannot write {self._path}: {error.strerror}. Fix: make room (training goes on)")
