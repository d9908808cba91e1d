"""Ranks to seats, by tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.head.placement import Room, Wanted, never_fits, place, schedule, unknown, why
from rudra_zmq.head.ranks import Seat

HOSTS = {"a": Room(4, 1), "b": Room(4, 3), "c": Room(2, 2)}
GPU = Room(8, 8, 2, ("0", "1"), frozenset({"gpu", "big"}))
MIXED = {"a": GPU, "b": Room(8, 7, 2, ("GPU-x",), frozenset({"gpu"})), "c": Room(16, 16, labels=frozenset({"cpu"}))}


def homes(wanted: Wanted, rooms: dict[str, Room]) -> str | None:
    seats = place(wanted, rooms)
    return None if seats is None else " ".join(f"{s.host}{s.device and ':'}{s.device}" for s in seats.values())


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, "b"), (3, "b b b"), (5, "b b b c c"), (6, "b b b c c a"), (7, None)],
)
def test_the_host_with_most_room_first(count: int, expected: str | None) -> None:
    assert homes(Wanted("", count), HOSTS) == expected


def test_a_host_that_says_that_it_has_room_for_all_the_world() -> None:
    assert homes(Wanted("", 2), {"a": Room(2**53, 2**53)}) == "a a"


def test_equal_hosts_go_by_name() -> None:
    assert homes(Wanted("", 1), {"z": Room(2, 2), "y": Room(2, 2)}) == "y"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted("", 3), "a:0 a:1 b:GPU-x"),  # where some hosts have GPUs, the others are not looked at
        (Wanted("", 4), None),
        (Wanted("", 3, device=False), "c c c"),
        (Wanted("", 1, ("b",)), "b:GPU-x"),
        (Wanted("", 3, ("gpu",)), "a:0 a:1 b:GPU-x"),
        (Wanted("", 2, ("c",)), "c c"),
        (Wanted("", 2, ("cpu", "big")), "a:0 a:1"),
        (Wanted("", 9, ("gpu",), device=False), "a a a a a a a a b"),
    ],
)
def test_hosts_labels_and_devices(wanted: Wanted, expected: str | None) -> None:
    assert homes(wanted, MIXED) == expected


def test_a_private_cluster_shares_its_devices() -> None:
    room = Room(4, 4, 2, ("0", "1"), shared=True)
    assert homes(Wanted("", 4), {"a": room}) == "a:0 a:1 a:0 a:1"
    assert homes(Wanted("", 1), {"a": Room(4, 4, 1, (), shared=True)}) is None  # its one GPU is awaited


@pytest.mark.parametrize(
    ("wanted", "rooms", "expected"),
    [
        (Wanted("", 4), {}, ""),
        (Wanted("", 9), HOSTS, ""),
        (Wanted("", 11), HOSTS, "the job needs 11 slots, the cluster has 10"),
        (Wanted("", 4), MIXED, ""),  # one GPU is busy or absent: it will come
        (Wanted("", 5), MIXED, "the job needs 5 devices, the cluster has 4"),
        (Wanted("", 3, ("big",)), MIXED, "the job needs 3 devices, big has 2"),
        (Wanted("", 33, ("a", "c"), device=False), MIXED, "the job needs 33 slots, a, c have 24"),
        (Wanted("", 1), {"a": Room(0, 0, closed="banned")}, "the job needs 1 slot, the cluster has 0"),
    ],
)
def test_what_can_never_fit(wanted: Wanted, rooms: dict[str, Room], expected: str) -> None:
    assert never_fits(wanted, rooms) == expected


def test_reasons() -> None:
    assert why(Wanted("", 4), {}) == "needs 4 slots, no learnerd is registered"
    assert why(Wanted("", 4), {"a": Room(4, 3)}) == "needs 4 slots, 3 free"
    assert why(Wanted("", 1), {"a": Room(4, 0)}) == "needs 1 slot, 0 free"
    assert why(Wanted("", 5), {"a": Room(4, 3)}) == "the job needs 5 slots, the cluster has 4"
    assert why(Wanted("", 4), MIXED) == "needs 4 devices, 3 free"
    closed = {"a": Room(4, 0, closed="drained"), "b": Room(4, 1), "c": Room(4, 0, closed="silent")}
    assert why(Wanted("", 2), closed) == "needs 2 slots, 1 free (a is drained, c is silent)"


def test_names_that_nobody_has() -> None:
    assert unknown(Wanted("", 1, ("gpu", "a")), MIXED) == ""
    assert unknown(Wanted("", 1, ("gpx",)), MIXED) == "no host and no label is called gpx, did you mean gpu?"
    assert unknown(Wanted("", 1, ("zzz",)), MIXED) == (
        "no host and no label is called zzz; there are a, b, big, c, cpu, gpu"
    )
    assert unknown(Wanted("", 1, ("gpx",)), {}) == ""


def test_the_queue_is_not_overtaken() -> None:
    plan = schedule([Wanted("1", 2), Wanted("2", 3), Wanted("3", 1)], {"a": Room(4, 4)})
    assert plan.placed == {"1": {0: Seat("a"), 1: Seat("a")}}
    assert plan.reasons == {"2": "needs 3 slots, 2 free", "3": "behind job 2 in the queue"}


def test_two_jobs_never_get_one_device() -> None:
    plan = schedule([Wanted("1", 1), Wanted("2", 1), Wanted("3", 1)], {"a": GPU})
    assert plan.placed == {"1": {0: Seat("a", "0")}, "2": {0: Seat("a", "1")}}
    assert plan.reasons == {"3": "needs 1 device, 0 free"}


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=6),
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=4),
)
def test_no_host_is_overfilled_and_the_start_is_a_prefix(
    jobs: list[tuple[int, bool]], free: dict[str, tuple[int, int]]
) -> None:
    rooms = {name: Room(8, n, d, tuple(map(str, range(d)))) for name, (n, d) in free.items()}
    queue = [Wanted(str(i), count, (), device) for i, (count, device) in enumerate(jobs)]
    plan = schedule(queue, rooms)
    used = [seat for seats in plan.placed.values() for seat in seats.values()]
    assert all([s.host for s in used].count(name) <= n for name, (n, _) in free.items())
    given = [seat for seat in used if seat.device]
    assert len(given) == len(set(given))
    could = [w.job for w in queue if not never_fits(w, rooms)]
    assert list(plan.placed) == could[: len(plan.placed)]
    assert all(sorted(seats) == list(range(jobs[int(job)][0])) for job, seats in plan.placed.items())
    assert set(plan.reasons) == {w.job for w in queue} - set(plan.placed)
