"""How much memory the servers of a job take, known before any of it is taken.

Owns: the arithmetic, what is said about it, and the decision: all as wished, a shorter ring, or a refusal. Must not
know: what allocates, how much is free (headroom.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rudra_zmq.core.versions import ring_size
from rudra_zmq.errors import Rejected


class TooLarge(Rejected):
    """The servers of a job need more memory than they may take."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job wants: bytes of one vector of each kind, and how many. ``rule`` names the optimizer's state.

    ``version``, ``slot``: as weights and gradients travel; ``weights``: float32; ``masters``: versions of these that
    the node keeps for itself; ``residuals``: of one learner under topk, else 0.

    ``state``: bytes of all of it; ``accumulator`` 0 where nothing is ever folded; ``decoded``: a gradient as an update
    takes it, where it cannot read it as it travels; ``queue``: bytes under way to and from one learner, at most;
    ``most``: the largest lambda; ``slots``: of each learner; ``backup``: so many of them no round waits for.
    """

    version: int
    slot: int
    weights: int
    slots: int
    state: int
    rule: str
    accumulator: int
    queue: int
    most: int
    protocol: str
    tests: bool
    snapshots: bool
    masters: int = 0
    residuals: int = 0
    backup: int = 0
    decoded: int = 0


class Limit(NamedTuple):
    """``nbytes`` may be taken; ``text``: why not more ("this host has 6.2 GB to spare"); ``fix``: how to get more."""

    nbytes: int
    text: str
    fix: str


class Part(NamedTuple):
    """One part of the plan, as people read it."""

    name: str
    nbytes: int


class Budget(NamedTuple):
    """``ring`` versions, and all parts with them; ``wanted``: how long a ring nobody would ever wait for."""

    ring: int
    wanted: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(part.nbytes for part in self.parts)

    def with_state(self, demand: Demand) -> Budget:
        """The same ring for another optimizer's state."""
        return self._replace(parts=_parts(demand, self.ring))

    def __str__(self) -> str:
        parts = ", ".join(f"{part.name} {size(part.nbytes)}" for part in self.parts)
        return f"the servers of this job need {size(self.nbytes)}: {parts}"


def budget(demand: Demand, limit: int) -> Budget:
    """The longest ring with which all fits into ``limit`` bytes; the shortest one where none does."""
    without = sum(part.nbytes for part in _parts(demand, 0))
    affordable = max(0, limit - without) // max(1, demand.version)
    ring = ring_size(demand.protocol, demand.most, affordable, demand.backup)
    wanted = ring_size(demand.protocol, demand.most, demand.most + 2, demand.backup)
    return Budget(ring, wanted, _parts(demand, ring))


def _parts(demand: Demand, ring: int) -> tuple[Part, ...]:
    slots = demand.slots * demand.most
    parts = [
        Part(_count(ring, "version"), ring * demand.version),
        Part("float32 weights", demand.masters * demand.weights),
        Part("residuals", demand.most * demand.residuals),
        Part(_count(slots, "slot"), slots * demand.slot),
        Part(demand.rule, demand.state),
        Part("accumulator", demand.accumulator),
        Part("decoded gradient", demand.decoded),
        Part("connections", 2 * demand.most * demand.queue),
        Part("evaluator", 2 * demand.weights if demand.tests else 0),
        Part("snapshot", demand.weights + demand.state if demand.snapshots else 0),
    ]
    return tuple(part for part in parts if part.nbytes)


def check(plan: Budget, limit: Limit) -> None:
    """Raises TooLarge, one line with the numbers and the fix, where the plan does not fit."""
    if plan.nbytes > limit.nbytes:
        fix = f"{limit.fix}, fewer learners (learners.count), a rule with less state (update.rule)"
        spare = next((part for part in plan.parts if part.name == "snapshot"), None)
        if spare is not None:
            fix += f', or servers.snapshot = "none", which saves {size(spare.nbytes)}'
        raise TooLarge(f"{plan}; {limit.text}", fix=fix)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size(nbytes: int) -> str:
    """Bytes with a decimal unit, as a job file takes them."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
