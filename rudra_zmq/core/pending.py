"""The accepted gradients that no update has taken yet, and how they become one update.

Owns folding (when a learner runs out of slots) and the coefficients of a decision. Must not know why an update
is due, nor who is present.
"""

from __future__ import annotations

from dataclasses import dataclass

from rudra_zmq.core.events import Decision, Entry, Fold, GradientId, Span
from rudra_zmq.core.staleness import float32, mean_sigma, scale


@dataclass(slots=True)
class Gradient:
    """One accepted gradient: ``count`` is mu_k in samples, ``folded`` the scale it was folded with."""

    id: GradientId
    slot: int
    timestamp: int
    spans: tuple[Span, ...]
    count: int
    rates: tuple[float, ...] | None
    folded: float | None = None

    @property
    def session(self) -> tuple[int, int]:
        """(rank, incarnation): whose slot it is in."""
        return self.id.rank, self.id.incarnation


class Pending:
    """The queue of accepted gradients in order of arrival."""

    def __init__(self, modulation: str) -> None:
        self._modulation = modulation
        self._queue: list[Gradient] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, gradient: Gradient) -> None:
        """Accept a gradient."""
        self._queue.append(gradient)

    def slots_of(self, session: tuple[int, int]) -> int:
        """How many slots of a session hold a gradient that is waiting."""
        return sum(g.session == session and g.folded is None for g in self._queue)

    def fold_oldest(self, session: tuple[int, int], timestamp: int, n: int) -> Fold:
        """Sum the oldest gradient of ``session`` into the accumulator, to free its slot.

        The scale is final: every pending gradient is in the next update, so that its sigma is known now.
        Only <sigma> is not, so ``average`` folds with 1 and is made up for in the fold coefficient.
        """
        first = all(g.folded is None for g in self._queue)
        oldest = next(g for g in self._queue if g.session == session and g.folded is None)
        modulation = "none" if self._modulation == "average" else self._modulation
        oldest.folded = scale(modulation, timestamp - oldest.timestamp, n, 1.0)
        return Fold(oldest.id, oldest.slot, float32(oldest.count * oldest.folded), first)

    def decide(
        self, *, update: int, generation: int, n: int, mu_bar: float | None, by_rank: bool, progress: float
    ) -> Decision:
        """Take all pending gradients as update ``update`` and empty the queue.

        a_k = mu_k / (c * mu_bar) with the true c; ``mu_bar`` None divides by the samples that came instead
        (hardsync, lambda = 1, last flush). ``by_rank`` sums in rank order, else in order of arrival.
        Coefficients are float32 values of a_k * s_k. There must be at least one gradient.
        """
        taken = sorted(self._queue, key=lambda g: g.id) if by_rank else self._queue
        self._queue = []
        c = len(taken)
        divisor = sum(g.count for g in taken) if mu_bar is None else c * mu_bar
        average = mean_sigma(update, [g.timestamp for g in taken])
        common = scale("average", 0, n, average) if self._modulation == "average" else 1.0
        fold_coefficient = float32(common / divisor)
        entries: list[Entry] = []
        weight_sum = 0.0
        for g in taken:
            sigma = (update - 1) - g.timestamp
            if g.folded is None:
                s = scale(self._modulation, sigma, n, average)
                coefficient = float32(g.count * s / divisor)
            else:
                s = g.folded * common
                coefficient = float32(fold_coefficient * float32(g.count * g.folded))
            weight_sum += coefficient
            folded = g.folded is not None
            entries.append(Entry(g.id, g.slot, g.timestamp, g.spans, g.count, sigma, s, coefficient, folded))
        return Decision(
            update=update,
            generation=generation,
            entries=tuple(entries),
            fold_coefficient=fold_coefficient,
            weight_sum=weight_sum,
            s_bar=sum(e.scale for e in entries) / c,
            mean_sigma=average,
            progress=progress,
            samples=sum(span.count for e in entries for span in e.spans),
            c=c,
            rates=_rates(taken),
        )


def _rates(taken: list[Gradient]) -> tuple[float, ...] | None:
    """The rates of the lowest rank that sent any (the chief), its newest ones."""
    sent = [g for g in taken if g.rates is not None]
    if not sent:
        return None
    chief = min(g.id.rank for g in sent)
    return max((g for g in sent if g.id.rank == chief), key=lambda g: g.id).rates
