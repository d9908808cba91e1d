"""The learnerds: who is registered, how many slots are free, who has gone silent; requests to them.

Owns the hosts' records and the ids of our own requests. Must not know: what becomes of a job (course, crew).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rudra_zmq.errors import Rejected
from rudra_zmq.head.effects import Effect, Send
from rudra_zmq.head.placement import Slots
from rudra_zmq.wire.messages.control import HostRow, Register
from rudra_zmq.wire.messages.data import Message

PING_S = 1.0
LIVENESS_S = 3 * PING_S
REPLY_S = 30.0


@dataclass
class Host:
    """A learnerd. ``peer`` None: it is silent or gone since ``heard`` (monotonic seconds)."""

    name: str
    slots: int
    pid: int
    boot: str
    heard: float
    peer: bytes | None = None
    versions: dict[str, str] = field(default_factory=dict)
    dead: bool = False  # its process is known to be gone, and its learners with it


@dataclass(frozen=True)
class _Asked:
    peer: bytes
    then: Callable[[Message | None], None]
    deadline: float


class Fleet:
    """Hosts by name. ``boot`` is this machine's boot id, ``lives`` tells whether a PID of it is alive."""

    def __init__(self, out: list[Effect], *, boot: str, lives: Callable[[int], bool]) -> None:
        self.hosts: dict[str, Host] = {}
        self.born = 0.0  # when the head began to listen
        self._out = out
        self._boot = boot
        self._lives = lives
        self._ids = itertools.count(1)
        self._asked: dict[str, _Asked] = {}

    def register(self, peer: bytes, message: Register, now: float) -> Host:
        """A learnerd is here (again). Rejected where another living one has its name."""
        known = self.hosts.get(message.name)
        if known is not None and known.pid != message.pid and known.peer is not None and not self._gone(known):
            raise Rejected(
                f"a learnerd is registered as {message.name} already, with PID {known.pid}",
                fix="stop that one, or give this one another --name",
            )
        host = Host(
            message.name, message.slots, message.pid, message.boot, now, peer, dict(message.versions)
        )  # fmt: skip
        self.hosts[message.name] = host
        return host

    def _gone(self, host: Host) -> bool:
        """Whether its process is known to have ended."""
        return host.boot == self._boot and not self._lives(host.pid)

    def of(self, peer: bytes) -> Host | None:
        """The host whose connection this is."""
        return next((host for host in self.hosts.values() if host.peer == peer), None)

    def registered(self, name: str) -> Host | None:
        """The host, where it can be talked to."""
        host = self.hosts.get(name)
        return host if host is not None and host.peer is not None else None

    def heard(self, peer: bytes, now: float) -> None:
        """Any message is a sign of life."""
        if (host := self.of(peer)) is not None:
            host.heard = now

    def lost(self, now: float) -> list[Host]:
        """Hosts that went silent just now, or whose process was just found dead."""
        found = []
        for host in self.hosts.values():
            silent = host.peer is not None and now - host.heard > LIVENESS_S
            died = not host.dead and self._gone(host)
            if silent or died:
                self.drop(host)
                host.dead = host.dead or died
                found.append(host)
        return found

    def drop(self, host: Host) -> None:
        """The connection is of no more use; those who wait for an answer get None."""
        peer, host.peer = host.peer, None
        for key in [key for key, asked in self._asked.items() if asked.peer == peer]:
            self._asked.pop(key).then(None)

    def slots(self, used: Mapping[str, int]) -> dict[str, Slots]:
        """Registered hosts; ``used`` is how many ranks each of them has been given."""
        return {
            host.name: Slots(host.slots, max(0, host.slots - used.get(host.name, 0)))
            for host in self.hosts.values()
            if host.peer is not None
        }

    def row(self, host: Host, used: Mapping[str, int], wall: float, now: float) -> HostRow:
        """As the command line shows it; a host that cannot be talked to has nothing free."""
        free = max(0, host.slots - used.get(host.name, 0)) if host.peer is not None else 0
        return HostRow(
            name=host.name,
            slots=host.slots,
            free=free,
            pid=host.pid,
            last_seen=wall - (now - host.heard),
            versions=host.versions,
        )

    # ---------------------------------------------------------------------------------------- talking

    def tell(self, host: Host, message: Message) -> None:
        """A notice. What gets lost with a connection is put right at the next Register."""
        if host.peer is not None:
            self._out.append(Send(host.peer, message))

    def ask(self, host: Host, message: Message, now: float, then: Callable[[Message | None], None]) -> None:
        """A request; ``then`` gets the answer, or None where none came."""
        if host.peer is None:
            then(None)
            return
        key = f"h{next(self._ids)}"
        self._asked[key] = _Asked(host.peer, then, now + REPLY_S)
        self._out.append(Send(host.peer, message, key))

    def answered(self, peer: bytes, key: str, message: Message) -> None:
        """A reply to a request of ours; one that nobody waits for any more is left alone."""
        asked = self._asked.get(key)
        if asked is not None and asked.peer == peer:
            del self._asked[key]
            asked.then(message)

    def expire(self, now: float) -> None:
        """Give up on answers that do not come."""
        for key in [key for key, asked in self._asked.items() if asked.deadline <= now]:
            self._asked.pop(key).then(None)
