"""Is everybody alive? Silence is flagged, then the process is asked to be killed, then the session is given up.

Owns: the deadlines of a session's silence and of a kill that nobody confirms, and what is said of first mini-batches
that take long. Must not know: what a loss means for the job (core), who kills (learnerd, by way of psd).

    3 pings without a word: torpid, said    liveness_s: fenced    confirmed, or another liveness_s: lost

A silent process of this host that is at work is not fenced: step_timeout decides about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rudra_zmq import log
from rudra_zmq.core.sync import Sync
from rudra_zmq.node.life import Process
from rudra_zmq.node.sessions import TORPID_PINGS, Session
from rudra_zmq.node.work import Work
from rudra_zmq.wire.messages.control import NodeFence

_log = log.get("node")
HUNG_S = 2.0  # between two looks, of which there are two a second


class Fence(Protocol):
    """Asks for the end of a session's process."""

    def __call__(self, session: Session, reason: str, *, hard: bool) -> None: ...


class Watch:
    """``lost`` ends a session that nobody will hear of again."""

    def __init__(self, work: Work, lost: Callable[[Session, str], None]) -> None:
        self._work = work
        self._lost = lost
        self._looked = work.clock()

    def look(self) -> None:
        """To be called every second, from the loop that serves: a node that hangs judges nobody."""
        now = self._work.clock()
        hung, self._looked = now - self._looked, now
        for session in self._work.sessions.all:
            if hung > HUNG_S:  # what was said meanwhile may not be read yet
                session.heard = min(now, session.heard + hung)
                session.fenced_at = None if session.fenced_at is None else session.fenced_at + hung
            if session.process is None and self._work.is_here(session.host, session.pid, session.space):
                session.process = Process(session.pid)
            if session.fenced_at is not None:
                self._fenced(session, now)
            elif now - session.heard <= TORPID_PINGS * self._work.spec.ping_s:
                self._hears(session)
            else:
                self._silent(session, now)
        if self._work.sync is not None:
            self._slow_starters(self._work.sync, now)

    def _hears(self, session: Session) -> None:
        if session.torpid:
            session.torpid = session.at_work = False
            if session.process is not None:
                session.process.heard()
            self._work.event("I", f"rank {session.rank} is heard again")

    def _silent(self, session: Session, now: float) -> None:
        silent = now - session.heard
        idle = silent if session.process is None else session.process.idle(silent, now)
        if idle > self._work.spec.liveness_s:
            self.fence(session, f"silent for {silent:.0f} s", hard=False)
        elif not session.torpid:
            session.torpid = True
            self._work.event("W", f"rank {session.rank} is silent for {silent:.0f} s")
        elif silent > self._work.spec.liveness_s and not session.at_work:
            session.at_work = True
            self._work.event(
                "W",
                f"rank {session.rank} is silent for {silent:.0f} s, but its process (PID {session.pid}) computes: "
                f"step_timeout = {self._work.job.learners.step_timeout} decides",
            )

    def _slow_starters(self, sync: Sync, now: float) -> None:
        """Said when step_timeout has passed, and each time that it has become twice as long."""
        for rank, seconds, most in sync.slow_starters(now):
            session = self._work.sessions.at(rank)
            if session is not None and seconds >= 2 * session.slow_said:
                session.slow_said = seconds
                self._work.event("W", slow_start(rank, seconds, most))

    def fence(self, session: Session, reason: str, *, hard: bool) -> None:
        """Ask that the process be killed; ``hard``: also if it is heard again."""
        if session.fenced_at is not None:
            return
        session.fenced_at = self._work.clock()
        session.fenced_hard = hard
        _log.warning("asks for a kill", rank=session.rank, incarnation=session.incarnation, reason=reason)
        self._work.head.notify(
            NodeFence(job=self._work.spec.job, rank=session.rank, incarnation=session.incarnation, reason=reason)
        )

    def _fenced(self, session: Session, now: float) -> None:
        assert session.fenced_at is not None
        if session.heard > session.fenced_at and not session.fenced_hard:
            session.fenced_at = None  # it only slept, and nobody killed it
            return
        if now - session.fenced_at > self._work.spec.liveness_s:
            # Nothing that its sockets send is heard from here on, so its samples may be leased again.
            self._lost(session, f"nobody confirms its death; last heard {now - session.heard:.0f} s ago")


def slow_start(rank: int, seconds: float, most: float) -> str:
    """What is said of a first mini-batch that takes longer than any other may."""
    return (
        f"learner {rank} has computed its first mini-batch for {_span(seconds)}; "
        f"step_timeout does not apply to the first, it is waited for {_span(most)}"
    )


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
