"""What the end-to-end tests share: the commands as a user types them, and readers of what they leave.

Nothing of the product is imported for judging it, save the NumPy reference of the update.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rudra_zmq

BIN = Path(sys.executable).parent


@dataclass
class Result:
    """A finished command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object that ``--json`` leaves as the last line of stdout."""
        value = json.loads(self.out.strip().splitlines()[-1])
        assert isinstance(value, dict)
        return value


class Rudra:
    """The CLI in a home of its own; ``env`` is all that its processes inherit."""

    def __init__(self, home: Path, env: dict[str, str]) -> None:
        self.home = home
        self.env = env

    def __call__(
        self, *args: str | Path, timeout: float = 240, status: int | None = 0, cwd: Path | None = None
    ) -> Result:
        """Run to the end; ``status`` None accepts any exit status."""
        done = subprocess.run(
            [str(BIN / "rudra"), *map(str, args)],
            env=self.env,
            cwd=cwd or self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        result = Result(done.returncode, done.stdout, done.stderr)
        if status is not None:
            assert result.status == status, f"rudra {args}: {result.status}\n{result.out}\n{result.err}"
        return result

    def logs(self) -> list[Path]:
        """The decision logs of all runs. Not by rglob: a snapshot's folder may go while it is looked into."""
        return list(self.home.glob("state/rudra/*/runs/*/jobs/*/decisions.jsonl"))

    def start(self, *args: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start in a process group of its own; the caller waits and kills."""
        return subprocess.Popen(
            [str(BIN / "rudra"), *map(str, args)],
            env=self.env,
            cwd=cwd or self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> dict[int, str]:
        """Pid -> command line of every process that lives in this home."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if f"HOME={self.home}\0".encode() in environ + b"\0" and command:
                found[int(entry.name)] = command
        return found


def wait_for(
    what: str, probe: Callable[[], Any], deadline: float = 60.0, alive: subprocess.Popen[str] | None = None
) -> Any:
    """Poll until ``probe`` gives something true; its deadline is the caller's."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        value = probe()
        if value:
            return value
        if alive is not None and alive.poll() is not None:
            out, err = alive.communicate()
            raise AssertionError(f"ended with {alive.returncode} before {what}\n{out}\n{err}")
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {deadline:g} s")


def decisions(path: Path) -> list[dict[str, Any]]:
    """The updates that count: records that a restore made void are left out."""
    live: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a line cut short by a kill
        if "restored" in record:
            live = [r for r in live if r["update"] <= record["restored"]]
        elif "update" in record:
            live.append(record)
    return live


def spans(records: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """(gradient id, span) of every applied gradient."""
    for record in records:
        for gid, ranges in zip(record["ids"], record["ranges"], strict=True):
            for span in ranges:
                yield tuple(gid), tuple(span)


def job_file(folder: Path, text: str, name: str = "job.toml") -> Path:
    """Write a job file."""
    path = folder / name
    path.write_text(text)
    return path


def child_env(home: Path, runtime: Path) -> dict[str, str]:
    """A built environment, as a fresh login would have it."""
    env = {
        "HOME": str(home),
        "PATH": f"{BIN}:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "XDG_RUNTIME_DIR": str(runtime),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
    }
    root = str(Path(rudra_zmq.__file__).parents[1])
    if root in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        env["PYTHONPATH"] = root  # the code under test is not the installed one
    if "RUDRA_DATA" in os.environ:
        env["RUDRA_DATA"] = os.environ["RUDRA_DATA"]
    return env
