"""Times of several contenders, taken in turns, so that what drifts on a machine meets all of them alike.

Owns: clock, turns, medians. Must not know: what is timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Clock = Callable[[], float]

SHORTEST = 2e-3
"""Seconds: quicker calls are timed several at once."""


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
