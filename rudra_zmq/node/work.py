"""What the parts of a node share: the job, who is connected, the model, the core, the figures, the way to psd.

Owns: no rule of its own, only the things and the few words that every part says (an event, a refusal). Must not know:
sockets; a function sends to a peer, a `Head` passes messages to psd.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from rudra_zmq import log
from rudra_zmq.config.job import JobFile
from rudra_zmq.core.events import Clock
from rudra_zmq.core.sync import Sync
from rudra_zmq.errors import RudraError
from rudra_zmq.node import headroom, life
from rudra_zmq.node.budget import Limit
from rudra_zmq.node.decisions import DecisionLog
from rudra_zmq.node.evaluate import Mailbox
from rudra_zmq.node.figures import Figures
from rudra_zmq.node.metrics import MetricsCsv
from rudra_zmq.node.model import Model
from rudra_zmq.node.post import Post
from rudra_zmq.node.sessions import Session, Sessions
from rudra_zmq.node.spec import NodeSpec
from rudra_zmq.node.vectors import F32
from rudra_zmq.wire.codec import clip, refusal
from rudra_zmq.wire.messages.control import NodeDone, NodeEvent
from rudra_zmq.wire.messages.data import Bulk, Message, Ready

Level = Literal["I", "W", "E"]

_log = log.get("node")
_SAY = {"I": _log.info, "W": _log.warning, "E": _log.error}
OFTEN_S = 10.0
MEMORY = "use fewer learners or a smaller model, or give this host more memory"


def new_key() -> int:
    """A random id for chunks, of 52 bits; 0 is none."""
    return 1 + (int.from_bytes(os.urandom(7), "little") >> 4)


class NodeEnds(RudraError):
    """This node cannot go on: its successor does, from the last good snapshot."""


class Exhausted(NodeEnds):
    """There was no memory left to carry out what the core had decided."""

    def __init__(self, error: MemoryError) -> None:
        super().__init__(f"out of memory in the middle of a turn; back to the last snapshot{told(error)}", fix=MEMORY)


def told(error: MemoryError) -> str:
    """What is known of it (NumPy says how much was wanted), after a colon."""
    return f": {error}" if str(error) else ""


class Diverged(NodeEnds):
    """Weights are not finite any more."""

    def __init__(self, update: int, what: str = "not finite") -> None:
        fix = "lower the learning rate, or clip the gradients (update.clip_norm)"
        super().__init__(f"at update {update} the weights are {what}; back to the last snapshot", fix=fix)


class Head(Protocol):
    """The way to psd. Nothing here waits or raises."""

    def notify(self, message: Message) -> None:
        """An event, a fence."""

    def report(self) -> None:
        """The state changed: the figures are due at once."""

    def done(self, message: NodeDone) -> None:
        """The job has ended; the process ends when psd has heard it."""


@dataclass
class Work:
    """Everything of one job. ``clock`` gives seconds that never go back."""

    spec: NodeSpec
    job: JobFile
    post: Post
    head: Head
    sessions: Sessions
    decisions: DecisionLog
    metrics: MetricsCsv
    clock: Callable[[], float]
    off_loop: Callable[[Callable[[], object]], object]
    """Calls a function in the loop's thread; for the thread that writes snapshots."""
    channel: Callable[[bytes], Bulk | None] = lambda _: None
    """Makes the sealed channel of a peer that is welcomed, where tcp is encrypted."""
    model: Model | None = None
    sync: Sync | None = None
    figures: Figures | None = None
    mailbox: Mailbox | None = None
    started: bool = False  # Start was given to the core
    over: bool = False  # training has ended
    stopping: bool = False  # a drain is on: learners are asked to leave
    evaluator_free: bool = False  # attached and not testing
    evaluator_lost: bool = False  # no result is awaited of it
    members: frozenset[int] = frozenset()  # ranks of the snapshot that the job goes on from; empty: those declared
    ended: set[int] = field(default_factory=set)  # ranks whose process is gone and will not be started again
    _parked: deque[tuple[Session, bytes, Callable[[], None]]] = field(default_factory=deque)
    _accounted: float = 0.0
    _limits: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The job's folder."""
        return Path(self.spec.folder)

    @property
    def shares(self) -> bool:
        """Whether slots and versions are to lie in shared memory."""
        return bool(self.spec.bind.shm)

    @property
    def evaluated(self) -> bool:
        """Whether the job has an evaluator: a task has, a script tests by itself."""
        return self.job.kind == "task"

    def is_here(self, host: str, pid: int, space: int) -> bool:
        """Whether what a process says of itself means one of this host."""
        return bool(self.spec.host) and host == self.spec.host and pid > 0 and 0 < space == life.space()

    def check_weights(self) -> None:
        """Raises Diverged if the current version holds a NaN or an infinity.

        Not looked at with each update: where it happens, every gradient that follows is refused.
        """
        assert self.model is not None and self.sync is not None
        if not self.model.versions.current.finite():
            raise Diverged(self.sync.clock.timestamp)

    def account(self) -> bool:
        """Add the time since the last call to the running time, if the job runs; whether it does."""
        now = self.clock()
        elapsed, self._accounted = now - self._accounted, now
        runs = self.started and not self.over and self.sync is not None and self.sync.waiting is None
        if runs and self.figures is not None:
            self.figures.seconds += elapsed
        return runs

    def event(self, level: Level, text: str) -> None:
        """A line for the job's story and for the node's log."""
        _SAY[level](text)
        self.head.notify(NodeEvent(job=self.spec.job, level=level, text=clip(text)))

    def seldom(self, key: str, level: Level, text: str) -> None:
        """The same, at most once in ten seconds for each ``key``."""
        now = self.clock()
        if now - self._limits.get(key, -OFTEN_S) >= OFTEN_S:
            if len(self._limits) > 1000:
                self._limits.clear()
            self._limits[key] = now
            self.event(level, text)

    def warn(self, text: str) -> None:
        """For parts that only know how to complain."""
        self.event("W", text)

    def limit(self) -> Limit:
        """What the servers of the job may take of the memory there is now."""
        return headroom.limit(self.job.servers.memory_bytes)

    def say_budget(self) -> None:
        """Before the memory is taken: how much, and what for."""
        assert self.model is not None
        plan = self.model.budget
        self.event("I", f"model of {self.model.layout.P:,} parameters; {plan}")
        if plan.ring < plan.wanted:
            text = f"memory is short: {plan.ring} versions instead of {plan.wanted}, so that a learner may have to wait"
            self.event("W", f"{text} until another one has its weights")

    def brief(self, session: Session) -> bool:
        """Whether a version that ``session`` is given now is let go before the next update is due."""
        hardsync = self.sync is not None and self.sync.protocol == "hardsync" and not self.job.sync.backup
        return self.job.learners.most == 1 or (hardsync and session.joined)

    def has_room(self, session: Session) -> bool:
        """Whether a version can be held for ``session``, or it has to wait until another one lets go."""
        assert self.model is not None
        return self.model.versions.room(session.reader, self.brief(session))

    def wait_for_room(self, session: Session, say: Callable[[], None]) -> None:
        """``say`` is called when there is, if the session then has the connection that it has now.

        Whoever waits reads nothing: what it held is let go, or all would wait for what the others hold.
        """
        assert self.model is not None
        self.model.versions.release(session.reader)
        if session.peer is not None:
            self._parked.append((session, session.peer, say))

    def give_room(self) -> None:
        """After anything that may have let a version go: who has waited longest is next."""
        while self._parked and self.has_room(self._parked[0][0]):
            session, peer, say = self._parked.popleft()
            if session.peer == peer:
                say()

    def send_weights(self, session: Session, key: int, clock: Clock) -> None:
        """The newest version (its clock is ``clock``), behind the message that announced it under ``key``."""
        model = self.model
        assert model is not None
        if session.peer is None:
            return
        session.held = clock
        session.transfer = key
        vector = model.versions.hold(session.reader, self.brief(session))

        def sent() -> None:
            if session.transfer == key:
                session.transfer = 0
                model.versions.release(session.reader)

        self.post.to(session.peer).vector(key, vector.data, sent)

    def send_ready(self, session: Session, clock: Clock, residual: F32 | None) -> None:
        """That there is a version, the newest one (its clock is ``clock``), and what topk is to go on from."""
        assert self.model is not None
        key, after = new_key(), 0 if residual is None else new_key()
        nbytes = self.model.down.nbytes
        timestamp, generation = clock.timestamp, clock.generation
        ready = Ready(generation=generation, timestamp=timestamp, key=key, nbytes=nbytes, residual=after)
        self.send(session, ready)
        self.send_weights(session, key, clock)
        if residual is not None and session.peer is not None:
            self.post.to(session.peer).vector(after, residual.data, lambda: None)

    def show_weights(self, session: Session, clock: Clock) -> int:
        """The newest version (its clock is ``clock``) as it lies in shared memory: which one, kept until the next."""
        assert self.model is not None
        session.held = clock
        session.transfer = 0
        return self.model.versions.place(session.reader, self.brief(session))

    def send(self, session: Session, message: Message) -> None:
        """A message to a learner, if it has a connection."""
        if session.peer is not None:
            self.post.to(session.peer).message(message)

    def refuse(self, peer: bytes, error: RudraError) -> None:
        """Tell a peer why it is not wanted, once."""
        self.post.to(peer).message(refusal(error))
