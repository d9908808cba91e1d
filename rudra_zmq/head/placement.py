"""Which host runs which ranks: pure rules over free slots.

Owns the order of the queue and the choice of hosts. Must not know: jobs beyond their count, messages, time.

The queue is strictly first in, first out: a wide job at its head is not overtaken by narrow ones, or it would
never start. Ranks go to the host with the most free slots first, so that a job spans as few hosts as it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True)
class Slots:
    """A registered learnerd: slots in all and free ones."""

    total: int
    free: int


@dataclass(frozen=True)
class Wanted:
    """A job that waits for ``count`` slots."""

    job: str
    count: int


@dataclass(frozen=True)
class Plan:
    """``placed``: job -> rank -> host, for jobs that can start now; ``reasons``: job -> why it waits."""

    placed: dict[str, dict[int, str]]
    reasons: dict[str, str]


def never_fits(count: int, hosts: Mapping[str, Slots]) -> str:
    """Why the job can never run on these hosts, or "" (also where there are no hosts yet)."""
    total = sum(h.total for h in hosts.values())
    if not hosts or count <= total:
        return ""
    return f"the job needs {_slots(count)}, the cluster has {total}"


def place(count: int, hosts: Mapping[str, Slots]) -> dict[int, str] | None:
    """rank -> host for ranks 0..count-1, or None where too few slots are free."""
    order = sorted(hosts, key=lambda name: (-hosts[name].free, name))
    homes = list(islice((name for name in order for _ in range(hosts[name].free)), count))
    return dict(enumerate(homes)) if len(homes) == count else None


def schedule(queue: Sequence[Wanted], hosts: Mapping[str, Slots]) -> Plan:
    """Start what can start, in order; the first that cannot holds up those behind it."""
    free = dict(hosts)
    placed: dict[str, dict[int, str]] = {}
    reasons: dict[str, str] = {}
    blocked = ""
    for wanted in queue:
        if blocked:
            reasons[wanted.job] = f"behind job {blocked} in the queue"
            continue
        homes = place(wanted.count, free)
        if homes is None:
            blocked = wanted.job
            reasons[wanted.job] = why(wanted.count, free)
            continue
        placed[wanted.job] = homes
        for host in homes.values():
            free[host] = Slots(free[host].total, free[host].free - 1)
    return Plan(placed, reasons)


def why(count: int, hosts: Mapping[str, Slots]) -> str:
    """The reason of a job that waits: "needs 4 slots, 3 free"."""
    if not hosts:
        return f"needs {_slots(count)}, no learnerd is registered"
    return never_fits(count, hosts) or f"needs {_slots(count)}, {sum(h.free for h in hosts.values())} free"


def _slots(count: int) -> str:
    return f"{count} slot" if count == 1 else f"{count} slots"
