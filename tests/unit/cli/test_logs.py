"""The reader of a job's logs: no line lost, none twice, in an order that can be read."""

from __future__ import annotations

import os
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.cli import logs
from rudra_zmq.cli.logs import DaemonReader, Line, Reader
from rudra_zmq.daemons.output import OutputFile
from rudra_zmq.errors import NotFound, NotRunning, TimedOut, Unreachable
from rudra_zmq.head.files import KEPT, list_files, read_file
from rudra_zmq.wire.messages.control import FileData, JobReply, JobRow, LogData

LINES = 600_000


class Folder:
    """A place that has one job's files; ``away`` makes it silent, ``limit`` cuts what an answer holds."""

    def __init__(self, root: Path, limit: int = 1 << 18) -> None:
        self.root, self.limit, self.away, self.state = root, limit, False, "RUNNING"
        self.gone: set[str] = set()  # files whose host is away
        self.reads = 0
        (root / "logs").mkdir()

    def write(self, name: str, text: str) -> None:
        with open(self.root / "logs" / name, "a", encoding="utf-8") as file:
            file.write(text)

    def get(self, job: str) -> JobReply:
        self._answer()
        return JobReply(row=JobRow(job="7f3a01", name="x", state=self.state, created=1.0))  # type: ignore[arg-type]

    def files(self, job: str) -> list[tuple[str, int]]:
        self._answer()
        return list_files(self.root)

    def read(self, job: str, path: str, offset: int, limit: int) -> FileData:
        self._answer()
        self.reads += 1
        if path in self.gone:
            raise NotRunning("learnerd on b is away")
        return read_file(self.root, path, offset, min(limit, self.limit))

    def _answer(self) -> None:
        if self.away:
            raise Unreachable("nobody")


def reader(place: Folder, wanted: frozenset[str] | None = None, since: Any = None, grep: str | None = None) -> Reader:
    return Reader(place, "7f3a01", wanted, since, re.compile(grep) if grep else None)  # type: ignore[arg-type]


def shown(lines: Any) -> list[str]:
    def text(line: Line) -> str:
        return f"{line.source.label} {line.text}"

    return [text(line) for line in lines]


def stamped(second: int, text: str) -> str:
    return f"2026-12-01T04:00:{second:02}.000Z I {text}\n"


@pytest.fixture
def place(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_ours_by_time_then_the_scripts_own(place: Folder) -> None:
    place.write("learner-0.log", stamped(1, "a") + "  more of a\n" + stamped(5, "d"))
    place.write("learner-0.out", "printed\n")
    place.write("node.log", stamped(2, "b") + stamped(4, "c"))
    lines = shown(reader(place).first(None, last=True))
    assert [line.split()[-1] for line in lines] == ["a", "a", "b", "c", "d", "printed"]
    assert lines[0] == "0: 2026-12-01T04:00:01.000Z I a" and lines[1] == "0:   more of a"
    assert lines[2].startswith("node: ") and lines[-1] == "0| printed"


def test_tail_is_of_each_file(place: Folder) -> None:
    place.write("learner-0.out", "1\n2\n3\n")
    place.write("learner-1.out", "4\n5")
    assert shown(reader(place).first(2, last=True)) == ["0| 2", "0| 3", "1| 4", "1| 5"]
    assert shown(reader(place).first(0, last=True)) == []
    assert shown(reader(place).first(9, last=True)) == ["0| 1", "0| 2", "0| 3", "1| 4", "1| 5"]


def test_a_follower_gets_each_line_once_and_whole(tmp_path: Path) -> None:
    place = Folder(tmp_path, limit=3)  # also in the middle of a character
    place.write("learner-0.out", "eins é\nzw")
    read = reader(place)
    assert shown(read.first(None, last=False)) == ["0| eins é"]
    place.write("learner-0.out", "ei\ndr")
    assert shown(read.more(last=False)) == ["0| zwei"]
    assert shown(read.more(last=False)) == []
    place.write("learner-1.out", "new\n")
    assert shown(read.more(last=False)) == ["1| new"]
    assert shown(read.more(last=True)) == ["0| dr"]  # the job is over: nothing ends that line any more
    assert shown(read.more(last=True)) == []


def test_a_file_that_was_replaced_is_read_anew(place: Folder) -> None:
    place.write("learner-0.out", "old old\n")
    read = reader(place)
    assert shown(read.first(None, last=False)) == ["0| old old"]
    other = place.root / "logs" / "other"
    other.write_text("new, and longer than before\n")
    other.rename(place.root / "logs" / "learner-0.out")
    assert shown(read.more(last=False)) == ["0| new, and longer than before"]


@pytest.mark.parametrize("every", [20_000, 45_000, 150_000])  # lines between two looks: 0.4, 1 and 3 MB
def test_a_file_that_is_shortened_meanwhile_is_followed_on(place: Folder, every: int) -> None:
    out = OutputFile(place.root / "logs" / "learner-0.out")
    read = reader(place)
    got: list[str] = []
    for start in range(0, LINES, every):
        block = b"".join(b"a line, number %06d\n" % i for i in range(start, min(start + every, LINES)))
        for at in range(0, len(block), 99_991):
            out.write(block[at : at + 99_991])
        got += shown(read.more(last=False) if start else read.first(None, last=False))
    out.close()
    numbers = [int(line[-6:]) for line in got if re.fullmatch(r"0[|] a line, number [0-9]{6}", line)]
    assert numbers == sorted(set(numbers)) and (numbers[0], numbers[-1]) == (0, LINES - 1)
    said = sum("bytes of output cut here" in line for line in got)
    if every < 150_000:  # the reader keeps up: it sees no cut at all
        assert numbers == list(range(LINES)) and said == 0
    else:
        assert 0 < said < len(range(0, LINES, every)) and len(got) - len(numbers) <= 4 * said


def test_a_full_disk_that_costs_the_tail_repeats_no_head(place: Folder) -> None:
    place.write("learner-0.out", "x" * (KEPT - 2) + "\ny" + "lost\n" * 1000)
    read = reader(place)
    first = shown(read.first(None, last=False))
    os.truncate(place.root / "logs" / "learner-0.out", KEPT)
    place.write("learner-0.out", "ou\nnext\n")
    assert len(first) == 1001 and shown(read.more(last=False)) == ["0| ou", "0| next"]


def test_since_leaves_out_what_has_no_time_but_what_comes_is_recent(place: Folder) -> None:
    place.write("learner-0.log", stamped(1, "early") + "of early\n" + stamped(9, "late") + "of late\n")
    place.write("learner-0.out", "printed before\n")
    read = reader(place, since=datetime(2026, 12, 1, 4, 0, 5, tzinfo=timezone.utc))
    lines = shown(read.first(None, last=False))
    assert [line.split()[-1] for line in lines] == ["late", "late"] and len(lines) == 2
    place.write("learner-0.out", "printed now\n")
    place.write("learner-1.out", "another\n")
    assert shown(read.more(last=False)) == ["0| printed now", "1| another"]


def test_wanted_and_grep(place: Folder) -> None:
    for rank in range(3):
        place.write(f"learner-{rank}.out", f"loss={rank}\nother\n")
    place.write("../decisions.jsonl", "{}\n")
    assert shown(reader(place, grep="loss=[01]").first(None, last=True)) == ["0| loss=0", "1| loss=1"]
    assert shown(reader(place, frozenset({"learner-2"})).first(None, last=True)) == ["2| loss=2", "2| other"]
    with pytest.raises(NotFound, match="learner-7") as caught:
        reader(place, frozenset({"learner-7"})).first(None, last=True)
    assert caught.value.fix


def test_state_while_the_head_is_away(place: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reader(place)
    assert read.state() == "RUNNING"
    place.state, place.away = "DONE", True
    assert read.state() == "RUNNING"  # not known: it is waited for
    monkeypatch.setattr(logs, "PATIENCE_S", -1.0)
    with pytest.raises((Unreachable, TimedOut)):
        read.state()
    place.away = False
    assert read.state() == "DONE"


def test_a_host_that_is_away_holds_up_no_other_and_loses_nothing(place: Folder) -> None:
    place.write("learner-0.out", "a1\n")
    place.write("learner-1.out", "b1\n")
    read = reader(place)
    assert shown(read.first(None, last=False)) == ["0| a1", "1| b1"]
    place.gone.add("logs/learner-0.out")
    place.write("learner-0.out", "a2\n")
    place.write("learner-1.out", "b2\n")
    assert shown(read.more(last=False)) == ["1| b2"]
    assert read.away == {"learnerd on b is away": {"logs/learner-0.out"}}
    place.gone.clear()
    assert shown(read.more(last=False)) == ["0| a2"] and not read.away


class Fading(Folder):
    """It says that the job has ended, and is away for the look after that."""

    ended = False

    def files(self, job: str) -> list[tuple[str, int]]:
        if self.state == "DONE" and not self.ended:
            self.ended = True
            raise TimedOut("nobody")
        return super().files(job)


def test_the_last_lines_are_waited_for_where_the_head_is_away_just_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Fading(tmp_path)
    monkeypatch.setattr(logs, "Head", Fading)
    place.write("learner-0.out", "a\n")
    read = reader(place)  # type: ignore[arg-type]
    assert shown(read.first(None, last=False)) == ["0| a"]
    place.write("learner-0.out", "the last words")
    place.state = "DONE"
    assert shown(read.rest(0.0)) == ["0| the last words"]
    assert read.status == "DONE"


def test_files_that_did_not_grow_are_not_asked_for(place: Folder) -> None:
    for rank in range(20):
        place.write(f"learner-{rank}.out", "x\n")
    read = reader(place)
    assert len(shown(read.first(None, last=False))) == 20
    place.reads = 0
    place.write("learner-7.out", "y\n")
    assert shown(read.more(last=False)) == ["7| y"] and place.reads == 2
    place.write("learner-7.out", "end")
    assert shown(read.more(last=False)) == [] and shown(read.more(last=True)) == ["7| end"]


class Daemon:
    """A head that has one daemon's log."""

    def __init__(self) -> None:
        self.run, self.start, self.text, self.away = 5, 0, b"", False

    def read_log(self, host: str, offset: int, limit: int) -> LogData:
        if self.away:
            raise NotRunning("away")
        begin = max(offset, self.start)
        return LogData(data=self.text[begin - self.start :][:7], offset=begin, run=self.run)


def test_a_daemons_log_is_followed_over_cuts_and_restarts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = Daemon()
    read = DaemonReader(head, "b", None, None)  # type: ignore[arg-type]
    head.away = True
    with pytest.raises(NotRunning):
        list(read.more())
    head.away = False
    head.text = b"one\ntwo\nthr"
    assert shown(read.more()) == ["b: one", "b: two"]
    head.away = True
    assert shown(read.more()) == []
    head.away, head.text = False, head.text + b"ee\n"
    assert shown(read.more()) == ["b: three"]
    head.start, head.text = 100, b"much later\n"
    assert shown(read.more()) == ["b: much later"] and "bytes of its log are gone" in capsys.readouterr().err
    head.run, head.start, head.text = 6, 0, b"new one\n"
    assert shown(read.more()) == ["b: new one"] and "started anew" in capsys.readouterr().err
    head.away = True
    monkeypatch.setattr(logs, "PATIENCE_S", -1.0)
    with pytest.raises(NotRunning):
        list(read.more())
