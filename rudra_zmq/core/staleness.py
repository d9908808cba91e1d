"""Staleness and what it does to a gradient's weight.

Owns the formulas of RUDRA.md "as we define it": scales s_k, weights a_k, <sigma> of a vector clock, and the
histogram of sigma. Must not know where gradients come from.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence


def float32(value: float) -> float:
    """``value`` rounded to the nearest float32: the number that the sum is made with."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def mean_sigma(update: int, timestamps: Sequence[int]) -> float:
    """<sigma> of update i: (i-1) - mean(i_1..i_c)."""
    return (update - 1) - sum(timestamps) / len(timestamps)


def scale(modulation: str, sigma: int, n: int, average: float) -> float:
    """s_k: 1 (none), 1/n, 1/max(1,<sigma>) (average), 1/max(1,sigma_k) (staleness), 1/sqrt(max(1,sigma_k)).

    ``sigma`` is sigma_k, ``average`` is <sigma> of the update. Raises ValueError for an unknown modulation.
    """
    if modulation == "none":
        return 1.0
    if modulation == "n":
        return 1.0 / n
    if modulation == "average":
        return 1.0 / max(1.0, average)
    if modulation == "staleness":
        return 1.0 / max(1, sigma)
    if modulation == "inverse-sqrt":
        return 1.0 / math.sqrt(max(1, sigma))
    raise ValueError(f"unknown modulation {modulation!r}")


class Histogram:
    """How many gradients were applied at each sigma."""

    def __init__(self, counts: Mapping[str | int, int] | None = None) -> None:
        self.counts: dict[int, int] = {int(sigma): int(count) for sigma, count in (counts or {}).items()}

    def add(self, sigma: int, count: int = 1) -> None:
        """Count ``count`` gradients of staleness ``sigma``."""
        self.counts[sigma] = self.counts.get(sigma, 0) + count

    @property
    def total(self) -> int:
        """Number of gradients."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        """Mean sigma; 0 where nothing was counted."""
        total = self.total
        return sum(sigma * count for sigma, count in self.counts.items()) / total if total else 0.0

    @property
    def max(self) -> int:
        """Largest sigma; 0 where nothing was counted."""
        return max(self.counts, default=0)

    @property
    def p95(self) -> int:
        """The smallest sigma that at least 95 % of the gradients do not exceed; 0 where nothing was counted."""
        needed = math.ceil(0.95 * self.total)
        seen = 0
        for sigma in sorted(self.counts):
            seen += self.counts[sigma]
            if seen >= needed:
                return sigma
        return 0

    def to_json(self) -> dict[str, int]:
        """Counts by sigma as text, ascending: JSON has no integer keys. ``Histogram(...)`` takes it back."""
        return {str(sigma): self.counts[sigma] for sigma in sorted(self.counts)}
