"""A temporary folder that is known to be in use as long as its process lives.

Owns: its name, its lock, and removing those that a killed benchmark could not. Must not know: what lies in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "rudra-bench-"
YOUNG_S = 60.0
"""A folder that is younger may not be locked yet."""


class Folder:
    """``path`` exists until `close`."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        for old in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                _sweep(old)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._fd = _locked(self.path)

    def close(self) -> None:
        """Remove it, with what is in it. Harmless twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _locked(path: Path) -> int:
    """Its descriptor, with the lock that ends with this process. OSError where another has it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _sweep(old: Path) -> None:
    """Remove a folder of ours whose process has ended."""
    status = old.lstat()
    if status.st_uid != os.getuid() or time.time() - status.st_mtime < YOUNG_S:
        return
    fd = _locked(old)
    shutil.rmtree(old, ignore_errors=True)
    os.close(fd)
