"""The files of a job's folder: listing, reading a piece, sizes, removal; never a path that leaves the folder.

Owns what may be seen of a folder from outside: plain files below it, no link out; and the mark in what a script
printed too much of. Must not know: jobs, hosts.
Used by the head, by learnerd for the logs on its host, by the command line for a cluster that is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from rudra_zmq.errors import NotFound, RefusedBySecurity
from rudra_zmq.wire.messages.control import FileData

MAX_READ = 262144
KEPT = 1 << 20
"""Bytes at each end of a script's output that stay when it is shortened; the mark stands after the first so many."""
CUT = re.compile(rb"\n\[rudra: (\d+) bytes of output cut here\]\n")


def _walk(folder: Path) -> Iterator[tuple[str, int]]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            try:
                info = os.lstat(path)
            except FileNotFoundError:
                continue  # a snapshot that was just replaced
            if stat.S_ISREG(info.st_mode):
                yield os.path.relpath(path, folder), info.st_size


def list_files(folder: Path) -> list[tuple[str, int]]:
    """(path relative to the folder, bytes) of every plain file, by path; empty where there is no folder."""
    return sorted(_walk(folder))


def usage(folder: Path, job: str) -> list[tuple[str, str, int]]:
    """(job, what, bytes) with what = snapshots, logs, weights, other; all four, also where they are 0."""
    sums = {"snapshots": 0, "logs": 0, "weights": 0, "other": 0}
    for path, size in _walk(folder):
        top = "weights" if path == "weights.safetensors" else path.partition("/")[0]
        sums[top if top in sums else "other"] += size
    return [(job, what, size) for what, size in sums.items()]


def resolve(folder: Path, path: str) -> Path:
    """The file that ``path`` names below ``folder``. RefusedBySecurity where it leads out of it."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\0" in path or ".." in parts:
        raise RefusedBySecurity(f"{path!r} is no path inside the job's folder", fix="name one of its files")
    base = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(base / path))
    if not real.is_relative_to(base):
        raise RefusedBySecurity(f"{path!r} leads out of the job's folder", where=str(folder))
    return real


def read_file(folder: Path, path: str, offset: int, limit: int) -> FileData:
    """Up to ``limit`` (<= 262144) bytes at ``offset``; none at or after the end.

    RefusedBySecurity for a path that leads out, NotFound where there is no such plain file.
    """
    real = resolve(folder, path)
    try:
        fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise _missing(folder, path) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise _missing(folder, path)
        data = os.pread(fd, min(limit, MAX_READ), offset)
        return FileData(data=data, inode=info.st_ino, size=info.st_size)
    finally:
        os.close(fd)


def _missing(folder: Path, path: str) -> NotFound:
    return NotFound(f"there is no file {path}", where=str(folder), fix="wait until its process has started")


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it; nothing to do where it is gone already. OSError where it cannot be."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
