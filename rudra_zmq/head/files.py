"""The files of a job's folder: listing, reading a piece, sizes, removal; never a path that leaves the folder.

Owns what may be seen of a folder from outside: plain files below it, no link out; and the mark in what a script
printed too much of. Must not know: jobs, hosts.
Used by the head, by learnerd for the logs on its host, by the command line for a cluster that is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from rudra_zmq import paths
from rudra_zmq.errors import NotFound, RefusedBySecurity
from rudra_zmq.head import bundles
from rudra_zmq.wire.messages.control import FileData

MAX_READ = 262144
KEPT = 1 << 20
"""Bytes at each end of a script's output that stay when it is shortened; the mark stands after the first so many."""
CUT = re.compile(rb"\n\[rudra: (\d+) bytes of output cut here\]\n")


def _walk(folder: Path, code: bool) -> Iterator[tuple[str, int]]:
    """``code``: also the files of the job's own code."""
    for root, folders, names in os.walk(folder):
        if not code and root == str(folder) and "code" in folders:
            folders.remove("code")
        for name in names:
            path = os.path.join(root, name)
            try:
                info = os.lstat(path)
            except FileNotFoundError:
                continue  # a snapshot that was just replaced
            if stat.S_ISREG(info.st_mode):
                yield os.path.relpath(path, folder), info.st_size


def list_files(folder: Path) -> list[tuple[str, int]]:
    """(path relative to the folder, bytes) of every plain file but those of the user's code, by path; empty where
    there is no folder."""
    return sorted(_walk(folder, code=False))


def usage(state: Path, jobs: Iterable[str]) -> list[tuple[str, str, int]]:
    """(job, what, bytes) with what = snapshots, logs, weights, code, other; all five, also where they are 0.

    A bundle that several jobs need counts for the first of them.
    """
    rows: list[tuple[str, str, int]] = []
    counted: set[str] = set()
    for job in jobs:
        folder = paths.job_folder(state, job)
        sums = {"snapshots": 0, "logs": 0, "weights": 0, "code": 0, "other": 0}
        for path, size in _walk(folder.root, code=True):
            top = "weights" if path == "weights.safetensors" else path.partition("/")[0]
            sums[top if top in sums else "other"] += size
        if (name := bundles.needed(folder)) and name not in counted:
            counted.add(name)
            with contextlib.suppress(OSError):
                sums["code"] += bundles.place(state, name).stat().st_size
        rows += [(job, what, size) for what, size in sums.items()]
    return rows


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
        fd = _open(Path(os.path.realpath(folder)), real)
    except (OSError, ValueError):
        raise _missing(folder, path) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise _missing(folder, path)
        data = os.pread(fd, min(limit, MAX_READ), offset)
        return FileData(data=data, inode=info.st_ino, size=info.st_size)
    finally:
        os.close(fd)


def _open(base: Path, real: Path) -> int:
    """A descriptor of ``real`` below ``base``. No link is followed: learners, which may be another user's, could put
    one into the way after it was looked at."""
    *folders, name = real.relative_to(base).parts
    fd = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
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
