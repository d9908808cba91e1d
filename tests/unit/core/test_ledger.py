"""Every position is applied once or skipped once; what comes back is leased again first."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.core.events import Lease, Span
from rudra_zmq.core.intervals import Intervals
from rudra_zmq.core.leases import without
from rudra_zmq.core.ledger import Closed, Ledger

PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=30)


def members(intervals: Intervals) -> set[int]:
    return {at for start, stop in intervals for at in range(start, stop)}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(-1, 6)), max_size=40))
def test_intervals_are_a_set_of_integers(steps: list[tuple[bool, int, int]]) -> None:
    intervals, model = Intervals(), set[int]()
    for add, start, length in steps:
        piece = set(range(start, start + length))
        possible = bool(piece) and (not piece & model if add else piece <= model)
        operation = intervals.add if add else intervals.remove
        if possible:
            operation(start, start + length)
            model = model | piece if add else model - piece
        else:
            with pytest.raises(ValueError, match=r"cannot be (added|removed)"):
                operation(start, start + length)
        assert members(intervals) == model and intervals.count == len(model)
        edges = [edge for piece in intervals for edge in piece]
        assert edges == sorted(set(edges)), "ascending, disjoint, and never touching"
        assert len(intervals) == len(edges) // 2


@given(PIECES, st.integers(0, 30), st.integers(0, 10), st.integers(0, 12))
def test_intervals_split_and_take(pieces: list[tuple[int, int]], start: int, length: int, want: int) -> None:
    intervals = Intervals()
    for at, size in pieces:
        if size and not set(range(at, at + size)) & members(intervals):
            intervals.add(at, at + size)
    model = members(intervals)
    inside, outside = intervals.split(start, start + length)
    asked = set(range(start, start + length))
    assert {at for low, high in inside for at in range(low, high)} == asked & model
    assert {at for low, high in outside for at in range(low, high)} == asked - model
    assert inside == sorted(inside) and outside == sorted(outside)
    taken = [at for low, high in intervals.take(want) for at in range(low, high)]
    assert taken == sorted(model)[:want]
    assert members(intervals) == model - set(taken)


def lease(*spans: tuple[int, int, int]) -> Lease:
    return Lease(tuple(Span(*span) for span in spans))


def test_a_lease_is_the_lowest_of_its_epoch() -> None:
    ledger = Ledger(10, 2)
    assert ledger.take(4, 0) == lease((0, 0, 4))
    assert ledger.take(4, 0) == lease((0, 4, 8))
    ledger.give_back([Span(0, 1, 3)])
    assert ledger.take(4, 0) == lease((0, 1, 3), (0, 8, 10))
    assert ledger.take(4, 0) is None
    assert ledger.leasable(2) == 1
    assert ledger.leasable(1) is None


def test_two_epochs_are_open_and_close_in_order() -> None:
    ledger = Ledger(4, 3)
    assert ledger.take(1, 2) is None, "epoch 2 is not open yet"
    first, second = ledger.take(4, 0), ledger.take(4, 1)
    assert first and second
    ledger.apply(second.spans)
    assert ledger.advance() == [], "epoch 1 waits for epoch 0"
    assert ledger.counts(1) == {"pool": 0, "out": 0, "applied": 4, "skipped": 0}
    ledger.apply(first.spans)
    assert ledger.advance() == [Closed(0, 4, 0), Closed(1, 4, 0)]
    assert (ledger.epoch, ledger.finished) == (2, False)
    with pytest.raises(ValueError, match="epoch 0 is not open"):
        ledger.counts(0)
    last = ledger.take(9, 2)
    assert last == lease((2, 0, 4))
    ledger.apply(last.spans)
    assert ledger.advance() == [Closed(2, 4, 0)]
    assert ledger.finished and ledger.leasable(3) is None


def test_the_second_skip_counts() -> None:
    ledger = Ledger(6, 1)
    ledger.take(4, 0)
    assert ledger.skip([Span(0, 0, 2)]) == 0
    assert ledger.take(3, 0) == lease((0, 0, 2), (0, 4, 5))
    assert ledger.skip([Span(0, 0, 2), Span(0, 2, 3)]) == 2
    assert ledger.counts(0) == {"pool": 2, "out": 2, "applied": 0, "skipped": 2}
    assert ledger.take(2, 0) == lease((0, 2, 3), (0, 5, 6))
    assert ledger.skip([Span(0, 2, 4)]) == 1
    assert ledger.counts(0) == {"pool": 1, "out": 2, "applied": 0, "skipped": 3}


@pytest.mark.parametrize("method", ["give_back", "apply", "skip"])
def test_what_is_not_out_cannot_come_back(method: str) -> None:
    ledger = Ledger(6, 1)
    ledger.take(4, 0)
    ledger.apply([Span(0, 0, 2)])
    for span in [Span(0, 0, 1), Span(0, 3, 5), Span(0, 5, 6), Span(3, 0, 1)]:
        with pytest.raises(ValueError, match=r"not there|not open"):
            getattr(ledger, method)([span])


def test_state_keeps_what_is_done_and_what_came_back_once() -> None:
    ledger = Ledger(10, 3)
    ledger.take(10, 0)
    ledger.apply([Span(0, 0, 3), Span(0, 5, 6)])
    ledger.skip([Span(0, 6, 8)])
    ledger.take(1, 0)
    ledger.skip([Span(0, 6, 7)])
    again = Ledger(10, 3, json.loads(json.dumps(ledger.state())))
    assert again.counts(0) == {"pool": 5, "out": 0, "applied": 4, "skipped": 1}
    assert again.take(9, 0) == lease((0, 3, 5), (0, 7, 10))
    assert again.skip([Span(0, 7, 8), Span(0, 3, 4)]) == 1
    assert again.counts(1)["pool"] == 10
    with pytest.raises(ValueError, match="10 samples, the data has 9"):
        Ledger(9, 3, ledger.state())


def test_a_ledger_needs_samples() -> None:
    for samples, epochs in [(0, 1), (1, -1)]:
        with pytest.raises(ValueError, match="at least one sample"):
            Ledger(samples, epochs)
    assert Ledger(1, 0).finished


@pytest.mark.parametrize(
    ("spans", "rest"),
    [
        ([(0, 0, 4)], [[], [(0, 4, 6), (0, 8, 9)]]),
        ([(0, 1, 2)], [[(0, 0, 1), (0, 2, 4)], [(0, 4, 6), (0, 8, 9)]]),
        ([(0, 0, 4), (0, 4, 6), (0, 8, 9)], [[], []]),
        ([(0, 0, 2), (0, 3, 4)], [[(0, 2, 3)], [(0, 4, 6), (0, 8, 9)]]),
        ([], [[(0, 0, 4)], [(0, 4, 6), (0, 8, 9)]]),
        ([(0, 3, 5)], None),  # of two leases
        ([(0, 5, 9)], None),
        ([(1, 0, 4)], None),
        ([(0, 0, 3), (0, 2, 4)], None),  # twice
        ([(0, 0, 1), (0, 0, 1)], None),
        ([(0, 2, 2)], None),
        ([(0, 3, 2)], None),
        ([(0, 0, 4), (0, 9, 10)], None),
    ],
)
def test_leases_without_spans(spans: list, rest: list | None) -> None:
    leases = [lease((0, 0, 4)), lease((0, 4, 6), (0, 8, 9))]
    expected = None if rest is None else [tuple(Span(*span) for span in pieces) for pieces in rest]
    assert without(leases, [Span(*span) for span in spans]) == expected


def test_a_lease_counts() -> None:
    held = lease((3, 4, 6), (3, 8, 9))
    assert (held.count, held.epoch) == (3, 3)
