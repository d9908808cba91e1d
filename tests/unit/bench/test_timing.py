"""Turns, medians and ratios, with a clock that the contenders themselves move."""

from __future__ import annotations

import time

import pytest

from rudra_zmq.bench.timing import FIRST_ROUNDS, MOST_ROUNDS, SHORTEST, Block, blocks_in_turns, clock_for, in_turns


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


def answer(start: float, end: float, times: list[float]) -> dict[str, object]:
    return {"start": start, "end": end, "times": times, "cpu": 0.5, "faults": 2}


def test_in_step_the_first_ones_rounds_are_everybodys() -> None:
    block = Block.of([answer(0, 9, [1.0, 5.0, 3.0]), answer(0, 9, [2.0])], updates=3, in_step=True, cpu=1.0, faults=7)
    assert block == Block(3.0, 3, 2.0, 11)


def test_out_of_step_it_is_the_time_of_all_over_the_updates() -> None:
    block = Block.of([answer(1.0, 3.0, []), answer(2.0, 7.0, [])], updates=12, in_step=False)
    assert block == Block(0.5, 12, 1.0, 4)


def test_blocks_take_turns_and_last_about_as_long() -> None:
    done: list[tuple[str, int]] = []

    def contender(name: str, seconds: float, updates: float = 1.0):
        def block(rounds: int) -> Block:
            done.append((name, rounds))
            return Block(seconds, rounds * updates, cpu=0.1, faults=rounds)

        return block

    # The second makes two updates in each round, the third is slower than a block may last.
    contenders = {"a": contender("a", 0.01), "b": contender("b", 0.01, 2.0), "c": contender("c", 9.0)}
    blocks = blocks_in_turns(contenders, turns=2, seconds=0.5)
    assert done[6:] == 2 * [("a", 50), ("b", 25), ("c", FIRST_ROUNDS)]
    assert all(rounds == FIRST_ROUNDS for _, rounds in done[:6])
    assert blocks.per_update("b") == (0.2 / 100, 0.5)
    assert blocks.best(["c", "b"]) == "b"
    assert blocks.times.ratio("a", "c") == pytest.approx(900)
    done.clear()
    blocks_in_turns({"a": contender("a", 0.0)}, turns=2, rounds=40)
    assert done == 3 * [("a", 40)]
    done.clear()
    blocks_in_turns({"a": contender("a", 1e-6)}, turns=1, seconds=60.0)
    assert done[-1] == ("a", MOST_ROUNDS)
