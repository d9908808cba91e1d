"""Where jobs are found: at a head that answers, or in the folder that a finished ``rudra run`` left.

Owns the search for a job by id, name or "the newest". Both kinds of place answer the same questions, so no
command asks which it has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from rudra_zmq import __version__, paths
from rudra_zmq.cli.output import note
from rudra_zmq.config import RudraToml
from rudra_zmq.errors import NotFound, NotRunning, RudraError, Unreachable
from rudra_zmq.head.files import list_files, read_file, remove_folder, usage
from rudra_zmq.head.registry import Registry
from rudra_zmq.net.client import RpcClient
from rudra_zmq.wire.messages import control as c

CALL_S = 10.0


class Place(Protocol):
    """Somewhere that jobs live. Every method raises a RudraError that says what to do."""

    live: bool

    def jobs(self) -> list[c.JobRow]: ...
    def get(self, job: str) -> c.JobReply: ...
    def events(self, job: str, after: int, wait: float, state: str) -> c.Events: ...
    def files(self, job: str) -> list[tuple[str, int]]: ...
    def read(self, job: str, path: str, offset: int, limit: int) -> c.FileData: ...
    def usage(self) -> list[tuple[str, str, int]]: ...
    def remove(self, job: str) -> str: ...
    def close(self) -> None: ...


class Head:
    """A psd that answers at ``address``."""

    live = True

    def __init__(self, address: str, token_file: Path, *, of_run: bool = False) -> None:
        """``of_run``: the psd of a private cluster, which ends with its one job."""
        self.address, self.of_run = address, of_run
        token = paths.read_token(token_file)
        self._rpc = RpcClient(address, whoami=c.Whoami(token=token, version=__version__))

    def close(self) -> None:
        self._rpc.close()

    def jobs(self) -> list[c.JobRow]:
        return self._rpc.call(c.ListJobs(), expect=c.Jobs, timeout=CALL_S).rows

    def get(self, job: str) -> c.JobReply:
        return self._rpc.call(c.GetJob(job=job), expect=c.JobReply, timeout=CALL_S)

    def events(self, job: str, after: int, wait: float, state: str) -> c.Events:
        message = c.GetEvents(job=job, after=after, wait=wait, state=state)
        return self._rpc.call(message, expect=c.Events, timeout=CALL_S + wait)

    def files(self, job: str) -> list[tuple[str, int]]:
        return self._rpc.call(c.ListFiles(job=job), expect=c.Files, timeout=CALL_S).rows

    def read(self, job: str, path: str, offset: int, limit: int) -> c.FileData:
        message = c.ReadFile(job=job, path=path, offset=offset, limit=limit)
        return self._rpc.call(message, expect=c.FileData, timeout=CALL_S)

    def usage(self) -> list[tuple[str, str, int]]:
        return self._rpc.call(c.DiskUse(), expect=c.DiskUsed, timeout=CALL_S).rows

    def remove(self, job: str) -> str:
        return self._rpc.call(c.RemoveJob(job=job), expect=c.Ok, timeout=CALL_S).text

    def submit(self, message: c.Submit) -> str:
        return self._rpc.call(message, expect=c.Submitted, timeout=CALL_S).job

    def stop(self, job: str, now: bool) -> str:
        return self._rpc.call(c.StopJob(job=job, now=now), expect=c.Ok, timeout=CALL_S).text

    def resume(self, job: str) -> str:
        return self._rpc.call(c.ResumeJob(job=job), expect=c.Ok, timeout=CALL_S).text

    def hosts(self) -> list[c.HostRow]:
        return self._rpc.call(c.ListHosts(), expect=c.Hosts, timeout=CALL_S).rows


class FinishedRun:
    """The folder of a ``rudra run`` whose private cluster is gone."""

    live = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._registry = Registry.open_readonly(paths.registry_file(folder))

    def close(self) -> None:
        self._registry.close()

    def jobs(self) -> list[c.JobRow]:
        return [_settled(row) for row in self._registry.jobs()]

    def get(self, job: str) -> c.JobReply:
        reply = self._registry.get(job)
        return c.JobReply(row=_settled(reply.row), toml=reply.toml, origins=reply.origins, code_hash=reply.code_hash)

    def events(self, job: str, after: int, wait: float, state: str) -> c.Events:
        return c.Events(rows=self._registry.events(job, after), job=self.get(job).row)

    def files(self, job: str) -> list[tuple[str, int]]:
        return list_files(self.folder / "jobs" / job)

    def read(self, job: str, path: str, offset: int, limit: int) -> c.FileData:
        return read_file(self.folder / "jobs" / job, path, offset, limit)

    def usage(self) -> list[tuple[str, str, int]]:
        return [row for job in self.jobs() for row in usage(self.folder / "jobs" / job.job, job.job)]

    def remove(self, job: str) -> str:
        """The run and its one job are the same thing."""
        self.close()
        remove_folder(self.folder)
        return f"removed {self.folder}"


def _settled(row: c.JobRow) -> c.JobRow:
    """Nothing runs in a folder without a cluster: a job that had no end was LOST (R16)."""
    if row.state in ("STOPPED", "DONE", "FAILED", "LOST"):
        return row
    reason = "its private cluster is gone; `rudra resume` goes on from the newest snapshot"
    return msgspec.structs.replace(row, state="LOST", reason=reason)


@dataclass
class Found:
    """A job and where it is."""

    place: Head | FinishedRun
    row: c.JobRow


class Places:
    """All places of this person on this machine, opened as they are asked for; close it."""

    def __init__(self, settings: RudraToml, head: str = "") -> None:
        self.settings = settings
        self._address = head
        self._open: list[Head | FinishedRun] = []

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *exc: object) -> None:
        for place in self._open:
            place.close()

    def head(self) -> Head:
        """The one head that submit and the like talk to; Unreachable with the fix where there is none."""
        state = paths.state_folder(self.settings.paths.state)
        endpoint = live_endpoint(state)
        address = self._address or self.settings.head.address or (endpoint or {}).get("address", "")
        if not address or (endpoint is None and address.startswith("ipc://") and not Path(address[6:]).exists()):
            raise Unreachable(
                f"no psd is running{f' at {address}' if address else ''}",
                where=str(state),
                fix="start one with `rudra up`, name one with --head or head.address, or use `rudra run`",
            )
        token = os.environ.get("RUDRA_TOKEN_FILE") or (endpoint or {}).get("token_file") or paths.token_file(state)
        place = Head(address, Path(token))
        self._open.append(place)
        return place

    def runs(self) -> Iterator[Head | FinishedRun]:
        """The private clusters that run, and the folders of those that have."""
        folder = paths.state_folder(self.settings.paths.state) / "runs"
        for run in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []:
            if not paths.registry_file(run).exists():
                continue
            endpoint = live_endpoint(run)
            place = _run_place(run, endpoint)
            self._open.append(place)
            yield place

    def all(self) -> Iterator[Head | FinishedRun]:
        """The head first, where one runs, then the runs."""
        try:
            yield self.head()
        except Unreachable:
            if self._address or self.settings.head.address:
                raise
        yield from self.runs()

    def jobs(self) -> list[Found]:
        """Every job, newest first; a place that does not answer is named and left out."""
        found: list[Found] = []
        for place in self.all():
            try:
                found += [Found(place, row) for row in place.jobs()]
            except RudraError as error:
                note(f"rudra: {error}")
        return sorted(found, key=lambda f: f.row.created, reverse=True)

    def find(self, job: str) -> Found:
        """By id, else the newest of that name, else ("") the newest of all, which is said."""
        found = self.jobs()
        if not found:
            raise NotFound("there are no jobs", fix="start one with `rudra run JOB.toml`")
        if not job:
            note(f"job {found[0].row.job} {found[0].row.name} (the newest)")
            return found[0]
        for candidate in [f for f in found if f.row.job == job] + [f for f in found if f.row.name == job]:
            return candidate
        raise NotFound(f"no job {job!r}", fix="`rudra jobs` lists them")

    def find_live(self, job: str) -> tuple[Head, c.JobRow]:
        """As ``find``, for what needs a head."""
        found = self.find(job)
        if not isinstance(found.place, Head):
            raise NotRunning(
                f"job {found.row.job} is {found.row.state}",
                fix=f"`rudra resume {found.row.job}` goes on with it",
            )
        return found.place, found.row


def _run_place(run: Path, endpoint: dict[str, str] | None) -> Head | FinishedRun:
    return Head(endpoint["address"], Path(endpoint["token_file"]), of_run=True) if endpoint else FinishedRun(run)


def live_endpoint(state: Path) -> dict[str, str] | None:
    """What the psd of this state folder wrote of itself, None unless it lives."""
    try:
        value = json.loads(paths.endpoint_file(state).read_text())
        command = Path(f"/proc/{int(value['pid'])}/cmdline").read_bytes()  # empty for a zombie
    except (OSError, ValueError, KeyError):
        return None
    return {k: str(v) for k, v in value.items()} if b"psd" in command else None
