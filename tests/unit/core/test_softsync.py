"""n-softsync and async: when updates happen, what gradients weigh, where they are folded, how the job ends."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rudra_zmq.core.events import (
    Clock,
    Decision,
    EpochDone,
    Finished,
    Fold,
    GradientId,
    Grant,
    Lease,
    Members,
    Push,
    Span,
    Update,
)
from tests.unit.core.world import World, make


def kinds(actions: list) -> list[str]:
    return [type(action).__name__ for action in actions]


def decision(actions: list) -> Decision:
    (update,) = [action for action in actions if isinstance(action, Update)]
    return update.decision


@pytest.mark.parametrize(("count", "n", "c"), [(30, 4, 7), (30, 1, 30), (30, 30, 1), (30, 16, 1), (4, 2, 2), (5, 2, 2)])
def test_c_is_the_floor_of_lambda_over_n(count: int, n: int, c: int) -> None:
    world = make(n=n, count=count, samples=1000)
    assert (world.sync.lam, world.sync.n, world.sync.c, world.sync.protocol) == (count, n, c, "softsync")
    assert world.sync.global_batch == 4 * count
    world.begin()
    for push in range(1, 2 * c + 1):
        world.push(world.computing[0])
        assert world.sync.clock.timestamp == push // c


def test_async_is_lambda_softsync() -> None:
    async_, soft = make("async", n=1), make("softsync", n=4)
    for world in (async_, soft):
        world.begin()
        world.finish()
    assert (async_.sync.n, async_.sync.c, async_.sync.protocol) == (4, 1, "async")
    assert [d.entries for d in async_.decisions] == [d.entries for d in soft.decisions]


def test_begin_leases_one_to_each_before_any_ahead() -> None:
    world = make(samples=22, count=3)
    actions = world.begin(prefetch=2)
    assert kinds(actions) == ["Members", "Grant", "Grant", "Grant"]
    assert actions[0] == Members(3, 1, 3, 12, "softsync")
    leases = [[lease.spans[0][1:] for lease in grant.leases] for grant in actions[1:]]
    assert leases == [[(0, 4), (12, 16), (16, 20)], [(4, 8), (20, 22)], [(8, 12)]]
    assert [(g.rank, g.incarnation, g.ack, g.verdict, g.slot, g.done) for g in actions[1:]] == [
        (rank, 1, 0, "", 0, False) for rank in range(3)
    ]


def test_the_answer_comes_in_the_same_turn_and_names_the_version_that_it_made() -> None:
    world = make(n=2)
    world.begin()
    (grant,) = world.push(3)
    assert isinstance(grant, Grant) and grant.clock == Clock(1, 0) and grant.ack == 1 and grant.slot == 1
    update, grant = world.push(1)
    assert isinstance(update, Update) and isinstance(grant, Grant) and grant.clock == Clock(1, 1)
    assert [e.id for e in update.decision.entries] == [GradientId(3, 1, 1), GradientId(1, 1, 1)], "in order of arrival"
    assert (update.decision.generation, update.decision.update, update.decision.c) == (1, 1, 2)


def test_mean_staleness_is_the_law() -> None:
    # Each learner pushes in turn: sigma is (lambda-1)/c exactly once the start is over.
    for n, c in [(1, 4), (2, 2), (4, 1)]:
        world = make(n=n, samples=4 * 400)
        world.begin()
        for _ in range(80):
            for rank in range(4):
                world.push(rank)
        sigmas = [e.sigma for d in world.decisions[40 // c :] for e in d.entries]
        assert sum(sigmas) / len(sigmas) == pytest.approx(3 / c)


def test_weights_are_samples_over_c_mu_bar() -> None:
    world = make(samples=1000, n=2, sync={"modulation": "none"})
    world.begin(mus=[2, 8, 4, 4])
    assert world.sync.global_batch == 18
    world.push(0)
    made = decision(world.push(1))
    mu_bar = 18 / 4
    assert [e.coefficient for e in made.entries] == [float(np.float32(m / (2 * mu_bar))) for m in (2, 8)]
    assert made.weight_sum == pytest.approx(10 / 9) and made.s_bar == 1.0 and made.samples == 10


def test_a_part_of_a_batch_weighs_its_samples() -> None:
    world = make(samples=100, n=4, sync={"modulation": "none"})
    world.begin()
    made = decision(world.push(0, spans=(Span(0, 0, 3),)))
    assert made.entries[0].coefficient == float(np.float32(3 / 4)) and made.samples == 3
    assert world.live[0].grant.leases[0] == Lease((Span(0, 3, 4),)), "the rest stays its own"


@pytest.mark.parametrize(
    ("modulation", "scales"),
    [
        ("none", [1, 1]),
        ("n", [1 / 2, 1 / 2]),
        ("average", [1 / 1.5, 1 / 1.5]),
        ("staleness", [1, 1 / 3]),
        ("auto", [1, 1 / 3]),
    ],
)
def test_modulation(modulation: str, scales: list[float]) -> None:
    world = make(samples=1000, n=2, sync={"modulation": modulation})
    world.begin()
    for rank in (0, 1, 0, 1, 0, 1):  # rank 2 still computes from version 0
        world.push(rank)
    world.push(1)
    made = decision(world.push(2))
    assert [e.sigma for e in made.entries] == [0, 3] and made.mean_sigma == 1.5
    assert [e.scale for e in made.entries] == scales
    assert [e.coefficient for e in made.entries] == [float(np.float32(s / 2)) for s in scales]
    assert made.s_bar == pytest.approx(sum(scales) / 2)


def test_lambda_one_divides_by_what_came() -> None:
    for protocol in ("softsync", "async", "hardsync"):
        world = make(protocol, count=1, samples=10)
        world.begin(mus=[4])
        assert [decision(world.push(0)).entries[0].coefficient for _ in range(3)] == [1.0, 1.0, 1.0]
        assert world.finished and world.finished.complete


@pytest.mark.parametrize("modulation", ["none", "average", "staleness", "n", "inverse-sqrt"])
def test_a_learner_out_of_slots_has_its_oldest_gradient_folded(modulation: str) -> None:
    world = make(samples=1000, n=1, sync={"modulation": modulation})
    world.begin(mus=[2, 4, 4, 6])
    for rank in (1, 2, 3, 1):
        world.push(rank)  # update 1
    assert [g.slot for g in world.grants if g.rank == 1] == [0, 1, 0]
    assert kinds(world.push(0)) == ["Grant"]  # from version 0: sigma 1
    fold, grant = world.push(0)
    assert isinstance(fold, Fold) and isinstance(grant, Grant)
    assert (fold.id, fold.slot, fold.first) == (GradientId(0, 1, 1), 0, True)
    assert fold.scale == 2.0 and grant.slot == 0
    fold, grant = world.push(0)
    assert (fold.id.seq, fold.slot, fold.first, grant.slot) == (2, 1, False, 1)
    made = decision(world.push(1))
    common = 1 / max(1.0, made.mean_sigma) if modulation == "average" else 1.0
    assert made.fold_coefficient == float(np.float32(common / (4 * 4)))
    assert [e.folded for e in made.entries] == [True, True, False, False]
    for entry in made.entries:
        assert entry.coefficient == pytest.approx(entry.count * entry.scale / 16, rel=1e-6)
    assert made.weight_sum == pytest.approx(sum(e.count * e.scale for e in made.entries) / 16, rel=1e-6)
    if modulation == "inverse-sqrt":
        assert made.entries[0].scale == 1.0  # sigma 1


def test_the_scale_of_a_folded_gradient_is_that_of_the_update() -> None:
    world = make(samples=1000, n=2, count=6, sync={"modulation": "staleness"})
    world.begin()
    for rank in [1, 2, 3] * 2:
        world.push(rank)  # updates 1 and 2
    world.push(0)  # sigma 2
    (fold, _) = world.push(0)
    assert fold.scale == 2.0, "4 samples at sigma 2"
    made = decision(world.push(1))
    assert [(e.sigma, e.scale, e.folded) for e in made.entries] == [(2, 0.5, True), (0, 1.0, False), (1, 1.0, False)]


def test_no_barrier_between_epochs_and_the_last_flush() -> None:
    world = make(samples=18, epochs=2, n=1, count=4)
    world.begin(prefetch=0)
    for rank in (0, 1, 2):
        world.push(rank)
    assert world.live[0].grant.leases[0] == Lease((Span(0, 16, 18),))
    assert world.live[1].grant.leases[0] == Lease((Span(1, 0, 4),)), "epoch 1 begins before epoch 0 has ended"
    assert kinds(world.push(3)) == ["Update", "Grant"] and world.sync.epoch == 0
    world.push(0)
    assert world.sync.epoch == 0 and world.sync.pending == 1
    world.push(1)
    world.push(2)
    assert kinds(world.push(3)) == ["Update", "EpochDone"]  # nothing is left to lease
    assert world.sync.epoch == 1
    assert world.push(0) == []
    last = world.push(1)
    assert kinds(last) == ["Update", "EpochDone", "Finished", "Grant", "Grant", "Grant", "Grant"]
    assert last[0].decision.c == 2 and [e.coefficient for e in last[0].decision.entries] == pytest.approx(
        [4 / 6, 2 / 6]
    )
    assert last[1] == EpochDone(1, Clock(1, 3)) and last[2] == Finished("all epochs are applied", True)
    assert all(g.done and g.leases == () and g.clock == Clock(1, 3) for g in last[3:])
    assert world.sync.samples_applied == 36 and world.sync.finished and world.sync.next_deadline() is None


def test_progress_is_epochs_of_samples_applied_before() -> None:
    world = make(samples=8, epochs=2, n=4)
    world.begin()
    world.finish()
    assert [d.progress for d in world.decisions] == [0.0, 0.5, 1.0, 1.5]


def test_tiny_data_is_flushed_when_both_open_epochs_are_out() -> None:
    world = make(samples=2, epochs=5, n=1, count=4)
    world.begin()
    world.finish()
    assert world.finished.complete and [d.c for d in world.decisions] == [2, 2, 1]


def test_an_epoch_that_ends_before_the_one_below_is_said_with_it() -> None:
    world = make(samples=4, epochs=2, n=2, count=2)
    world.begin(prefetch=0)
    assert world.live[1].grant.leases[0].epoch == 1
    assert kinds(world.push(1)) == ["Update"]
    actions = world.push(0)
    assert kinds(actions)[:4] == ["Update", "EpochDone", "EpochDone", "Finished"]
    assert [a.clock.timestamp for a in actions[1:3]] == [2, 2]


def test_max_updates_ends_at_that_update() -> None:
    world = make(samples=1000, n=4, max_updates=3)
    world.begin()
    world.push(0)
    world.push(1)
    assert kinds(world.push(2)) == ["Update", "Finished", "Grant"]
    assert world.finished == Finished("3 updates are made", False)
    (grant,) = world.push(3)
    assert grant.done and grant.verdict == "late" and world.sync.clock.timestamp == 3
    assert world.sync.counters.dropped == {"late": 1}


def test_rates_are_the_newest_of_the_chief() -> None:
    world = make(samples=1000, n=1)
    world.begin()

    def push(rank: int, rates: tuple[float, ...] | None) -> list:
        learner = world.live[rank]
        learner.seq += 1
        event = Push(
            GradientId(rank, 1, learner.seq), learner.grant.clock, learner.grant.leases[0].spans, 4, True, rates
        )
        world.memory[rank, 1, learner.slot] = event.id
        return world.turn(event)

    push(2, (0.2,))
    push(1, (0.5,))
    push(1, (0.4,))
    assert decision(push(3, None)).rates == (0.4,)
    push(0, None), push(1, None), push(2, None)
    assert decision(push(3, None)).rates is None


def test_state_goes_on_where_it_was() -> None:
    world = make(samples=40, epochs=2, n=2)
    world.begin()
    for rank in (0, 1, 2):
        world.push(rank)
    saved = json.loads(json.dumps(world.sync.state()))
    assert saved["timestamp"] == 1 and saved["samples_applied"] == 8
    assert saved["counters"] == {"accepted": 2, "applied": 2, "skipped": 0, "dropped": {}}
    again = world.restart()
    assert again.sync.clock == Clock(2, 1) and again.sync.staleness.counts == {0: 2}
    assert again.sync.samples_applied == 8
    again.begin()
    assert again.live[0].grant.leases[0] == Lease((Span(0, 8, 12),))
    again.finish()
    assert len(again.applied) == 80 and again.sync.counters.accepted == again.sync.counters.applied == 20
    assert again.sync.samples_applied == 80


def test_restored_after_its_last_update_it_ends_at_once() -> None:
    world = make(samples=8, n=4, max_updates=1)
    world.begin()
    world.push(0)
    again = world.restart()
    again.begin()
    assert again.finished == Finished("1 updates are made", False)
    whole = make(samples=8, n=4)
    whole.begin()
    whole.finish()
    again = whole.restart()
    again.begin()
    assert again.finished.complete and all(grant.done for grant in again.grants)


def test_drop_returns_the_samples_of_a_stale_gradient() -> None:
    world = make(samples=100, n=4, sync={"max_staleness": 1})
    world.begin()
    world.push(0)
    world.push(0)
    (grant,) = world.push(1)
    assert grant.verdict == "stale" and grant.clock.timestamp == 2
    assert grant.leases[-1] == Lease((Span(0, 4, 8),)), "its own samples are the lowest in the pool"
    assert world.sync.counters.dropped == {"stale": 1} and world.sync.counters.accepted == 2
    world.finish()
    assert world.finished.complete and max(world.sync.staleness.counts) <= 1


def test_hold_waits_for_the_gradient_that_it_would_make_too_stale() -> None:
    world = make(samples=200, n=4, sync={"max_staleness": 1, "on_stale": "hold"})
    world.begin()
    assert kinds(world.push(0)) == ["Update", "Grant"]
    assert kinds(world.push(0)) == [], "update 2 would give the others sigma 2"
    assert kinds(world.push(1)) == [] and kinds(world.push(2)) == []
    actions = world.push(3)
    assert kinds(actions) == ["Update"] + ["Grant"] * 4
    made = decision(actions)
    assert made.c == 4 and [e.sigma for e in made.entries] == [0, 1, 1, 1]
    assert made.entries[1].coefficient == float(np.float32(1 / 4)), "the true count divides"
    world.finish()
    assert world.finished.complete and world.sync.staleness.max <= 1


def test_hold_ends_when_the_slow_learner_leaves() -> None:
    world = make(samples=200, n=2, count=2, sync={"max_staleness": 0, "on_stale": "hold"})
    world.begin()
    assert kinds(world.push(0)) == []
    assert kinds(world.leave(1, "lost")) == ["Release", "Update", "Grant"]


def test_warm_up_is_hardsync_then_the_protocol() -> None:
    world = make("softsync", samples=16, epochs=3, n=2, sync={"warmup_epochs": 1})
    world.begin()
    assert (world.sync.protocol, world.sync.n, world.sync.c) == ("hardsync", 1, 4)
    for rank in (3, 0, 1):
        assert kinds(world.push(rank)) == []
    actions = world.push(2)
    assert kinds(actions) == ["Update", "EpochDone", "Members"] + ["Grant"] * 4
    assert actions[2] == Members(4, 2, 2, 16, "softsync")
    assert [e.id.rank for e in actions[0].decision.entries] == [0, 1, 2, 3]
    assert [grant.leases[0].epoch for grant in actions[3:]] == [1] * 4
    world.finish()
    assert world.finished.complete and len(world.applied) == 48


def test_warm_up_of_the_whole_job_is_hardsync() -> None:
    world = make("async", samples=16, epochs=2, sync={"warmup_epochs": 5})
    world.begin()
    world.finish()
    assert world.sync.staleness.counts == {0: 8}


def test_a_restored_job_knows_that_its_warm_up_is_over() -> None:
    world = make("async", samples=16, epochs=3, sync={"warmup_epochs": 1})
    world.begin()
    for _ in range(2):
        for rank in range(4):
            world.push(rank)
    assert world.restart().sync.protocol == "async"


def global_batch_world(count: int) -> World:
    return make(samples=1000, count=count, mu=0, global_batch=10, n=1)


def test_a_global_batch_is_divided_among_those_present() -> None:
    world = global_batch_world(4)
    world.begin()
    assert [grant.leases[0].count for grant in world.grants] == [3, 3, 2, 2]
    assert world.sync.global_batch == 10
    world.leave(3, "bye")
    assert world.members[-1] == Members(3, 1, 3, 10, "softsync")
    world.push(0)
    assert world.live[0].grant.leases[-1].count == 4


def test_the_ledger_stays_small_however_long_the_job() -> None:
    # A turn costs O(intervals): they are those of what is outstanding, not of what was applied.
    world = make(samples=2000, epochs=3, count=30, mu=4, n=15)
    world.begin()
    most, turn = 0, 0
    while not world.over:
        turn += 7
        world.push(world.computing[turn % len(world.computing)])
        if turn % 70 == 0:
            pages = world.sync.state()["ledger"]["open"].values()
            most = max([most, *(len(page["applied"]) for page in pages)])
    assert most <= 4 * 30 and world.finished.complete


@pytest.mark.parametrize(("modulation", "scales"), [("average", [3 / 10] * 3), ("staleness", [1 / 4, 1, 1 / 6])])
def test_folding_weighs_like_the_update_that_it_ends_in(modulation: str, scales: list[float]) -> None:
    world = make(samples=1000, n=2, count=7, sync={"modulation": modulation})
    world.begin()
    for _ in range(2):
        for rank in (1, 2, 3):
            world.push(rank)
    world.push(0), world.push(1), world.push(2)  # update 3, rank 0 from version 2 on
    for _ in range(3):
        for rank in (1, 2, 3):
            world.push(rank)
    # Clock 6, rank 0 computes from version 2: sigma 4, then 0.
    assert [kinds(world.push(0)), kinds(world.push(0))] == [["Grant"], ["Fold", "Grant"]]
    made = decision(world.push(4))
    assert [(e.id.rank, e.folded, e.sigma) for e in made.entries] == [(0, True, 4), (0, False, 0), (4, False, 6)]
    assert made.mean_sigma == pytest.approx(10 / 3)
    assert [e.scale for e in made.entries] == pytest.approx(scales)
    assert [e.coefficient for e in made.entries] == pytest.approx([s / 3 for s in scales])
    fold = 4 / 4 if modulation == "staleness" else 4.0
    assert made.fold_coefficient * fold == pytest.approx(made.entries[0].coefficient)


def test_drain_takes_back_what_one_who_waits_has_not_begun() -> None:
    world = make(samples=100, n=2, count=2, sync={"max_staleness": 0, "on_stale": "hold"})
    world.begin()
    assert world.push(0) == []  # held back: rank 1 computes from version 0
    world.drain()
    actions = world.push(1)
    assert kinds(actions) == ["Update", "Finished", "Grant", "Grant"]
    assert world.sync.samples_applied == 8


def test_a_forecast_is_no_longer_than_asked_for() -> None:
    for protocol in ("softsync", "hardsync"):
        world = make(protocol, samples=1000)
        world.begin(prefetch=2)
        assert world.sync._common.ledger.counts(0)["out"] == 3 * 16
