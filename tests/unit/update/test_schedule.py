"""Schedules against values worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from rudra_zmq.update.schedule import ScheduleSpec, rate, scaled_lr

STEP = ScheduleSpec("step", epochs=(120, 130), gamma=0.1)


@pytest.mark.parametrize(
    ("spec", "progress", "expected"),
    [
        (ScheduleSpec("constant"), 0.0, 2.0),
        (ScheduleSpec("constant"), 99.0, 2.0),
        (STEP, 119.999, 2.0),
        (STEP, 120.0, 0.2),
        (STEP, 130.5, 0.02),
        (ScheduleSpec("exponential", gamma=0.25), 0.0, 2.0),
        (ScheduleSpec("exponential", gamma=0.25), 0.5, 1.0),
        (ScheduleSpec("exponential", gamma=0.25), 2.0, 0.125),
        (ScheduleSpec("power", power=1.0), 3.0, 0.5),
        (ScheduleSpec("power", power=0.5, gamma=4.0), 2.0, 2 / 3),
        (ScheduleSpec("cosine"), 0.0, 2.0),
        (ScheduleSpec("cosine"), 1.0, 1.5),
        (ScheduleSpec("cosine"), 1.5, 1.0),
        (ScheduleSpec("cosine"), 3.0, 0.0),
        (ScheduleSpec("cosine"), 4.0, 0.0),
    ],
)
def test_rate(spec: ScheduleSpec, progress: float, expected: float) -> None:
    assert rate(spec, 2.0, progress, 3.0) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("spec", [ScheduleSpec("exponential", gamma=0.9), ScheduleSpec("power", power=1.0)])
def test_the_rate_moves_with_every_update(spec: ScheduleSpec) -> None:
    rates = [rate(spec, 0.03, i * 128 / 60000, 3) for i in range(100)]
    assert all(a > b for a, b in pairwise(rates))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kind": "cosin"}, "schedule 'cosin' is unknown; known schedules: constant, step"),
        ({"kind": "constant", "gamma": 0.1}, "schedule 'constant' has no parameter 'gamma'"),
        ({"kind": "cosine", "epochs": [1]}, "schedule 'cosine' has no parameter 'epochs'"),
        ({"kind": "exponential", "gamma": 0.1, "power": 1.0}, "'exponential' has no parameter 'power'"),
        ({"kind": "step", "epochs": [1]}, "schedule 'step' needs 'gamma'"),
        ({"kind": "step", "gamma": 0.1}, "schedule 'step' needs 'epochs'"),
        ({"kind": "power"}, "schedule 'power' needs 'power'"),
        ({"kind": "exponential"}, "schedule 'exponential' needs 'gamma'"),
        ({"kind": "step", "epochs": [], "gamma": 0.1}, "epochs"),
        ({"kind": "step", "epochs": [2, 1], "gamma": 0.1}, "rising"),
        ({"kind": "step", "epochs": [0, 1], "gamma": 0.1}, "above 0"),
        ({"kind": "step", "epochs": [1, math.inf], "gamma": 0.1}, "finite"),
        ({"kind": "exponential", "gamma": 0.0}, "gamma = 0.0"),
        ({"kind": "power", "power": math.nan}, "power = nan"),
    ],
)
def test_bad_parameters_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as raised:
        ScheduleSpec(**given)
    assert "\n" not in str(raised.value)


def test_a_list_of_epochs_becomes_a_tuple() -> None:
    spec = ScheduleSpec("step", epochs=[1, 2], gamma=0.1)  # type: ignore[arg-type]
    assert spec.epochs == (1, 2)
    assert hash(spec) == hash(ScheduleSpec("step", epochs=(1, 2), gamma=0.1))


def test_bad_progress_is_refused() -> None:
    for bad in (-0.1, math.nan):
        with pytest.raises(ValueError, match="progress"):
            rate(ScheduleSpec("constant"), 1.0, bad, 1.0)
    with pytest.raises(ValueError, match="cosine schedule over 0 epochs"):
        rate(ScheduleSpec("cosine"), 1.0, 0.0, 0)


def test_scaled_lr() -> None:
    assert scaled_lr(0.01, 16, 32, 128, "none") == 0.01
    assert scaled_lr(0.01, 16, 32, 128, "sqrt") == pytest.approx(0.02)
    assert scaled_lr(0.01, 16, 32, 128, "linear") == pytest.approx(0.04)
    with pytest.raises(ValueError, match="scaling 'square' is unknown; known scalings: none, sqrt, linear"):
        scaled_lr(0.01, 16, 32, 128, "square")
    for mu, reference in ((0, 128), (16, 0), (16, -1)):
        with pytest.raises(ValueError, match="scaling 'sqrt' of a batch"):
            scaled_lr(0.01, mu, 32, reference, "sqrt")
