"""Sets of integers kept as sorted disjoint intervals.

Owns the arithmetic that the ledger is made of. Knows nothing of epochs or learners. Every operation costs
O(log k + pieces touched) for k intervals, never O(N).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Intervals:
    """A set of integers as half-open intervals [start, stop), ascending, never touching one another."""

    __slots__ = ("_starts", "_stops", "count")

    def __init__(self, pieces: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.count = 0
        for start, stop in pieces:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def __len__(self) -> int:
        """Number of intervals (not of integers: that is ``count``)."""
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop). Raises ValueError if it is empty or any of it is in the set already."""
        at = bisect_left(self._starts, start)
        before = self._stops[at - 1] if at > 0 else start - 1
        after = self._starts[at] if at < len(self) else stop + 1
        if not before <= start < stop <= after:
            raise ValueError(f"[{start}, {stop}) cannot be added: it is empty or already there")
        self.count += stop - start
        joins_before = before == start
        joins_after = after == stop
        if joins_before and joins_after:
            self._stops[at - 1] = self._stops[at]
            del self._starts[at], self._stops[at]
        elif joins_before:
            self._stops[at - 1] = stop
        elif joins_after:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)

    def remove(self, start: int, stop: int) -> None:
        """Remove [start, stop). Raises ValueError unless all of it is in the set."""
        at = bisect_right(self._starts, start) - 1
        if not (start < stop and at >= 0 and stop <= self._stops[at]):
            raise ValueError(f"[{start}, {stop}) cannot be removed: it is not there")
        self.count -= stop - start
        leaves_before = self._starts[at] < start
        leaves_after = stop < self._stops[at]
        if leaves_before and leaves_after:
            self._starts.insert(at + 1, stop)
            self._stops.insert(at, start)
        elif leaves_before:
            self._stops[at] = start
        elif leaves_after:
            self._starts[at] = stop
        else:
            del self._starts[at], self._stops[at]

    def take(self, want: int) -> list[tuple[int, int]]:
        """Remove and return the lowest ``want`` integers (all of them where there are fewer)."""
        taken: list[tuple[int, int]] = []
        while want > 0 and self._starts:
            start = self._starts[0]
            stop = min(self._stops[0], start + want)
            self.remove(start, stop)
            taken.append((start, stop))
            want -= stop - start
        return taken

    def split(self, start: int, stop: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The pieces of [start, stop) that are in the set, and those that are not; both ascending."""
        inside: list[tuple[int, int]] = []
        outside: list[tuple[int, int]] = []
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self) and self._starts[at] < stop:
            low, high = max(start, self._starts[at]), min(stop, self._stops[at])
            if low < high:
                if start < low:
                    outside.append((start, low))
                inside.append((low, high))
                start = high
            at += 1
        if start < stop:
            outside.append((start, stop))
        return inside, outside
