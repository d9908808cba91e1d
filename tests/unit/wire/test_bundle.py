"""Bundles: equal folders are equal bytes; nothing gets out of the folder, nothing is overwritten, nothing is half there."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rudra_zmq.errors import Rejected, RudraError
from rudra_zmq.wire import bundle
from rudra_zmq.wire.bundle import Entry

FILES = [Entry("train.py", b"print(1)\n", False), Entry("a/b/ü.txt", b"", False), Entry("a/run", b"x" * 600_000, True)]


def unpacked(tmp_path: Path, data: bytes, name: str = "") -> Path:
    """The target; the bundle lies beside it."""
    file, target = tmp_path / "bundle", tmp_path / "code"
    file.write_bytes(data)
    for _ in bundle.unpack(file, name or hashlib.sha256(data).hexdigest(), target):
        assert not (target.exists() and list(tmp_path.glob(".code.*"))), "it appears whole, at the end"
    return target


def crafted(rows: Any, content: bytes, *, magic: bytes = b"RZB1", length: int | None = None) -> bytes:
    table = msgspec.msgpack.encode(rows)
    return magic + (len(table) if length is None else length).to_bytes(4, "big") + table + content


def test_there_and_back(tmp_path: Path) -> None:
    made = bundle.make(FILES)
    assert made == bundle.make(FILES[::-1]) and made.name == hashlib.sha256(made.data).hexdigest()
    code = unpacked(tmp_path, made.data, made.name)
    found = {str(p.relative_to(code)): p.read_bytes() for p in code.rglob("*") if p.is_file()}
    assert found == {entry.path: entry.data for entry in FILES}
    assert [bool(stat.S_IMODE((code / e.path).stat().st_mode) & 0o100) for e in FILES] == [False, False, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "code"]


@pytest.mark.parametrize("change", [Entry("train.py", b"print(2)\n", False), Entry("train.py", b"print(1)\n", True),
                                    Entry("train2.py", b"print(1)\n", False)])  # fmt: skip
def test_every_difference_is_another_name(change: Entry) -> None:
    assert bundle.make([change, *FILES[1:]]).name != bundle.make(FILES).name


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../x", "a//b", "./x", "a/.", "", ".", "..", "a/", "a\0b", "a\nb", "a\\b", "x" * 2000],
)
def test_names_that_are_none(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError):
        bundle.make([Entry(path, b"", False)])
    (tmp_path / "in").mkdir()
    with pytest.raises(Rejected):
        unpacked(tmp_path / "in", crafted([(path, 1, False)], b"x"))
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "bundle"]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"RZB1", b"x" * 100, crafted([("a", 1, False)], b"x", magic=b"RZB2"), crafted([("a", 2, False)], b"x"),
        crafted([("a", 1, False)], b"xy"), crafted([("a", 1, False)], b"x", length=2**32 - 1),
        crafted([("a", -1, False)], b""), crafted([("a", 1)], b"x"), crafted([("a", "1", False)], b"x"), crafted({}, b""),
        crafted([(7, 1, False)], b"x"), crafted([(f"{i}", 0, False) for i in range(bundle.MOST_FILES + 1)], b""),
        crafted([("a", 1, False), ("a", 1, False)], b"xx"), crafted([("a", 1, False), ("a/b", 1, False)], b"xx"),
        crafted([("a/b", 1, False), ("a", 1, False)], b"xx"), crafted([("a", 2**63, False)], b"x"),
        crafted([["a", 1, False, "/etc/passwd"]], b"x"),
    ],
)  # fmt: skip
def test_what_is_no_bundle_leaves_nothing(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(Rejected) as caught:
        unpacked(tmp_path, data)
    assert caught.value.fix and [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_content_that_is_not_what_the_name_says(tmp_path: Path) -> None:
    made = bundle.make(FILES)
    for data in (made.data[:-1] + b"y", made.data[:-1], made.data + b"x"):
        with pytest.raises(Rejected, match="name says"):
            unpacked(tmp_path, data, made.name)
    assert not (tmp_path / "code").exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("mine")
    unpacked_to = tmp_path / "code"
    file = tmp_path / "bundle"
    made = bundle.make(FILES)
    file.write_bytes(made.data)
    list(bundle.unpack(file, made.name, unpacked_to))
    assert [p.name for p in unpacked_to.iterdir()] == ["train.py"] and (unpacked_to / "train.py").read_text() == "mine"
    other = tmp_path / "link"
    os.symlink(tmp_path / "nowhere", other)
    with pytest.raises(RudraError):
        list(bundle.unpack(file, made.name, other))
    assert not (tmp_path / "nowhere").exists() and not list(tmp_path.glob(".*"))


def test_a_job_that_is_removed_while_its_code_is_unpacked_stays_removed(tmp_path: Path) -> None:
    code = bundle.make([bundle.Entry(f"d{i}/x.py", b"1", False) for i in range(5)])
    (tmp_path / "b").write_bytes(code.data)
    job = tmp_path / "jobs" / "abc123"
    job.mkdir(parents=True)
    steps = bundle.unpack(tmp_path / "b", code.name, job / "code")
    while not list(job.iterdir()):
        next(steps)
    shutil.rmtree(job)
    with pytest.raises(RudraError, match="cannot be unpacked"):
        list(steps)
    assert not job.exists()
