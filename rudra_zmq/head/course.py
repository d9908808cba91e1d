"""The course of a job: queue, node, end. Each wait has a deadline, and each step a line in the job's story.

Owns how the effects of core.job's table are carried out: the node's life as the head sees it, and how a job ends. Must
not know: sockets, processes (effects say what is to be done), the learners' own states (crew).

A job ends in steps: its end is decided (``Job.ending``), node and learners are told, timers see to those who do not
listen, and once nothing of it runs any more the end is written down and its slots are free.
"""

from __future__ import annotations

from rudra_zmq import log
from rudra_zmq.core import job as life
from rudra_zmq.errors import NotRunning
from rudra_zmq.head.crew import Crew
from rudra_zmq.head.effects import Effect, Send, StartNode, StopNode
from rudra_zmq.head.fleet import Fleet
from rudra_zmq.head.inspection import Findings, inspect
from rudra_zmq.head.jobs import Book, Job
from rudra_zmq.head.placement import schedule
from rudra_zmq.head.ranks import Seat
from rudra_zmq.wire.messages.control import CheckJob, JobState, NodeDone, NodeHello, NodeReport, NodeStop

logger = log.get()

DRAIN_S = 30.0  # a clean stop: the running step, the last update and the snapshot
END_S = 2.0  # an end at once
FAIL_S = 5.0  # of the 10 s that a failed job may still be there
FORCE_S = 4.0  # from the kill until what is left is given up on
DEATHS = 5
DEATHS_S = 600.0
BACKOFF_S = 0.2
MOST_BACKOFF_S = 5.0
HELLO_S = 60.0  # a node that restores a large snapshot takes its time
SILENT_S = 10.0  # of a node that reports every second: said
HUNG_S = 60.0  # and killed; learners look for it for learners.deadline from about SILENT_S on
LEARNERS_END_S = 60.0  # at least, for what a script does after its training

_REPORTED: dict[str, life.Event] = {"RUNNING": "running", "WAITING": "waiting"}
_DONE: dict[str, life.Event] = {"DONE": "node-done", "STOPPED": "node-stopped"}


class Course:
    """All live jobs. Every method may append effects; ``tick`` is called often."""

    def __init__(self, book: Book, fleet: Fleet, out: list[Effect], *, suspend_as: JobState) -> None:
        self._book, self._fleet, self._out = book, fleet, out
        self._suspend_as = suspend_as
        self._stopping = False
        self._looked = 0.0
        self.crew = Crew(book, fleet, out, fail=self.fail, changed=self._check_end)
        self._carry_out = {
            "start-node": self._start_node,
            "start-learners": self.crew.node_serves,
            "tell-learners": self.crew.node_serves,
            "drain-node": self._drain,
            "end-node": self._end_at_once,
            "stop-learners": self._end_learners,
        }

    def _happens(self, job: Job, event: life.Event, now: float, reason: str = "") -> bool:
        """Take the step of the table and carry out its effects. False where the event means nothing here."""
        ending = "FAILED" if job.ending and job.ending[0] == "FAILED" else "STOPPED"
        step = life.step(job.state, event, ending)  # type: ignore[arg-type]
        if step is None:
            return False
        if step.state in life.ENDED:
            job.ending = (step.state, reason)  # written down once nothing runs: "free-slots"
        else:
            self._book.set_state(job, step.state, reason)
        for effect in step.effects:
            if effect in self._carry_out:
                self._carry_out[effect](job, now)
        self._check_end(job)
        return True

    # ---------------------------------------------------------------------------------------- start

    def schedule(self, now: float) -> None:
        """Start what the free slots allow, in the order of the queue."""
        queue = self._book.pending()
        if not queue or self._stopping:
            return
        plan = schedule([job.wanted for job in queue], self._fleet.rooms(self.crew.used()))
        for job in queue:
            seats = plan.placed.get(job.id)
            if seats is not None:
                self._book.settle(job, seats)
                self._inspect(job, list(seats.values()), now)
            elif job.reason != plan.reasons[job.id]:
                self._book.set_state(job, "PENDING", plan.reasons[job.id])
                self._book.event(job.id, "I", f"waits: {job.reason}")

    def _inspect(self, job: Job, seats: list[Seat], now: float) -> None:
        """Its hosts are asked whether they have what it needs; its seats are kept meanwhile."""
        job.checking = True
        question = CheckJob(name=job.name, toml=job.toml, cwd="" if job.bundle else job.cwd)
        names = [seat.host for seat in seats]
        inspect(self._fleet, names, question, now, lambda found: self._inspected(job, seats, found, now))

    def _inspected(self, job: Job, seats: list[Seat], found: Findings, now: float) -> None:
        if self._book.live.get(job.id) is not job or not job.checking:
            return
        job.checking = False
        if self._stopping or found.silent:  # the queue is looked at again at the next tick
            job.learners = {}
            return
        for host, lines in found.problems.items():
            for line in lines:
                self._book.event(job.id, "W", f"host {host}: {line}")
        if refusal := found.refusal():
            job.learners = {}
            self.fail(job, refusal, now)
            return
        hosts = list(dict.fromkeys(seat.host for seat in seats))
        devices = [seat.device for seat in seats if seat.device]
        few = len(set(devices))
        what = "device" if devices else "slot"
        text = f"gets {job.count} {what}{'' if job.count == 1 else 's'} on {', '.join(hosts)}"
        if few < len(devices):
            text = f"{job.count} learners share {few} device{'' if few == 1 else 's'} of {', '.join(hosts)}"
        self._book.event(job.id, "I", text)
        if different := self._fleet.differences(hosts):
            self._book.event(job.id, "W", f"its hosts differ: {different}")
        self._happens(job, "placed", now)

    def _start_node(self, job: Job, now: float) -> None:
        """At once, or after a pause that grows with each death of late."""
        if not job.deaths:
            self._spawn(job, now)
        else:
            pause = min(BACKOFF_S * 2 ** (len(job.deaths) - 1), MOST_BACKOFF_S)
            job.timers.append((now + pause, "spawn"))

    def _spawn(self, job: Job, now: float) -> None:
        job.generation += 1
        job.peer = None
        job.node_runs = True
        job.timers.append((now + HELLO_S, "hello"))
        self._book.store_course(job)
        spec = {
            "job": job.id,
            "name": job.name,
            "generation": job.generation,
            "token": job.token,
            "folder": str(self._book.folder(job.id).root),
            "toml": job.toml,
            "resume": job.generation > 1,
            "previous": list(job.addresses),
        }
        self._out.append(StartNode(job.id, spec))

    def take_up(self, job: Job, now: float) -> None:
        """A job that this head's predecessor left unfinished. Its learners may be alive, its node is not."""
        if job.state == "PENDING":
            return
        if job.state == "STOPPING" or not job.learners:
            job.ending = ("STOPPED", "psd ended while the job was stopping")
            self._check_end(job)
            return
        self._book.event(job.id, "W", "psd was started again; the job goes on from its newest snapshot")
        self._spawn(job, now)

    def resume(self, job: Job, now: float) -> None:
        """An ended job, just loaded, goes back into the queue."""
        job.learners = {}
        self._happens(job, "resume", now)
        self._book.event(job.id, "I", "goes on from its newest snapshot")
        self.schedule(now)

    # ---------------------------------------------------------------------------------------- node

    def hello(self, job: Job, peer: bytes, message: NodeHello, now: float) -> None:
        """The node serves."""
        job.peer, job.addresses, job.key = peer, list(message.addresses), message.key
        job.heard = now
        _drop(job, "hello")
        where = message.addresses[0] if message.addresses else "nowhere"
        self._book.event(job.id, "I", f"node (PID {message.pid}, generation {job.generation}) serves at {where}")
        self.crew.recall(job)
        if job.ending or not self._happens(job, "node-up", now, job.reason):
            self._tell_node(job, now=True)

    def report(self, job: Job, message: NodeReport, now: float) -> None:
        """Figures, and with them the state."""
        progress = message.progress
        self._book.report(job, progress, now)
        if job.ending:
            return
        event = _REPORTED.get(progress.state)
        moved = event is not None and self._happens(job, event, now, progress.reason)
        if not moved and progress.state == job.state:
            self._book.set_state(job, progress.state, progress.reason)

    def done(self, job: Job, message: NodeDone, now: float) -> None:
        """The node's own end: everything of it is on disk, and it exits."""
        job.done = True
        job.timers = [(now + END_S + FAIL_S, "kill-node")]
        self._book.report(job, message.progress, now, save=True)
        event: life.Event = _DONE.get(message.state, "node-failed")
        reason = message.reason
        if job.ending is not None and (job.ending[0] == "FAILED" or event == "node-stopped"):
            event = "node-failed" if job.ending[0] == "FAILED" else event
            reason = job.ending[1]
        self._happens(job, event, now, reason)

    def _end_learners(self, job: Job, now: float) -> None:
        """Trained learners end by themselves, a script may still have work of its own; others are told."""
        if job.ending and job.ending[0] == "DONE":
            self.crew.dismiss(job)
            patience = max(LEARNERS_END_S, job.file.learners.step_timeout_s)
            job.timers += [(now + patience, "stop-learners"), (now + patience + FORCE_S + 3.0, "force")]
            if self.crew.alive(job):
                self._book.set_state(job, job.state, "trained; its learners end")  # type: ignore[arg-type]
        else:
            self.crew.stop(job, grace=FAIL_S)
            job.timers.append((now + FAIL_S + FORCE_S, "force"))

    def node_exited(self, job: Job, status: int, words: str, now: float) -> None:
        """Its process ended; unless that was due, it is started again with a new generation."""
        job.node_runs, job.peer, job.torpid = False, None, False
        _drop(job, "hello")
        if job.done:
            self._check_end(job)
            return
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        if job.ending:
            self._happens(job, "node-exit", now, job.ending[1])
            return
        said = f"{how}: {words}" if words else how
        job.deaths.append(now)
        while job.deaths and now - job.deaths[0] > DEATHS_S:
            job.deaths.popleft()
        if len(job.deaths) > DEATHS:
            reason = f"its node ended {len(job.deaths)} times in 10 minutes, last {said}"
            self._book.event(job.id, "E", reason)
            self._happens(job, "node-hopeless", now, reason)
            return
        text = f"node ended {said}; restart {len(job.deaths)} of {DEATHS} from the newest snapshot"
        self._book.event(job.id, "W", text)
        self._happens(job, "node-exit", now, "its node is started again")

    def _tell_node(self, job: Job, *, now: bool) -> None:
        """Ask, where it listens; else end its process."""
        _drop(job, "spawn")
        if job.done:
            return
        if job.peer is not None and job.ending:
            state = "FAILED" if job.ending[0] == "FAILED" else "STOPPED"
            stop = NodeStop(now=now, state=state, reason=job.ending[1][:4000])  # type: ignore[arg-type]
            self._out.append(Send(job.peer, stop))
        elif job.node_runs:
            self._out.append(StopNode(job.id, 1.0))

    # ---------------------------------------------------------------------------------------- end

    def fail(self, job: Job, reason: str, now: float) -> None:
        """The job cannot succeed any more: everything of it is gone within 10 s."""
        if job.ending and job.ending[0] != "DONE":
            return
        job.ending = ("FAILED", reason)
        self._book.event(job.id, "E", reason)
        self._happens(job, "fail", now, reason)

    def stop(self, job: Job, at_once: bool, now: float, reason: str = "stopped on request") -> str:
        """Drain and snapshot, or at once; says what is being done. NotRunning where it ends another way."""
        if job.done:
            self.crew.stop(job, grace=END_S)
            return "it has ended already, its learners are stopped"
        if job.ending and job.ending[0] != "STOPPED":
            raise NotRunning(f"job {job.id} ends already", where=job.ending[1], fix="wait a few seconds")
        waited = job.state == "PENDING"
        job.ending = ("STOPPED", reason)
        if not self._happens(job, "stop-now" if at_once else "stop", now, reason):
            return "it is stopping already"
        if waited:
            return "stopped; it had not started"
        return "stopping at once" if at_once else "stopping"

    def _drain(self, job: Job, now: float) -> None:
        if job.peer is None:
            self._end_at_once(job, now)
            return
        text = f"stops: running mini-batches are finished and a snapshot is made (at most {DRAIN_S:g} s)"
        self._book.event(job.id, "I", text)
        self._tell_node(job, now=False)
        over = now + DRAIN_S
        job.timers = [(over, "kill-node"), (over, "stop-learners"), (over + FORCE_S, "force")]

    def _end_at_once(self, job: Job, now: float) -> None:
        failed = job.ending is not None and job.ending[0] == "FAILED"
        if not failed:
            self._book.event(job.id, "I", "is stopped at once; its newest snapshot stays")
        self._tell_node(job, now=True)
        self.crew.stop(job, grace=END_S)
        over = now + (FAIL_S if failed else END_S)
        job.timers = [(over, "kill-node"), (over + FORCE_S, "force")]

    def suspend(self, now: float) -> None:
        """psd ends: jobs stop cleanly, and wait for its next start (or are STOPPED, where there will be none)."""
        self._stopping = True
        for job in list(self._book.live.values()):
            if (job.state == "PENDING" and self._suspend_as == "PENDING") or job.ending:
                continue
            job.suspended = True
            self.stop(job, at_once=False, now=now, reason="psd stops")

    @property
    def busy(self) -> bool:
        """Whether something of a job may still run."""
        return any(job.state != "PENDING" for job in self._book.live.values())

    def _check_end(self, job: Job) -> None:
        """Once nothing of an ending job runs, its end is written down."""
        if job.ending and not job.node_runs and not self.crew.alive(job) and job.id in self._book.live:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        assert job.ending is not None
        state, reason = job.ending
        if job.suspended and state == "STOPPED":
            state, reason = self._suspend_as, "psd was stopped"
        if job.progress is not None:
            self._book.report(job, job.progress, job.saved, save=True)
        self._book.event(job.id, "E" if state == "FAILED" else "I", _last_line(job, state, reason))
        self._book.set_state(job, state, reason)  # type: ignore[arg-type]
        del self._book.live[job.id]

    # ---------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """What is due."""
        for host in self._fleet.lost(now):
            self.crew.host_lost(host, now)
        self.crew.move_away(now)
        slept, self._looked = now - self._looked > SILENT_S / 2, now
        for job in list(self._book.live.values()):
            if slept:  # this daemon, and heard nobody
                job.heard = now
            self._watch_node(job, now)
            due = [what for when, what in job.timers if when <= now]
            job.timers = [timer for timer in job.timers if timer[0] > now]
            for what in due:
                self._due(job, what, now)
        self.schedule(now)

    def heard(self, name: str, now: float) -> None:
        """A word of the node of the job ``name``."""
        job = self._book.live.get(name)
        if job is not None:
            if job.torpid:
                job.torpid = False
                self._book.event(job.id, "I", "node is heard again")
            job.heard = now

    def _watch_node(self, job: Job, now: float) -> None:
        """One that neither works nor ends would keep its job, and all who wait for it, for ever."""
        silent = now - job.heard
        if job.peer is None or not job.node_runs or job.done or job.ending or silent < SILENT_S:
            return
        if not job.torpid:
            job.torpid = True
            self._book.event(job.id, "W", f"node is silent for {silent:.0f} s; at {HUNG_S:g} s it is killed")
        elif silent >= HUNG_S:
            job.heard = now
            self._book.event(job.id, "W", f"node is silent for {silent:.0f} s and is killed")
            self._out.append(StopNode(job.id, 0.0))

    def _due(self, job: Job, what: str, now: float) -> None:
        if what == "spawn" and not job.ending:
            self._spawn(job, now)
        elif what == "hello" and job.node_runs:
            self._book.event(job.id, "W", f"node did not serve within {HELLO_S:g} s and is killed")
            self._out.append(StopNode(job.id, 0.0))
        elif what == "kill-node" and job.node_runs:
            if not job.done:
                self._book.event(job.id, "W", "node did not stop in time and is killed; its newest snapshot stays")
            self._out.append(StopNode(job.id, 0.0))
        elif what == "stop-learners":
            self.crew.stop(job, grace=END_S)
        elif what == "force" and job.ending and job.id in self._book.live:
            left = [learner.rank for learner in self.crew.alive(job)]
            logger.error("processes of a job did not end in time", job=job.id, ranks=left, node=job.node_runs)
            self._finish(job)


def _drop(job: Job, what: str) -> None:
    job.timers = [timer for timer in job.timers if timer[1] != what]


def _last_line(job: Job, state: str, reason: str) -> str:
    """How it ended; a reason that its story has just told is not told again."""
    p = job.progress
    news = "" if reason == job.told else reason
    if state != "DONE" and (news or p is None):
        return f"{state}: {news}" if news else state
    if p is None:
        return state
    accuracy = "" if p.accuracy is None else f", test accuracy {100 * p.accuracy:.2f} %"
    return f"{state}: {p.samples:,} samples in {p.updates:,} updates and {p.seconds:.1f} s{accuracy}"
