"""What a child prints, raw, in a file that keeps its head and its tail when there is too much of it.

Owns one such file. Must not know: processes, pipes, jobs. A full disk loses output, never the daemon.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rudra_zmq.head.files import CUT, KEPT

LIMIT = 4 << 20


class OutputFile:
    """``write`` appends; beyond ``limit`` bytes all but ``keep`` bytes at each end goes, and the file says so.

    The shortened file is a new one (another inode), so that a follower notices. ``lost`` counts bytes that a full
    disk swallowed.
    """

    def __init__(self, path: Path, *, keep: int = KEPT, limit: int = LIMIT) -> None:
        if limit < 2 * keep + 256:
            raise ValueError("the limit has no room for both ends")
        self.path = path
        self.lost = 0
        self._keep, self._limit = keep, limit
        self._fd = _open(path)
        self._size = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        """Append all of ``data``; on a full disk what does not fit is counted as lost."""
        view = memoryview(data)
        while view:
            if self._size >= self._limit:
                self._shorten()
            room = max(1, self._limit - self._size)
            try:
                done = os.write(self._fd, view[:room])
            except OSError:
                self.lost += len(view)
                return
            self._size += done
            view = view[done:]

    def _shorten(self) -> None:
        head = os.pread(self._fd, self._keep, 0)
        after = os.pread(self._fd, 64, self._keep)
        start = self._keep
        cut = 0
        if (before := CUT.match(after)) is not None:
            start += before.end()
            cut = int(before[1])
        tail = os.pread(self._fd, self._keep, self._size - self._keep)
        cut += self._size - self._keep - start
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            fresh.unlink(missing_ok=True)
            fd = _open(fresh)
        except OSError:
            return self._restart()
        try:
            mark = b"\n[rudra: %d bytes of output cut here]\n" % cut
            size = sum(_write_all(fd, part) for part in (head, mark, tail))
            os.replace(fresh, self.path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            return self._restart()
        os.close(self._fd)
        self._fd, self._size = fd, size
        return None

    def _restart(self) -> None:
        """No room for a second file: the head stays, the rest goes."""
        self.lost += self._size - self._keep
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._keep)
        self._size = self._keep

    def tail(self, count: int) -> bytes:
        """The last ``count`` bytes."""
        return os.pread(self._fd, count, max(0, self._size - count))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _write_all(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


def last_words(tail: bytes) -> str:
    """The line that says what went wrong: the exception of the last traceback, else the last line, else ""."""
    lines = tail.decode("utf-8", "replace").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last):")]
    if starts:
        for line in lines[starts[-1] + 1 :]:
            if line and not line[0].isspace():
                return line.strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
