"""``rudra logs``: what a job's processes wrote, from the start or as it comes.

Owns the merging of several files and the follower's offsets: a read names (inode, offset), so a cut connection
resumes where it was, nothing lost and nothing twice. A file that was shortened meanwhile says how much is missing.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import NamedTuple

import click

from rudra_zmq.cli.base import Cli, command, job_argument
from rudra_zmq.cli.follow import story
from rudra_zmq.cli.output import emit_json, note, say
from rudra_zmq.cli.places import ENDED, AnyPlace, DownCluster, Head, down, ended_run
from rudra_zmq.cli.report import FAILED_PROCESS
from rudra_zmq.config import parse_duration
from rudra_zmq.errors import EXIT_JOB_FAILED, NotFound, NotRunning, RudraError, TimedOut, Unreachable, UsageError
from rudra_zmq.head.files import CUT, KEPT
from rudra_zmq.wire.messages.control import FileData

PIECE = 131072
BEAT_S = 0.5
SETTLE_S = 1.0  # after the end of a job, without another line
PATIENCE_S = 60.0
_NAME = re.compile(r"logs/(learner-(\d+)|evaluator|node)\.(log|out)")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)Z ")


@dataclass
class Source:
    """One file that is being read."""

    path: str
    label: str
    offset: int = 0
    inode: int = 0
    cut: int = 0  # bytes that are missing from the middle of this file
    mark: int = 0  # bytes of the line that says so
    rest: bytes = b""  # of a line whose end is not written yet
    fresh: bool = True  # whether the line that comes next is recent enough for --since
    stamp: str = ""  # of the newest line that has one

    @property
    def raw(self) -> bool:
        """A script's own output, which has no times."""
        return self.path.endswith(".out")


class Line(NamedTuple):
    """A line and where it is from. ``stamp``: its time or that of the line before it, as the file has it."""

    source: Source
    stamp: str
    text: str


@command("logs")
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended; Ctrl-C stops the reader alone.")
@click.option("--learner", metavar="RANK|failed", help="Only this rank, or those that failed.")
@click.option(
    "--since",
    metavar="TIME",
    help="Only lines from then on: 10m, 14:30, 2026-12-01T14:30. A script's own output has no times: of it, only what "
    "comes with -f.",
)
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Begin with the last N lines of each file.")
@click.option("--grep", metavar="REGEX", help="Only lines that match.")
@click.option("--daemon", is_flag=True, help="No job's lines: those of psd about itself, or (--host) of a learnerd.")
@click.option("--host", metavar="NAME", default="", help="With --daemon: the learnerd on this host.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.pass_obj
def logs(
    cli: Cli,
    job: str,
    daemon: bool,
    host: str,
    follow: bool,
    learner: str | None,
    since: str | None,
    tail: int | None,
    grep: str | None,
    as_json: bool,
) -> int:
    """Show what a job's learners, evaluator and node wrote, on whatever host.

    \b
      rudra logs -f
      rudra logs 7f3a01 --learner failed
      rudra logs --since 10m --grep 'loss=[01]'
      rudra logs --host gpu1 --daemon -f

    With -f a connection that is cut is waited for, a minute at most, and no line is lost or shown twice. It ends with
    the job, with status 8 where that failed.

    Each line begins with its source: "3:" is rudra's own line about learner 3 (learner-3.log), "3|" what the script
    printed there (learner-3.out).
    """
    pattern = _pattern(grep)
    begin = parse_since(since) if since else None
    if host and not daemon:
        raise UsageError("--host is given without --daemon", fix=f"rudra logs --host {host} --daemon")
    if daemon and (job or learner):
        raise UsageError("--daemon shows no job's lines", fix="leave the job, or --daemon, out")
    with cli.places() as places:
        if daemon:
            lines = DaemonReader(places.head(), host, begin, pattern)
            return _follow_daemon(lines, tail, follow, as_json)
        found = places.find(job)
        reader = Reader(found.place, found.row.job, _wanted(found.place, found.row.job, learner), begin, pattern)
        for line in reader.first(tail, last=not follow):
            _write(line, as_json)
        if follow:
            for line in reader.rest():
                _write(line, as_json)
            if reader.status not in ENDED:
                raise down(found.row)
        _tell_away(reader)
        if follow:
            note(f"job {found.row.job} is {reader.status}")
    return EXIT_JOB_FAILED if reader.status == "FAILED" else 0


def _tell_away(reader: Reader) -> None:
    for why, sources in sorted(reader.away.items()):
        names = ", ".join(sorted(path.removeprefix("logs/") for path in sources))
        note(f"lines of {names} may be missing: {why}")


def _follow_daemon(lines: DaemonReader, tail: int | None, follow: bool, as_json: bool) -> int:
    """What is there, and with ``follow`` what comes, until Ctrl-C."""
    there = list(lines.more())
    for line in there if tail is None else there[max(0, len(there) - tail) :]:
        _write(line, as_json)
    while follow:
        time.sleep(BEAT_S)
        for line in lines.more():
            _write(line, as_json)
    return 0


def _write(line: Line, as_json: bool) -> None:
    if as_json:
        emit_json({"source": line.source.path.removeprefix("logs/"), "text": line.text})
    else:
        say(f"{line.source.label} {line.text}")


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text is not None else None
    except re.error as error:
        raise UsageError(
            f"--grep {text!r} is no regular expression: {error}", fix="escape special characters"
        ) from None


def parse_since(text: str) -> datetime:
    """ "10m" ago, "14:30" local (today, or yesterday when that is still to come), or ISO; aware, in local time."""
    now = datetime.now().astimezone()
    try:
        if re.fullmatch(r"\d\d?:\d\d(:\d\d)?", text):
            hour, minute, *second = (int(part) for part in text.split(":"))
            then = now.replace(hour=hour, minute=minute, second=second[0] if second else 0, microsecond=0)
            return then if then <= now else then - timedelta(days=1)
        if re.match(r"\d{4}-", text):
            return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
        return now - timedelta(seconds=parse_duration(text))
    except (ValueError, OverflowError, RudraError):
        raise UsageError(f"--since {text!r} is no time", fix="use 10m, 14:30 or 2026-12-01T14:30") from None


def _wanted(place: AnyPlace, job: str, learner: str | None) -> frozenset[str] | None:
    """The processes to show by the stem of their files; None for everything."""
    if learner is None:
        return None
    if learner == "failed":
        texts = [place.get(job).row.reason, *(e.text for e in story(place, job) if e.level == "E")]
        failed = {m[1] or "evaluator" for text in texts for m in FAILED_PROCESS.finditer(text)}
        if not failed:
            raise NotFound(f"no learner of job {job} failed", fix="leave --learner out to see all")
        return frozenset(name if name == "evaluator" else f"learner-{name}" for name in failed)
    if not learner.isdigit():
        raise UsageError(f"--learner {learner!r} is no rank", fix='give a rank such as 0, or "failed"')
    return frozenset({f"learner-{int(learner)}"})


class Reader:
    """Reads all wanted files of a job, again and again."""

    def __init__(
        self,
        place: AnyPlace,
        job: str,
        wanted: frozenset[str] | None,
        since: datetime | None,
        pattern: re.Pattern[str] | None,
    ) -> None:
        self.place, self.job, self.wanted, self.since, self.pattern = place, job, wanted, since, pattern
        self.sources: dict[str, Source] = {}
        self.away: dict[str, set[str]] = {}  # why -> files that could not be read at the last look
        self.status = ""  # the job's state at the last look of ``rest``
        self._behind = False  # the head did not answer at the last look
        self._lost: float | None = None

    def state(self) -> str:
        """The job's state; RUNNING while the head does not answer, for at most a minute."""
        try:
            state = self.place.get(self.job).row.state
            self._lost = None
            return state
        except (Unreachable, TimedOut):
            over = ended_run(self.place) if isinstance(self.place, Head) else None
            if over is not None:  # the private cluster has done its work; the files are where they were
                self.place = over
                return self.state()
            self._lost = self._lost or time.monotonic()
            if time.monotonic() - self._lost > PATIENCE_S:
                raise
            return "RUNNING"

    def first(self, tail: int | None, last: bool) -> Iterator[Line]:
        """What is there now, of each file all or the last ``tail`` lines: ours by time, then the scripts' own.

        ``last``: nothing more will be asked for, so a line without its end is one.
        """
        self._look()
        if self.wanted is not None and not self.sources:
            what = ", ".join(sorted(self.wanted))
            raise NotFound(f"no log of {what} in job {self.job}", fix=f"`rudra show {self.job}` lists the files")
        ours: list[list[Line]] = []
        raw: list[list[Line]] = []
        for source in self.sources.values():
            lines = [*self._read_there(source, last)]
            (raw if source.raw else ours).append(lines if tail is None else lines[max(0, len(lines) - tail) :])
            source.fresh = True
        return chain(heapq.merge(*ours, key=lambda line: line.stamp), *raw)

    def rest(self, beat: float = BEAT_S) -> Iterator[Line]:
        """Lines as they come, to the end of the job; or to that of its cluster, where ``status`` is none of an end."""
        grown = time.monotonic()
        while True:
            self.status = self.state()  # asked before the read, so that the last lines are not missed
            over = self.status in ENDED
            before = self._read_so_far
            down = isinstance(self.place, DownCluster)
            # A host may still be writing what its learners said last.
            settled = over and time.monotonic() - grown >= SETTLE_S
            yield from self.more(last=settled or down)
            if down or (settled and not self._behind and before == self._read_so_far):
                return
            if not over or self._behind or before != self._read_so_far:
                grown = time.monotonic()
            time.sleep(beat)

    @property
    def _read_so_far(self) -> int:
        return sum(source.offset for source in self.sources.values())

    def more(self, last: bool) -> Iterator[Line]:
        """Lines that came since; nothing while the head does not answer."""
        self._behind = False
        try:
            there = self._look()
            self.away.clear()
            for path, source in self.sources.items():
                if last or source.offset != there.get(path, -1):
                    yield from self._read_there(source, last)
        except (Unreachable, TimedOut):
            if not isinstance(self.place, Head):
                raise
            self._behind = True

    def _read_there(self, source: Source, last: bool) -> Iterator[Line]:
        """As ``_read``; a host that is away holds up no other one."""
        try:
            yield from self._read(source, last)
        except NotFound as error:
            self.away.setdefault(error.message, set()).add(source.path)

    def _look(self) -> dict[str, int]:
        """The sizes of all files; new ones become sources."""
        first = not self.sources
        there = dict(self.place.files(self.job))
        for path in there:
            match = _NAME.fullmatch(path)
            if match is None or path in self.sources:
                continue
            if self.wanted is not None and match[1] not in self.wanted:
                continue
            label = f"{match[2] or match[1]}{'|' if match[3] == 'out' else ':'}"
            self.sources[path] = Source(path, label, fresh=self.since is None or not first)
        return there

    def _read(self, source: Source, last: bool) -> Iterator[Line]:
        while True:
            piece = self.place.read(self.job, source.path, source.offset, PIECE)
            if source.inode != piece.inode or piece.size < source.offset:
                self._replaced(source, piece)
                continue
            source.offset += len(piece.data)
            *lines, source.rest = (source.rest + piece.data).split(b"\n")
            if not piece.data and last and source.rest:
                lines, source.rest = [source.rest], b""
            for raw in lines:
                text = raw.decode(errors="replace").rstrip("\r")
                if self._passes(source, text):
                    yield Line(source, source.stamp, text)
            if not piece.data:
                return

    def _replaced(self, source: Source, piece: FileData) -> None:
        """Find the place in a file that is new, shortened or another one."""
        read = source.offset - source.mark + source.cut if source.offset > KEPT else source.offset
        found = None
        if piece.size > KEPT:
            piece = self.place.read(self.job, source.path, KEPT, 64)
            found = CUT.match(piece.data)
        same = source.inode == piece.inode
        source.inode = piece.inode
        source.cut, source.mark = (int(found[1]), found.end()) if found else (0, 0)
        if read <= KEPT and (found or same):
            source.offset = min(read, piece.size)
        elif found:  # what follows, or the mark where some of it is gone
            source.offset = KEPT + source.mark + read - KEPT - source.cut if read >= KEPT + source.cut else KEPT
        elif same:
            source.offset = min(KEPT, piece.size)  # a full disk: its head alone was kept
        else:
            source.offset, source.rest = 0, b""

    def _passes(self, source: Source, text: str) -> bool:
        return _passes(source, text, self.since, self.pattern)


class DaemonReader:
    """Reads a daemon's own log, which is kept in its memory: the newest lines since it was started."""

    def __init__(self, head: Head, host: str, since: datetime | None, pattern: re.Pattern[str] | None) -> None:
        self._head, self._host, self._since, self._pattern = head, host, since, pattern
        self._source = Source("learnerd" if host else "psd", f"{host or 'psd'}:", fresh=since is None)
        self._lost: float | None = None

    def more(self) -> Iterator[Line]:
        """What came since the last time; nothing while it does not answer, which may take a minute once it has."""
        source = self._source
        while True:
            try:
                piece = self._head.read_log(self._host, source.offset, PIECE)
            except (Unreachable, TimedOut, NotRunning):
                self._lost = self._lost or time.monotonic()
                if not source.inode or time.monotonic() - self._lost > PATIENCE_S:
                    raise
                return
            self._lost = None
            if source.inode not in (0, piece.run):
                note(f"{source.path} was started anew")
                source.offset, source.inode, source.rest = 0, piece.run, b""
                continue
            source.inode = piece.run
            if piece.offset > source.offset and source.offset:
                note(f"{piece.offset - source.offset} bytes of its log are gone")
                source.rest = b""
            source.offset = piece.offset + len(piece.data)
            *lines, source.rest = (source.rest + piece.data).split(b"\n")
            for raw in lines:
                text = raw.decode(errors="replace")
                if _passes(source, text, self._since, self._pattern):
                    yield Line(source, source.stamp, text)
            if not piece.data:
                return


def _passes(source: Source, text: str, since: datetime | None, pattern: re.Pattern[str] | None) -> bool:
    stamp = None if source.raw else _STAMP.match(text)
    if stamp:  # a line without a time belongs to the one before it
        source.stamp = stamp[1]
        if since is not None:
            source.fresh = datetime.fromisoformat(stamp[1] + "+00:00") >= since
    return source.fresh and (pattern is None or pattern.search(text) is not None)
