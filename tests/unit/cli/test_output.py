"""Tables, times and sizes as a person reads them, and as a program does."""

from __future__ import annotations

import contextlib
import json
import re
import time
from datetime import datetime, timedelta

import msgspec
import pytest

from rudra_zmq.cli import output
from rudra_zmq.cli.logs import parse_since
from rudra_zmq.cli.report import failure, job_object, print_status, print_summary, time_left
from rudra_zmq.errors import UsageError
from rudra_zmq.wire.messages.control import EpochRow, JobRow, LearnerRow, Progress


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.6, "60 s"), (125, "2 m 05 s"), (700, "11 m"), (7260, "2 h 01 m")],
)
def test_span(seconds: float, text: str) -> None:
    assert output.span(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3072.0 GiB")])
def test_size(count: int, text: str) -> None:
    assert output.size(count) == text


def test_times() -> None:
    assert output.utc(0) is None
    assert output.utc(1.5) == "1970-01-01T00:00:01.500Z"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", output.local(1000.0))
    now = time.time()
    for seconds, text in ((4, "4 s"), (119, "119 s"), (190, "3 m"), (7300, "2 h"), (86400 * 2.1, "2 d")):
        assert output.ago(now - seconds) == f"{text} ago"
    assert output.ago(0) == output.local(0) == "-"


def test_table_aligns_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["job", "count"], [["a", "5"], ["bcdef", "1,000"]])
    assert capsys.readouterr().out == "JOB    COUNT\na          5\nbcdef  1,000\n"


def test_table_knows_numbers_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["a", "b", "c", "d"], [["88.7 %", "5.3e-07", "60,000 of 60,000", "1x"], ["-", "0.03", "9 of 9", "1"]])
    assert capsys.readouterr().out.splitlines()[2] == "     -     0.03            9 of 9  1"


def test_names_give_way_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")
    output.table(["job", "name", "state"], [["7f3a01", "a-very-long-name-of-a-job", "RUNNING"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "7f3a01  a-very-long..  RUNNING" and len(lines[0]) <= 30
    assert output.fitted("x" * 31) == "x" * 27 + "..." and output.fitted("x" * 30) == "x" * 30


def test_a_screen_is_what_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("LINES", "4")
    with output.screen():
        for k in range(9):
            output.say(f"{k} {'x' * 20}")
    text = capsys.readouterr().out
    assert text.count("\n") == 3 and "0 xxxxxxxx\x1b[K" in text and "3 x" not in text


def test_a_note_that_nobody_can_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        output.note("x")
        with contextlib.suppress(OSError):
            full.close()


def test_json_is_one_line_with_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "a": 1}


def row() -> JobRow:
    progress = Progress(
        state="DONE", protocol="softsync", rule="momentum", n=1, lam=4, declared=4, mu=32, c=4, updates=10, epochs=1,
        samples=1280, samples_per_epoch=1280, accuracy=0.8872, staleness_mean=0.75, staleness_max=3, seconds=3.0,
        histogram={"0": 10, "1": 29, "10": 1}, drops={"stale": 2},
        rows=[EpochRow(epoch=0, samples=1280, distinct=1280, updates=10, seconds=3.0, accuracy=0.8872)],
        learners=[LearnerRow(rank=0, incarnation=1, state="present")],
    )  # fmt: skip
    return JobRow(job="7f3a01", name="x", state="DONE", created=1.0, folder="/s/jobs/7f3a01", progress=progress)


def test_job_object_has_the_promised_names() -> None:
    value = job_object(row())
    promised = {
        "job", "state", "protocol", "n", "lambda", "mu", "seconds", "samples_per_s", "updates", "accuracy", "staleness",
        "overlap", "epochs", "weights",
    }  # fmt: skip
    assert promised <= value.keys()
    assert value["staleness"] == {"mean": 0.75, "p95": 0.0, "max": 3, "histogram": {"0": 10, "1": 29, "10": 1}}
    assert {"epoch", "samples", "distinct", "accuracy", "seconds"} <= value["epochs"][0].keys()
    assert value["weights"] is None and value["started"] is None
    json.dumps(value)


def test_a_job_without_figures_has_the_same_names() -> None:
    bare = job_object(JobRow(job="7f3a01", name="x", state="PENDING", created=1.0, reason="needs 4 slots, 3 free"))
    assert bare.keys() == job_object(row()).keys()
    assert bare["reason"] == "needs 4 slots, 3 free" and bare["accuracy"] is None


def test_screens(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(row())
    text = capsys.readouterr().out
    for word in ("7f3a01", "1-softsync", "1,280 of 1,280", "88.72 %", "mean 0.750", "/s/jobs/7f3a01"):
        assert word in text
    assert text.index("   0 #") < text.index("   1 #") < text.index("  10 #")
    print_status(row(), ["12:00:00 started"])
    text = capsys.readouterr().out
    for word in ("DONE", "1 of 4", "stale 2", "12:00:00 started"):
        assert word in text


def test_screens_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    big = Progress(
        state="RUNNING", protocol="softsync", rule="rudra-adagrad", n=15, lam=30, declared=30, mu=128, c=2, epochs=140,
        updates=1_234_567, epoch=139, samples=123_456_789, samples_per_epoch=1_281_167, seconds=360_000.0, lr=1.234e-05,
        samples_per_s=123_456.7, updates_per_s=1234.5, loss=6.9078, accuracy=0.8888, staleness_mean=14.512,
        staleness_p95=44, staleness_max=1000, accepted=9_999_999, applied=9_999_998, pending=1, skipped=12,
        memory=5 << 30, generation=3, snapshot_age=250.0, histogram={str(k): 100_000 for k in range(40)},
        limited_by="exchange (learners wait 45% of their time for it)", parameters=25_557_032,
        rows=[
            EpochRow(epoch=k, samples=1_281_167, distinct=1_281_167, updates=12_345, seconds=1234.5, train_loss=6.9,
                     accuracy=0.8888, staleness_mean=14.5, staleness_p95=44, lr=1.234e-05, lam=30)
            for k in range(139)
        ],
        learners=[
            LearnerRow(rank=k, incarnation=1, state="lost" if k == 29 else "present", host="gpu-17", pid=1_234_567,
                       gradients=123_456, samples_per_s=12_345.0, silent=0.1)
            for k in range(30)
        ],
    )  # fmt: skip
    job = JobRow(job="7f3a01", name="x", state="RUNNING", created=time.time(), progress=big)
    print_status(job, [])
    status = capsys.readouterr().out
    print_summary(job)
    summary = capsys.readouterr().out
    for text in (status, summary):
        assert max(map(len, text.splitlines())) <= 80, max(text.splitlines(), key=len)
    assert re.search(r"^ +29 +1 +lost ", status, re.MULTILINE) and "(8 of 30 learners" in status
    assert "(the last 4 of 139 epochs" in status and "(the last 20 of 139 epochs" in summary
    assert "1,281,167 of 1,281,167" in summary


def test_time_left() -> None:
    p = Progress(state="RUNNING", epochs=2, samples_per_epoch=1000, samples=500, samples_per_s=100.0)
    assert time_left(p) == "15 s"
    assert time_left(msgspec.structs.replace(p, samples_per_s=0.0)) == ""
    assert time_left(msgspec.structs.replace(p, samples=2000)) == ""


def test_what_came_to_nothing_is_said_with_its_fix() -> None:
    def job(state: str, reason: str = "") -> JobRow:
        return JobRow(job="7f3a01", name="x", state=state, created=1.0, reason=reason)  # type: ignore[arg-type]

    assert failure(job("DONE")) == failure(job("STOPPED")) == ""
    line = failure(job("FAILED", "learner 1 failed: ValueError: x"))
    assert "learner 1 failed: ValueError: x. Fix: `rudra logs 7f3a01 --learner failed`" in line
    assert "--learner" not in failure(job("FAILED", "diverged"))
    told = failure(job("LOST", "its node is gone"), told=True)
    assert "its node" not in told and "`rudra resume 7f3a01`" in told


def test_since() -> None:
    now = datetime.now().astimezone()
    assert abs(parse_since("10m") - (now - timedelta(minutes=10))) < timedelta(seconds=5)
    assert parse_since("2026-12-01T14:30:00Z").timestamp() == 1796135400
    minute = now.replace(second=0, microsecond=0) - timedelta(minutes=1)
    assert parse_since(minute.strftime("%H:%M")) == minute
    later = parse_since((now + timedelta(minutes=5)).strftime("%H:%M"))
    assert later < now
    for wrong in ("yesterday", "25:00", "10x", "2026-13-01"):
        with pytest.raises(UsageError, match="is no time"):
            parse_since(wrong)
