"""The line to the node: one connection after another, each greeted in full, until the deadline.

Owns: where the node is looked for, how often, for how long, and what a refusal means. Must not know: what the process
has to say, beyond that it is said again on every new connection.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar, cast

from rudra_zmq import __version__, log
from rudra_zmq.errors import NotRunning, RudraError, Unreachable
from rudra_zmq.learner.keys import Keys
from rudra_zmq.learner.link import SLICE, Link, LinkLost
from rudra_zmq.learner.spec import LearnerSpec, NodeFile, read_node_file
from rudra_zmq.net.addresses import parse, unreachable
from rudra_zmq.net.retry import Backoff
from rudra_zmq.net.sockets import Context
from rudra_zmq.node import life
from rudra_zmq.wire.codec import clip, error_of
from rudra_zmq.wire.messages.data import Hello, Message, Refused, Welcome

GIVE_UP_S = 60.0
CONNECT_S = 2.0
ANSWER_S = 5.0
STABLE_S = 10.0
"""A connection that held for so long was one; a shorter one counts as another failed attempt."""

_log = log.get()
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class NodeLost(Unreachable):
    """The servers could not be reached, or no longer want this process: a loss, not a failure of the script."""


def hello_of(spec: LearnerSpec, role: Literal["learner", "pulse", "evaluator", "evaluator-pulse"]) -> Hello:
    """The first message of a connection; `Keys.sign` adds the key where it is encrypted."""
    return Hello(
        role=role,
        job=spec.job,
        token=spec.token,
        rank=spec.rank,
        incarnation=spec.incarnation,
        host=spec.host,
        pid=os.getpid(),
        space=life.space(),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Of what a gradient depends on, as far as this process has loaded it: for people."""
    found = {"rudra": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        if (module := sys.modules.get(name)) is not None:
            found[name] = clip(str(getattr(module, "__version__", "?")), 64)
    return found


class Line:
    """`look` is called while anything waits and may raise; `on_open` when a connection was welcomed."""

    def __init__(
        self,
        context: Context,
        spec: LearnerSpec,
        keys: Keys,
        role: Literal["learner", "evaluator"],
        look: Callable[[], None],
        on_open: Callable[[Welcome], None],
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self.greeting: list[Callable[[], object]] = []  # what each new connection has to say again, in order
        self.welcome: Welcome | None = None  # of the present connection; of the last one where there is none
        self.stands = False  # there is a connection, and it was welcomed
        self._context = context
        self._spec = spec
        self._keys = keys
        self.hello = hello_of(spec, role)
        self._look = look
        self._on_open = on_open
        self._give_up_s = give_up_s
        self._link: Link | None = None
        self._tried: NodeFile | None = None
        self._since = 0.0  # when the present connection was welcomed
        self._backoff = Backoff()
        self._failing_since: float | None = None  # stays until one has lasted, or a call was answered
        self._address = ""

    @property
    def now(self) -> Link:
        """The connection."""
        assert self._link is not None
        return self._link

    def keep_on(self, call: Callable[[], T]) -> T:
        """`call` on a connection that stands; again on a new one, as often as it is lost.

        A call that came to its end was answered: who gets on is not lost, however often its connections are cut.
        Raises NodeLost past the deadline, and what the node refuses at the first attempt; later that is a loss too.
        """
        while True:
            try:
                if self._link is None:
                    self._open()
                result = call()
                self._failing_since = None
                return result
            except LinkLost as lost:
                self._failed(str(lost))

    def receive(self, *kinds: type[M]) -> M:
        """The next message of these kinds; a refusal is raised."""
        answer = self.now.receive(*kinds, Refused)
        if isinstance(answer, Refused):
            raise _refusal(answer)
        return cast(M, answer)

    def hang_up(self, linger: float = 0.0) -> None:
        """End the connection, if there is one; last words are given `linger` seconds."""
        self.stands = False
        if self._link is not None:
            self._link.close(linger)
            self._link = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._link is not None

    def _open(self) -> None:
        """One attempt at each address: connect, be welcomed, say again what was said. Raises LinkLost."""
        known = read_node_file(Path(self._spec.node_file))
        reason = "learnerd has not said where the node is"
        for self._address in known.addresses if known is not None else []:
            assert known is not None
            try:
                self._greet(self._address, known)
                return
            except LinkLost as lost:
                reason = str(lost)
            except RudraError as error:
                if self.welcome is None or isinstance(error, NodeLost):
                    raise
                raise NodeLost(error.message, where=error.where, fix=error.fix) from None
            if self.stands:
                break
            self.hang_up()
        raise LinkLost(reason)

    def _greet(self, address: str, known: NodeFile) -> None:
        self.stands = False
        self._tried = known
        curve = self._keys.curve(known, address)
        name = f"{self.hello.role}.{self.hello.rank}"
        self._link = link = Link(self._context, address, name, self._look_around, curve)
        link.wait_connected(CONNECT_S)
        link.send(self._keys.sign(self.hello, curve))
        answer = link.receive(Welcome, Refused, seconds=ANSWER_S)
        if isinstance(answer, Refused):
            raise _refusal(answer)
        assert isinstance(answer, Welcome)
        if curve is not None and answer.bulk is None:
            raise LinkLost("the node offers no sealed channel")
        if answer.bulk is not None:
            link.move(answer.bulk, answer.credit, CONNECT_S)
        link.size(answer.credit, answer.chunk)
        self.welcome, self.stands = answer, True
        self._since = time.monotonic()
        self._on_open(answer)
        for say in self.greeting:
            say()
        if self._failing_since is not None:
            _log.info("connected to the node", address=address, generation=answer.generation)

    def _look_around(self) -> None:
        """A node that was started again has another key: no connection to it comes about with the old one."""
        self._look()
        if not self.stands and read_node_file(Path(self._spec.node_file)) not in (None, self._tried):
            raise LinkLost("the node moved")

    def _failed(self, reason: str) -> None:
        """Wait a little before the next attempt; raises NodeLost where there has been no lasting one for too long."""
        now = time.monotonic()
        stable = self.stands and now - self._since > STABLE_S
        self.hang_up()
        if self._failing_since is None or stable:
            _log.warning("node lost, trying to reach it again", reason=reason, deadline_s=self._give_up_s)
            self._failing_since = now
            self._backoff.reset()
        left = self._failing_since + self._give_up_s - now
        if left <= 0:
            raise self._lost(self._address, reason)
        until = now + min(self._backoff.next(now), left)
        while (wait := until - time.monotonic()) > 0:
            self._look()
            time.sleep(min(SLICE, wait))

    def _lost(self, address: str, reason: str) -> NodeLost:
        fix = "see what became of it: rudra status, rudra logs"
        what = f"the node of job {self._spec.job} was not reached for {self._give_up_s:g} s"
        if not address:
            return NodeLost(f"{what}: {reason}", where=self._spec.node_file, fix=fix)
        found = unreachable(parse(address), f"{what} ({reason})", fix=fix)
        return NodeLost(found.message, where=found.where, fix=found.fix)


def _refusal(message: Refused) -> RudraError:
    """What is over is a loss; what was understood and refused is a failure."""
    error = error_of(message)
    return NodeLost(error.message, where=error.where, fix=error.fix) if isinstance(error, NotRunning) else error
