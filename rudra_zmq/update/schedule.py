"""Learning-rate schedules: the rate as a function of progress in epochs.

Owns: the kinds of schedule and the scaling of the first rate with the global batch. Must not know: rules,
clocks.

Progress is a number of epochs, samples applied / samples in the data, so the rate moves with every update
and a change in the number of learners does not move the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

_READS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # kind: (required, optional)
    "constant": ((), ()),
    "step": (("epochs", "gamma"), ()),
    "exponential": (("gamma",), ()),
    "power": (("power",), ("gamma",)),
    "cosine": ((), ()),
}

SCALINGS = ("none", "sqrt", "linear")


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule, t being the progress in epochs and T the epochs of the job:

    constant     lr0
    step         lr0 * gamma^(number of the epochs that are <= t)
    exponential  lr0 * gamma^t
    power        lr0 * (1 + gamma*t)^-power, gamma 1 where it is not given
    cosine       lr0 * (1 + cos(pi * min(t, T)/T)) / 2

    Raises ValueError (one line) for an unknown kind, for a parameter that is missing, out of range, or
    not the kind's.
    """

    kind: str
    epochs: tuple[float, ...] | None = None
    gamma: float | None = None
    power: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _READS:
            raise ValueError(f"schedule {self.kind!r} is unknown; known schedules: {', '.join(_READS)}")
        if self.epochs is not None:
            object.__setattr__(self, "epochs", tuple(self.epochs))
        required, optional = _READS[self.kind]
        for name in ("epochs", "gamma", "power"):
            given = getattr(self, name) is not None
            if given and name not in required + optional:
                raise ValueError(f"schedule {self.kind!r} has no parameter {name!r}")
            if not given and name in required:
                raise ValueError(f"schedule {self.kind!r} needs {name!r}")
        self._check_values()

    def _check_values(self) -> None:
        if self.epochs is not None:
            times = self.epochs
            rising = all(a < b for a, b in pairwise(times))
            if not times or not rising or not all(math.isfinite(t) and t > 0 for t in times):
                raise ValueError(f"schedule epochs = {list(times)} are not finite, above 0 and rising")
        for name in ("gamma", "power"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"schedule {name} = {value} is not a finite number above 0")


def rate(spec: ScheduleSpec, lr0: float, progress_epochs: float, total_epochs: float) -> float:
    """The rate at progress_epochs (samples applied / N); total_epochs is read by cosine alone.

    Raises ValueError for a negative progress, or a cosine without epochs.
    """
    if not progress_epochs >= 0:
        raise ValueError(f"progress of {progress_epochs} epochs is not a number of at least 0")
    if spec.kind == "step":
        assert spec.epochs is not None and spec.gamma is not None
        passed = sum(epoch <= progress_epochs for epoch in spec.epochs)
        return float(lr0 * spec.gamma**passed)
    if spec.kind == "exponential":
        assert spec.gamma is not None
        return float(lr0 * spec.gamma**progress_epochs)
    if spec.kind == "power":
        assert spec.power is not None
        gamma = 1.0 if spec.gamma is None else spec.gamma
        return float(lr0 * (1.0 + gamma * progress_epochs) ** -spec.power)
    if spec.kind == "cosine":
        if not total_epochs > 0:
            raise ValueError(f"a cosine schedule over {total_epochs} epochs: needs more than 0")
        return lr0 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress_epochs / total_epochs)))
    return lr0


def scaled_lr(lr0: float, mu: float, lam: int, reference_batch: float, scaling: str) -> float:
    """The first rate for a global batch of mu*lam samples, lr0 being right for reference_batch (hardsync).

    none: lr0; sqrt: lr0*sqrt(mu*lam/reference_batch) (arXiv 1509.04210); linear:
    lr0*mu*lam/reference_batch. mu may be a mean. Raises ValueError (one line) for another scaling or a
    batch that is not above 0.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"scaling {scaling!r} is unknown; known scalings: {', '.join(SCALINGS)}")
    if scaling == "none":
        return lr0
    ratio = mu * lam / reference_batch if reference_batch > 0 else 0.0
    if not (math.isfinite(ratio) and ratio > 0):
        raise ValueError(f"scaling {scaling!r} of a batch of {mu} x {lam} against one of {reference_batch}")
    return lr0 * (math.sqrt(ratio) if scaling == "sqrt" else ratio)
