"""Snapshots: whole or not at all, the newest good one, what a kill or a full disk leaves."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudra_zmq.node import snapshot, tensors
from rudra_zmq.node.snapshot import Content, Store


def _content(generation: int, update: int) -> Content:
    rows = [tensors.Tensor("weights", "F32", (4,), np.full(4, update, np.float32))]
    return Content(generation, update, rows, {"update": update, "text": "x" * 100})


def _no_warning(text: str) -> None:
    raise AssertionError(text)


def test_the_newest_is_of_the_highest_generation(tmp_path: Path) -> None:
    store = Store(tmp_path / "snapshots", keep=5)
    for generation, update in [(1, 50), (1, 200), (2, 120), (10, 90)]:
        assert store.write(_content(generation, update)).error == ""
    loaded = store.newest(_no_warning)
    assert loaded is not None
    assert (loaded.generation, loaded.update, loaded.state["update"]) == (10, 90, 90)
    np.testing.assert_array_equal(snapshot.vectors(loaded)["weights"], np.full(4, 90, np.float32))


def test_as_many_are_kept_as_asked_for(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for update in range(5):
        store.write(_content(1, update))
    assert [update for _, update, _ in store.complete()] == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1-3", "1-4"]


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, name: str, how: str) -> None:
    store = Store(tmp_path, keep=3)
    store.write(_content(1, 1))
    store.write(_content(1, 2))
    path = tmp_path / "1-2" / name
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-7] if how == "cut" else data[:-7] + bytes([data[-7] ^ 1]) + data[-6:])
    said: list[str] = []
    loaded = store.newest(said.append)
    assert loaded is not None and loaded.update == 1
    if name != "manifest.json" or how != "gone":  # without a manifest it never was one
        assert len(said) == 1 and "1-2" in said[0]


def test_none_at_all(tmp_path: Path) -> None:
    assert Store(tmp_path / "absent", keep=1).newest(_no_warning) is None
    assert Store(tmp_path / "absent", keep=1).clean() == 0


@pytest.mark.parametrize("step", ["fsync", "rename", "open"])
@pytest.mark.parametrize("nth", range(6))
def test_a_kill_at_any_step_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, nth: int
) -> None:
    """A kill between two system calls is an exception that nobody catches: nothing is tidied up after it."""
    store = Store(tmp_path, keep=1)
    store.write(_content(1, 1))

    class Killed(BaseException):
        pass

    real = getattr(os, step)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth + 1:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, dying)
        try:
            store.write(_content(1, 2))
            survived = True
        except Killed:
            survived = False
    assert survived or calls == nth + 1
    again = Store(tmp_path, keep=1)
    again.clean()
    loaded = again.newest(_no_warning)
    assert loaded is not None and loaded.update in ((2,) if survived else (1, 2))
    assert not list(tmp_path.glob(".*"))
    assert again.write(_content(1, 3)).error == ""
    assert [p.name for p in tmp_path.iterdir()] == ["1-3"]


def test_a_full_disk_is_said_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, keep=1)
    store.write(_content(1, 1))

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        outcome = store.write(_content(1, 2))
    assert "No space left" in outcome.error and "Fix:" in outcome.error
    loaded = store.newest(_no_warning)
    assert loaded is not None and loaded.update == 1
    assert [p.name for p in tmp_path.iterdir()] == ["1-1"]


def test_a_manifest_of_a_later_format_is_passed_over(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    store.write(_content(1, 1))
    path = tmp_path / "1-1" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    said: list[str] = []
    assert store.newest(said.append) is None
    assert "format 2" in said[0]


def test_the_writer_calls_back() -> None:
    results: list[int] = []
    writer = snapshot.Writer(results.append)
    assert not writer.busy
    writer.start(lambda: 7)
    assert writer.join(10)
    assert results == [7]
