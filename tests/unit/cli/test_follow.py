"""Followers of a job: what is told of its story and its epochs, and when they end."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.cli import follow
from rudra_zmq.cli.follow import Epochs, Follower, event_line, progress_text, story
from rudra_zmq.errors import RudraError, TimedOut, Unreachable
from rudra_zmq.wire.messages.control import EpochRow, EventRow, Events, JobReply, JobRow, Progress

NOW = time.time()


def event(seq: int, text: str, level: Any = "I") -> EventRow:
    return EventRow(seq, NOW, level, text)


def epoch(k: int, accuracy: float | None = None) -> EpochRow:
    return EpochRow(
        epoch=k, samples=100, distinct=100, updates=10, seconds=2.0, train_loss=0.5, accuracy=accuracy
    )  # fmt: skip


def figures(*rows: EpochRow) -> Progress:
    done = 100 * len(rows)
    return Progress(
        state="RUNNING", epochs=3, epoch=len(rows), samples=done, samples_per_epoch=100, samples_per_s=50.0,
        rows=list(rows),
    )  # fmt: skip


def job(state: str = "RUNNING", p: Progress | None = None) -> JobRow:
    return JobRow(job="7f3a01", name="x", state=state, created=NOW, progress=p)  # type: ignore[arg-type]


def texts(lines: list[str]) -> list[str]:
    return [line.partition(" ")[2] for line in lines]


class FakeHead:
    """Gives its answers in their order; an exception is raised."""

    run: Path | None = None

    def __init__(self, *answers: Events | RudraError) -> None:
        self.answers: Iterator[Events | RudraError] = iter(answers)
        self.asked: list[tuple[int, float]] = []

    def events(self, job: str, after: int, wait: float, state: str) -> Events:
        self.asked.append((after, wait))
        answer = next(self.answers)
        if isinstance(answer, RudraError):
            raise answer
        return answer


def follower(head: FakeHead, **given: Any) -> Follower:
    return Follower(head, "7f3a01", **given)  # type: ignore[arg-type]


def test_an_epoch_is_told_when_its_figures_are_here_and_its_test_later() -> None:
    epochs = Epochs()
    assert not epochs.done(event(1, "version 0 from rank 0"))
    assert epochs.lines(figures(), False) == []
    assert epochs.done(event(2, "epoch 1: 100 samples (100 distinct), 10 updates"))
    assert epochs.lines(figures(), False) == []  # the event is quicker than the report of each second
    line = "epoch 1 of 3: 100 of 100 samples, 10 updates, 50 samples/s, loss 0.5000, 4.0 s left"
    assert texts(epochs.lines(figures(epoch(0)), False)) == [line]
    assert epochs.lines(figures(epoch(0)), False) == []
    assert texts(epochs.lines(figures(epoch(0, 0.8601)), False)) == ["epoch 1 tested: accuracy 86.01 %"]
    assert epochs.lines(figures(epoch(0, 0.8601)), False) == []


def test_a_test_that_is_here_with_its_epoch_is_one_line() -> None:
    epochs = Epochs()
    epochs.lines(figures(), False)
    epochs.done(event(1, "epoch 1: ..."))
    (line,) = epochs.lines(figures(epoch(0, 0.9)), True)
    assert line.endswith("loss 0.5000, accuracy 90.00 %")  # an ended job has no time left
    assert epochs.lines(figures(epoch(0, 0.9)), True) == []


def test_what_was_tested_before_the_reader_came_is_not_news() -> None:
    epochs = Epochs()
    assert epochs.lines(figures(epoch(0, 0.8), epoch(1)), False) == []
    assert texts(epochs.lines(figures(epoch(0, 0.8), epoch(1, 0.9)), False)) == ["epoch 2 tested: accuracy 90.00 %"]


def test_an_epoch_that_is_done_again_after_a_restore_is_told_again() -> None:
    epochs = Epochs()
    for seq in (1, 2):
        epochs.done(event(seq, "epoch 1: ..."))
        assert len(epochs.lines(figures(epoch(0)), False)) == 1
        assert epochs.lines(figures(), False) == []


def test_a_follower_tells_all_of_the_story_before_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    ended = job("DONE", figures(epoch(0, 0.8)))
    head = FakeHead(
        Events(rows=[event(1, "starts"), event(2, "epoch 1: ...")], job=job("RUNNING", figures())),
        Events(rows=[event(3, "slow", "W")], job=ended),  # one answer has a part of the rest
        Events(rows=[event(4, "DONE: 100 samples")], job=ended),
        Events(rows=[], job=ended),
    )
    assert follower(head).wait().state == "DONE"
    assert [after for after, _ in head.asked] == [0, 2, 3, 4]
    assert [wait for _, wait in head.asked] == [1.0, 1.0, 0.0, 0.0]
    lines = texts(capsys.readouterr().err.splitlines())
    assert lines[0] == "starts" and lines[-1] == "DONE: 100 samples"
    assert sum("epoch 1 of 3" in line for line in lines) == 1 and "warning: slow" in lines


@pytest.mark.parametrize("state", ["RUNNING", "DONE"])  # the line may come before the state
def test_the_last_test_is_told_before_the_end(state: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended = job("DONE", figures(epoch(0, 0.8)))
    head = FakeHead(
        Events(rows=[event(1, "epoch 1: ...")], job=job("RUNNING", figures(epoch(0)))),
        Events(rows=[event(2, "DONE: 100 samples")], job=job(state, figures(epoch(0, 0.8)))),
        Events(rows=[], job=ended),
        Events(rows=[], job=ended),
    )
    follower(head).wait()
    lines = texts(capsys.readouterr().err.splitlines())
    assert lines[-2:] == ["epoch 1 tested: accuracy 80.00 %", "DONE: 100 samples"]


def test_a_follower_from_the_middle_tells_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    head = FakeHead(Events(rows=[], job=job("STOPPED")), Events(rows=[], job=job("STOPPED")))
    follower(head, since=17).wait()
    assert head.asked[0][0] == 17 and capsys.readouterr().err == ""


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ended = job("FAILED", figures(epoch(0)))
    head = FakeHead(Events(rows=[event(1, "epoch 1: "), event(2, "x", "E")], job=ended), Events(rows=[], job=ended))
    follower(head, quiet=True).wait()
    assert capsys.readouterr() == ("", "")


def test_a_head_that_comes_back_is_waited_for_and_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "HOLD_S", 0.0)
    away = [Unreachable("psd cannot be reached")] * 3
    head = FakeHead(*away, Events(rows=[], job=job("DONE")), Events(rows=[], job=job("DONE")))
    follower(head).wait()
    assert capsys.readouterr().err.splitlines() == ["waiting for psd: psd cannot be reached", "psd answers again"]


def test_a_head_that_stays_away_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "HOLD_S", 0.0)
    monkeypatch.setattr(follow, "PATIENCE_S", 0.0)
    with pytest.raises(Unreachable, match="nobody"):
        follower(FakeHead(*[Unreachable("nobody")] * 9), quiet=True).wait()


def test_the_deadline_holds_also_while_the_head_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "HOLD_S", 0.0)
    with pytest.raises(TimedOut):
        follower(FakeHead(Unreachable("x")), quiet=True).wait(time.monotonic())
    head = FakeHead(Events(rows=[], job=job("PENDING")))
    with pytest.raises(TimedOut, match="PENDING") as caught:
        follower(head, quiet=True).wait(time.monotonic())
    assert caught.value.fix and head.asked[0][1] == 0.0


def test_a_private_cluster_that_ended_is_looked_up_in_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Over:
        def get(self, name: str) -> JobReply:
            return JobReply(row=job("DONE"))

    monkeypatch.setattr(follow, "ended_run", lambda head: Over())
    assert follower(FakeHead(Unreachable("no such socket")), quiet=True).wait().state == "DONE"


def test_a_check_that_raises_ends_the_wait() -> None:
    def check() -> None:
        raise RudraError("psd of the private cluster ended")

    for answer in (Unreachable("x"), Events(rows=[], job=job())):  # a psd that answers is not all of a cluster
        with pytest.raises(RudraError, match="ended"):
            follower(FakeHead(answer), quiet=True, check=check).wait()
    follower(FakeHead(*2 * [Events(rows=[], job=job("DONE"))]), quiet=True, check=check).wait()


def test_the_story_is_all_of_it() -> None:
    parts = [[event(1, "a"), event(2, "b")], [event(3, "c")], []]
    head = FakeHead(*[Events(rows=rows, job=job()) for rows in parts])
    assert [e.text for e in story(head, "7f3a01")] == ["a", "b", "c"]  # type: ignore[arg-type]
    assert [after for after, _ in head.asked] == [0, 2, 3]


def test_lines() -> None:
    assert event_line(event(1, "x", "E")).endswith(" error: x")
    assert len(event_line(EventRow(1, NOW - 90_000, "I", "x")).split()) == 3  # with its date
    text = progress_text(figures(epoch(0)))
    assert text == "epoch 2/3  50 samples/s  loss -  test -  4.0 s left"


class ClosedTerminal:
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_is_closed_ends_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    monkeypatch.setenv("TERM", "xterm")
    answers = [Events(rows=[event(i, "a line")], job=job(p=figures(epoch(0)))) for i in (1, 2)]
    end = [Events(rows=[], job=job("DONE", figures(epoch(0), epoch(1))))] * 2
    head: Any = FakeHead(*answers, *end)
    assert Follower(head, "7f3a01").wait().state == "DONE"
