"""Real training in virtual time: the update's CPU code behind the engine's callback.

Owns the versions and the accumulator. Must not know time or learners. Vectors are float32 of shape (n,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rudra_zmq.core.events import Decision, Fold, Span
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.rules import RuleSpec

Vector: TypeAlias = npt.NDArray[np.float32]


class CpuTraining:
    """A rule of ``update`` over a vector; ``gradient(weights, spans)`` is the mean over the spans' samples.

    ``rate`` maps the progress in epochs to the learning rate.
    """

    def __init__(
        self,
        spec: RuleSpec,
        weights: Vector,
        gradient: Callable[[Vector, tuple[Span, ...]], Vector],
        rate: Callable[[float], float],
    ) -> None:
        self._update = CpuUpdate(spec, weights.size)
        self._weights: Vector = weights.copy()
        self._accumulator = np.zeros_like(weights)
        self._gradient = gradient
        self._rate = rate

    def weights(self) -> Vector:
        """The newest version; every update makes another array."""
        return self._weights

    def gradient(self, weights: Vector, spans: tuple[Span, ...]) -> Vector:
        """What the callback says."""
        gradient: Vector = self._gradient(weights, spans)
        return gradient

    def fold(self, fold: Fold, gradient: Vector) -> None:
        """Add scale * gradient to the accumulator, or begin it."""
        if fold.first:
            self._accumulator.fill(0)
        self._update.fold(self._accumulator, fold.scale, gradient)

    def update(self, decision: Decision, gradients: Sequence[Vector]) -> None:
        """Make the next version. Raises FloatingPointError if the sum of the gradients is not finite."""
        direct = [entry.coefficient for entry in decision.entries if not entry.folded]
        folded = (decision.fold_coefficient, self._accumulator) if len(direct) < decision.c else None
        out: Vector = np.empty_like(self._weights)
        report = self._update.step(
            self._weights,
            list(zip(direct, gradients, strict=True)),
            folded,
            decision.weight_sum,
            decision.s_bar,
            self._rate(decision.progress),
            out,
        )
        if not report.finite:
            raise FloatingPointError(f"the gradient of update {decision.update} is not finite")
        self._weights = out
