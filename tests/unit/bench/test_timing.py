"""Turns, medians and ratios, with a clock that the contenders themselves move."""

from __future__ import annotations

import time

import pytest

from rudra_zmq.bench.timing import SHORTEST, clock_for, in_turns


class Clock:
    """Each contender adds to it what it is said to take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def contender(self, name: str, *seconds: float):
        times = list(seconds)

        def work() -> None:
            self.calls.append(name)
            self.now += times.pop(0) if len(times) > 1 else times[0]

        return work


def test_contenders_take_turns_after_a_call_to_warm_up() -> None:
    clock = Clock()
    times = in_turns({"a": clock.contender("a", 9.0, 9.0, 1.0, 2.0, 6.0), "b": clock.contender("b", 4.0)}, clock, 3)
    assert clock.calls == ["a", "a", "b", "b"] + ["a", "b"] * 3
    assert times.seconds["a"] == pytest.approx((1.0, 2.0, 6.0))
    assert times.median("a") == pytest.approx(2.0)
    assert times.ratio("a", "b") == pytest.approx(2.0)  # of 4, 2 and 2/3; of the medians too
    assert times.ratio("b", "a") == pytest.approx(0.5)


def test_a_ratio_is_of_the_same_turn() -> None:
    """A machine that gets three times slower half way leaves the ratio alone."""
    clock = Clock()
    mine, theirs = clock.contender("a", 1, 1, 1, 1, 3, 3, 3), clock.contender("b", 2, 2, 2, 2, 6, 6, 6)
    assert in_turns({"a": mine, "b": theirs}, clock, 5).ratio("a", "b") == pytest.approx(2.0)


def test_quick_calls_are_timed_together() -> None:
    clock = Clock()
    times = in_turns({"a": clock.contender("a", SHORTEST / 10)}, clock, 2)
    assert len(clock.calls) == 2 + 2 * 10
    assert times.median("a") == pytest.approx(SHORTEST / 10)


def test_one_thread_is_timed_by_its_own_clock() -> None:
    assert clock_for(1) is time.thread_time
    assert clock_for(2) is time.perf_counter
