"""What of a job's folder can be seen, and that nothing else can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rudra_zmq.errors import NotFound, RefusedBySecurity
from rudra_zmq.head import bundles, files
from rudra_zmq.head.files import list_files, read_file, remove_folder, usage
from rudra_zmq.paths import JobFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "jobs" / "abc123"
    (root / "logs").mkdir(parents=True)
    (root / "snapshots" / "1-10").mkdir(parents=True)
    (root / "logs" / "learner-0.out").write_bytes(b"0123456789")
    (root / "snapshots" / "1-10" / "state.json").write_bytes(b"{}")
    (root / "weights.safetensors").write_bytes(b"w" * 7)
    (root / "metrics.csv").write_bytes(b"m" * 3)
    (root / "code" / "pkg").mkdir(parents=True)
    (root / "code" / "pkg" / "train.py").write_bytes(b"c" * 5)
    (tmp_path / "jobs" / "secret").write_text("token")
    os.symlink(tmp_path / "jobs" / "secret", root / "logs" / "link")
    os.symlink(tmp_path, root / "out")
    os.mkfifo(root / "logs" / "fifo")
    return root


def test_list_has_plain_files_alone(folder: Path) -> None:
    assert list_files(folder) == [
        ("logs/learner-0.out", 10),
        ("metrics.csv", 3),
        ("snapshots/1-10/state.json", 2),
        ("weights.safetensors", 7),
    ]
    assert list_files(folder / "nowhere") == []


def test_usage_by_kind(folder: Path) -> None:
    state = folder.parents[1]
    assert usage(state, ["abc123"]) == [
        ("abc123", "snapshots", 2), ("abc123", "logs", 10), ("abc123", "weights", 7), ("abc123", "code", 5),
        ("abc123", "other", 3),
    ]  # fmt: skip


def test_a_bundle_counts_once(folder: Path) -> None:
    state, name = folder.parents[1], "a" * 64
    (state / "bundles").mkdir()
    (state / "bundles" / name).write_bytes(b"b" * 100)
    (state / "jobs" / "def456").mkdir()
    for job in ("abc123", "def456"):
        bundles.need(JobFolder(state / "jobs" / job), name)
    code = {job: size for job, what, size in usage(state, ["def456", "abc123", "ffffff"]) if what == "code"}
    assert code == {"def456": 100, "abc123": 5, "ffffff": 0}


@pytest.mark.parametrize(("offset", "limit", "data"), [(0, 4, b"0123"), (8, 100, b"89"), (10, 5, b""), (99, 5, b"")])
def test_reads_a_piece(folder: Path, offset: int, limit: int, data: bytes) -> None:
    got = read_file(folder, "logs/learner-0.out", offset, limit)
    assert (got.data, got.size) == (data, 10)
    assert got.inode == (folder / "logs" / "learner-0.out").stat().st_ino


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../secret", "logs/../../secret", "logs/link", "out/secret", "a\0b", "logs/.."],
)
def test_never_leaves_the_folder(folder: Path, path: str) -> None:
    with pytest.raises(RefusedBySecurity):
        read_file(folder, path, 0, 10)


@pytest.mark.parametrize("path", ["logs/nope", "logs", "logs/fifo", "metrics.csv/x", "x" * 300, "."])
def test_what_is_not_a_file_is_not_found(folder: Path, path: str) -> None:
    with pytest.raises(NotFound):
        read_file(folder, path, 0, 10)


def test_remove_is_whole_and_repeatable(folder: Path) -> None:
    remove_folder(folder)
    remove_folder(folder)
    assert not folder.exists()
    assert (folder.parent / "secret").exists()


def test_a_link_that_comes_after_the_look_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "job"
    outside.mkdir()
    (outside / "token").write_text("secret")
    (folder / "output").mkdir(parents=True)
    (folder / "output/own").write_text("mine")
    assert read_file(folder, "output/own", 0, 100).data == b"mine"
    (folder / "output/deep").symlink_to(outside)
    monkeypatch.setattr(files, "resolve", lambda folder, path: folder / path)  # as if it had been a folder then
    with pytest.raises(NotFound):
        read_file(folder, "output/deep/token", 0, 100)
