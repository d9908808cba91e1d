"""Where the command line's questions about files are answered: here, or by the learnerd whose host has the file.

Owns which host to ask. Must not know: the course of jobs. The rules of a path are files'.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rudra_zmq.errors import NotFound, NotRunning
from rudra_zmq.head import files
from rudra_zmq.head.effects import Effect, Send
from rudra_zmq.head.fleet import Fleet
from rudra_zmq.head.jobs import MOST_LISTED, Book
from rudra_zmq.head.ranks import EVALUATOR
from rudra_zmq.wire.codec import error_message
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

_LOG = re.compile(r"logs/(?:learner-(\d{1,5})|evaluator)\.(?:out|log)")


class Shelf:
    """The files of all jobs; its methods are handlers of the coordinator."""

    def __init__(
        self, book: Book, fleet: Fleet, out: list[Effect], log_piece: Callable[[c.ReadLog], c.LogData]
    ) -> None:
        """``log_piece``: of this daemon's own log."""
        self._book, self._fleet, self._out, self._log_piece = book, fleet, out, log_piece

    def usage(self, peer: bytes, request: str, message: c.DiskUse, now: float) -> Message:
        """Bytes per job and kind."""
        jobs = [row.job for row in self._book.registry.jobs()[:MOST_LISTED]]
        return c.DiskUsed(rows=files.usage(self._book.state, jobs))

    def _hosts_of(self, job: str) -> dict[int, str]:
        live = self._book.live.get(job)
        if live is not None:
            return {learner.rank: learner.host for learner in live.learners.values()}
        hosts = {rank: seat.host for rank, seat in self._book.registry.stored(job).hosts.items()}
        return hosts | ({EVALUATOR: hosts[0]} if 0 in hosts else {})

    def list_files(self, peer: bytes, request: str, message: c.ListFiles, now: float) -> Message | None:
        """Ours, and the logs of learners whose host keeps them."""
        folder = self._book.folder(message.job)
        elsewhere = {
            name
            for rank, name in self._hosts_of(message.job).items()
            if rank != EVALUATOR and not folder.output(f"learner-{rank}").exists()
        }
        hosts = [host for name in elsewhere if (host := self._fleet.registered(name)) is not None]
        found = dict(files.list_files(folder.root))
        if not hosts:
            return c.Files(rows=sorted(found.items()))
        left = len(hosts)

        def merge(answer: Message | None) -> None:
            nonlocal left
            left -= 1
            if isinstance(answer, c.Files):
                for path, size in answer.rows:
                    found.setdefault(path, size)
            if not left:
                self._out.append(Send(peer, c.Files(rows=sorted(found.items())), request, reply=True))

        for host in hosts:
            self._fleet.ask(host, message, now, merge)
        return None

    def read_file(self, peer: bytes, request: str, message: c.ReadFile, now: float) -> Message | None:
        """Our own file, else a learner's log from its host."""
        hosts = self._hosts_of(message.job)
        try:
            return files.read_file(self._book.folder(message.job).root, message.path, message.offset, message.limit)
        except NotFound:
            match = _LOG.fullmatch(message.path)
            if match is None:
                raise
            name = hosts.get(int(match[1]) if match[1] else EVALUATOR, "")
            if not name:
                raise
            self._ask(peer, request, name, message, now)
        return None

    def read_log(self, peer: bytes, request: str, message: c.ReadLog, now: float) -> Message | None:
        """Of the daemon that is meant: this one, or a host's."""
        if not message.host:
            return self._log_piece(message)
        if message.host not in self._fleet.hosts:
            known = ", ".join(sorted(self._fleet.hosts)) or "none"
            raise NotFound(f"no learnerd has registered as {message.host}", fix=f"name one that has: {known}")
        self._ask(peer, request, message.host, message, now)
        return None

    def _ask(self, peer: bytes, request: str, name: str, message: c.ReadFile | c.ReadLog, now: float) -> None:
        """The learnerd on ``name``, for the command line. NotRunning where it is away."""
        host = self._fleet.registered(name)
        if host is None:
            raise _away(name)
        self._fleet.ask(host, message, now, lambda answer: self._pass_on(peer, request, name, answer))

    def _pass_on(self, peer: bytes, request: str, host: str, answer: Message | None) -> None:
        if not isinstance(answer, (c.FileData, c.LogData, c.Error)):
            answer = error_message(_away(host))
        self._out.append(Send(peer, answer, request, reply=True))


def _away(host: str) -> NotRunning:
    return NotRunning(f"learnerd on {host} is away", fix="ask again when it is back: `rudra hosts`")
