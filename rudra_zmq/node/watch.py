"""Is everybody alive? Silence is flagged, then the process is asked to be killed, then the session is given up.

Owns: the deadlines of a session's silence and of a kill that nobody confirms. Must not know: what a loss means for the
job (core), who kills (learnerd, by way of psd).

    3 pings without a word: torpid, said    liveness_s: fenced    confirmed, or another liveness_s: lost
"""

from __future__ import annotations

from collections.abc import Callable

from rudra_zmq import log
from rudra_zmq.node.sessions import TORPID_PINGS, Session
from rudra_zmq.node.work import Work
from rudra_zmq.wire.messages.control import NodeFence

_log = log.get("node")


class Watch:
    """``lost`` ends a session that nobody will hear of again."""

    def __init__(self, work: Work, lost: Callable[[Session, str], None]) -> None:
        self._work = work
        self._lost = lost

    def look(self) -> None:
        """To be called every second, from the loop that serves: a node that hangs judges nobody."""
        spec = self._work.spec
        now = self._work.clock()
        for session in self._work.sessions.all:
            silent = now - session.heard
            if session.fenced_at is not None:
                self._fenced(session, now)
            elif silent > spec.liveness_s:
                self.fence(session, f"silent for {silent:.0f} s", hard=False)
            elif silent > TORPID_PINGS * spec.ping_s:
                if not session.torpid:
                    session.torpid = True
                    self._work.event("W", f"rank {session.rank} is silent for {silent:.0f} s")
            elif session.torpid:
                session.torpid = False
                self._work.event("I", f"rank {session.rank} is heard again")

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
