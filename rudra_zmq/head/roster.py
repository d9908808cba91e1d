"""What people ask about hosts, and what they decide about them: list, drain, ban, where would a job go.

Owns: the answers to these requests. Must not know: who may ask; the course of a job.
"""

from __future__ import annotations

import difflib

import msgspec

from rudra_zmq import __version__
from rudra_zmq.config import job_from_toml
from rudra_zmq.errors import NotFound
from rudra_zmq.head.course import Course
from rudra_zmq.head.effects import Effect, Send
from rudra_zmq.head.fleet import Fleet
from rudra_zmq.head.inspection import Findings, inspect
from rudra_zmq.head.jobs import Book, wanted_of
from rudra_zmq.head.placement import admit, place, why
from rudra_zmq.head.ranks import Seat
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

_DONE = {
    "ready": "takes learners",
    "drained": "takes no new learners",
    "banned": "takes no learners",
}


class Roster:
    """Its methods are the coordinator's handlers."""

    def __init__(self, book: Book, fleet: Fleet, course: Course, out: list[Effect]) -> None:
        self._book, self._fleet, self._course, self._out = book, fleet, course, out

    def rows(self, now: float) -> list[c.HostRow]:
        """All hosts of the last seven days, by name."""
        used, wall = self._course.crew.used(), self._book.wall()
        rows = [self._fleet.row(host, used, wall, now) for host in self._fleet.hosts.values()]
        former = self._fleet.former.values()
        standing = self._fleet.standing
        rows += [msgspec.structs.replace(row, state=standing.get(row.name, "ready")) for row in former]
        return sorted(rows, key=lambda row: row.name)

    def listed(self, peer: bytes, request: str, message: c.ListHosts, now: float) -> Message:
        """ListHosts."""
        return c.Hosts(rows=self.rows(now), now=self._book.wall(), version=__version__)

    def decided(self, peer: bytes, request: str, message: c.SetHost, now: float) -> Message:
        """SetHost. NotFound."""
        rows = {row.name: row for row in self.rows(now)}
        row = rows.get(message.host)
        if row is None:
            near = difflib.get_close_matches(message.host, list(rows), n=1)
            fix = f"write {near[0]}" if near else "`rudra hosts` lists them"
            raise NotFound(f"there is no host {message.host}", fix=fix)
        if message.state == "ready":
            self._fleet.standing.pop(row.name, None)
        else:
            self._fleet.standing[row.name] = message.state
        self._book.see_host(msgspec.structs.replace(row, state=message.state))
        text = f"{row.name} {_DONE[message.state]}"
        host = self._fleet.registered(row.name)
        if host is not None and message.state == "banned":
            count = self._course.crew.banned(host)
            text += f", {count} of its processes leave" if count else ""
        elif host is not None and message.state == "ready":
            self._course.crew.welcome(host, now)
        self._course.schedule(now)
        return c.Ok(text=text)

    def planned(self, peer: bytes, request: str, message: c.PlanJob, now: float) -> Message | None:
        """PlanJob: the answer follows when the hosts have answered. Rejected where a submit would be."""
        file = job_from_toml(message.toml, name=message.name).job
        wanted = wanted_of("", file)
        rooms = self._fleet.rooms(self._course.crew.used())
        admit(wanted, rooms)
        seats = place(wanted, rooms)
        if seats is None:
            return c.Planned(reason=why(wanted, rooms))

        def found(findings: Findings) -> None:
            self._out.append(Send(peer, _plan(seats, findings), request, reply=True))

        question = c.CheckJob(name=message.name, toml=message.toml, cwd="" if file.run.code else message.cwd)
        inspect(self._fleet, (seat.host for seat in seats.values()), question, now, found)
        return None


def _plan(seats: dict[int, Seat], findings: Findings) -> c.Planned:
    rows = []
    for host in dict.fromkeys(seat.host for seat in seats.values()):
        ranks = [rank for rank, seat in seats.items() if seat.host == host]
        answer = findings.answers.get(host)
        rows.append(
            c.PlanRow(
                host=host,
                ranks=ranks,
                devices=[seats[rank].device for rank in ranks if seats[rank].device],
                problems=["it does not answer"] if answer is None else answer.problems,
                memory=0 if answer is None else answer.memory,
            )
        )
    return c.Planned(rows=rows)
