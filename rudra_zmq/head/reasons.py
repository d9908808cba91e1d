"""What each process of a job waits for, since when and until when, as the head knows it and as the node says.

Owns the words for the head's own waits, and since when each one is there. Must not know: who acts at a deadline
(course, crew). A wait whose beginning nobody wrote down counts from when it was seen first; the head looks each second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from rudra_zmq.head.fleet import Fleet
from rudra_zmq.head.jobs import Book, Job, Learner
from rudra_zmq.head.ranks import called
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

LOOK_S = 1.0
MOST = 4096


@dataclass(frozen=True)
class Limits:
    """The deadlines of course and crew that a row names, seconds."""

    hung: float
    move: float


class Reasons:
    """For all live jobs; ``why`` is a handler of the coordinator."""

    def __init__(self, book: Book, fleet: Fleet, limits: Limits) -> None:
        self._book, self._fleet, self._limits = book, fleet, limits
        self._since: dict[tuple[str, str, str], float] = {}  # job, who, what -> when it was seen first
        self._looked = float("-inf")

    def look(self, now: float) -> None:
        """Often; remembers what is new and forgets what is over."""
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        there = {(job.id, r.who, r.what) for job in self._book.live.values() for r in self._rows(job, now)}
        self._since = {key: self._since.get(key, now) for key in there}

    def why(self, peer: bytes, request: str, message: c.Why, now: float) -> Message:
        """Every wait of one job; none of one that has ended. NotFound."""
        row = self._book.row(message.job)
        job = self._book.live.get(row.job)
        rows = [] if job is None else [self._dated(job, r, now) for r in self._rows(job, now)]
        return c.Waits(rows=rows[:MOST], job=msgspec.structs.replace(row, progress=None))

    def _dated(self, job: Job, row: c.WaitRow, now: float) -> c.WaitRow:
        if row.since is not None:
            return row
        return msgspec.structs.replace(row, since=max(0.0, now - self._since.get((job.id, row.who, row.what), now)))

    # ---------------------------------------------------------------------------------------- rows

    def _rows(self, job: Job, now: float) -> Iterator[c.WaitRow]:
        if job.state == "PENDING":
            what = "for its hosts to say whether they have what it needs" if job.checking else job.reason
            yield c.WaitRow(who="job", what=what or "for its turn", then="" if job.checking else "it starts")
            return
        if job.ending is not None:
            yield self._end(job, now)
        else:
            yield from self._node(job, now)
        for learner in job.learners.values():
            if (row := self._learner(job, learner, now)) is not None:
                yield row
        # What the node says is a second old; of one that is silent it may be anything.
        if job.progress is not None and job.node_runs and job.peer is not None:
            yield from job.progress.waits

    def _end(self, job: Job, now: float) -> c.WaitRow:
        assert job.ending is not None
        left = [when - now for when, _ in job.timers if when > now]
        what = ["its node"] if job.node_runs else []
        what += [called(learner.rank) for learner in job.learners.values() if learner.alive][:8]
        return c.WaitRow(
            who="job",
            what=f"to be {job.ending[0]}: for the end of {', '.join(what) or 'its processes'}",
            left=min(left, default=None),
            then="what still runs is told, then killed" if left else "",
        )

    def _node(self, job: Job, now: float) -> Iterator[c.WaitRow]:
        due = {what: when - now for when, what in job.timers if when > now}
        if "spawn" in due:
            yield c.WaitRow(who="node", what="to be started again", left=due["spawn"], then="it starts")
        elif job.peer is None and job.node_runs:
            what = "starts" if job.generation <= 1 else "starts from the newest snapshot"
            yield c.WaitRow(who="node", what=what, left=due.get("hello"), then="it is killed and started again")
        elif job.torpid:
            silent = now - job.heard
            then = "it is killed and started again"
            left = max(0.0, self._limits.hung - silent)
            yield c.WaitRow(who="node", what="is silent", since=silent, left=left, then=then)

    def _learner(self, job: Job, learner: Learner, now: float) -> c.WaitRow | None:
        who, host = called(learner.rank), self._fleet.hosts.get(learner.host)
        if learner.state == "wanted" and (host is None or host.peer is None):
            left = None if host is None else max(0.0, host.heard + self._limits.move - now)
            since = None if host is None else now - host.heard
            what, then = f"for its host {learner.host}, which is away", "it moves to another one, where there is room"
            if job.wanted.hosts == (learner.host,):
                left, then = None, "its job may run nowhere else: it starts there when that host is back"
            return c.WaitRow(who=who, what=what, since=since, left=left, then=then)
        words: dict[str, Callable[[], str]] = {
            "wanted": lambda: "for the node, which does not serve yet",
            "starting": lambda: f"for learnerd on {learner.host} to start it" + (", with its code" * bool(job.bundle)),
            "backoff": lambda: f"for learnerd on {learner.host} to start it again",
        }
        return c.WaitRow(who=who, what=words[learner.state]()) if learner.state in words and not job.ending else None
