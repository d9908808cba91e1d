"""Hardsync: rounds in rank order, whatever comes, goes, skips or is slow."""

from __future__ import annotations

import pytest

from rudra_zmq.core.events import Clock, GradientId, Grant, Join, Lease, Members, Push, Span, Update, Waiting
from tests.unit.core.test_softsync import decision, kinds
from tests.unit.core.world import World, make


def rounds(world: World) -> list[list[tuple[int, tuple]]]:
    return [[(e.id.rank, e.spans) for e in made.entries] for made in world.decisions]


def test_one_gradient_of_each_in_rank_order() -> None:
    world = make("hardsync", samples=40)
    actions = world.begin()
    assert actions[0] == Members(4, 1, 4, 16, "hardsync")
    assert [g.leases for g in actions[1:]] == [
        (Lease((Span(0, 4 * r, 4 * r + 4),)), Lease((Span(0, 16 + 4 * r, 20 + 4 * r),))) for r in range(4)
    ]
    for rank in (2, 0, 3):
        assert world.push(rank) == []
    actions = world.push(1)
    assert kinds(actions) == ["Update"] + ["Grant"] * 4
    assert [g.rank for g in actions[1:]] == [0, 1, 2, 3] and all(g.clock == Clock(1, 1) for g in actions[1:])
    made = decision(actions)
    assert [e.id.rank for e in made.entries] == [0, 1, 2, 3]
    assert [(e.sigma, e.scale, e.coefficient) for e in made.entries] == [(0, 1.0, 0.25)] * 4


def test_the_last_round_deals_what_is_left() -> None:
    # 60,000 / 128 = 468.75 in small: 22 samples in rounds of 16.
    world = make("hardsync", samples=22, epochs=2)
    world.begin()
    world.finish()
    assert [[e.count for e in made.entries] for made in world.decisions] == [[4] * 4, [4, 2]] * 2
    assert [made.entries[0].coefficient for made in world.decisions] == pytest.approx([1 / 4, 4 / 6] * 2)
    assert world.epochs_done == [0, 1] and world.sync.staleness.counts == {0: 12}
    for made in world.decisions:
        assert sum(e.coefficient for e in made.entries) == pytest.approx(1.0)


def test_who_gets_nothing_waits_for_the_next_round_and_nobody_waits_for_it() -> None:
    world = make("hardsync", samples=22, epochs=2)
    world.begin()
    for rank in range(4):
        world.push(rank)
    assert world.computing == [0, 1]
    assert world.push(1) == []
    actions = world.push(0)
    assert kinds(actions) == ["Update", "EpochDone"] + ["Grant"] * 4
    assert [g.leases[0].spans for g in actions[2:]] == [(Span(1, 4 * r, 4 * r + 4),) for r in range(4)]


def test_the_forecast_is_what_is_dealt() -> None:
    world = make("hardsync", samples=100, epochs=2)
    world.begin(prefetch=3)
    told: dict[int, list[Lease]] = {rank: list(world.live[rank].grant.leases) for rank in range(4)}
    for _ in range(5):
        for rank in range(4):
            world.push(rank)
        for rank in range(4):
            leases = list(world.live[rank].grant.leases)
            assert leases[: len(told[rank]) - 1] == told[rank][1:]
            told[rank] = leases


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_the_assignment_does_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    world = make("hardsync", samples=50, count=3)
    world.begin()
    while not world.over:
        for rank in order:
            if rank in world.computing:
                world.push(rank)
    reference = make("hardsync", samples=50, count=3)
    reference.begin()
    reference.finish()
    assert rounds(world) == rounds(reference)


@pytest.mark.parametrize("at", range(17))
def test_a_job_that_goes_on_from_its_state_deals_the_same(at: int) -> None:
    reference = make("hardsync", samples=50, count=3)
    reference.begin()
    reference.finish()
    world = make("hardsync", samples=50, count=3)
    world.begin()
    for _ in range(at):
        if not world.over:
            world.push(world.computing[0])
    before = rounds(world)
    again = world.restart()
    again.begin()
    again.finish()
    assert before + rounds(again) == rounds(reference)


def test_a_batch_that_is_skipped_comes_once_more_in_the_next_round() -> None:
    world = make("hardsync", samples=100)
    world.begin()
    world.push(0)
    world.push(1, skip=True)
    world.push(2)
    made = decision(world.push(3))
    assert [e.id.rank for e in made.entries] == [0, 2, 3] and made.entries[0].coefficient == pytest.approx(1 / 3)
    assert world.live[0].grant.leases[0] == Lease((Span(0, 4, 8),))
    assert world.live[1].grant.verdict == "skipped"
    world.push(0, skip=True)
    for rank in (1, 2, 3):
        world.push(rank)
    assert world.sync.counters.skipped == 2 and len(world.skipped) == 4
    world.finish()
    assert world.finished.complete and len(world.applied) == 96


def test_a_round_without_gradients_makes_no_update() -> None:
    world = make("hardsync", samples=8, count=2)
    world.begin()
    assert world.push(0, skip=True) == []
    actions = world.push(1, finite=False)
    assert kinds(actions) == ["Grant", "Grant"] and world.sync.clock.timestamp == 0
    world.push(0, skip=True)
    actions = world.push(1, skip=True)
    assert kinds(actions) == ["EpochDone", "Failed", "Grant", "Grant"]
    assert world.failed is not None and world.skipped == {(0, at) for at in range(8)}


@pytest.mark.parametrize("protocol", ["hardsync", "async"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("skipped", "restarts"), [(8, False), (5, False), (5, True), (4, False)])
def test_an_epoch_that_skips_more_than_it_applies_fails(
    protocol: str, last: bool, skipped: int, restarts: bool
) -> None:
    world = make(protocol, samples=8, epochs=1 if last else 2, count=1, mu=1)
    world.begin(prefetch=0)
    for at in range(2 * skipped):  # refused twice, a sample counts as skipped
        world.push(0, finite=False, skip=at % 3 == 1)
    if restarts:
        world = world.restart()
        world.begin(prefetch=0)
    while not world.over and not world.epochs_done:
        world.push(0)
    assert world.epochs_done == [0]
    if skipped == 4:
        assert world.failed is None and (world.finished is not None) == last
    else:
        assert world.failed is not None and world.finished is None
        assert world.failed.reason.startswith(f"epoch 1 applied {8 - skipped} samples and skipped {skipped}: ")
        assert "Fix: " in world.failed.reason


def test_a_part_of_the_lease_returns_the_rest() -> None:
    world = make("hardsync", samples=100, count=2)
    world.begin()
    world.push(0, spans=(Span(0, 1, 3),))
    made = decision(world.push(1))
    assert [e.count for e in made.entries] == [2, 4]
    assert world.live[0].grant.leases[0] == Lease((Span(0, 0, 1), Span(0, 3, 4), Span(0, 8, 10)))


def test_all_that_is_held_may_be_pushed_at_once() -> None:
    world = make("hardsync", samples=100, count=2)
    world.begin()
    leases = world.live[0].grant.leases
    world.push(0, spans=(*leases[0].spans, Span(0, 8, 10)))
    world.push(1)
    assert [e.count for e in world.decisions[0].entries] == [6, 4]
    assert world.live[0].grant.leases[0] == Lease((Span(0, 10, 14),))


def test_samples_that_are_not_held_cost_nobody_the_round() -> None:
    world = make("hardsync", samples=100, count=2)
    world.begin()
    (grant,) = world.push(0, spans=(Span(0, 4, 8),))
    assert grant.verdict == "unheld" and grant.leases[0] == Lease((Span(0, 0, 4),))
    world.push(0)
    assert kinds(world.push(1)) == ["Update", "Grant", "Grant"]


def test_who_has_no_part_in_the_round_cannot_push_ahead_of_it() -> None:
    world = make("hardsync", samples=6, epochs=2, count=2, sync={"backup": 1})
    world.begin()
    spans = world.live[1].grant.leases[0].spans
    world.push(0)  # closes the round; rank 1 is late, and its two samples go to rank 0
    world.live[1].seq = 1
    assert world.turn(Push(GradientId(1, 1, 1), Clock(1, 1), spans, 2)) == []
    assert world.sync.counters.dropped == {"unheld": 1}


# --------------------------------------------------------------------------------------------- backup


def test_the_slowest_are_not_waited_for() -> None:
    world = make("hardsync", samples=100, sync={"backup": 1})
    world.begin()
    world.push(3)
    world.push(0)
    actions = world.push(1)
    assert kinds(actions) == ["Update", "Grant", "Grant", "Grant"]
    assert [e.id.rank for e in decision(actions).entries] == [0, 1, 3]
    assert actions[1].leases[0] == Lease((Span(0, 8, 12),)), "what rank 2 held is dealt first"
    (grant,) = world.push(2)
    assert grant.verdict == "late" and grant.clock.timestamp == 1
    assert grant.leases[0] == Lease((Span(0, 20, 24),)), "its part of the round under way"
    assert world.sync.counters.dropped == {"late": 1}
    world.finish()
    assert world.finished.complete and world.sync.staleness.max == 0


def test_a_late_gradient_of_samples_that_it_was_dealt_again_is_late() -> None:
    world = make("hardsync", samples=100, count=2, sync={"backup": 1})
    world.begin(prefetch=0)
    world.push(1)  # closes the round; rank 0 held 0..4, the lowest: dealt to it again
    (grant,) = world.push(0)
    assert grant.verdict == "late" and grant.leases == (Lease((Span(0, 0, 4),)),)


def test_a_late_one_that_comes_back_between_its_rounds_is_answered_with_the_next() -> None:
    # A new connection waits for its answer before it repeats the push: with none it would wait for ever.
    world = make("hardsync", samples=18, epochs=2, count=3, sync={"backup": 1})
    world.begin(prefetch=0)
    for _ in range(2):
        world.push(0)
        world.push(1)  # closes the round without rank 2; then two samples are left, for rank 0
    assert world.turn(Join(2, 1, 0, 0)) == []
    grant = world.push(0)[-1]
    assert (grant.rank, grant.ack, grant.leases[0].epoch) == (2, 0, 1)
    (late,) = world.sync.handle(Push(GradientId(2, 1, 1), Clock(1, 0), (Span(0, 8, 12),), 4), world.now)
    assert late.verdict == "late" and late.leases == grant.leases


def test_at_least_one_is_waited_for() -> None:
    world = make("hardsync", samples=4, count=3, sync={"backup": 2})
    world.begin()
    actions = world.push(0)
    assert kinds(actions)[:3] == ["Update", "EpochDone", "Finished"]


# ------------------------------------------------------------------------------------ losses and joins


def test_a_lost_rank_that_is_back_in_time_gets_the_same_samples() -> None:
    reference = make("hardsync", samples=50, count=3)
    reference.begin()
    reference.finish()
    world = make("hardsync", samples=50, count=3)
    world.begin()
    world.push(0)
    world.leave(1)
    assert world.push(2) == [] and world.sync.lam == 3
    world.now = 59.0
    actions = world.join(1)
    assert [(a.rank, a.incarnation, a.ack, a.leases[0].spans) for a in actions] == [(1, 2, 0, (Span(0, 4, 8),))]
    world.finish()
    assert rounds(world) == rounds(reference) and world.members[1:] == []


def test_a_lost_rank_keeps_its_part_of_later_rounds() -> None:
    world = make("hardsync", samples=100, count=3)
    world.begin()
    world.push(1)
    world.leave(1)
    world.push(0)
    actions = world.push(2)
    assert kinds(actions) == ["Update", "Release", "Grant", "Grant"]
    assert world.live[2].grant.leases[0] == Lease((Span(0, 20, 24),)), "16..20 is reserved for rank 1"
    world.push(0)
    assert world.push(2) == []
    assert [a.leases[0].spans for a in world.join(1)] == [(Span(0, 16, 20),)]
    assert kinds(world.push(1))[0] == "Update"


def test_after_the_deadline_the_round_closes_with_those_present() -> None:
    world = make("hardsync", samples=100, count=3, deadline=10.0)
    world.begin()
    world.push(0)
    world.push(2)
    world.leave(1)
    assert world.sync.next_deadline() == 10.0
    assert world.tick(9.9) == []
    actions = world.tick(10.0)
    assert kinds(actions) == ["Members", "Update", "Grant", "Grant"]
    assert actions[0] == Members(2, 1, 2, 8, "hardsync")
    assert [e.coefficient for e in decision(actions).entries] == [0.5, 0.5]
    assert [a.leases[0].spans for a in actions[2:]] == [(Span(0, 4, 8),), (Span(0, 12, 16),)]
    assert kinds(world.join(1)) == ["Members"], "it joins at the next deal"
    world.push(0)
    assert len([a for a in world.push(2) if isinstance(a, Grant)]) == 3


def test_a_new_rank_joins_at_the_next_deal() -> None:
    world = make("hardsync", samples=100, count=2, max=3)
    world.begin()
    assert kinds(world.join(2)) == ["Members"] and world.sync.c == 3
    world.push(0)
    actions = world.push(1)
    assert [a.leases[0].spans for a in actions[1:]] == [(Span(0, 8 + 4 * r, 12 + 4 * r),) for r in range(3)]
    assert isinstance(actions[0], Update) and decision(actions).c == 2


def test_leaving_by_itself_shrinks_at_once() -> None:
    world = make("hardsync", samples=100, count=3)
    world.begin()
    world.push(0)
    world.push(2)
    actions = world.leave(1, "bye")
    assert kinds(actions) == ["Release", "Members", "Update", "Grant", "Grant"]


def test_wait_for_ever_then_go_on() -> None:
    world = make("hardsync", samples=100, count=2, on_lost="wait", deadline=5.0)
    world.begin()
    world.push(0)
    world.leave(1)
    (waiting,) = world.tick(5.0)
    assert waiting == Waiting(1, 2, (1,), float("inf")) == world.sync.waiting
    assert world.tick(1e6) == [] and world.sync.next_deadline() is None
    assert kinds(world.join(1)) == ["Grant"] and world.sync.waiting is None
    assert kinds(world.push(1)) == ["Update", "Grant", "Grant"]


def test_drain_finishes_the_round_without_the_lost() -> None:
    world = make("hardsync", samples=100, count=3)
    world.begin()
    world.push(0)
    world.leave(1)
    assert kinds(world.drain()) == []
    actions = world.push(2)
    assert kinds(actions) == ["Update", "Finished", "Grant", "Grant"]
    assert world.finished.reason == "stop" and not world.finished.complete
    assert all(g.done for g in actions[2:])
    assert len(world.applied) == 8


def test_want_deals_one_round_more_to_all() -> None:
    world = make("hardsync", samples=100, count=2)
    world.begin(prefetch=0)
    (grant,) = world.want(0)
    assert [lease.spans for lease in grant.leases] == [(Span(0, 0, 4),), (Span(0, 8, 12),)]
    (grant,) = world.want(0)
    assert len(grant.leases) == 3
    world.push(0, spans=tuple(span for lease in grant.leases for span in lease.spans))
    world.push(1)
    assert [e.count for e in world.decisions[0].entries] == [12, 4]
    assert world.live[0].grant.leases == (Lease((Span(0, 12, 16),)),), "what was dealt to rank 1 is dealt anew"


@pytest.mark.parametrize("wants", [0, 1])
def test_drain_takes_back_the_forecast(wants: int) -> None:
    world = make("hardsync", samples=100, count=2)
    world.begin(prefetch=1)
    for _ in range(wants):
        world.want(0)
    world.drain()
    # Begun are one lease each; by wanting a third one rank 0 has begun all three of its own.
    assert world.sync._common.ledger.counts(0)["out"] == 8 + 8 * wants


def test_a_round_counts_those_who_are_left_of_it() -> None:
    world = make("hardsync", samples=100, sync={"backup": 1})
    world.begin()
    world.push(0)
    world.leave(1, "bye")
    assert kinds(world.push(2)) == ["Update", "Grant", "Grant"], "two of three"
