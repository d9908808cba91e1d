"""Which host runs which ranks: pure rules over free slots and devices.

Owns: the order of the queue and the choice of hosts. Must not know: jobs beyond what they want, messages, time.

The queue is strictly first in, first out: a wide job at its head is not overtaken by narrow ones, or it would
never start. Ranks go to the host with the most room first, so that a job spans as few hosts as it can.

A learner takes a slot, and a device where the hosts that its job may run on have declared some: then hosts without
one are none of its own, for a learner that falls back to the CPU holds up the others for hours before anyone sees it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rudra_zmq.errors import Rejected
from rudra_zmq.head.ranks import Seat


@dataclass(frozen=True)
class Room:
    """A host: slots in all and free ones, devices declared and those that are there and free; names for groups.

    ``shared``: its learners share its devices (a private cluster). A host that takes no learners now has none free;
    ``closed`` says why, and one that never will has no slots at all.
    """

    slots: int
    free: int
    devices: int = 0
    free_devices: tuple[str, ...] = ()
    labels: frozenset[str] = frozenset()
    shared: bool = False
    closed: str = ""

    def capacity(self, by_device: bool) -> int:
        """Learners that it could take if nothing ran on it."""
        return min(self.slots, self.devices) if by_device and not self.shared else self.slots

    def open(self, by_device: bool) -> int:
        """Learners that it can take now."""
        if not by_device:
            return self.free
        if self.shared:
            return self.free if self.free_devices else 0
        return min(self.free, len(self.free_devices))

    def seats(self, host: str, by_device: bool) -> list[Seat]:
        """One for each learner that it can take now."""
        count = min(self.open(by_device), MOST_SEATS)
        names = self.free_devices if by_device else ("",)
        return [Seat(host, names[i % len(names)]) for i in range(count)]

    def less(self, seats: Sequence[Seat]) -> Room:
        """With these taken."""
        gone = {seat.device for seat in seats} if not self.shared else set()
        left = tuple(name for name in self.free_devices if name not in gone)
        return replace(self, free=self.free - len(seats), free_devices=left)


MOST_SEATS = 65536


@dataclass(frozen=True)
class Wanted:
    """A job that waits for ``count`` seats on ``hosts`` (names and labels; (): any), with ``device`` one each of the
    devices where there are some."""

    job: str
    count: int
    hosts: tuple[str, ...] = ()
    device: bool = True


@dataclass(frozen=True)
class Plan:
    """``placed``: job -> rank -> seat, for jobs that can start now; ``reasons``: job -> why it waits."""

    placed: dict[str, dict[int, Seat]]
    reasons: dict[str, str]


def _choice(wanted: Wanted, rooms: Mapping[str, Room]) -> tuple[dict[str, Room], bool]:
    """The hosts that the job may run on, and whether each learner takes a device of them."""
    names = set(wanted.hosts)
    chosen = {name: room for name, room in rooms.items() if not names or name in names or room.labels & names}
    by_device = wanted.device and any(room.devices for room in chosen.values())
    return ({n: r for n, r in chosen.items() if r.devices} if by_device else chosen), by_device


def unknown(wanted: Wanted, rooms: Mapping[str, Room]) -> str:
    """Why the job's hosts cannot be meant: a name that no host and no label has; "" where all are known."""
    known = sorted({*rooms, *(label for room in rooms.values() for label in room.labels)})
    for name in wanted.hosts if rooms else ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f", did you mean {near[0]}?" if near else f"; there are {', '.join(known[:20])}"
            return f"no host and no label is called {name}{meant}"
    return ""


def never_fits(wanted: Wanted, rooms: Mapping[str, Room]) -> str:
    """Why the job can never run on these hosts, or "" (also where there are no hosts yet)."""
    if not rooms:
        return ""
    chosen, by_device = _choice(wanted, rooms)
    total = sum(room.capacity(by_device) for room in chosen.values())
    if wanted.count <= total:
        return ""
    whose = "the cluster has" if not wanted.hosts else f"{', '.join(wanted.hosts)} {_have(wanted.hosts)}"
    return f"the job needs {_units(wanted.count, by_device)}, {whose} {total}"


def admit(wanted: Wanted, rooms: Mapping[str, Room]) -> None:
    """Whether the job may wait in the queue. Rejected where it would wait for ever."""
    if who := unknown(wanted, rooms):
        raise Rejected(who, where="learners.hosts", fix="`rudra hosts` lists them")
    if never := never_fits(wanted, rooms):
        raise Rejected(never, fix="set learners.count lower, or add a host")


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def place(wanted: Wanted, rooms: Mapping[str, Room]) -> dict[int, Seat] | None:
    """rank -> seat for ranks 0..count-1, or None where too few are free."""
    chosen, by_device = _choice(wanted, rooms)
    order = sorted(chosen, key=lambda name: (-chosen[name].open(by_device), name))
    seats = list(islice((seat for name in order for seat in chosen[name].seats(name, by_device)), wanted.count))
    return dict(enumerate(seats)) if len(seats) == wanted.count else None


def schedule(queue: Sequence[Wanted], rooms: Mapping[str, Room]) -> Plan:
    """Start what can start, in order; the first that waits for room holds up those behind it. One for which there
    never will be enough (its host is banned or forgotten by now) holds up nobody."""
    left = dict(rooms)
    placed: dict[str, dict[int, Seat]] = {}
    reasons: dict[str, str] = {}
    blocked = ""
    for wanted in queue:
        if blocked:
            reasons[wanted.job] = f"behind job {blocked} in the queue"
            continue
        seats = place(wanted, left)
        if seats is None:
            reasons[wanted.job] = why(wanted, left)
            if not (unknown(wanted, rooms) or never_fits(wanted, rooms)):
                blocked = wanted.job
            continue
        placed[wanted.job] = seats
        for host in {seat.host for seat in seats.values()}:
            left[host] = left[host].less([seat for seat in seats.values() if seat.host == host])
    return Plan(placed, reasons)


def why(wanted: Wanted, rooms: Mapping[str, Room]) -> str:
    """The reason of a job that waits: "needs 4 slots, 3 free"; and which of its hosts take nobody now."""
    chosen, by_device = _choice(wanted, rooms)
    units = _units(wanted.count, by_device)
    if not rooms:
        return f"needs {units}, no learnerd is registered"
    if reason := unknown(wanted, rooms) or never_fits(wanted, rooms):
        return reason
    free = sum(room.open(by_device) for room in chosen.values())
    closed = [f"{name} is {room.closed}" for name, room in sorted(chosen.items()) if room.closed]
    more = f" ({', '.join(closed[:8])})" if closed else ""
    return f"needs {units}, {free} free{more}"


def _units(count: int, by_device: bool) -> str:
    return f"{count} {'device' if by_device else 'slot'}{'' if count == 1 else 's'}"
