"""The learnerds: who is registered, how many slots are free, who has gone silent; requests to them.

Owns the hosts' records and the ids of our own requests. Must not know: what becomes of a job (course, crew).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rudra_zmq.errors import Rejected
from rudra_zmq.head.effects import Effect, Send
from rudra_zmq.head.placement import Room
from rudra_zmq.head.ranks import Seat
from rudra_zmq.head.registry import FORGET_HOST_S
from rudra_zmq.net.addresses import is_any, is_loopback, parse
from rudra_zmq.wire.messages.control import HostRow, Register, Standing
from rudra_zmq.wire.messages.data import Message

PING_S = 1.0
LIVENESS_S = 3 * PING_S
REPLY_S = 30.0
MOST_WAYS = 4
COMPARED = ("rudra", "torch", "cuda", "python")


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
    labels: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # declared
    absent: frozenset[str] = frozenset()  # of these
    reached: str = ""  # IP of ours that it dialled; "" over ipc
    dead: bool = False  # its process is known to be gone, and its learners with it
    key: str = ""  # that it registered under


@dataclass(frozen=True)
class _Asked:
    peer: bytes
    then: Callable[[Message | None], None]
    deadline: float


class Fleet:
    """Hosts by name. ``boot`` is this machine's mark, ``lives`` tells whether a PID of it is alive; ``shared``: the
    learners of a host share its devices."""

    def __init__(self, out: list[Effect], *, boot: str, lives: Callable[[int], bool], shared: bool = False) -> None:
        self.hosts: dict[str, Host] = {}
        self.former: dict[str, HostRow] = {}  # known to our predecessor, not seen since
        self.standing: dict[str, Standing] = {}  # of those that are not "ready"
        self._shared = shared
        self.born = 0.0  # when the head began to listen
        self._out = out
        self._boot = boot
        self._lives = lives
        self._ids = itertools.count(1)
        self._asked: dict[str, _Asked] = {}

    def register(self, peer: bytes, message: Register, now: float) -> Host:
        """A learnerd is here (again). Rejected where another living one has its name."""
        known = self.hosts.get(message.name)
        same = known is not None and (known.pid, known.boot) == (message.pid, message.boot)
        if known is not None and not same and known.peer is not None and not self._gone(known):
            elsewhere = "" if known.boot == message.boot else " on another machine"
            raise Rejected(
                f"a learnerd is registered as {message.name} already, with PID {known.pid}{elsewhere}",
                fix="stop that one, or give this one another --name",
            )
        host = Host(
            message.name,
            message.slots,
            message.pid,
            message.boot,
            now,
            peer,
            dict(message.versions),
            tuple(message.labels),
            tuple(message.devices),
            frozenset(message.absent),
            message.reached,
        )
        self.hosts[message.name] = host
        self.former.pop(message.name, None)
        return host

    def recall(self, rows: Sequence[HostRow]) -> None:
        """What the registry has of hosts that were here before this head."""
        self.former = {row.name: row for row in rows if row.name not in self.hosts}
        self.standing = {row.name: row.state for row in rows if row.state != "ready"}

    def forget_old(self, now: float, keep: Callable[[str], bool]) -> None:
        """Those that were silent for seven days are no hosts of this cluster any more, unless ``keep`` says so; one
        that was drained or banned stays so."""
        for host in list(self.hosts.values()):
            decided = host.name in self.standing
            if host.peer is None and now - host.heard > FORGET_HOST_S and not decided and not keep(host.name):
                del self.hosts[host.name]

    def forget(self, name: str) -> None:
        """As if it had never been here; what was decided about it goes too."""
        self.hosts.pop(name, None)
        self.former.pop(name, None)
        self.standing.pop(name, None)

    def differences(self, names: Iterable[str]) -> str:
        """As ``differing``, in one line; "" if nothing differs."""
        return "; ".join(differing({name: self.hosts[name].versions for name in names if name in self.hosts}))

    def addresses(self, host: Host, given: Sequence[str]) -> list[str]:
        """Where ``host`` reaches a node of this machine that listens at ``given``, best first.

        A socket's path is of use on this machine alone. What a host dialled to reach us is proven to lead here, and
        comes before the address that was bound; all interfaces at once (0.0.0.0) are no address to dial.
        """
        here = host.boot == self._boot
        found = [text for text in given if text.startswith("ipc:")] if here else []
        for bound in (parse(text) for text in given if not text.startswith("ipc:")):
            loopback = "::1" if ":" in bound.host else "127.0.0.1"
            tries = [bound.host] if here else []
            tries += [host.reached, bound.host] if host.reached else []
            tries += [loopback] if here else []
            usable = (ip for ip in tries if not is_any(ip) and (here or not is_loopback(ip)))
            found += [str(replace(bound, host=ip)) for ip in dict.fromkeys(usable)][:MOST_WAYS]
        return found

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

    def rooms(self, used: Mapping[str, Sequence[Seat]]) -> dict[str, Room]:
        """All hosts, also those that are away; ``used`` is what each of them has given away."""
        rooms = {name: self._former_room(row) for name, row in self.former.items()}
        return rooms | {name: self._room(host, used.get(name, ())) for name, host in self.hosts.items()}

    def _room(self, host: Host, seats: Sequence[Seat]) -> Room:
        standing = self.standing.get(host.name, "ready")
        closed = standing if standing != "ready" else "silent" if host.peer is None else ""
        taken = set() if self._shared else {seat.device for seat in seats}
        free = tuple(d for d in host.devices if d not in host.absent and d not in taken)
        slots = 0 if standing == "banned" else host.slots
        return Room(
            slots,
            0 if closed else max(0, host.slots - len(seats)),
            len(host.devices),
            () if closed else free,
            frozenset(host.labels),
            self._shared,
            closed,
        )

    def _former_room(self, row: HostRow) -> Room:
        slots = 0 if self.standing.get(row.name) == "banned" else row.slots
        return Room(slots, 0, len(row.devices), (), frozenset(row.labels), self._shared, "silent")

    def row(self, host: Host, used: Mapping[str, Sequence[Seat]], wall: float, now: float) -> HostRow:
        """As the command line shows it; a host that takes no learners has nothing free."""
        room = self._room(host, used.get(host.name, ()))
        return HostRow(
            state=self.standing.get(host.name, "ready"),
            silent=host.peer is None,
            labels=list(host.labels),
            devices=list(host.devices),
            absent=sorted(host.absent),
            free_devices=len(room.free_devices),
            address=host.reached,
            name=host.name,
            slots=host.slots,
            free=room.free,
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


def differing(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """ "torch 2.9.0 on a, 2.8.1 on b c": what differs between hosts (name -> versions) of what a gradient is made by.

    A patch level of Python is no difference.
    """
    found = []
    for what in COMPARED:
        who: dict[str, list[str]] = {}
        for name, has in versions.items():
            if version := _release(what, has.get(what, "")):
                who.setdefault(version, []).append(name)
        if len(who) > 1:
            told = ", ".join(f"{version} on {' '.join(names)}" for version, names in who.items())
            found.append(f"{what} {told}")
    return found


def _release(name: str, version: str) -> str:
    """What counts of a version: of Python and CUDA major and minor."""
    return ".".join(version.split(".")[:2]) if name in ("python", "cuda") else version
