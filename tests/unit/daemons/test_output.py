"""The capped output file, and the line of a failure."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from rudra_zmq.daemons.output import OutputFile, last_words


def small(path: Path) -> OutputFile:
    return OutputFile(path, keep=1000, limit=4000)


def test_little_output_is_kept_whole(tmp_path: Path) -> None:
    out = small(tmp_path / "o")
    out.write(b"a" * 2000)
    out.write(b"b" * 2000)
    out.close()
    assert (tmp_path / "o").read_bytes() == b"a" * 2000 + b"b" * 2000
    assert stat.S_IMODE((tmp_path / "o").stat().st_mode) == 0o600


@pytest.mark.parametrize("piece", [1, 7, 999, 3000, 100_000])
def test_head_and_tail_are_kept_and_the_cut_is_said(tmp_path: Path, piece: int) -> None:
    total = 100_000
    whole = b"".join(b"%09d\n" % i for i in range(total // 10))
    out = small(tmp_path / "o")
    for start in range(0, total, piece):
        out.write(whole[start : start + piece])
        assert (tmp_path / "o").stat().st_size <= 4000
    got = (tmp_path / "o").read_bytes()
    assert out.tail(500) == whole[-500:]
    out.close()
    marks = list(re.finditer(rb"\n\[rudra: (\d+) bytes of output cut here\]\n", got))
    assert len(marks) == 1
    head, tail = got[: marks[0].start()], got[marks[0].end() :]
    assert head == whole[:1000]
    assert len(tail) >= 1000 and whole.endswith(tail)
    assert len(head) + int(marks[0][1]) + len(tail) == total
    assert not list(tmp_path.glob("*.new"))


def test_a_cut_is_counted_on_when_the_file_is_opened_again(tmp_path: Path) -> None:
    for _ in range(3):
        out = small(tmp_path / "o")
        out.write(b"x" * 7000)
        out.close()
    got = (tmp_path / "o").read_bytes()
    (mark,) = re.finditer(rb"\n\[rudra: (\d+) bytes of output cut here\]\n", got)
    assert len(got) - len(mark[0]) + int(mark[1]) == 21000


def test_a_shortened_file_is_another_inode(tmp_path: Path) -> None:
    out = small(tmp_path / "o")
    before = (tmp_path / "o").stat().st_ino
    out.write(b"x" * 9000)
    assert (tmp_path / "o").stat().st_ino != before
    out.close()


def test_a_full_disk_loses_output_alone(tmp_path: Path) -> None:
    out = small(tmp_path / "o")
    out.write(b"x" * 10)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, out._fd)
    os.close(full)
    out.write(b"x" * 100)
    assert out.lost == 100
    out.close()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("epoch 1\nepoch 2\n\n", "epoch 2"),
        ("Traceback (most recent call last):\n  File \"x\", line 1, in f\n    g()\nValueError: boom\n", "ValueError: boom"),
        (
            "Traceback (most recent call last):\n  File \"x\"\nKeyError: 1\n\nDuring handling of the above exception, "
            "another exception occurred:\n\nTraceback (most recent call last):\n  File \"y\"\n    ^^^\nmy.Error: two\n",
            "my.Error: two",
        ),
        ("Traceback (most recent call last):\n  File \"x\"\nOSError: e\nlater: a worker says something\n", "OSError: e"),
        ("Traceback (most recent call last):\n  File \"x\"\n", "File \"x\""),
    ],
)  # fmt: skip
def test_last_words(text: str, line: str) -> None:
    assert last_words(text.encode()) == line
