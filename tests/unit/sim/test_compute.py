"""The texts of the command line, and that the draws have the moments that they promise."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import pytest

from rudra_zmq.errors import UsageError
from rudra_zmq.sim.compute import Compute, Link, parse_compute, parse_link, parse_straggler, slowness


@pytest.mark.parametrize(
    ("text", "compute"),
    [
        ("constant:20ms", Compute("constant", 0.02)),
        ("gaussian:1s,0.2", Compute("gaussian", 1.0, 0.2)),
        ("lognormal:20ms,1.5", Compute("lognormal", 0.02, 1.5)),
        ("exponential:1m", Compute("exponential", 60.0)),
        ("gaussian:20ms,0", Compute("gaussian", 0.02, 0.0)),
    ],
)
def test_compute(text: str, compute: Compute) -> None:
    assert parse_compute(text) == compute


@pytest.mark.parametrize(
    "text",
    [
        "",
        "20ms",
        "uniform:20ms",
        "constant:",
        "constant:0s",
        "constant:20ms,0.2",
        "gaussian:20ms",
        "gaussian:20ms,x",
        "gaussian:20ms,-1",
        "gaussian:20ms,nan",
        "lognormal:20ms,inf",
        "exponential:20",
        "exponential:20ms,1",
    ],
)
def test_no_compute(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_compute(text)
    assert "(--compute)" in str(error.value) and "Fix: write constant:20ms" in str(error.value)


@pytest.mark.parametrize("text", ["constant:20ms", "gaussian:20ms,0.2", "lognormal:20ms,0.5", "exponential:20ms"])
def test_moments(text: str) -> None:
    compute, rng = parse_compute(text), random.Random(1)
    times = [compute.draw(rng) for _ in range(20_000)]
    relative = 1.0 if compute.kind == "exponential" else compute.relative
    assert min(times) >= 0
    assert fmean(times) == pytest.approx(0.02, rel=0.02)
    assert pstdev(times) == pytest.approx(0.02 * relative, rel=0.05, abs=1e-9)


def test_a_wide_gaussian_is_cut_off_at_zero() -> None:
    rng = random.Random(1)
    times = [Compute("gaussian", 1.0, 3.0).draw(rng) for _ in range(100)]
    assert min(times) == 0.0 < max(times)


def test_straggler() -> None:
    assert parse_straggler("1x3") == (1, 3.0) and parse_straggler("12x1.5") == (12, 1.5)
    for text in ["", "x3", "1x", "3", "1x0", "-1x3", "1x3x"]:
        with pytest.raises(UsageError, match=r"--straggler.*Fix"):
            parse_straggler(text)


def test_slowness() -> None:
    assert slowness(4, [(1, 3.0), (2, 2.0)]) == [1.0, 3.0, 2.0, 2.0]
    assert slowness(2, []) == [1.0, 1.0]
    with pytest.raises(UsageError, match="3 stragglers among 2 learners"):
        slowness(2, [(3, 2.0)])


def test_link() -> None:
    assert parse_link("1gbit,0.1ms") == Link(125e6, 1e-4) and parse_link("2.5mbit,0s") == Link(312500.0, 0.0)
    assert parse_link("8kbit,1s").rate == 1000
    for text in ["", "1gbit", "1gb,1ms", "0gbit,1ms", "1gbit,1", "gbit,1ms"]:
        with pytest.raises(UsageError, match=r"--link.*Fix"):
            parse_link(text)
