"""Ranks to hosts, by tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.head.placement import Slots, Wanted, never_fits, place, schedule, why

HOSTS = {"a": Slots(4, 1), "b": Slots(4, 3), "c": Slots(2, 2)}


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, "b"),
        (3, "bbb"),
        (5, "bbbcc"),
        (6, "bbbcca"),
        (7, None),
    ],
)
def test_the_host_with_most_room_first(count: int, expected: str | None) -> None:
    homes = place(count, HOSTS)
    assert (None if homes is None else "".join(homes[r] for r in range(count))) == expected


def test_a_host_that_says_that_it_has_room_for_all_the_world() -> None:
    assert place(2, {"a": Slots(2**53, 2**53)}) == {0: "a", 1: "a"}


def test_equal_hosts_go_by_name() -> None:
    assert place(1, {"z": Slots(2, 2), "y": Slots(2, 2)}) == {0: "y"}


@pytest.mark.parametrize(
    ("count", "hosts", "expected"),
    [
        (4, {}, ""),
        (10, HOSTS, ""),
        (11, HOSTS, "the job needs 11 slots, the cluster has 10"),
    ],
)
def test_what_can_never_fit(count: int, hosts: dict[str, Slots], expected: str) -> None:
    assert never_fits(count, hosts) == expected


def test_reasons() -> None:
    assert why(4, {}) == "needs 4 slots, no learnerd is registered"
    assert why(4, {"a": Slots(4, 3)}) == "needs 4 slots, 3 free"
    assert why(1, {"a": Slots(4, 0)}) == "needs 1 slot, 0 free"
    assert why(5, {"a": Slots(4, 3)}) == "the job needs 5 slots, the cluster has 4"


def test_the_queue_is_not_overtaken() -> None:
    plan = schedule([Wanted("1", 2), Wanted("2", 3), Wanted("3", 1)], {"a": Slots(4, 4)})
    assert plan.placed == {"1": {0: "a", 1: "a"}}
    assert plan.reasons == {"2": "needs 3 slots, 2 free", "3": "behind job 2 in the queue"}


@given(
    st.lists(st.integers(1, 6), max_size=6),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 5), max_size=4),
)
def test_no_host_is_overfilled_and_the_start_is_a_prefix(counts: list[int], free: dict[str, int]) -> None:
    hosts = {name: Slots(8, n) for name, n in free.items()}
    queue = [Wanted(str(i), count) for i, count in enumerate(counts)]
    plan = schedule(queue, hosts)
    used = [host for homes in plan.placed.values() for host in homes.values()]
    assert all(used.count(name) <= n for name, n in free.items())
    assert list(plan.placed) == [w.job for w in queue[: len(plan.placed)]]
    assert all(sorted(homes) == list(range(counts[int(job)])) for job, homes in plan.placed.items())
    assert set(plan.reasons) == {w.job for w in queue} - set(plan.placed)
