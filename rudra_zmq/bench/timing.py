"""Times of several contenders, taken in turns, so that what drifts on a machine meets all of them alike.

Owns: clock, turns, medians. Must not know: what is timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Clock = Callable[[], float]

SHORTEST = 2e-3
"""Seconds: quicker calls are timed several at once."""

FIRST_ROUNDS, MOST_ROUNDS = 3, 2000
"""Of a block."""


def clock_for(threads: int) -> Clock:
    """What to time work of so many threads with: one thread's own time on a processor, else the clock on the wall.

    The first is the same on an idle machine, and hardly moves when others run.
    """
    return time.thread_time if threads == 1 else time.perf_counter


@dataclass(frozen=True)
class Times:
    """Seconds per call of each contender, one per turn, in the same order of turns."""

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """The other's time over that of ``name``: the median over the turns. Above 1, ``name`` is the faster."""
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return statistics.median(theirs / mine for mine, theirs in pairs)


@dataclass(frozen=True)
class Block:
    """Rounds that a contender did in one go. seconds: of a round, or of an update where rounds are not in step.

    ``cpu`` (seconds) and ``faults`` are those of all its processes, over so many ``updates``.
    """

    seconds: float
    updates: float
    cpu: float = 0.0
    faults: int = 0

    @classmethod
    def of(
        cls, answers: Sequence[Mapping[str, Any]], *, updates: float, in_step: bool, cpu: float = 0.0, faults: int = 0
    ) -> Block:
        """From what the members of a group answered; ``cpu`` and ``faults`` are those of others.

        In step, the first member's rounds are everybody's: their median. Else the time from the first one's beginning
        to the last one's end, over the updates.
        """
        if in_step:
            seconds = statistics.median(answers[0]["times"])
        else:
            seconds = (max(a["end"] for a in answers) - min(a["start"] for a in answers)) / updates
        return cls(seconds, updates, cpu + sum(a["cpu"] for a in answers), faults + sum(a["faults"] for a in answers))

    @classmethod
    def alone(cls, times: Sequence[float]) -> Block:
        """Of calls in this process."""
        return cls(statistics.median(times), len(times))


@dataclass(frozen=True)
class Blocks:
    """What contenders did in turns: a block of each in every turn, in the same order."""

    of: Mapping[str, Sequence[Block]] = field(default_factory=dict)

    @property
    def times(self) -> Times:
        """Seconds of each block."""
        return Times({name: tuple(block.seconds for block in blocks) for name, blocks in self.of.items()})

    def per_update(self, name: str) -> tuple[float, float]:
        """CPU seconds and page faults, over all blocks."""
        blocks = self.of[name]
        updates = sum(block.updates for block in blocks)
        return sum(block.cpu for block in blocks) / updates, sum(block.faults for block in blocks) / updates

    def best(self, names: Sequence[str]) -> str:
        """The one with the least median."""
        return min(names, key=self.times.median)


def blocks_in_turns(
    contenders: Mapping[str, Callable[[int], Block]], turns: int, seconds: float = 0.0, rounds: int = 0
) -> Blocks:
    """A block of each in every turn, after one to warm up: of so many rounds, or of as many as fit into ``seconds``."""
    counts = {}
    for name, block in contenders.items():
        if rounds:
            block(rounds)
            counts[name] = rounds
        else:
            block(FIRST_ROUNDS)
            first = block(FIRST_ROUNDS)
            fit = math.ceil(FIRST_ROUNDS * seconds / max(first.seconds * first.updates, 1e-9))
            counts[name] = min(MOST_ROUNDS, max(FIRST_ROUNDS, fit))
    done: dict[str, list[Block]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, block in contenders.items():
            done[name].append(block(counts[name]))
    return Blocks(done)


def in_turns(contenders: Mapping[str, Callable[[], object]], clock: Clock, turns: int) -> Times:
    """Call each once to warm it up and to see how long it takes, then all in ``turns`` turns."""
    calls = {}
    for name, work in contenders.items():
        work()
        calls[name] = max(1, math.ceil(SHORTEST / max(_timed(work, clock, 1), 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, work in contenders.items():
            seconds[name].append(_timed(work, clock, calls[name]))
    return Times({name: tuple(values) for name, values in seconds.items()})


def _timed(work: Callable[[], object], clock: Clock, calls: int) -> float:
    start = clock()
    for _ in range(calls):
        work()
    return (clock() - start) / calls
