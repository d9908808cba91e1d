"""Following a job to its end: its story line by line, its epochs, and on a terminal a bar that moves.

Owns the loop around GetEvents and what is drawn. Never stops a job: Ctrl-C is the caller's.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable

from rudra_zmq.cli.output import note, percent
from rudra_zmq.cli.places import ENDED, Head, Place, ended_run
from rudra_zmq.cli.report import time_left
from rudra_zmq.errors import TimedOut, Unreachable
from rudra_zmq.wire.messages.control import EpochRow, EventRow, Events, JobRow, Progress

HOLD_S = 1.0  # how long the head may hold an answer: also the beat of the bar
PATIENCE_S = 60.0  # a head that restarts is waited for
DAY_S = 86400.0
WIDEST_BAR = 30
_ENDS = tuple(ENDED)  # a line of the story that begins so is the head's, of the job's end
_EPOCH_DONE = re.compile(r"epoch (\d+): ")  # the node's line, told with more figures than it has at that moment


def clock(when: float) -> str:
    """A time of the story, local; with its date where that is not clear."""
    form = "%H:%M:%S" if abs(time.time() - when) < DAY_S / 2 else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, time.localtime(when))


def event_line(row: EventRow) -> str:
    """A line of the story."""
    mark = {"W": "warning: ", "E": "error: "}.get(row.level, "")
    return f"{clock(row.time)} {mark}{row.text}"


def story(place: Place, job: str) -> list[EventRow]:
    """All of it: one answer holds a part."""
    rows: list[EventRow] = []
    while more := place.events(job, rows[-1].seq if rows else 0, 0.0, "").rows:
        rows += more
    return rows


def progress_text(p: Progress) -> str:
    """The figures beside the bar."""
    loss = "-" if p.loss is None else f"{p.loss:.3f}"
    left = time_left(p)
    return (
        f"epoch {min(p.epoch + 1, p.epochs)}/{p.epochs}  {p.samples_per_s:,.0f} samples/s  loss {loss}  "
        f"test {percent(p.accuracy)}" + (f"  {left} left" if left else "")
    )


class Epochs:
    """The lines about a job's epochs: one when it is done, one when it is tested later than that."""

    def __init__(self) -> None:
        self._known: dict[int, float] | None = None  # accuracies that the reader knows
        self._due: dict[int, float] = {}  # done at this time, figures not here yet

    def done(self, event: EventRow) -> bool:
        """Whether the event is the end of an epoch, whose line ``lines`` will give with its figures."""
        match = _EPOCH_DONE.match(event.text)
        if match:
            self._due[int(match[1]) - 1] = event.time
        return match is not None

    def lines(self, p: Progress, ended: bool) -> list[str]:
        """What is new in these figures."""
        rows = {row.epoch: row for row in p.rows}
        known = {row.epoch: row.accuracy for row in p.rows if row.accuracy is not None}
        if self._known is None:
            self._known = known  # what was tested before the reader came
        told = []
        for epoch in sorted(self._due.keys() & rows.keys()):
            last = not ended and epoch == p.rows[-1].epoch
            told.append(f"{clock(self._due.pop(epoch))} {epoch_text(rows[epoch], p, time_left(p) if last else '')}")
            self._known.update({epoch: known[epoch]} if epoch in known else {})
        for epoch, accuracy in known.items():
            if self._known.get(epoch) != accuracy and epoch not in self._due:
                self._known[epoch] = accuracy
                told.append(f"{clock(time.time())} epoch {epoch + 1} tested: accuracy {percent(accuracy)}")
        return told


def epoch_text(row: EpochRow, p: Progress, left: str) -> str:
    """An epoch in one line."""
    parts = [f"{row.distinct:,} of {p.samples_per_epoch:,} samples, {row.updates:,} updates"]
    parts += [f"{row.samples / row.seconds:,.0f} samples/s"] if row.seconds > 0 else []
    parts += [f"loss {row.train_loss:.4f}"] if row.train_loss is not None else []
    parts += [f"accuracy {percent(row.accuracy)}"] if row.accuracy is not None else []
    parts += [f"{left} left"] if left else []
    return f"epoch {row.epoch + 1} of {p.epochs}: " + ", ".join(parts)


class Bar:
    """The line at the bottom of a terminal; a line told goes above it."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Live

        self._column = BarColumn(WIDEST_BAR)
        self.console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        figures = TextColumn("{task.percentage:>3.0f}%  {task.description}", markup=False)
        # No thread that draws: it would cost the learners' cores more than the figures are worth.
        self._live = Live(self._column, figures, console=self.console, transient=True, auto_refresh=False)
        self._task = self._live.add_task("", total=total)
        self._live.start()

    def draw(self, done: int, text: str) -> None:
        """At the new figures."""
        self._column.bar_width = max(4, min(WIDEST_BAR, self.console.width - len(text) - 8))
        self._live.update(self._task, completed=done, description=text, refresh=True)

    def close(self) -> None:
        """The line goes."""
        self._live.stop()


class Follower:
    """Draws a job until it has ended; usable again after a KeyboardInterrupt.

    A terminal that is closed does not end this by itself: whether the job goes on then is for its SIGHUP to say.
    """

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
        self._epochs = Epochs()
        self._bar: Bar | None = None
        self._lost: float | None = None

    def wait(self, deadline: float | None = None) -> JobRow:
        """Until the job has ended; TimedOut at ``deadline`` (monotonic seconds), Unreachable if the head stays away."""
        state = ""
        try:
            while True:
                ended = state in ENDED  # what is left of its story is there at once
                hold = 0.0 if ended else HOLD_S
                if deadline is not None:
                    hold = max(0.0, min(hold, deadline - time.monotonic()))
                try:
                    reply = self.head.events(self.job, self.seen, hold, state)
                except (Unreachable, TimedOut) as error:
                    self.check()
                    if (over := ended_run(self.head)) is not None:
                        return over.get(self.job).row  # the private cluster has done its work
                    self._absent(error)
                    _in_time(deadline, self.job, "not known: psd does not answer")
                    time.sleep(HOLD_S)
                    continue
                self._present()
                self._show(reply)
                state = reply.job.state
                if ended and state in ENDED and not reply.rows:
                    return reply.job
                if state not in ENDED:
                    self.check()
                    _in_time(deadline, self.job, state)
        finally:
            self._close()

    def _absent(self, error: Unreachable | TimedOut) -> None:
        """Once a second while the head does not answer; said once."""
        if self._lost is None:
            self._lost = time.monotonic()
            self._tell(f"waiting for psd: {error.message}")
        if time.monotonic() - self._lost > PATIENCE_S:
            raise error

    def _present(self) -> None:
        if self._lost is not None:
            self._lost = None
            self._tell("psd answers again")

    def _show(self, reply: Events) -> None:
        p, ended = reply.job.progress, reply.job.state in ENDED
        for event in reply.rows:
            self.seen = event.seq
            if p is not None and event.text.startswith(_ENDS):  # how it ended comes last
                self._tell(*self._epochs.lines(p, ended))
            if not self._epochs.done(event):
                self._tell(event_line(event))
            elif p is not None:
                self._tell(*self._epochs.lines(p, ended))
        if p is not None:
            self._tell(*self._epochs.lines(p, ended))
            self._draw(p)

    def _tell(self, *lines: str) -> None:
        for line in () if self.quiet else lines:
            if self._bar is not None:
                with contextlib.suppress(OSError):
                    self._bar.console.print(line)
            else:
                note(line)

    def _draw(self, p: Progress) -> None:
        if self.quiet or not p.samples_per_epoch or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            return
        with contextlib.suppress(OSError):
            if self._bar is None:
                self._bar = Bar(p.samples_per_epoch * p.epochs)
            self._bar.draw(p.samples, progress_text(p))

    def _close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError):
                bar.close()


def _in_time(deadline: float | None, job: str, state: str) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise TimedOut(f"job {job} is {state}", fix=f"raise --timeout, or `rudra follow {job}`")
