"""Log lines, where they go, and the limiter."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq import log


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger("rudra")
    before = (root.handlers[:], root.level, root.propagate, log._unit)
    root.handlers[:] = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])
    log._unit = before[3]


def written(unit: str = "learner[3]", **options: Any) -> io.StringIO:
    stream = io.StringIO()
    log.setup(unit, stream=stream, **options)
    return stream


def test_the_form_of_a_line() -> None:
    stream = written()
    log.get().info("progress", job="7f3a01", step=1240, loss=2.3104)
    line = stream.getvalue()
    assert re.fullmatch(
        r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z I learner\[3\] progress job=7f3a01 step=1240 loss=2.3104\n", line
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (1796098704.0035, "2026-12-01T04:18:24.003Z"),
        (1796098704.9999, "2026-12-01T04:18:24.999Z"),
    ],
)
def test_times_are_utc_with_milliseconds(seconds: float, text: str) -> None:
    assert log.timestamp(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (2.5, "2.5"),
        (1 / 3, "0.333333"),
        (float("nan"), "nan"),
        (True, "true"),
        (None, "none"),
        ("plain", "plain"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("one\ntwo\r\n", '"one\\ntwo\\r\\n"'),
        ("\x1b[31mred", '"\\x1b[31mred"'),
        ("ünï", "ünï"),
        ([1, 2.5, "x"], "1,2.5,x"),
        ({"a": 1, "b": [2, 3]}, "a:1,b:2,3"),
        (Path("/a b"), '"/a b"'),
    ],
)
def test_values(value: Any, text: str) -> None:
    assert log.logfmt({"key": value}) == f"key={text}"


def test_a_value_cannot_forge_a_line() -> None:
    stream = written()
    log.get().warning("refused", reason="x\n2026-12-01T04:18:24.003Z E psd all is lost\u2028\x85")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("level", "letters"), [("debug", "DIWE"), ("info", "IWE"), ("warning", "WE"), ("error", "E")])
def test_levels(level: log.Level, letters: str) -> None:
    stream = written(level=level)
    logger = log.get()
    for name in ("debug", "info", "warning", "error"):
        getattr(logger, name)("event")
        assert logger.enabled(name) == (name[0].upper() in letters)  # type: ignore[arg-type]
    assert "".join(line.split()[1] for line in stream.getvalue().splitlines()) == letters


def test_units_and_bound_pairs() -> None:
    stream = written("psd")
    log.get().bind(job="7f3a01").bind(rank=1).info("joined", host="a", sentence="s")
    log.get("node").info("up")
    first, second = (line.split(" ", 2)[2] for line in stream.getvalue().splitlines())
    assert first == "psd joined job=7f3a01 rank=1 host=a sentence=s"
    assert second == "node up"


def test_json_has_the_same_keys() -> None:
    stream = written(fmt="json")
    log.get().error("learner lost", rank=3, silent=9.25, level="x", path=Path("/a"), bad=float("nan"), ok=None)
    row = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-.*Z", row.pop("time"))
    assert row == {
        "level": "E",
        "unit": "learner[3]",
        "sentence": "learner lost",
        "rank": 3,
        "silent": 9.25,
        "level_": "x",
        "path": "/a",
        "bad": None,
        "ok": None,
    }


def test_an_exception_is_one_line_and_its_traceback_only_for_debug() -> None:
    def fail() -> None:
        raise ValueError("two\nlines")

    for level, expected in (("info", 1), ("debug", None)):
        stream = written(level=level)
        try:
            fail()
        except ValueError as error:
            log.get().exception("job failed", error, job="a")
        lines = stream.getvalue().splitlines()
        assert lines[0].endswith('E learner[3] job failed job=a exc="ValueError: two\\nlines"')
        if expected is not None:
            assert len(lines) == expected
        else:
            assert all(" D learner[3] traceback line=" in line for line in lines[1:])
            assert any("in fail" in line for line in lines[1:])


def test_journald_gets_priorities_instead_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    with path.open("w+") as stream:
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        log.setup("psd", level="debug", stream=stream)
        for name in ("debug", "info", "warning", "error"):
            getattr(log.get(), name)("event", a=1)
        assert path.read_text().splitlines() == [
            "<7>D psd event a=1",
            "<6>I psd event a=1",
            "<4>W psd event a=1",
            "<3>E psd event a=1",
        ]
        log.setup("psd", fmt="json", stream=stream)
        log.get().info("event")
        assert path.read_text().splitlines()[-1].startswith('<6>{"time":')
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino + 1}")
        assert not log.is_journal(stream)
    assert not log.is_journal(io.StringIO())


def test_a_rotated_file_is_opened_again(tmp_path: Path) -> None:
    path, old = tmp_path / "psd.log", tmp_path / "psd.log.1"
    log.setup("psd", file=path)
    log.get().info("one")
    path.rename(old)
    log.get().info("two")
    path.unlink()
    log.get().info("three")
    assert [line.split()[-1] for line in old.read_text().splitlines()] == ["one"]
    assert [line.split()[-1] for line in path.read_text().splitlines()] == ["three"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log.setup("psd", file=folder / "psd.log")
    (folder / "psd.log").unlink()
    folder.rmdir()
    log.get().info("lost")
    folder.mkdir()
    log.get().info("found")
    assert (folder / "psd.log").read_text().endswith(" found\n")


def test_a_closed_stream_loses_lines_and_nothing_else() -> None:
    stream = written()
    stream.close()
    log.get().error("nobody hears")


def test_a_second_setup_replaces_the_first() -> None:
    first, second = written("a"), written("b")
    log.get().info("once")
    assert first.getvalue() == ""
    assert second.getvalue().endswith(" I b once\n")


def test_without_setup_lines_go_where_the_scripts_own_logging_sends_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log.get().info("ready", rank=0)
    assert caplog.messages == ["ready rank=0"]


def test_a_line_of_plain_logging_keeps_the_form() -> None:
    stream = written()
    logging.getLogger("rudra").warning("plain %d", 3)
    assert stream.getvalue().endswith(" W learner[3] plain 3\n")


# ---- limits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_limited_sentence_says_how_often_it_happened() -> None:
    stream, clock = written(), Clock()
    limiter = log.RateLimiter(10.0, clock)
    logger = log.get()
    for i in range(42):
        logger.limited(limiter, "warning", "message dropped", rank=i)
    logger.limited(limiter, "warning", "another")
    clock.now += 9.9
    logger.limited(limiter, "warning", "message dropped", rank=42)
    clock.now += 0.1
    logger.limited(limiter, "warning", "message dropped", rank=43)
    clock.now += 10.0
    logger.limited(limiter, "warning", "message dropped", rank=44)
    lines = [line.split(" ", 3)[3] for line in stream.getvalue().splitlines()]
    assert lines == [
        "message dropped rank=0",
        "another",
        "message dropped (x43) rank=43",
        "message dropped rank=44",
    ]


def test_what_is_below_the_level_does_not_use_up_the_limit() -> None:
    stream = written(level="warning")
    limiter = log.RateLimiter(10.0, Clock())
    log.get().limited(limiter, "debug", "tick")
    log.get().limited(limiter, "warning", "tick")
    assert len(stream.getvalue().splitlines()) == 1


def test_a_limiter_of_many_keys_stays_small() -> None:
    clock = Clock()
    limiter = log.RateLimiter(10.0, clock)
    for i in range(5000):
        clock.now += 0.001
        assert limiter.admit(str(i)) == 1
    assert len(limiter._seen) <= 1024
    assert limiter.admit("4999") == 0
    clock.now += 20
    assert limiter.admit("fresh") == 1
    assert len(limiter._seen) <= 2


def test_memory_keeps_the_newest_lines_and_says_where_they_begin() -> None:
    memory = log.Memory(limit=400)
    log.setup("psd", stream=io.StringIO(), memory=memory)
    sizes = []
    for i in range(20):
        log.get().info("a line", number=i)
        sizes.append(memory.read(0, 1000)[0] + len(memory.read(0, 1000)[1]))
    begin, data = memory.read(0, 1000)
    numbers = [int(line.rpartition(b"=")[2]) for line in data.splitlines()]
    assert begin > 0 and len(data) <= 400 and numbers == list(range(numbers[0], 20)) and len(numbers) > 5
    assert begin + len(data) == sizes[-1] and memory.read(sizes[-1], 9) == memory.read(10**9, 9) == (sizes[-1], b"")
    assert memory.read(begin + 3, 5) == (begin + 3, data[3:8])
    log.setup("psd", stream=io.StringIO(), memory=memory, level="error")  # a reload keeps what is there
    log.get().info("not written")
    assert memory.read(begin, 1000) == (begin, data)
