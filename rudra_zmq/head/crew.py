"""The learners of the jobs: asked for, adopted, lost, ended.

Owns each rank's state as the head sees it, and what the job's node is told about it. Must not know: the node's own
life, and how a job ends (course); it says so through ``fail`` and ``changed``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from rudra_zmq import log
from rudra_zmq.head.effects import Effect, Send
from rudra_zmq.head.fleet import Fleet, Host
from rudra_zmq.head.jobs import Book, Job, Learner
from rudra_zmq.head.placement import place
from rudra_zmq.head.ranks import EVALUATOR, Seat, called, file_stem
from rudra_zmq.wire.messages.control import (
    Error,
    KillLearner,
    LearnerExit,
    LearnerGone,
    LearnerStarted,
    NodeFence,
    NodeMoved,
    Ok,
    StartLearners,
    StopLearners,
)
from rudra_zmq.wire.messages.data import Message

logger = log.get()

LEAVE_S = 30.0  # of a learner on a banned host: the running step
MOVE_S = 10.0  # a rank whose host is away this long may start elsewhere


class Crew:
    """All learners of all live jobs."""

    def __init__(
        self,
        book: Book,
        fleet: Fleet,
        out: list[Effect],
        *,
        fail: Callable[[Job, str, float], None],
        changed: Callable[[Job], None],
    ) -> None:
        self._book, self._fleet, self._out = book, fleet, out
        self._fail, self._changed = fail, changed

    def used(self) -> dict[str, list[Seat]]:
        """Seats that are given away, by host: a learner that might still run holds its own."""
        used: dict[str, list[Seat]] = {}
        for job in self._book.live.values():
            for learner in job.learners.values():
                if learner.rank != EVALUATOR:
                    used.setdefault(learner.host, []).append(learner.seat)
        return used

    # ---------------------------------------------------------------------------------------- starting

    def node_serves(self, job: Job, now: float) -> None:
        """The node is there (again): who runs is told where, who does not is started."""
        for name in dict.fromkeys(learner.host for learner in job.learners.values()):
            host = self._fleet.registered(name)
            if host is not None:
                self._provide(job, host, now)

    def recall(self, job: Job) -> None:
        """A node was restored: what followed its snapshot is void, and so is the good-bye of who had finished."""
        if job.generation > 1 and not job.done:
            for learner in job.learners.values():
                if learner.state == "left":
                    learner.state = "wanted"

    def _provide(self, job: Job, host: Host, now: float) -> None:
        if not job.addresses or job.peer is None or job.ending or self._fleet.standing.get(host.name) == "banned":
            return
        mine = job.on(host.name)
        if any(learner.alive for learner in mine):
            addresses = self._fleet.addresses(host, job.addresses)
            moved = NodeMoved(job=job.id, generation=job.generation, addresses=addresses, key=job.key)
            self._fleet.tell(host, moved)
        wanted = [learner for learner in mine if learner.state == "wanted"]
        if wanted:
            self._start(job, host, wanted, now)

    def _start(self, job: Job, host: Host, wanted: Sequence[Learner], now: float) -> None:
        restarts = job.file.learners.restarts
        base = max(learner.next for learner in wanted)
        for learner in wanted:
            learner.state, learner.next = "starting", base + restarts + 1
        job.incarnation = max(job.incarnation, base + restarts + 1)
        self._book.store_course(job)
        seats = {learner.rank: learner.device for learner in wanted if learner.rank != EVALUATOR}
        ranks = sorted(seats)
        message = StartLearners(
            job=job.id,
            generation=job.generation,
            name=job.name,
            token=job.token,
            toml=job.toml,
            cwd=job.cwd,
            ranks=ranks,
            evaluator=len(ranks) < len(wanted),
            addresses=self._fleet.addresses(host, job.addresses),
            threads=job.file.learners.threads,
            restarts=restarts,
            incarnation=base,
            key=job.key,
            bundle=job.bundle,
            devices=[seats[rank] for rank in ranks] if any(seats.values()) else [],
        )
        self._fleet.ask(host, message, now, lambda answer: self._asked(job, host, wanted, answer, now))

    def _asked(self, job: Job, host: Host, asked: Sequence[Learner], answer: Message | None, now: float) -> None:
        if isinstance(answer, Ok):
            ranks = [learner.rank for learner in asked if learner.rank != EVALUATOR]
            who = f"{len(ranks)} learners start" if len(ranks) > 1 else f"{called(asked[0].rank)} starts"
            self._book.event(job.id, "I", f"{who} on {host.name}: {answer.text}")
        elif isinstance(answer, Error):
            for learner in asked:
                learner.state = "lost"
            self._fail(job, f"{host.name} cannot start learners: {answer.message}", now)

    def started(self, message: LearnerStarted, host: Host) -> None:
        """A process runs."""
        job, learner = self._find(message.job, message.rank, message.evaluator)
        if job is None or learner is None or learner.host != host.name:
            self._fleet.tell(host, StopLearners(job=message.job, ranks=[message.rank], grace=2.0))
            return
        again = learner.state == "backoff"
        learner.state, learner.incarnation = "running", message.incarnation
        learner.next = max(learner.next, message.incarnation + 1)
        if job.done:
            self.dismiss(job)
        elif again:
            text = f"{called(learner.rank)} runs again as incarnation {message.incarnation} (PID {message.pid})"
            self._book.event(job.id, "I", text)

    def _find(self, job_id: str, rank: int, evaluator: bool) -> tuple[Job | None, Learner | None]:
        job = self._book.live.get(job_id)
        if job is None:
            return None, None
        return job, job.learners.get(EVALUATOR if evaluator else rank)

    # ---------------------------------------------------------------------------------------- ending

    def exited(self, message: LearnerExit, host: Host, now: float) -> None:
        """A process ended: an error fails the job, a signal is a loss, a good end is a good end."""
        job, learner = self._find(message.job, message.rank, message.evaluator)
        if job is None or learner is None or learner.host != host.name:
            return
        if (learner.rank, message.incarnation) in job.exits or message.incarnation < learner.incarnation:
            return  # told before, or of a process that was replaced meanwhile
        job.exits.add((learner.rank, message.incarnation))
        learner.incarnation = message.incarnation
        learner.next = max(learner.next, message.incarnation + 1)
        if message.tail and message.kind != "ok":
            self._keep_tail(job, learner, message.tail)
        gone = self._settle(job, learner, message)
        left = learner.leaving and learner.state != "backoff"  # that would be of before it was told
        learner.leaving = learner.leaving and not left
        if message.kind in ("error", "spawn") and not (job.ending and job.ending[0] != "DONE"):
            self._fail(job, f"{called(learner.rank)} failed: {message.text or f'status {message.status}'}", now)
        elif message.kind in ("signal", "oom"):
            self._loss_event(job, learner, message)
        # After the stop of a job that failed: its node does not tell once more what made it fail.
        self._tell_gone(job, learner, gone, message.respawn, message.text)
        if job.done and message.respawn and message.kind != "ok":
            # The job is trained: nobody is to come back.
            self._fleet.tell(host, StopLearners(job=job.id, ranks=[learner.rank], grace=0.0))
            learner.state = "left"
        elif left and learner.state == "wanted":
            self._provide(job, host, now)  # its host takes learners again by now
        self._changed(job)

    def _settle(self, job: Job, learner: Learner, message: LearnerExit) -> str:
        """The rank's new state; what the node is to be told."""
        fenced = (learner.rank, message.incarnation) in job.fences
        if message.kind == "ok":
            learner.state = "wanted" if message.respawn else "left"
            return "bye"
        if message.kind in ("signal", "oom"):
            learner.state = "backoff" if message.respawn else "lost"
            return "fenced" if fenced else "lost"
        learner.state = "lost"
        return "lost"

    def _tell_gone(self, job: Job, learner: Learner, kind: str, respawn: bool, text: str, lowest: int = 0) -> None:
        if job.peer is None or job.done:
            return
        gone = LearnerGone(
            rank=learner.rank,
            incarnation=learner.incarnation,
            kind=kind,  # type: ignore[arg-type]
            respawn=respawn,
            text=text[:4000],
            evaluator=learner.rank == EVALUATOR,
            lowest=lowest,
        )
        self._out.append(Send(job.peer, gone))

    def _loss_event(self, job: Job, learner: Learner, message: LearnerExit) -> None:
        if job.ending or job.done or _known_to_node(job, learner):
            return  # the node says it, with what follows from it
        what = f"{called(learner.rank)} was lost: {message.text or f'status {message.status}'}"
        if message.respawn:
            self._book.event(job.id, "W", f"{what}; it is started again")
        else:
            self._book.event(job.id, "W", f"{what}; its {job.file.learners.restarts} restarts are used up")

    def _keep_tail(self, job: Job, learner: Learner, tail: str) -> None:
        """What a dead learner printed last is readable also when its host is gone, or its folder is elsewhere."""
        name = file_stem(learner.rank)
        folder = self._book.folder(job.id)
        if folder.output(name).exists():
            return
        with contextlib.suppress(OSError):
            (folder.logs / f"{name}.tail").write_text(tail, "utf-8")

    def fence(self, job: Job, message: NodeFence) -> None:
        """The node wants this incarnation dead; it hears of it when it is."""
        learner = job.learners.get(message.rank)
        if learner is None or message.incarnation == 0:
            return
        self._book.event(job.id, "W", f"{called(message.rank)} is killed: {message.reason}")
        host = self._fleet.registered(learner.host)
        stale = not learner.alive or (learner.incarnation and learner.incarnation != message.incarnation)
        job.fences.add((message.rank, message.incarnation))
        if host is None or stale:
            if not stale:
                learner.state = "wanted"  # its host is silent, perhaps for good
            again = learner.alive or learner.state == "wanted"
            gone = LearnerGone(rank=message.rank, incarnation=message.incarnation, kind="fenced", respawn=again)
            if job.peer is not None:
                self._out.append(Send(job.peer, gone))
            return
        kill = KillLearner(job=job.id, rank=message.rank, incarnation=message.incarnation, reason=message.reason)
        self._fleet.tell(host, kill)

    def dismiss(self, job: Job) -> None:
        """The job is trained: who comes (again) too late to have a part in it is not to look for its node."""
        rows = [] if job.progress is None else job.progress.learners
        newest = {row.rank: row.incarnation for row in rows}
        for learner in job.learners.values():
            here = newest.get(learner.rank, learner.incarnation) == learner.incarnation
            late = learner.state in ("starting", "backoff") or not here
            host = self._fleet.registered(learner.host)
            if learner.alive and late and learner.rank != EVALUATOR and host is not None:
                self._fleet.tell(host, StopLearners(job=job.id, ranks=[learner.rank], grace=0.0))

    def stop(self, job: Job, grace: float) -> None:
        """End all of a job, on all hosts that run some of it."""
        for name in dict.fromkeys(learner.host for learner in job.learners.values() if learner.alive):
            host = self._fleet.registered(name)
            if host is not None:
                self._fleet.tell(host, StopLearners(job=job.id, ranks=[], grace=grace))

    def alive(self, job: Job) -> list[Learner]:
        """Those that something may still run of: not on a host that is known to be dead."""
        dead = {host.name for host in self._fleet.hosts.values() if host.dead}
        known = set(self._fleet.hosts) - dead
        return [learner for learner in job.learners.values() if learner.alive and learner.host in known]

    # ---------------------------------------------------------------------------------------- hosts

    def banned(self, host: Host) -> int:
        """Its learners finish their step and leave; they start elsewhere, where there is room. How many there are."""
        count = 0
        for job in self._book.live.values():
            mine = [learner for learner in job.on(host.name) if learner.alive]
            ranks = [learner.rank for learner in mine]
            if ranks and not job.ending and not job.done:
                count += len(ranks)
                for learner in mine:
                    learner.leaving = True
                self._book.event(job.id, "W", f"{host.name} is banned, {len(ranks)} of its processes leave")
                self._fleet.tell(host, StopLearners(job=job.id, ranks=ranks, grace=LEAVE_S, leave=True))
        return count

    def welcome(self, host: Host, now: float) -> None:
        """It takes learners again: those that were its and found no other place start there."""
        for job in list(self._book.live.values()):
            self._provide(job, host, now)

    def registered(self, host: Host, running: Sequence[tuple[str, int, int, int]], now: float) -> None:
        """A learnerd tells what runs on it: adopt it, end what nobody wants, start what is missing."""
        seen: set[tuple[str, int]] = set()
        for job_id, rank, incarnation, pid in running:
            job = self._book.live.get(job_id)
            learner = job.learners.get(rank) if job is not None else None
            if job is None or learner is None or learner.host != host.name:
                self._fleet.tell(host, StopLearners(job=job_id, ranks=[rank], grace=2.0))
                continue
            seen.add((job_id, rank))
            learner.state = "running" if pid else "backoff"
            learner.incarnation = incarnation
            learner.next = max(learner.next, incarnation + 1)
            if incarnation < learner.lowest:  # it was shut out meanwhile, and its node does not take it any more
                learner.leaving = True
                self._fleet.tell(host, StopLearners(job=job_id, ranks=[rank], grace=2.0, leave=True))
            elif pid and (rank, incarnation) in job.fences:  # while its host was silent
                kill = KillLearner(job=job_id, rank=rank, incarnation=incarnation, reason="the node has given it up")
                self._fleet.tell(host, kill)
        for job in list(self._book.live.values()):
            for learner in job.on(host.name):
                if learner.alive and (job.id, learner.rank) not in seen:
                    self._gone_with_host(job, learner)
            if job.ending:
                self.stop(job, grace=2.0)
                self._changed(job)
            else:
                self._provide(job, host, now)
        if self._fleet.standing.get(host.name) == "banned":  # what it was told may be lost with its connection
            self.banned(host)

    def host_lost(self, host: Host, now: float) -> None:
        """Its connection is silent, or its process dead. Only the dead take their learners with them: those of a
        silent one may well go on, and the node hears from them itself."""
        for job in list(self._book.live.values()):
            mine = [learner for learner in job.on(host.name) if learner.alive]
            if not mine or job.done or job.ending:
                self._changed(job)
                continue
            since = f"silent for {now - host.heard:.0f} s"
            what = f"is gone (PID {host.pid}), and its learners" if host.dead else f"is {since}"
            self._book.event(job.id, "W", f"learnerd on {host.name} {what}")
            if host.dead:
                for learner in mine:
                    self._gone_with_host(job, learner)
            self._changed(job)

    def _gone_with_host(self, job: Job, learner: Learner) -> None:
        """It comes back by our order alone: a learnerd that was shut out may start again what it had."""
        learner.state, learner.lowest, learner.leaving = "wanted", learner.next, False
        self._tell_gone(job, learner, "lost", True, "its learnerd is gone", learner.next)

    def move_away(self, now: float) -> None:
        """Ranks that wait for a host that stays away start on another one, where there is room."""
        for job in list(self._book.live.values()):
            if job.ending or job.done or job.peer is None:
                continue
            waiting = [
                learner
                for learner in job.learners.values()
                if learner.state == "wanted" and learner.rank != EVALUATOR and self._away(learner.host, now)
            ]
            seats = place(replace(job.wanted, count=len(waiting)), self._fleet.rooms(self.used())) if waiting else None
            if not seats:
                continue
            for learner, seat in zip(waiting, seats.values(), strict=True):
                self._book.event(job.id, "W", f"{called(learner.rank)} moves from {learner.host} to {seat.host}")
                learner.host, learner.device = seat
            evaluator = job.learners.get(EVALUATOR)
            if evaluator is not None and evaluator.state == "wanted" and self._away(evaluator.host, now):
                evaluator.host = job.learners[0].host
            self.node_serves(job, now)

    def _away(self, name: str, now: float) -> bool:
        host = self._fleet.hosts.get(name)
        if self._fleet.standing.get(name) == "banned":
            return True
        if host is None:
            return now - self._fleet.born > MOVE_S
        return host.peer is None and now - host.heard > MOVE_S


def _known_to_node(job: Job, learner: Learner) -> bool:
    """Whether the node had a session with this incarnation."""
    return (
        job.peer is not None
        and job.progress is not None
        and any((row.rank, row.incarnation) == (learner.rank, learner.incarnation) for row in job.progress.learners)
    )
