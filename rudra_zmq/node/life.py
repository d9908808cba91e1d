"""Does a process that says nothing live? What /proc tells of one on this host.

Owns: the reading of /proc/PID/stat, and when a silent process is at work. Must not know: sessions, what follows.

A thread that pings has no turn while another one holds the interpreter (a C call that does not let go of it): such a
process is silent and computes. One that is stopped, gone, or another one by now is as silent as it seems.

A PID means a process only within its namespace: containers may share a host's name and not its numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STOPPED = "TtZXx"


class Stat(NamedTuple):
    """State letter, start in clock ticks since the boot, and clock ticks of processor time of all threads."""

    state: str
    started: int
    cpu: int


def space() -> int:
    """The PID namespace (an inode) of this process, where /proc shows that one; 0 where it does not."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino if os.readlink("/proc/self") == str(os.getpid()) else 0
    except OSError:
        return 0


def read(pid: int) -> Stat | None:
    """Of a process of this host; None where there is none, or none that may be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return Stat(fields[0], int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, IndexError, ValueError):
        return None


class Process:
    """The process ``pid`` of this host, from now on."""

    def __init__(self, pid: int, read: Callable[[int], Stat | None] = read) -> None:
        self.pid = pid
        self._read = read
        self._first = read(pid)
        self._cpu: int | None = None  # at the last look, while it is silent
        self._worked = -math.inf

    def idle(self, silent: float, now: float) -> float:
        """Seconds without a sign of life, where nothing was heard for ``silent``. To be called about every second.

        Work shows between two looks, so the first one of a silence only says how much there was before it.
        """
        stat = self._read(self.pid)
        if self._first is None or stat is None or stat.started != self._first.started or stat.state in STOPPED:
            self._cpu = None
            return silent
        if self._cpu is not None and stat.cpu > self._cpu:
            self._worked = now
        self._cpu = stat.cpu
        return min(silent, now - self._worked)

    def heard(self) -> None:
        """It spoke: the next silence is another one."""
        self._cpu = None
        self._worked = -math.inf
