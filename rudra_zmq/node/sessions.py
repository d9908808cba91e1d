"""Who is connected: identities of sockets, the learners behind them, what was dropped and why.

Owns: the checks of a Hello, which socket speaks for which incarnation, when each was last heard, the counts of what
was dropped. Must not know: the protocol's rules (core), what a message after Hello means.

One data connection and one pulse per rank and for the evaluator: a thousand connects and disconnects leave no more.
"""

from __future__ import annotations

import hmac
import itertools
from collections import Counter
from dataclasses import dataclass, field

from rudra_zmq.core.events import Clock
from rudra_zmq.errors import NotRunning, RefusedBySecurity, Rejected, RudraError
from rudra_zmq.node.life import Process
from rudra_zmq.wire.codec import clip
from rudra_zmq.wire.messages.data import Hello

TORPID_PINGS = 3
MOST_VERSIONS = 16
EVALUATOR = ("evaluator", "evaluator-pulse")


class Turned(Exception):
    """A Hello that is not let in: the reason that is counted, and what the peer is told."""

    def __init__(self, reason: str, error: RudraError) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


@dataclass(eq=False)
class Session:
    """One incarnation of a learner, across its connections. ``peer`` is None while it has none."""

    rank: int
    incarnation: int
    host: str
    pid: int
    space: int  # PID namespace of pid
    public: str = ""  # key that its process has the secret of
    peer: bytes | None = None
    heard: float = 0.0
    attached: bool = False
    ready: bool = False  # was sent a version since it attached
    joined: bool = False  # the core knows it
    listens: bool = False  # has said Data on the present connection: a grant would be heard
    mapped: bool = False  # the present connection's process has mapped the shared memory
    shared: bool = False  # and uses it
    minibatch: int = 0
    prefetch: int = 1
    held: Clock | None = None  # version that it has, or is being sent
    transfer: int = 0  # key of the weights that are being sent to it
    ack: int = -1  # of the grant that `key` belongs to
    key: int = 0  # of the chunks of its next gradient
    slot: int = 0  # that they go into
    leases: int = 0  # that it holds, as of its last grant
    expecting: bool = False  # the present connection's inbox knows `key`
    finite: bool = True  # what came of that gradient so far
    pushed: int = 0  # last seq that has a verdict
    accepted: int = 0  # last seq of a gradient that counts
    applied: int = 0  # and of one that an update has applied
    answered: int = -1  # last ack that was sent on the present connection
    process: Process | None = None  # where this host runs it
    turn: float = 0.0  # since when it is for its script to say what comes next, before its first mini-batch
    torpid: bool = False
    at_work: bool = False  # silent, and seen to compute: said
    slow_said: float = 0.0  # seconds of its first mini-batch when they were said last
    fenced_at: float | None = None
    fenced_hard: bool = False
    samples: int = 0
    gradients: int = 0
    compute: float = 0.0  # seconds that a gradient takes it, smoothed
    rate: float = 0.0
    rated: int = 0  # samples at the last look
    refused: int = 0  # gradients that were not finite

    @property
    def who(self) -> tuple[int, int]:
        """(rank, incarnation)."""
        return self.rank, self.incarnation

    @property
    def reader(self) -> str:
        """Its name as a reader of versions."""
        return f"{self.rank}.{self.incarnation}"


@dataclass(eq=False)
class Connection:
    """A socket that said Hello."""

    peer: bytes
    role: str
    rank: int
    incarnation: int
    pid: int = 0
    key: str = ""

    @property
    def evaluates(self) -> bool:
        """Whether it is the evaluator's, its pulse or the other one."""
        return self.role in EVALUATOR


@dataclass
class Sessions:
    """``most`` is the largest number of learners; ranks are 0 to most - 1."""

    job: str
    token: str
    most: int
    drops: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._connections: dict[bytes, Connection] = {}
        self._places: dict[tuple[str, int], Connection] = {}
        self._sessions: dict[int, Session] = {}
        self._over: dict[int, int] = {}  # rank: highest incarnation that ended
        self._tested = 0  # lowest incarnation of the evaluator that may come
        self._versions: dict[str, dict[str, str]] = {}  # who: what its newest process says that it runs

    # ------------------------------------------------------------------------------------------ look-up

    def connection(self, peer: bytes) -> Connection | None:
        """The connection of an identity, if it said Hello."""
        return self._connections.get(peer)

    def session(self, rank: int, incarnation: int) -> Session | None:
        """The live session of exactly this incarnation."""
        session = self._sessions.get(rank)
        return session if session is not None and session.incarnation == incarnation else None

    def of(self, connection: Connection) -> Session | None:
        """The live session that a learner's connection or pulse belongs to."""
        if connection.evaluates:
            return None
        return self.session(connection.rank, connection.incarnation)

    def at(self, rank: int) -> Session | None:
        """The live session of a rank, whatever its incarnation."""
        return self._sessions.get(rank)

    @property
    def all(self) -> list[Session]:
        """Live sessions in rank order."""
        return [self._sessions[rank] for rank in sorted(self._sessions)]

    @property
    def chief(self) -> int | None:
        """The lowest rank that takes part (or has attached, before anyone does)."""
        for attribute in ("joined", "attached"):
            ranks = [s.rank for s in self._sessions.values() if getattr(s, attribute)]
            if ranks:
                return min(ranks)
        return None

    @property
    def evaluator(self) -> bytes | None:
        """The identity of the evaluator's socket."""
        connection = self._places.get(("evaluator", 0))
        return connection.peer if connection else None

    @property
    def evaluators(self) -> list[Connection]:
        """Both sockets of the evaluator's process."""
        places = (self._places.get((role, 0)) for role in EVALUATOR)
        return [connection for connection in places if connection is not None]

    def drop(self, reason: str) -> None:
        """Count something that was not taken."""
        self.drops[reason] += 1

    def versions(self) -> dict[str, str]:
        """What all run, by name; where they differ, each value with who has it."""
        found: dict[str, dict[str, list[str]]] = {}
        for who, versions in self._versions.items():
            for name, value in versions.items():
                found.setdefault(name, {}).setdefault(value, []).append(who)
        return {
            name: next(iter(values))
            if len(values) == 1
            else clip("; ".join(f"{value} ({', '.join(who)})" for value, who in values.items()), 200)
            for name, values in itertools.islice(found.items(), MOST_VERSIONS)
        }

    # -------------------------------------------------------------------------------------------- hello

    def hello(self, peer: bytes, hello: Hello, now: float) -> tuple[Connection, Session | None]:
        """Let a peer in; a learner's session comes with it, new or taken up again. Turned if it is not let in.

        A new session of a rank takes the old one's place: the caller has ended that one before (``replaces``).
        """
        self.check(hello)
        place = _place(hello)
        self.gone(peer)  # a second Hello on one socket moves it
        old = self._places.get(place)
        if old is not None:
            self._connections.pop(old.peer, None)
        connection = Connection(peer, hello.role, hello.rank, hello.incarnation, hello.pid, hello.key)
        self._connections[peer] = self._places[place] = connection
        if hello.versions and hello.role in ("learner", "evaluator"):  # a pulse's process has said it already
            who = "evaluator" if hello.role == "evaluator" else f"learner {hello.rank}"
            self._versions[who] = dict(itertools.islice(hello.versions.items(), MOST_VERSIONS))
        if hello.role != "learner":
            return connection, None
        session = self._sessions.get(hello.rank)
        if session is None:
            session = Session(hello.rank, hello.incarnation, hello.host, hello.pid, hello.space, hello.key)
            self._sessions[hello.rank] = session
        session.peer = peer
        session.heard = session.turn = now
        session.attached = session.ready = session.listens = session.expecting = False
        session.mapped = session.shared = False
        session.answered = -1
        return connection, session

    def check(self, hello: Hello) -> None:
        """Whether a Hello may be let in at all; Turned if not. Changes nothing."""
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            fix = "use the token file of the psd that runs the job"
            raise Turned("bad-token", RefusedBySecurity("wrong token for this job", fix=fix))
        if hello.job != self.job:
            fix = "the node of that job listens elsewhere"
            raise Turned("wrong-job", Rejected(f"this is job {self.job}, not {hello.job}", fix=fix))
        if hello.role in EVALUATOR:
            self._check_evaluator(hello)
            return
        if hello.rank >= self.most:
            error = Rejected(f"rank {hello.rank} is outside 0 to {self.most - 1}", fix="raise learners.max")
            raise Turned("wrong-rank", error)
        self._check_incarnation(hello)

    def _check_evaluator(self, hello: Hello) -> None:
        if hello.incarnation < self._tested:
            raise Turned("old-incarnation", NotRunning(f"evaluator {hello.incarnation} is over"))
        old = self._places.get(("evaluator", 0))
        if old is not None and hello.incarnation < old.incarnation:
            error = NotRunning(f"evaluator {old.incarnation} has taken the place of {hello.incarnation}")
            raise Turned("old-incarnation", error)
        if old is not None and hello.incarnation == old.incarnation and hello.key != old.key:
            raise Turned("wrong-key", RefusedBySecurity(f"evaluator {old.incarnation} has another key"))

    def _check_incarnation(self, hello: Hello) -> None:
        session = self._sessions.get(hello.rank)
        over = self._over.get(hello.rank, -1)
        newest = max(over, session.incarnation if session else -1)
        if hello.incarnation < newest or hello.incarnation == over:
            text = f"incarnation {hello.incarnation} of rank {hello.rank} is over"
            raise Turned("old-incarnation", NotRunning(text, fix="start the learner anew"))
        same = session is not None and session.incarnation == hello.incarnation
        if same and session is not None and session.public != hello.key:
            error = RefusedBySecurity(f"rank {hello.rank} incarnation {hello.incarnation} has another key")
            raise Turned("wrong-key", error)
        if same and session is not None and (session.host, session.pid) != (hello.host, hello.pid):
            text = f"rank {hello.rank} incarnation {hello.incarnation} is process {session.pid} on {session.host!r}"
            raise Turned("duplicate", Rejected(text, fix="start a learner by learnerd alone"))

    def displaces(self, peer: bytes, hello: Hello) -> list[bytes]:
        """Sockets that a Hello from ``peer`` will take the place of: this one itself, and the place's old one."""
        old = self._places.get(_place(hello))
        return [p for p in {peer, old.peer if old else peer} if p in self._connections]

    def peers(self, session: Session) -> list[bytes]:
        """The sockets of a session's process."""
        places = (self._places.get((role, session.rank)) for role in ("learner", "pulse"))
        return [c.peer for c in places if c is not None and c.incarnation <= session.incarnation]

    def replaces(self, hello: Hello) -> Session | None:
        """The older session whose place this Hello takes; the caller ends it first."""
        session = self._sessions.get(hello.rank)
        if hello.role != "learner" or session is None or session.incarnation >= hello.incarnation:
            return None
        return session

    # ---------------------------------------------------------------------------------------------- end

    def end(self, session: Session) -> None:
        """A session is over: nothing that its sockets send is heard any more."""
        if self._sessions.get(session.rank) is session:
            del self._sessions[session.rank]
        self._over[session.rank] = max(self._over.get(session.rank, -1), session.incarnation)
        for role in ("learner", "pulse"):
            connection = self._places.get((role, session.rank))
            if connection is not None and connection.incarnation <= session.incarnation:
                del self._places[role, session.rank]
                self._connections.pop(connection.peer, None)
        session.peer = None

    def bar(self, rank: int | None, lowest: int) -> None:
        """What is below ``lowest`` of a rank (None: of the evaluator) is not let in any more; who is in stays in."""
        if rank is None:
            self._tested = max(self._tested, lowest)
        else:
            self._over[rank] = max(self._over.get(rank, -1), lowest - 1)

    def gone(self, peer: bytes) -> Connection | None:
        """A socket cannot be reached any more; the connection that it was."""
        connection = self._connections.pop(peer, None)
        if connection is None:
            return None
        self._places = {key: c for key, c in self._places.items() if c is not connection}
        session = self.of(connection)
        if session is not None and session.peer == peer:
            session.peer = None
        return connection

    def heard(self, connection: Connection, now: float) -> Session | None:
        """Any traffic is a sign of life; the session that gave it."""
        session = self.of(connection)
        if session is not None:
            session.heard = now
        return session


def _place(hello: Hello) -> tuple[str, int]:
    return hello.role, 0 if hello.role in EVALUATOR else hello.rank
