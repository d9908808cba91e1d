"""Tables, times and sizes as a person reads them, and as a program does."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime, timedelta

import pytest

from rudra_zmq.cli import output
from rudra_zmq.cli.logs import parse_since
from rudra_zmq.cli.report import job_object, print_status, print_summary
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


def test_json_is_one_line_with_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "a": 1}


def row(**given: object) -> JobRow:
    progress = Progress(
        state="DONE", protocol="softsync", rule="momentum", n=1, lam=4, declared=4, mu=32, c=4, updates=10, epochs=1,
        samples=1280, samples_per_epoch=1280, accuracy=0.8872, staleness_mean=0.75, staleness_max=3, seconds=3.0,
        histogram={"0": 10, "1": 29, "10": 1}, drops={"stale": 2},
        rows=[EpochRow(epoch=0, samples=1280, distinct=1280, updates=10, seconds=3.0, accuracy=0.8872)],
        learners=[LearnerRow(rank=0, incarnation=1, state="present")],
    )  # fmt: skip
    return JobRow(
        job="7f3a01", name="x", state="DONE", created=1.0, folder="/s/jobs/7f3a01", progress=progress, **given
    )  # type: ignore[arg-type]


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
