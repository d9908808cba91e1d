"""``rudra reload``: a SIGHUP to the daemons of this person, or of the system, and what each of them made of it.

Owns where their locks are and the wait for their answers. Must not know: which settings there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rudra_zmq import paths
from rudra_zmq.config import RudraToml
from rudra_zmq.errors import RefusedBySecurity, RudraError, TimedOut, from_wire
from rudra_zmq.net.addresses import lock_holder

ANSWER_S = 10.0


@dataclass(frozen=True)
class Asked:
    """A daemon that was sent a HUP. ``before``: how many reloads it had answered."""

    name: str
    folder: Path
    pid: int
    before: int


@dataclass(frozen=True)
class Answer:
    """What came of it: ``line`` for people, ``row`` for machines, ``error`` where its settings are wrong."""

    line: str
    row: dict[str, Any]
    error: RudraError | None


def places(settings: RudraToml) -> list[tuple[str, Path]]:
    """Where the daemons of this person hold their locks; for root also where the system's do."""
    state = paths.state_folder(settings.paths.state)
    own = [("up", state), ("psd", state), ("learnerd", paths.runtime_place(settings.paths.runtime))]
    services = [("psd", paths.SYSTEM_PSD), ("learnerd", paths.SYSTEM_LEARNERD_RUNTIME)]
    return own if os.getuid() else [*own, *services]


def ask(name: str, folder: Path) -> Asked | None:
    """Send the HUP; None where the daemon does not run."""
    try:
        pid = lock_holder(folder / name, name)
        if not pid:
            return None
        before = int(_read(name, folder).get("count", 0))
        os.kill(pid, signal.SIGHUP)
    except PermissionError:
        raise RefusedBySecurity(f"{name} is another user's", where=str(folder), fix="run as its user") from None
    except (OSError, ValueError):
        return None
    return Asked(name, folder, pid, before)


def answer(asked: Asked) -> Answer:
    """Wait for what the daemon says. Raises TimedOut where it says nothing."""
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        found = _read(asked.name, asked.folder)
        if found.get("pid") == asked.pid and found.get("count", 0) > asked.before:
            return _told(asked, found)
        time.sleep(0.02)
    fix = "see its log: it is stopped, or busy"
    raise TimedOut(f"{asked.name} (PID {asked.pid}) did not answer within {ANSWER_S:g} s", fix=fix)


def _read(name: str, folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(paths.reload_file(folder, name).read_text("utf-8"))
        if isinstance(value, dict):
            return value
    return {}


def _told(asked: Asked, found: dict[str, Any]) -> Answer:
    error = from_wire(*found["problem"]) if found["problem"] else None
    parts = [f"{text} holds from now on" for text in found["applied"]]
    parts += [f"{key} needs a restart" for key in found["later"]]
    text = "nothing changes, its settings are wrong" if error else "; ".join(parts) or "nothing has changed"
    row = {
        "daemon": asked.name,
        "pid": asked.pid,
        "applied": found["applied"],
        "needs_restart": found["later"],
        "error": str(error) if error else "",
    }
    return Answer(f"{asked.name} (PID {asked.pid}): {text}", row, error)
