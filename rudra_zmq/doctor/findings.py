"""What a check finds, and the run of all checks at once under one deadline.

Owns: the form of a finding, the exit status that follows from many. Must not know: what is looked at.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rudra_zmq.errors import EXIT_FAILED, EXIT_OK, EXIT_SOME_HOSTS, RudraError, one_line

LIMIT_S = 15.0
"""All checks together; a command that needs longer is given up."""
HERE = "this host"

Level: TypeAlias = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One line. ``status``: the exit status that an error of its kind has."""

    id: str  # of the kind of fault; stable
    level: Level
    where: str
    text: str
    fix: str
    status: int = EXIT_FAILED

    def __str__(self) -> str:
        return one_line(f"{self.level}: {self.where}: {self.text}. Fix: {self.fix}")


Check: TypeAlias = Callable[[], Iterable[Finding]]


def of_error(id: str, error: RudraError, *, status: int = EXIT_FAILED) -> Finding:
    """An error as others raise it."""
    return Finding(id, "error", error.where or HERE, error.message, error.fix or "see its log", status)


def of_line(id: str, level: Level, line: str) -> Finding:
    """A line "what. Fix: how" about this host."""
    text, _, fix = line.partition(". Fix: ")
    return Finding(id, level, HERE, text, fix)


def size(count: float) -> str:
    """Bytes with a binary unit."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def examine(checks: Mapping[str, Check], limit: float = LIMIT_S) -> list[Finding]:
    """What all checks find, in their order. One that has not ended within ``limit`` seconds is itself a finding."""
    done: queue.SimpleQueue[tuple[str, list[Finding]]] = queue.SimpleQueue()
    for name, check in checks.items():
        # Daemon threads: the process can end although one waits for a disk that is gone.
        threading.Thread(target=lambda n=name, c=check: done.put((n, _run(n, c))), name=name, daemon=True).start()
    found: dict[str, list[Finding]] = {}
    end = time.monotonic() + limit
    while len(found) < len(checks):
        try:
            name, findings = done.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        found[name] = findings
    return [
        finding for name in checks for finding in found.get(name) or ([] if name in found else [_late(name, limit)])
    ]


def _run(name: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except RudraError as error:
        return [of_error(name, error)]
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        text = f"{name} could not be looked at: {error.strerror or error}{where}"
        return [Finding(name, "warning", HERE, text, "run it as the daemons' user, or as root")]


def _late(name: str, limit: float) -> Finding:
    text = f"looking at {name} has not ended within {limit:g} s"
    return Finding(name, "warning", HERE, text, "look for a disk, a name server or a driver that does not answer")


def verdict(findings: Sequence[Finding]) -> int:
    """The exit status: the head's first, since without it nothing is known of hosts; then this host's, then theirs."""
    statuses = {finding.status for finding in findings if finding.level == "error"}
    head = statuses - {EXIT_FAILED, EXIT_SOME_HOSTS}
    if head:
        return min(head)
    return next((status for status in (EXIT_FAILED, EXIT_SOME_HOSTS) if status in statuses), EXIT_OK)
