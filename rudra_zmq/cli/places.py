"""Where jobs are found: at a head that answers, or in the folder of one that does not run (any more).

Owns the search for a job by id, name or "the newest". All kinds of place answer the same questions, so few
commands ask which they have.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from rudra_zmq import paths
from rudra_zmq.cli.output import note
from rudra_zmq.config import RudraToml
from rudra_zmq.errors import NotFound, NotRunning, RefusedBySecurity, RudraError, TimedOut, Unreachable
from rudra_zmq.head import bundles
from rudra_zmq.head.files import list_files, read_file, remove_folder, usage
from rudra_zmq.head.registry import Registry
from rudra_zmq.net import keys
from rudra_zmq.net.addresses import parse
from rudra_zmq.net.client import RpcClient
from rudra_zmq.net.handshake import Curve, explain
from rudra_zmq.wire.bundle import MOST_BYTES, Bundle
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

CALL_S = 10.0
PIECE = 262144  # of a bundle
PLAN_S = 40.0  # its hosts are asked
SLICE_S = 2.0  # between looks at a private cluster that does not answer
M = TypeVar("M", bound=Message)
MOST_PROBLEMS = 3
ENDED = frozenset({"STOPPED", "DONE", "FAILED", "LOST"})


class Place(Protocol):
    """Somewhere that jobs live. Every method raises a RudraError that says what to do."""

    of_run: bool  # of a `rudra run`, whose cluster ends with its one job

    def jobs(self) -> list[c.JobRow]: ...
    def get(self, job: str) -> c.JobReply: ...
    def events(self, job: str, after: int, wait: float, state: str) -> c.Events: ...
    def files(self, job: str) -> list[tuple[str, int]]: ...
    def read(self, job: str, path: str, offset: int, limit: int) -> c.FileData: ...
    def usage(self) -> list[tuple[str, str, int]]: ...
    def remove(self, job: str) -> str:
        """Says what stays, if anything does."""
        ...

    def close(self) -> None: ...


class Head:
    """A psd that answers at ``address``."""

    def __init__(self, address: str, token_file: Path, *, run: Path | None = None, curve: Curve = None) -> None:
        """``run``: the folder of the private cluster whose psd this is. With ``curve`` no token is needed."""
        self.address, self.run, self.of_run = address, run, run is not None
        token = "" if curve is not None else paths.read_token(token_file)
        self._rpc = RpcClient(address, whoami=c.Whoami(token=token), curve=curve)

    def close(self) -> None:
        self._rpc.close()

    def _call(self, message: Message, *, expect: type[M], timeout: float) -> M:
        """The answer. A private cluster that has ended is no reason to wait for one."""
        if self.run is None:
            return self._rpc.call(message, expect=expect, timeout=timeout)
        end = time.monotonic() + timeout
        while True:
            try:
                return self._rpc.call(message, expect=expect, timeout=timeout - CALL_S + SLICE_S)
            except (TimedOut, Unreachable):
                if live_endpoint(self.run) is None:
                    raise Unreachable("its private cluster has ended", where=str(self.run)) from None
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def jobs(self) -> list[c.JobRow]:
        return self._call(c.ListJobs(), expect=c.Jobs, timeout=CALL_S).rows

    def get(self, job: str) -> c.JobReply:
        return self._call(c.GetJob(job=job), expect=c.JobReply, timeout=CALL_S)

    def events(self, job: str, after: int, wait: float, state: str) -> c.Events:
        message = c.GetEvents(job=job, after=after, wait=wait, state=state)
        return self._call(message, expect=c.Events, timeout=CALL_S + wait)

    def files(self, job: str) -> list[tuple[str, int]]:
        return self._call(c.ListFiles(job=job), expect=c.Files, timeout=CALL_S).rows

    def read(self, job: str, path: str, offset: int, limit: int) -> c.FileData:
        message = c.ReadFile(job=job, path=path, offset=offset, limit=limit)
        return self._call(message, expect=c.FileData, timeout=CALL_S)

    def usage(self) -> list[tuple[str, str, int]]:
        return self._call(c.DiskUse(), expect=c.DiskUsed, timeout=CALL_S).rows

    def remove(self, job: str) -> str:
        return self._call(c.RemoveJob(job=job), expect=c.Ok, timeout=CALL_S).text

    def submit(self, message: c.Submit, code: Bundle | None = None) -> str:
        """The id of the new job. ``code`` goes first, where the head lacks it."""
        if code is not None:
            self._put(code)
        try:
            return self._call(message, expect=c.Submitted, timeout=CALL_S).job
        except NotFound:
            if code is None:
                raise
            self._put(code)  # the last job that needed it was removed in between
            return self._call(message, expect=c.Submitted, timeout=CALL_S).job

    def _put(self, code: Bundle) -> None:
        held, size = 0, len(code.data)
        message = c.PutBundle(name=code.name, size=size)
        while (held := self._call(message, expect=c.BundleHeld, timeout=CALL_S).held) < size:
            piece = code.data[held : held + PIECE]
            message = c.PutBundle(name=code.name, size=size, offset=held, data=piece)

    def stop(self, job: str, now: bool) -> str:
        return self._call(c.StopJob(job=job, now=now), expect=c.Ok, timeout=CALL_S).text

    def resume(self, job: str) -> str:
        return self._call(c.ResumeJob(job=job), expect=c.Ok, timeout=CALL_S).text

    def why(self, job: str) -> c.Waits:
        """What its processes wait for."""
        return self._call(c.Why(job=job), expect=c.Waits, timeout=CALL_S)

    def read_log(self, host: str, offset: int, limit: int) -> c.LogData:
        """Of the learnerd on ``host``, or ("") of psd."""
        return self._call(c.ReadLog(host=host, offset=offset, limit=limit), expect=c.LogData, timeout=CALL_S)

    def keys(self) -> c.Keys:
        return self._call(c.ListKeys(), expect=c.Keys, timeout=CALL_S)

    def do(self, message: c.AuthorizeKey | c.RevokeKey | c.ForgetHost) -> str:
        """Carry out; what the head says of it."""
        return self._call(message, expect=c.Ok, timeout=CALL_S).text

    def invite(self, message: c.Invite) -> c.Keys:
        return self._call(message, expect=c.Keys, timeout=CALL_S)

    def hosts(self) -> list[c.HostRow]:
        return self.listing().rows

    def listing(self) -> c.Hosts:
        return self._call(c.ListHosts(), expect=c.Hosts, timeout=CALL_S)

    def set_host(self, host: str, state: c.Standing) -> str:
        return self._call(c.SetHost(host=host, state=state), expect=c.Ok, timeout=CALL_S).text

    def plan(self, message: c.Submit) -> c.Planned:
        plan = c.PlanJob(name=message.name, toml=message.toml, cwd=message.cwd)
        return self._call(plan, expect=c.Planned, timeout=PLAN_S)


class FinishedRun:
    """The folder of a ``rudra run`` whose private cluster is gone. Nothing is kept open: there may be thousands."""

    of_run = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def _registry(self) -> Iterator[Registry]:
        # Where SQLite may not put files of its own beside it, it is told that nobody writes.
        alone = not os.access(self.folder, os.W_OK)
        registry = Registry.open_readonly(paths.registry_file(self.folder), self._fix(), alone=alone)
        try:
            yield registry
        except ValueError as error:  # of values: SQLite holds nothing against its types
            raise RudraError(f"the registry cannot be read: {error}", where=str(self.folder), fix=self._fix()) from None
        finally:
            registry.close()

    def _fix(self) -> str:
        return f"use the rudra that wrote it if that is newer; else `rm -r {self.folder}`"

    def close(self) -> None: ...

    def jobs(self) -> list[c.JobRow]:
        with self._registry() as registry:
            return [self._settled(row) for row in registry.jobs()]

    def get(self, job: str) -> c.JobReply:
        with self._registry() as registry:
            reply = registry.get(job)
        return msgspec.structs.replace(reply, row=self._settled(reply.row))

    def events(self, job: str, after: int, wait: float, state: str) -> c.Events:
        with self._registry() as registry:
            return c.Events(rows=registry.events(job, after), job=self._settled(registry.get(job).row))

    def files(self, job: str) -> list[tuple[str, int]]:
        return list_files(self.folder / "jobs" / job)

    def read(self, job: str, path: str, offset: int, limit: int) -> c.FileData:
        return read_file(self.folder / "jobs" / job, path, offset, limit)

    def usage(self) -> list[tuple[str, str, int]]:
        return usage(self.folder, [job.job for job in self.jobs()])

    def bundle(self, name: str) -> Bundle:
        """Code that a job of it ran. NotFound."""
        return Bundle(name, bundles.read(self.folder, name, 0, MOST_BYTES)[0])

    def remove(self, job: str) -> str:
        """The run and its one job are the same thing."""
        try:
            remove_folder(self.folder)
        except OSError as error:
            text = f"the folder of job {job} stays: {error.strerror}"
            raise RudraError(text, where=str(self.folder), fix="look at its owner and permissions") from None
        return ""

    def _settled(self, row: c.JobRow) -> c.JobRow:
        """Nothing runs in a folder without a cluster: a job that had no end was LOST (R16)."""
        row = msgspec.convert(msgspec.to_builtins(row), c.JobRow)  # SQLite holds nothing against its types
        if row.state in ENDED:
            return row
        reason = "its private cluster is gone; `rudra resume` goes on from the newest snapshot"
        return msgspec.structs.replace(row, state="LOST", reason=reason)


class DownCluster(FinishedRun):
    """The state folder of a cluster that is down: its jobs can be looked at, and go on at the next ``rudra up``."""

    of_run = False

    def _fix(self) -> str:
        return "use the rudra that wrote it if that is newer, or another state folder (RUDRA_PATHS_STATE)"

    def remove(self, job: str) -> str:
        raise Unreachable(f"the cluster of job {job} is down", where=str(self.folder), fix="`rudra up` first")

    def _settled(self, row: c.JobRow) -> c.JobRow:
        row = msgspec.convert(msgspec.to_builtins(row), c.JobRow)
        if row.state in ENDED:
            return row
        return msgspec.structs.replace(row, reason="its cluster is down; `rudra up` goes on with it")


AnyPlace = Head | FinishedRun


@dataclass
class Found:
    """A job and where it is."""

    place: AnyPlace
    row: c.JobRow


class Places:
    """All places of this person on this machine, opened as they are asked for; close it."""

    def __init__(self, settings: RudraToml, head: str = "") -> None:
        self.settings = settings
        self._address = head
        self._open: list[Head] = []
        self._found: list[Found] | None = None
        self._problems: list[RudraError] = []
        self._silent: RudraError | None = None  # why a head was not asked

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *exc: object) -> None:
        for place in self._open:
            place.close()

    def head(self) -> Head:
        """The one head that submit and the like talk to; Unreachable with the fix where there is none."""
        address, token = self.where()
        try:
            place = Head(address, token, curve=keys.curve_to(address, self.settings.head.key, "user"))
        except NotFound as error:
            if (refused := explain(parse(address), None, None)) is not None:
                raise refused from None
            fix = f"name the token file of the psd at {address} with RUDRA_TOKEN_FILE"
            raise NotFound(error.message, where=error.where, fix=fix) from None
        self._open.append(place)
        return place

    def where(self) -> tuple[str, Path]:
        """The address of that head and the file of its token."""
        state = paths.state_folder(self.settings.paths.state)
        endpoint = live_endpoint(state)
        if endpoint is None and not self._has_registry(state):
            endpoint = live_endpoint(paths.SYSTEM_PSD)  # members of the group rudra may read it
        address = self._address or self.settings.head.address or (endpoint or {}).get("address", "")
        if not address or (endpoint is None and address.startswith("ipc://") and not Path(address[6:]).exists()):
            raise Unreachable(
                f"no psd is running{f' at {address}' if address else ''}",
                where=str(state),
                fix="start one with `rudra up`, name one with --head or head.address, or use `rudra run`",
            )
        parse(address)
        token = os.environ.get("RUDRA_TOKEN_FILE") or (endpoint or {}).get("token_file") or paths.token_file(state)
        return address, Path(token)

    def all(self) -> Iterator[AnyPlace]:
        """The head, or the folder of one that is down, then the runs; with --head that head alone.

        A place that cannot be opened is left out, and named by ``tell``.
        """
        if self._address:
            yield self.head()
            return
        state = paths.state_folder(self.settings.paths.state)
        down = live_endpoint(state) is None
        try:
            yield self.head()
        except Unreachable as error:
            if self.settings.head.address:
                self._problems.append(error)
        except RudraError as error:
            self._problems.append(error)
            self._silent = error
        if down and self._has_registry(state):
            yield DownCluster(state)
        yield from self._runs(state / "runs")

    def _has_registry(self, folder: Path) -> bool:
        try:
            return stat.S_ISREG(paths.registry_file(folder).stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            what = error.strerror or "it cannot be read"
            self._problems.append(RudraError(what, where=str(folder), fix="chown it to yourself, or remove it"))
            return False

    def _runs(self, folder: Path) -> Iterator[AnyPlace]:
        """The private clusters that run, and the folders of those that have."""
        try:
            runs = sorted(folder.iterdir(), reverse=True)
        except FileNotFoundError:
            runs = []
        for run in runs:
            if not self._has_registry(run):
                continue
            endpoint = live_endpoint(run)
            if endpoint is None:
                yield FinishedRun(run)
                continue
            try:
                place = Head(endpoint["address"], Path(endpoint["token_file"]), run=run)
            except RudraError as error:
                self._problems.append(error)
                continue
            except KeyError:
                self._problems.append(RudraError("its endpoint.json is not whole", where=str(run), fix="stop its psd"))
                continue
            self._open.append(place)
            yield place

    def tell(self) -> None:
        """Name the places that could not be asked, once."""
        lines = list(dict.fromkeys(map(str, self._problems)))
        for line in lines[:MOST_PROBLEMS]:
            note(f"rudra: {line}")
        if len(lines) > MOST_PROBLEMS:
            note(f"rudra: and {len(lines) - MOST_PROBLEMS} more places that cannot be read")
        self._problems.clear()

    def jobs(self) -> list[Found]:
        """Every job, newest first; asked once. Only a head that was named with --head must answer."""
        if self._found is None:
            found: list[Found] = []
            for place in self.all():
                try:
                    found += self._jobs_of(place)
                except RudraError as error:
                    if self._address:
                        raise
                    self._problems.append(error)
                    if isinstance(place, Head):
                        self._silent = self._silent or error
            self._found = sorted(found, key=lambda f: f.row.created, reverse=True)
        return self._found

    def check(self) -> None:
        """Raise where no job was found, and the reason may be a place that could not be asked; the others are told."""
        if self.jobs() or not self._problems:
            return
        first = self._silent or self._problems[0]
        self._problems = [error for error in self._problems if str(error) != str(first)]
        self.tell()
        raise first

    @staticmethod
    def _jobs_of(place: AnyPlace) -> list[Found]:
        try:
            return [Found(place, row) for row in place.jobs()]
        except Unreachable:
            if not isinstance(place, Head) or place.run is None:
                raise
            over = FinishedRun(place.run)  # it is just ending
            return [Found(over, row) for row in over.jobs()]

    def find(self, job: str) -> Found:
        """By id, else the newest of that name, else ("") the newest of all; a choice that was made is said."""
        found = self.jobs()
        for candidate in found:
            if candidate.row.job == job:
                return candidate
        self.check()
        self.tell()
        if not found:
            raise NotFound("there are no jobs", fix="start one with `rudra run JOB.toml`")
        named = [f for f in found if not job or f.row.name == job]
        if not named and self._silent is not None:
            if isinstance(self._silent, RefusedBySecurity):
                raise RefusedBySecurity(f"no job {job!r} where jobs could be asked for", fix="see the line before")
            raise Unreachable(f"no job {job!r} where jobs could be asked for", fix="see the line before, and ask again")
        if not named:
            raise NotFound(f"no job {job!r}", fix="`rudra jobs` lists them")
        if len(named) > 1 or not job:
            which = f"the newest of {len(named)} of this name" if job else "the newest"
            note(f"job {named[0].row.job} {named[0].row.name} ({which})")
        return named[0]

    def find_live(self, job: str) -> tuple[Head, c.JobRow]:
        """As ``find``, for a job that can be told something: one that has not ended, at a head that answers."""
        found = self.find(job)
        row, place = found.row, found.place
        if row.state in ENDED:
            fix = (
                f"`rudra again {row.job}` runs it anew" if row.state == "DONE" else f"`rudra resume {row.job}` goes on"
            )
            raise NotRunning(f"job {row.job} is {row.state}", fix=fix)
        if not isinstance(place, Head):
            raise down(row)
        return place, row


def down(row: c.JobRow) -> Unreachable:
    """The error of a job that has not ended and whose cluster does not run."""
    return Unreachable(f"job {row.job} is {row.state}, and its cluster is down", fix="`rudra up` first")


def ended_run(head: Head) -> FinishedRun | None:
    """Where the jobs of this head are now, if its private cluster has ended."""
    return FinishedRun(head.run) if head.run is not None and live_endpoint(head.run) is None else None


def live_endpoint(state: Path) -> dict[str, str] | None:
    """What the psd of this state folder wrote of itself, None unless it lives."""
    try:
        value = json.loads(paths.endpoint_file(state).read_text())
        command = Path(f"/proc/{int(value['pid'])}/cmdline").read_bytes()  # empty for a zombie
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {k: str(v) for k, v in value.items()} if b"psd" in command else None
