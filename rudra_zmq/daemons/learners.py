"""The learners of this host: spawned, respawned, stopped, and their ends told.

Owns the processes of ranks and evaluators, their spec files and the address file of each job's node. Must not know:
the connection to the head (learnerd); what it has to be told goes through ``tell``.

A death by a signal is a loss: the rank starts again with the next incarnation, after 0.5, 1, 2 s, ``restarts`` times.
Any other bad end is told and left to the head.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rudra_zmq import log, paths
from rudra_zmq.config import JobFile, job_from_toml
from rudra_zmq.config.host import HostSection
from rudra_zmq.daemons.account import Account
from rudra_zmq.daemons.base import write_json
from rudra_zmq.daemons.code import Code
from rudra_zmq.daemons.environment import learner_environment
from rudra_zmq.daemons.output import OutputFile, last_words
from rudra_zmq.daemons.readiness import interpreter, problems
from rudra_zmq.daemons.spawn import Child, Supervisor, memory_file
from rudra_zmq.errors import ConfigError, RudraError
from rudra_zmq.head import bundles
from rudra_zmq.head.files import remove_folder
from rudra_zmq.head.ranks import EVALUATOR, file_stem
from rudra_zmq.net.auth import KeyPair
from rudra_zmq.net.loop import Loop, Timer
from rudra_zmq.wire.messages.control import (
    KillLearner,
    LearnerExit,
    LearnerStarted,
    NodeMoved,
    StartLearners,
    StopLearners,
)

logger = log.get()

CODE_S = 900.0  # for its code to be there
BACKOFF_S = 0.5
MOST_BACKOFF_S = 8.0
EXIT_NO_NODE = 75  # of the learner's library: the node could not be reached
TAIL = 1 << 18


@dataclass
class Worker:
    """One rank or evaluator. ``ending``: "" | stop (the head's wish) | drain (to run elsewhere, or later)."""

    rank: int
    incarnation: int
    restarts: int
    device: str | None = None  # its GPU; "": none of those that the host has declared
    child: Child | None = None
    timer: Timer | None = None
    ending: str = ""
    why: str = ""  # of a kill
    ooms: int = 0  # of the memory controller, before it was started


@dataclass
class Work:
    """What this host does for one job."""

    order: StartLearners
    file: JobFile
    threads: int
    node_file: Path
    code: Path | None = None  # where its own code is or will be
    ready: bool = True  # the code is there
    workers: dict[int, Worker] = field(default_factory=dict)


class Learners:
    """All of them. ``tell`` takes LearnerStarted and LearnerExit."""

    def __init__(
        self,
        loop: Loop,
        supervisor: Supervisor,
        *,
        state: Path,
        runtime: Path,
        host: HostSection,
        tell: Callable[[LearnerStarted | LearnerExit], None],
        code: Code,
        account: Account | None = None,
    ) -> None:
        self._loop, self._supervisor = loop, supervisor
        self._state, self._runtime, self._host = state, runtime, host
        self._name = host.host_name
        self._tell = tell
        self._code = code
        self._account = account
        self._work: dict[str, Work] = {}
        self._draining = False

    def sweep(self) -> None:
        """Remove the files of learners of a daemon that was killed: they died with it, and tokens are in there."""
        for pattern in ("l-??????-*.json", "n-??????.json"):
            for left in self._runtime.glob(pattern):
                left.unlink(missing_ok=True)

    @property
    def count(self) -> int:
        """Learners that hold a slot."""
        return sum(rank != EVALUATOR for work in self._work.values() for rank in work.workers)

    def running(self) -> list[tuple[str, int, int, int]]:
        """(job, rank, incarnation, PID or 0 while it waits to start again)."""
        return [
            (job, worker.rank, worker.incarnation, worker.child.pid if worker.child else 0)
            for job, work in self._work.items()
            for worker in work.workers.values()
        ]

    # ---------------------------------------------------------------------------------------- orders

    def start(self, order: StartLearners) -> str:
        """Spawn what is asked for and does not run; says with how many threads. A RudraError fails the job."""
        if self._draining:
            raise RudraError(f"learnerd on {self._name} is stopping")
        file = job_from_toml(order.toml, name=order.name).job
        if found := problems(
            file, "" if order.bundle else order.cwd, self._host
        ):  # it was well when the job was placed
            raise ConfigError("; ".join(found), where=self._name)
        ranks = [*order.ranks, *([EVALUATOR] if order.evaluator else [])]
        devices = dict(zip(order.ranks, order.devices, strict=False))
        work = self._work.get(order.job)
        cores = len(os.sched_getaffinity(0))
        if work is None:
            threads = order.threads or max(1, cores // max(1, len(order.ranks)))
            folder = self._make_folder(order.job)
            work = Work(order, file, threads, self._runtime / f"n-{order.job}.json")
            self._work[order.job] = work
            if order.bundle:
                self._fetch(work, folder)
        work.order = order
        self._write_addresses(work, order)
        for rank in ranks:
            if rank not in work.workers:
                device = devices.get(rank, "" if self._host.devices else None)
                worker = work.workers[rank] = Worker(rank, order.incarnation, order.restarts, device)
                if work.ready:
                    self._spawn(work, worker)
                else:
                    worker.timer = self._loop.after(CODE_S, lambda: self._code_is_there(work, "its code did not come"))
            elif (child := work.workers[rank].child) is not None:
                self._started(work, work.workers[rank], child)
        plural = "s" if work.threads > 1 else ""
        code = f", code {order.bundle[:12]}" if order.bundle else ""
        return f"{work.threads} thread{plural} each, {cores} cores{code}"

    def _fetch(self, work: Work, folder: paths.JobFolder) -> None:
        """See to the job's own code; its learners start when it is there."""
        name = work.order.bundle
        try:
            bundles.place(self._state, name)
            bundles.need(folder, name)
        except (OSError, RudraError) as error:
            del self._work[work.order.job]
            if isinstance(error, RudraError):
                raise
            raise RudraError(f"the job's code: {error.strerror}", where=str(folder.root)) from None
        work.code, work.ready = folder.code, False
        self._code.provide(work.order.job, name, lambda problem: self._code_is_there(work, problem))

    def _code_is_there(self, work: Work, problem: str) -> None:
        """Or it will not be: then nobody can start."""
        if self._work.get(work.order.job) is not work or work.ready:
            return
        work.ready = not problem
        if not problem and self._account is not None and work.code is not None:
            problem = self._account.lend_tree(work.code)
        if not problem and not os.path.isdir(self._cwd(work)):
            problem = f"there is no folder {work.file.run.cwd} in the job's code"
        for worker in list(work.workers.values()):
            if worker.timer is not None:
                worker.timer.cancel()
                worker.timer = None
            if problem:
                self._over(work, worker, "spawn", 1, respawn=False, text=problem)
            else:
                self._spawn(work, worker)

    @staticmethod
    def _cwd(work: Work) -> str:
        """Where its learners start."""
        if work.code is not None:
            return str(work.code / work.file.run.cwd)
        return work.file.run.cwd or work.order.cwd

    def _make_folder(self, job: str) -> paths.JobFolder:
        """Of a job on this host; ``output`` in it is the learners' own."""
        folder = paths.job_folder(self._state, job).make(private=self._account is None)
        output = folder.root / "output"
        output.mkdir(mode=0o700, exist_ok=True)
        if self._account is not None:
            for path in (folder.root.parent, folder.root, folder.logs):
                self._account.lend(path, 0o750)
            self._account.lend(output, 0o770)
        return folder

    def moved(self, order: NodeMoved) -> None:
        """The job's node listens elsewhere now; its learners read it from the file."""
        work = self._work.get(order.job)
        if work is not None:
            try:
                self._write_addresses(work, order)
            except RudraError as error:
                logger.error("the node's addresses were not written", job=order.job, error=str(error))

    def _write_addresses(self, work: Work, order: StartLearners | NodeMoved) -> None:
        value = {"addresses": order.addresses, "generation": order.generation, "key": order.key}
        write_json(work.node_file, value, self._account)

    def stop(self, order: StopLearners) -> None:
        """TERM, KILL after the grace; without ranks all of the job."""
        work = self._work.get(order.job)
        if work is None:
            return
        for rank in order.ranks or list(work.workers):
            worker = work.workers.get(rank)
            if worker is not None:
                self._end(work, worker, "drain" if order.leave else "stop", order.grace)

    def remove(self, job: str) -> None:
        """The job is no more: what this host keeps of it goes, unless something of it still runs here."""
        if job not in self._work:
            folder = paths.job_folder(self._state, job)
            bundle = bundles.needed(folder)
            try:
                remove_folder(folder.root)
                bundles.collect(self._state, bundle)
            except OSError as error:
                logger.warning("a removed job's folder stays", job=job, error=str(error))

    def kill(self, order: KillLearner) -> None:
        """Fence: KILL, at once; then it starts again as after any loss."""
        work = self._work.get(order.job)
        worker = work.workers.get(order.rank) if work is not None else None
        if worker is not None and worker.child is not None and worker.incarnation == order.incarnation:
            worker.why = order.reason
            self._supervisor.kill(worker.child)

    def drain(self, grace: float) -> None:
        """This daemon ends: every learner finishes its step, pushes and leaves, ``grace`` seconds at most."""
        self._draining = True
        self.leave(grace)

    def leave(self, grace: float) -> None:
        """All that runs here ends as for a drain; what is asked for later starts."""
        for work in list(self._work.values()):
            for worker in list(work.workers.values()):
                self._end(work, worker, "drain", grace)

    def _end(self, work: Work, worker: Worker, ending: str, grace: float) -> None:
        worker.ending = worker.ending or ending
        if worker.child is not None:
            self._supervisor.stop(worker.child, grace)
        elif worker.timer is not None:
            # It waits to start again: the incarnation that will not be ends well.
            worker.timer.cancel()
            worker.incarnation += 1
            self._over(work, worker, "ok", 0, respawn=worker.ending == "drain")

    # ---------------------------------------------------------------------------------------- processes

    def _spawn(self, work: Work, worker: Worker) -> None:
        worker.timer = None
        name = file_stem(worker.rank)
        folder = paths.job_folder(self._state, work.order.job)
        spec = self._spec_file(work, worker)
        env = learner_environment(
            spec=spec,
            threads=work.threads,
            job=work.file.run.env,
            code=work.code,
            host=self._host,
            device=worker.device,
            source=None if self._account is None else self._account.environment(os.environ),
        )
        output: OutputFile | None = None
        key = -1
        try:
            key = memory_file("key", KeyPair.new().secret.encode("ascii"))
            write_json(spec, self._spec(work, worker, key), self._account)
            if self._account is not None:
                self._account.lend_file(folder.log(name))
            output = OutputFile(folder.output(name))
            if worker.incarnation > work.order.incarnation:
                output.write(b"[rudra: incarnation %d]\n" % worker.incarnation)
            worker.ooms = oom_kills()
            child = self._supervisor.spawn(
                [interpreter(work.file, self._host), "-m", "rudra_zmq.learner.process"],
                env=env,
                cwd=self._cwd(work),
                output=output,
                on_exit=lambda child: self._exited(work, worker, child),
                pass_fds=(key,),
                account=self._account,
            )
        except (OSError, RudraError) as error:
            if output is not None:
                output.close()
            text = str(error) if isinstance(error, RudraError) else f"cannot be started: {error.strerror}"
            # Later: whoever asked for it gets its answer before the news.
            self._loop.after(0.0, lambda: self._over(work, worker, "spawn", 1, respawn=False, text=text))
            return
        finally:
            if key >= 0:
                os.close(key)
        worker.child = child
        self._started(work, worker, child)

    def _started(self, work: Work, worker: Worker, child: Child) -> None:
        logger.info(
            "learner started", job=work.order.job, rank=worker.rank, incarnation=worker.incarnation, pid=child.pid
        )
        self._tell(
            LearnerStarted(
                job=work.order.job,
                rank=worker.rank,
                incarnation=worker.incarnation,
                pid=child.pid,
                evaluator=worker.rank == EVALUATOR,
            )
        )

    def _spec_file(self, work: Work, worker: Worker) -> Path:
        rank = "e" if worker.rank == EVALUATOR else str(worker.rank)
        return self._runtime / f"l-{work.order.job}-{rank}.json"

    def _spec(self, work: Work, worker: Worker, key: int) -> dict[str, object]:
        folder = paths.job_folder(self._state, work.order.job)
        return {
            "job": work.order.job,
            "rank": worker.rank,
            "incarnation": worker.incarnation,
            "role": "evaluator" if worker.rank == EVALUATOR else "learner",
            "token": work.order.token,
            "node_file": str(work.node_file),
            "log": str(folder.log(file_stem(worker.rank))),
            "output": str(folder.root / "output"),
            "toml": work.order.toml,
            "cwd": self._cwd(work),
            "code": "" if work.code is None else str(work.code),
            "threads": work.threads,
            "host": self._name,
            "ppid": os.getpid(),
            "key_fd": key,
        }

    def _exited(self, work: Work, worker: Worker, child: Child) -> None:
        worker.child = None
        status = child.returncode if child.returncode is not None else 1
        tail = child.tail
        if worker.ending:
            self._over(work, worker, "ok", status, respawn=worker.ending == "drain", tail=tail)
        elif status == 0:
            self._over(work, worker, "ok", 0, respawn=False, tail=tail)
        elif status < 0 or status == EXIT_NO_NODE:
            self._lost(work, worker, child, status)
        else:
            text = last_words(tail) or f"it ended with status {status} and no word"
            self._over(work, worker, "error", status, respawn=False, text=text, tail=tail)

    def _lost(self, work: Work, worker: Worker, child: Child, status: int) -> None:
        oom = status == -signal.SIGKILL and not child.killed and oom_kills() > worker.ooms
        text = _cause(status, child, worker, oom)
        worker.why = ""
        if worker.restarts <= 0:
            self._over(work, worker, "oom" if oom else "signal", status, respawn=False, text=text, tail=child.tail)
            return
        self._report(work, worker, "oom" if oom else "signal", status, respawn=True, text=text, tail=child.tail)
        pause = min(BACKOFF_S * 2 ** (work.order.restarts - worker.restarts), MOST_BACKOFF_S)
        worker.restarts -= 1
        worker.timer = self._loop.after(pause, lambda: self._again(work, worker))

    def _again(self, work: Work, worker: Worker) -> None:
        worker.incarnation += 1
        self._spawn(work, worker)

    def _over(
        self, work: Work, worker: Worker, kind: str, status: int, *, respawn: bool, text: str = "", tail: bytes = b""
    ) -> None:
        """The rank is no longer ours; with the last one the job is not either."""
        job = work.order.job
        self._spec_file(work, worker).unlink(missing_ok=True)
        work.workers.pop(worker.rank, None)
        if not work.workers and self._work.get(job) is work:
            work.node_file.unlink(missing_ok=True)
            del self._work[job]
        self._report(work, worker, kind, status, respawn=respawn, text=text, tail=tail)

    def _report(
        self, work: Work, worker: Worker, kind: str, status: int, *, respawn: bool, text: str = "", tail: bytes = b""
    ) -> None:
        job = work.order.job
        write = logger.info if kind == "ok" else logger.warning
        write("learner ended", job=job, rank=worker.rank, incarnation=worker.incarnation, kind=kind, text=text)
        self._tell(
            LearnerExit(
                job=job,
                rank=worker.rank,
                incarnation=worker.incarnation,
                evaluator=worker.rank == EVALUATOR,
                kind=kind,  # type: ignore[arg-type]
                status=status,
                respawn=respawn,
                text=text[:4000],
                tail=tail[-TAIL:].decode("utf-8", "replace") if kind != "ok" else "",
            )
        )


def _cause(status: int, child: Child, worker: Worker, oom: bool) -> str:
    """Why a process was lost, for people."""
    if status == EXIT_NO_NODE:
        return last_words(child.tail) or "it could not reach its node"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    if oom:
        return f"{name}, the host (or its memory limit) ran out of memory"
    if child.killed:
        return f"killed on purpose: {worker.why or 'it did not stop in time'}"
    return f"killed by {name}"


def oom_kills() -> int:
    """Processes that the kernel killed for want of memory in this process's control group; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text("ascii", "replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                file = Path(f"/sys/fs/cgroup{path}") / "memory.events"
            elif "memory" in controllers.split(","):
                file = Path(f"/sys/fs/cgroup/memory{path}") / "memory.oom_control"
            else:
                continue
            with contextlib.suppress(OSError):
                for row in file.read_text("ascii").splitlines():
                    if row.startswith("oom_kill "):
                        return int(row.split()[1])
    return 0
