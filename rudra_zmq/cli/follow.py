"""Following a job to its end: its story line by line, and on a terminal a bar that moves.

Owns the loop around GetEvents and what is drawn. Never stops a job: Ctrl-C is the caller's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rudra_zmq.cli.output import note, percent
from rudra_zmq.cli.places import Head
from rudra_zmq.cli.report import ENDED
from rudra_zmq.errors import TimedOut, Unreachable
from rudra_zmq.wire.messages.control import EventRow, JobRow, Progress

HOLD_S = 1.0  # how long the head may hold an answer: also the beat of the bar
PATIENCE_S = 60.0  # a head that restarts is waited for


def event_line(row: EventRow) -> str:
    """A line of the story, in local time."""
    mark = {"W": "warning: ", "E": "error: "}.get(row.level, "")
    return f"{time.strftime('%H:%M:%S', time.localtime(row.time))} {mark}{row.text}"


def progress_text(p: Progress) -> str:
    """The figures beside the bar."""
    loss = "-" if p.loss is None else f"{p.loss:.3f}"
    return (
        f"epoch {min(p.epoch + 1, p.epochs)}/{p.epochs}  {p.samples_per_s:,.0f} samples/s  loss {loss}  "
        f"test {percent(p.accuracy)}  sigma {p.staleness_mean:.2f}"
    )


class Follower:
    """Draws a job until it has ended; usable again after a KeyboardInterrupt."""

    def __init__(
        self,
        head: Head,
        job: str,
        *,
        quiet: bool = False,
        check: Callable[[], None] = lambda: None,
        since: int = 0,
    ) -> None:
        """``check`` raises where waiting has become pointless; events up to ``since`` are not told."""
        self.head, self.job, self.quiet, self.check = head, job, quiet, check
        self.seen = since
        self.row: JobRow | None = None
        self._bar: Any = None
        self._task: Any = None

    def wait(self, deadline: float | None = None) -> JobRow:
        """Until the job has ended; TimedOut at ``deadline`` (monotonic seconds), Unreachable if the head stays away."""
        lost_since: float | None = None
        state = ""
        try:
            while True:
                try:
                    reply = self.head.events(self.job, self.seen, HOLD_S, state)
                    lost_since = None
                except (Unreachable, TimedOut) as error:
                    self.check()
                    lost_since = lost_since or time.monotonic()
                    if time.monotonic() - lost_since > PATIENCE_S:
                        raise
                    self._tell(f"waiting for psd: {error.message}")
                    time.sleep(HOLD_S)
                    continue
                for event in reply.rows:
                    self.seen = event.seq
                    self._tell(event_line(event))
                self.row, state = reply.job, reply.job.state
                self._draw(reply.job)
                if state in ENDED:
                    return reply.job
                if deadline is not None and time.monotonic() > deadline:
                    raise TimedOut(f"job {self.job} is {state}", fix="raise --timeout, or `rudra follow` it")
        finally:
            self._close()

    def _tell(self, line: str) -> None:
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            note(line)

    def _draw(self, row: JobRow) -> None:
        p = row.progress
        if self.quiet or p is None or not p.samples_per_epoch or not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(30),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=p.samples_per_epoch * p.epochs)
            self._bar.start()
        self._bar.update(self._task, completed=p.samples, description=progress_text(p))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
