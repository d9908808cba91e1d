"""Shares of one piece of work on several threads, the caller's among them.

Owns: the threads. Must not know: what a share is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")


class Team:
    """``size`` threads, the caller's included; none is started for a size of 1."""

    def __init__(self, size: int) -> None:
        self._pool = ThreadPoolExecutor(size - 1, "rudra-update") if size > 1 else None

    def run(self, part: Callable[[S], bool], shares: Sequence[S]) -> bool:
        """Call part for every share; True if it said so each time. An exception of any is raised when all ended."""
        if self._pool is None or len(shares) == 1:
            return all(list(map(part, shares)))
        others = [self._pool.submit(part, share) for share in shares[1:]]
        try:
            mine = part(shares[0])
        finally:
            theirs = [other.exception() for other in others]
        for error in theirs:
            if error is not None:
                raise error
        return all([mine, *(other.result() for other in others)])

    def close(self) -> None:
        """End the threads; ``run`` must not be called any more."""
        if self._pool is not None:
            self._pool.shutdown()
