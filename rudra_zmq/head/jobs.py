"""Jobs in memory and in the registry, always both; their story, and who waits for its next line.

Owns the records of a live job and the long-polled answers. Must not know: why a state changes (course), hosts.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rudra_zmq import log, paths
from rudra_zmq.config import JobFile, job_from_toml
from rudra_zmq.core.job import ENDED
from rudra_zmq.errors import NotFound, RudraError
from rudra_zmq.head.effects import Effect, Send
from rudra_zmq.head.placement import Wanted
from rudra_zmq.head.ranks import EVALUATOR, Seat
from rudra_zmq.head.registry import Registry, StoredJob
from rudra_zmq.wire.messages.control import Error, Events, GetEvents, HostRow, JobRow, JobState, Progress

logger = log.get()

SAVE_S = 10.0
RETRY_S = 2.0
MAX_WAIT_S = 20.0
MAX_WAITERS = 1024
MOST_LISTED = 1000


@dataclass
class Learner:
    """One rank (or the evaluator) as the head knows it.

    ``state``: wanted (should run, nobody was asked yet), starting, running, backoff (its learnerd starts it again),
    left (ended by itself), lost (restarts used up). ``next`` is the lowest incarnation that was never handed out,
    ``lowest`` the lowest that its node takes.
    """

    rank: int
    host: str
    next: int
    state: str = "wanted"
    incarnation: int = 0
    device: str = ""
    leaving: bool = False  # its host was told to end it, and that it may start again
    lowest: int = 0

    @property
    def seat(self) -> Seat:
        """What it takes of its host."""
        return Seat(self.host, self.device)

    @property
    def alive(self) -> bool:
        """Whether its learnerd has something to end."""
        return self.state in ("starting", "running", "backoff")


@dataclass
class Job:
    """A job that has not ended, or whose processes have not. Times are the head's monotonic seconds."""

    id: str
    name: str
    token: str
    toml: str
    cwd: str
    file: JobFile
    state: str
    reason: str
    generation: int
    incarnation: int
    bundle: str = ""  # the name of its code
    learners: dict[int, Learner] = field(default_factory=dict)
    peer: bytes | None = None  # the node's
    node_runs: bool = False
    heard: float = 0.0  # of the node, while it has a peer
    torpid: bool = False  # it is silent, and that was said
    addresses: list[str] = field(default_factory=list)
    key: str = ""  # the node's public one
    progress: Progress | None = None
    saved: float = 0.0
    deaths: deque[float] = field(default_factory=deque)
    timers: list[tuple[float, str]] = field(default_factory=list)
    ending: tuple[str, str] | None = None  # the state and reason that it ends with
    done: bool = False  # the node said so
    checking: bool = False  # its hosts are asked whether they can run it; its seats are its own meanwhile
    suspended: bool = False  # psd stops, and will take the job up again
    fences: set[tuple[int, int]] = field(default_factory=set)
    exits: set[tuple[int, int]] = field(default_factory=set)
    told: str = ""  # the last error of its story

    @property
    def count(self) -> int:
        """Slots that it needs."""
        return self.file.learners.count

    @property
    def wanted(self) -> Wanted:
        """The seats that it needs."""
        return wanted_of(self.id, self.file)

    def on(self, host: str) -> list[Learner]:
        """Its learners on one host."""
        return [learner for learner in self.learners.values() if learner.host == host]


def wanted_of(job: str, file: JobFile) -> Wanted:
    """What a job file asks of the cluster."""
    return Wanted(job, file.learners.count, file.learners.host_names, file.learners.device == "auto")


@dataclass(frozen=True)
class _Waiter:
    peer: bytes
    id: str
    ask: GetEvents
    deadline: float


class Book:
    """The live jobs by id; writes through to the registry. A full disk is logged and costs no job."""

    def __init__(
        self, registry: Registry, state: Path, out: list[Effect], address: str, wall: Callable[[], float] = time.time
    ) -> None:
        self.registry = registry
        self.state = state
        self.address = address
        self.wall = wall
        self.live: dict[str, Job] = {}
        self._out = out
        self._waiters: list[_Waiter] = []
        self._limit = log.RateLimiter(30.0)
        self._unsaved: dict[str, dict[str, Any]] = {}  # columns that the disk had no room for
        self._retry = 0.0

    def load(self, stored: StoredJob) -> Job:
        """The record of a job of the registry, made live. ConfigError where its file no longer holds."""
        file = job_from_toml(stored.toml, name=stored.name).job
        job = Job(
            stored.id, stored.name, stored.token, stored.toml, stored.cwd, file, stored.state, stored.reason,
            stored.generation, stored.incarnation, stored.code_hash if file.run.code else "",
            progress=self.registry.get(stored.id).row.progress,
        )  # fmt: skip
        if stored.hosts and job.state != "PENDING":
            self.settle(job, stored.hosts)
        self.live[job.id] = job
        return job

    def settle(self, job: Job, seats: dict[int, Seat]) -> None:
        """Give each rank its seat, and the evaluator rank 0's host."""
        job.learners = {
            rank: Learner(rank, seat.host, job.incarnation, device=seat.device) for rank, seat in seats.items()
        }
        if job.file.kind == "task":
            job.learners[EVALUATOR] = Learner(EVALUATOR, seats[0].host, job.incarnation)

    def folder(self, job: str) -> paths.JobFolder:
        """Where the job keeps its things."""
        return paths.job_folder(self.state, job)

    def pending(self) -> list[Job]:
        """The queue, oldest first."""
        return [job for job in self.live.values() if job.state == "PENDING" and not job.checking]

    # ---------------------------------------------------------------------------------------- writing

    def set_state(self, job: Job, state: JobState, reason: str = "") -> None:
        """Write a state down and tell those who wait for one. A new reason alone (it may count seconds) is not
        written: the figures carry it."""
        same, job.state, job.reason = job.state == state, state, reason[:4000]
        if same:
            return
        values: dict[str, object] = {"state": state, "reason": job.reason}
        if state == "STARTING" and not job.generation:
            values["started"] = self.wall()
        self.store(job, ended=self.wall() if state in ENDED else 0.0, **values)
        self._answer(job.id)

    def store(self, job: Job, **values: object) -> None:
        """Columns of the registry; kept, shown and tried again where they cannot be written."""
        self._save(job.id, self._unsaved.pop(job.id, {}) | values)

    def _save(self, job: str, values: dict[str, Any]) -> None:
        try:
            self.registry.update(job, **values)
        except RudraError as error:
            logger.limited(self._limit, "error", error.message, what=job)
            self._unsaved[job] = values

    @contextlib.contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """A full disk is logged; what is in memory holds on."""
        try:
            yield
        except RudraError as error:
            logger.limited(self._limit, "error", error.message, what=what)

    def store_course(self, job: Job) -> None:
        """What a restart of the head must know beside the state."""
        hosts = {rank: learner.seat for rank, learner in job.learners.items() if rank != EVALUATOR}
        self.store(job, generation=job.generation, incarnation=job.incarnation, hosts=hosts)

    def event(self, job: str, level: str, text: str) -> None:
        """A line of the story; also in the daemon's log."""
        text = " ".join(text.split())[:4000]
        if level == "E" and (live := self.live.get(job)) is not None:
            live.told = text
        write = {"I": logger.info, "W": logger.warning}.get(level, logger.error)
        write("job", job=job, text=text)
        with self._logged(job):
            self.registry.add_event(job, level, text, self.wall())
        self._answer(job)

    def report(self, job: Job, progress: Progress, now: float, *, save: bool = False) -> None:
        """The node's figures: kept, and now and then written down."""
        job.progress = progress
        if save or now - job.saved >= SAVE_S:
            job.saved = now
            with self._logged(job.id):
                self.registry.save_progress(job.id, progress)

    def see_host(self, row: HostRow) -> None:
        """A learnerd has registered, or stands otherwise."""
        with self._logged(row.name):
            self.registry.see_host(row)

    # ---------------------------------------------------------------------------------------- reading

    def row(self, job: str) -> JobRow:
        """The job as it stands now. NotFound."""
        return self.current(self.registry.get(job).row)

    def current(self, row: JobRow) -> JobRow:
        """A row of the registry with what only memory knows."""
        job = self.live.get(row.job)
        if job is None:
            unsaved = self._unsaved.get(row.job, {})
            held = {name: unsaved[name] for name in ("state", "reason", "started", "ended") if name in unsaved}
            return msgspec.structs.replace(row, head=self.address, **held)
        return msgspec.structs.replace(
            row,
            head=self.address,
            state=job.state,
            reason=job.reason,
            generation=job.generation,
            progress=job.progress or row.progress,
        )

    # ---------------------------------------------------------------------------------------- waiting

    def ask(self, peer: bytes, request: str, ask: GetEvents, now: float) -> None:
        """Answer now, or once there is something new, or when the time is up. NotFound."""
        waiter = _Waiter(peer, request, ask, now + min(max(0.0, ask.wait), MAX_WAIT_S))
        if not self._reply(waiter, due=ask.wait <= 0 or len(self._waiters) >= MAX_WAITERS):
            self._waiters.append(waiter)

    def _reply(self, waiter: _Waiter, due: bool) -> bool:
        ask = waiter.ask
        rows = self.registry.events(ask.job, ask.after)
        row = self.row(ask.job)
        if not (due or rows or (ask.state and row.state != ask.state)):
            return False
        self._out.append(Send(waiter.peer, Events(rows=rows, job=row), waiter.id, reply=True))
        return True

    def _answer(self, job: str) -> None:
        mine = [w for w in self._waiters if w.ask.job == job]
        for waiter in mine:
            if self._reply(waiter, due=False):
                self._waiters.remove(waiter)

    def expire(self, now: float) -> None:
        """Answer those whose time is up; write what there was no room for."""
        if self._unsaved and now >= self._retry:
            self._retry = now + RETRY_S
            for job, values in list(self._unsaved.items()):
                del self._unsaved[job]
                self._save(job, values)
        for waiter in [w for w in self._waiters if w.deadline <= now]:
            self._waiters.remove(waiter)
            self._reply(waiter, due=True)

    def next_deadline(self) -> float | None:
        """When ``expire`` has something to do."""
        return min((w.deadline for w in self._waiters), default=None)

    def waiting(self, peer: bytes) -> list[str]:
        """Requests of a peer that wait for something to tell."""
        return [w.id for w in self._waiters if w.peer == peer]

    def forget(self, peer: bytes) -> None:
        """The peer is gone: nobody waits there."""
        self._waiters = [w for w in self._waiters if w.peer != peer]

    def remove(self, job: str) -> None:
        """Forget an ended job; those who wait for its next line are told so. RudraError where it cannot be."""
        self.registry.remove(job)
        self._unsaved.pop(job, None)
        for waiter in [w for w in self._waiters if w.ask.job == job]:
            self._waiters.remove(waiter)
            error = Error(code=NotFound.code, message=f"job {job} was removed")
            self._out.append(Send(waiter.peer, error, waiter.id, reply=True))
