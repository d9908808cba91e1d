"""decisions.jsonl: every update as it was decided, the proof of staleness and of the ledger.

Owns: the form of a line, and that lines are never torn in the middle of the file: what a full disk refuses
is kept and written later, up to a bound. Must not know: how a decision comes about.

Lines are written by the loop itself: that costs about a microsecond, and a millisecond once in a thousand where another
thread forces files of 200 MB to the same disk (the worst of 20,000: 30 ms). Forcing the file takes as long as the disk
wants, and is for threads that may wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rudra_zmq.core.events import Decision

MAX_BACKLOG = 16 << 20

_encode = msgspec.json.Encoder().encode


def record(decision: Decision, lr: float) -> dict[str, Any]:
    """The line of one update: entries in the order of summation, ranges as [epoch, start, stop)."""
    entries = decision.entries
    return {
        "generation": decision.generation,
        "update": decision.update,
        "ids": [e.id for e in entries],
        "timestamps": [e.timestamp for e in entries],
        "scales": [e.scale for e in entries],
        "coefficients": [e.coefficient for e in entries],
        "ranges": [e.spans for e in entries],
        "counts": [e.count for e in entries],
        "c": decision.c,
        "folded": [e.folded for e in entries],
        "mean_sigma": decision.mean_sigma,
        "lr": lr,
    }


class DecisionLog:
    """Appends to the file; nothing raises: what goes wrong on the disk is told once through ``warn``."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._said = False
        self._lost = 0
        self._backlog = bytearray()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        """A node killed in the middle of a line leaves its beginning: nobody could read what follows it."""
        end = os.lseek(self._fd, 0, os.SEEK_END)
        at = end
        while at > 0:
            start = max(0, at - 65536)
            newline = os.pread(self._fd, at - start, start).rfind(b"\n")
            if newline >= 0:
                at = start + newline + 1
                break
            at = start
        if at != end:
            os.ftruncate(self._fd, at)

    def restored(self, update: int, generation: int) -> None:
        """From here on ``generation`` counts: records of older ones with a higher update are void."""
        self._backlog += _encode({"restored": update, "generation": generation}) + b"\n"
        self.flush()

    def add(self, decision: Decision, lr: float) -> None:
        """One update; on the way to the disk with the next ``flush``."""
        if len(self._backlog) > MAX_BACKLOG:
            self._lost += 1
            return
        self._backlog += _encode(record(decision, lr)) + b"\n"

    def flush(self) -> None:
        """Give what is there to the system."""
        if not self._backlog:
            return
        try:
            while self._backlog:
                del self._backlog[: os.write(self._fd, self._backlog)]
        except OSError as error:
            self._say(error)
            return
        if self._said:
            self._said = False
            lost = f"; {self._lost} updates are not in it" if self._lost else ""
            self._warn(f"{self._path} is written again{lost}")

    def sync(self) -> None:
        """Force what was flushed to the disk (before a snapshot that builds on it). From any thread."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._say(error)

    def _say(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            self._warn(f"cannot write {self._path}: {error.strerror}. Fix: make room (training goes on)")

    def close(self) -> None:
        """The last lines, and the descriptor."""
        self.flush()
        self.sync()
        os.close(self._fd)
