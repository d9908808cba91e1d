"""decisions.jsonl: the fields, torn lines, a disk that is full for a while."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from rudra_zmq.core.events import Decision, Entry, GradientId, Span
from rudra_zmq.node import decisions
from rudra_zmq.node.decisions import DecisionLog


def _decision(update: int) -> Decision:
    entry = Entry(GradientId(3, 1, 7), 0, update - 2, (Span(0, 32, 64),), 32, 1, 0.5, 0.125, False)
    return Decision(
        update=update, generation=2, entries=(entry,), fold_coefficient=0.0, weight_sum=0.125, s_bar=0.5,
        mean_sigma=1.0, progress=0.25, samples=32, c=1,
    )  # fmt: skip


def _no_warning(text: str) -> None:
    raise AssertionError(text)


def test_a_line(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "d", _no_warning)
    log.restored(4, 2)
    log.add(_decision(5), 0.03)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "d").read_text().splitlines()]
    assert lines == [
        {"restored": 4, "generation": 2},
        {
            "generation": 2, "update": 5, "ids": [[3, 1, 7]], "timestamps": [3], "scales": [0.5],
            "coefficients": [0.125], "ranges": [[[0, 32, 64]]], "counts": [32], "c": 1, "folded": [False],
            "mean_sigma": 1.0, "lr": 0.03,
        },
    ]  # fmt: skip


@pytest.mark.parametrize("torn", [b"", b'{"generation":1,"upd', b"x" * 200_000])
def test_a_torn_line_is_cut(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "d"
    path.write_bytes(b'{"a":1}\n{"a":2}\n' + torn)
    log = DecisionLog(path, _no_warning)
    log.restored(2, 3)
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"a": 1}, {"a": 2}, {"restored": 2, "generation": 3},
    ]  # fmt: skip


def test_a_file_of_one_torn_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.write_bytes(b'{"generation"')
    DecisionLog(path, _no_warning).close()
    assert path.read_bytes() == b""


def test_a_full_disk_is_said_once_and_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = DecisionLog(tmp_path / "d", said.append)
    real = os.write

    def nearly_full(fd: int, data: bytearray) -> int:
        if len(data) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, bytes(data[:40]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        for update in (1, 2, 3):
            log.add(_decision(update), 0.1)
            log.flush()
    assert len(said) == 1 and "No space left" in said[0]
    log.add(_decision(4), 0.1)
    log.close()
    updates = [json.loads(line)["update"] for line in (tmp_path / "d").read_text().splitlines()]
    assert updates == [1, 2, 3, 4]
    assert len(said) == 2 and said[1].endswith("written again")


def test_what_a_full_disk_keeps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_BACKLOG", 1000)
    said: list[str] = []
    log = DecisionLog(tmp_path / "d", said.append)

    def full(fd: int, data: bytearray) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for update in range(1, 100):
            log.add(_decision(update), 0.1)
            log.flush()
    log.flush()
    assert "updates are not in it" in said[1]
    updates = [json.loads(line)["update"] for line in (tmp_path / "d").read_text().splitlines()]
    assert updates == list(range(1, len(updates) + 1))
    log.close()
