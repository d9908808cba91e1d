"""Joins, losses, deadlines, lies and repeats, whatever the protocol."""

from __future__ import annotations

import pytest

from rudra_zmq.core.events import (
    Clock,
    Drain,
    End,
    Failed,
    Fence,
    Finished,
    GradientId,
    Grant,
    Join,
    Lease,
    Leave,
    Members,
    Push,
    Refuse,
    Release,
    Span,
    Start,
    Tick,
    Waiting,
    Want,
)
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.sync import Sync
from tests.unit.core.test_softsync import decision, kinds
from tests.unit.core.world import make


def test_parameters_are_checked() -> None:
    for sync, learners, data in [
        (SyncParams(n=5), LearnerParams(), DataParams(1, 1)),
        (SyncParams(), LearnerParams(count=0), DataParams(1, 1)),
        (SyncParams(), LearnerParams(), DataParams(0, 1)),
    ]:
        with pytest.raises(ValueError):
            Sync(sync, learners, data)


def test_nothing_is_leased_before_start() -> None:
    world = make()
    for rank in range(4):
        assert world.join(rank) == []
    assert world.tick(1000.0) == [] and world.sync.next_deadline() is None
    assert kinds(world.turn(Start())) == ["Members"] + ["Grant"] * 4
    assert world.turn(Start()) == []


def test_start_with_those_who_are_here() -> None:
    world = make(n=4)
    world.join(0), world.join(2)
    actions = world.turn(Start())
    assert actions[0] == Members(2, 2, 1, 8, "softsync", "n = 4 is clamped to 2, the number of learners")
    assert kinds(world.join(3)) == ["Members", "Grant"] and world.sync.lam == 3


def test_who_left_before_start_is_not_counted() -> None:
    world = make()
    for rank in range(4):
        world.join(rank)
    assert world.leave(1) == [Release(1, 1)]
    assert world.sync.next_deadline() is None and world.sync.lam == 4
    world.turn(Start())
    assert world.sync.lam == 3
    assert world.sync.members()[1] == (1, 1, "lost", 0)


def test_members_tells_states_and_gradients() -> None:
    world = make()
    world.begin()
    world.push(0), world.push(0), world.push(2, skip=True)
    world.leave(1, "bye"), world.leave(3, "fenced")
    assert world.sync.members() == [(0, 1, "present", 2), (1, 1, "left", 0), (2, 1, "present", 0), (3, 1, "lost", 0)]


# -------------------------------------------------------------------------------------------- losses


def test_softsync_returns_the_samples_of_a_lost_learner_at_once() -> None:
    world = make(samples=100)
    world.begin()
    world.push(1)
    assert world.leave(1) == []  # its gradient is pending: its memory is still needed
    (grant,) = world.push(0)
    assert [lease.spans for lease in grant.leases] == [(Span(0, 16, 20),), (Span(0, 20, 24),)]
    world.push(0)
    actions = world.push(2)
    assert kinds(actions) == ["Update", "Release", "Grant"] and actions[1] == Release(1, 1)
    assert GradientId(1, 1, 1) in [e.id for e in decision(actions).entries]


def test_the_memory_of_a_lost_learner_is_released_once_folded() -> None:
    world = make(samples=100)
    world.begin()
    world.push(1), world.push(1)
    assert kinds(world.leave(1)) == []
    assert kinds(world.push(0)) == ["Grant"]
    assert kinds(world.push(2)) == ["Update", "Release", "Grant"]


def test_lambda_shrinks_at_the_deadline_and_pending_is_looked_at_once() -> None:
    world = make(samples=100, n=1, deadline=10.0)
    world.begin()
    world.push(0), world.push(1), world.push(2)
    world.leave(3)
    assert (world.sync.lam, world.sync.c) == (4, 4)
    actions = world.tick(10.0)
    assert kinds(actions) == ["Members", "Update"]
    assert actions[0] == Members(3, 1, 3, 12, "softsync")
    assert decision(actions).entries[0].coefficient == pytest.approx(1 / 3)


def test_back_before_the_deadline_changes_nothing() -> None:
    world = make(deadline=10.0)
    world.begin()
    world.leave(3)
    assert kinds(world.join(3)) == ["Grant"]
    assert world.tick(100.0) == [] and world.sync.lam == 4


def test_fail() -> None:
    world = make(on_lost="fail", deadline=10.0)
    world.begin()
    world.push(0)
    world.leave(3)
    assert world.tick(10.0) == [Failed("learner 3 was lost and did not come back within 10 s")]
    assert world.sync.finished and world.sync.next_deadline() is None
    (grant,) = world.push(1)
    assert grant.done and grant.verdict == "late"
    assert world.tick(1000.0) == []


def test_failing_with_every_slot_full_folds_nothing() -> None:
    world = make(
        count=3, mu=2, samples=100, on_lost="fail", deadline=10.0, sync={"max_staleness": 0, "on_stale": "hold"}
    )
    world.begin()
    world.push(0)
    world.push(0)  # both slots hold a gradient after the fold of none: the second is in slot 1
    world.leave(2)
    actions = world.tick(10.0)
    assert "Failed" in kinds(actions) and "Fold" not in kinds(actions)


def test_failing_tells_those_who_wait() -> None:
    world = make("hardsync", on_lost="fail", deadline=10.0)
    world.begin()
    world.push(0)
    world.leave(3), world.leave(2)
    actions = world.tick(10.0)
    assert kinds(actions) == ["Failed", "Grant"] and actions[1].done


def test_wait_lets_the_others_go_on_under_softsync() -> None:
    world = make(samples=40, count=2, n=2, on_lost="wait", deadline=10.0)
    world.begin()
    world.leave(1)
    assert world.tick(10.0) == [] and world.sync.lam == 2 and world.sync.waiting is None
    assert Waiting(0, 2, (0, 1), float("inf")) in world.leave(0)
    assert world.tick(30.0) == []
    world.join(0)
    assert world.sync.waiting is None
    world.finish()
    assert world.finished.complete


@pytest.mark.parametrize("protocol", ["hardsync", "softsync"])
def test_below_the_minimum_the_job_waits_then_goes_on(protocol: str) -> None:
    world = make(protocol, samples=100, count=2, min=2, deadline=10.0)
    world.begin()
    world.push(0)
    world.leave(1)
    actions = world.tick(10.0)
    assert Waiting(1, 2, (1,), 20.0) in actions and world.sync.waiting == Waiting(1, 2, (1,), 20.0)
    assert world.sync.next_deadline() == 20.0
    if protocol == "softsync":
        world.push(0)
    assert not world.computing, "nothing is leased"
    assert world.tick(19.0) == []
    actions = world.join(1)
    assert kinds(actions)[0] == "Members" and world.sync.waiting is None and world.computing == [0, 1]
    world.finish()
    assert world.finished.complete


def test_below_the_minimum_the_job_fails_after_another_deadline() -> None:
    world = make(samples=100, count=3, min=2, deadline=10.0)
    world.begin()
    world.leave(1)
    assert world.waitings == []
    world.leave(2, "bye")
    assert world.waitings == []
    world.tick(10.0)
    assert world.waitings == [Waiting(1, 2, (1, 2), 20.0)]
    actions = world.tick(20.0)
    assert actions == [Failed("1 learners are present, at least 2 are needed")]


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
def test_all_lost_at_once_fail_after_another_deadline_too(protocol: str) -> None:
    world = make(protocol, samples=100, count=2, deadline=10.0)
    world.begin()
    world.leave(0)
    world.leave(1)
    world.tick(10.0)
    assert world.waitings == [Waiting(0, 1, (0, 1), 20.0)]
    assert world.tick(20.0) == [Failed("0 learners are present, at least 1 are needed")]


def test_start_below_the_minimum_waits() -> None:
    world = make(count=3, min=2)
    world.join(0)
    assert kinds(world.turn(Start())) == ["Members", "Waiting"]
    assert kinds(world.join(2)) == ["Members", "Grant", "Grant"]
    lonely = make(count=3)
    assert kinds(lonely.turn(Start())) == ["Members", "Waiting"]
    assert lonely.sync.lam == 1


def test_what_is_all_leased_and_applied_needs_no_learners() -> None:
    world = make(samples=8, count=2, min=2)
    world.begin()
    world.push(0)
    assert kinds(world.push(1)) == ["Update", "EpochDone", "Finished", "Grant", "Grant"]


# -------------------------------------------------------------------------------------------- joining


def test_a_learner_that_joins_while_running_is_leased_at_once() -> None:
    world = make(samples=100, count=2, max=3)
    world.begin()
    actions = world.join(2, mu=8)
    assert actions[0] == Members(3, 1, 3, 16, "softsync") and actions[1].leases[0].count == 8
    (refusal,) = world.turn(Join(3, 1, 4))
    assert refusal == Refuse(3, 1, 0, "there is room for 3 learners only")
    world.leave(0)
    (refusal,) = world.turn(Join(3, 1, 4))
    assert refusal.reason == "there is room for 3 learners only", "the place of a lost one is kept"
    world.leave(1, "bye")
    assert kinds(world.join(3)) == ["Members", "Grant"]


def test_n_comes_back_with_the_learners() -> None:
    world = make(samples=1000, n=4)
    world.begin()
    world.leave(3, "bye")
    assert (world.sync.n, world.sync.c) == (3, 1)
    assert world.members[-1].note == "n = 4 is clamped to 3, the number of learners"
    world.join(3)
    assert (world.sync.n, world.sync.c) == (4, 1) and world.members[-1].note == ""


def test_an_old_incarnation_is_refused() -> None:
    world = make()
    world.begin()
    world.leave(1)
    (refusal,) = world.turn(Join(1, 1, 4))
    assert refusal == Refuse(1, 1, 0, "incarnation 1 was here already")
    world.join(1)
    assert world.turn(Join(1, 1, 4))[0].reason == "incarnation 2 was here already"


def test_a_replaced_incarnation_is_fenced_and_its_samples_wait_for_its_death() -> None:
    world = make("async", samples=100, count=2)
    world.begin()
    assert world.turn(Join(1, 2, 4)) == [Fence(1, 1, "replaced by incarnation 2")]
    assert world.turn(Join(1, 3, 4)) == [], "fenced once"
    assert world.turn(Join(1, 2, 4)) == []
    assert kinds(world.push(1)) == ["Update", "Grant"], "until it is dead its gradients count"
    actions = world.sync.handle(Leave(1, 1, "fenced"), 0.0)
    assert actions[0] == Release(1, 1)
    assert isinstance(actions[1], Grant) and actions[1].incarnation == 3
    assert actions[1].leases[0] == Lease((Span(0, 12, 16),)), "what its predecessor held"


def test_a_successor_that_dies_first_is_forgotten() -> None:
    world = make(count=2)
    world.begin()
    world.turn(Join(1, 2, 4))
    assert world.turn(Leave(1, 2, "lost")) == []
    assert kinds(world.leave(1)) == ["Release"]
    assert world.sync.members()[1][1:3] == (1, "lost")


def test_leaving_without_being_here() -> None:
    world = make()
    world.begin()
    assert world.turn(Leave(9, 1, "lost")) == [] and world.turn(Leave(1, 7, "lost")) == []
    assert world.sync.members()[1][2] == "present"


def test_a_reconnect_gets_its_grant_again_with_its_new_batches() -> None:
    world = make(samples=100)
    world.begin()
    before = world.live[1].grant
    actions = world.turn(Join(1, 1, 6, 2))
    assert actions[0] == Members(4, 1, 4, 18, "softsync")
    assert actions[1] == before
    assert world.push(1)[0].leases[-1].count == 6


def test_a_reconnect_while_it_waits_is_answered_in_its_time() -> None:
    world = make("hardsync", samples=100, count=2)
    world.begin()
    world.push(1)
    assert world.turn(Join(1, 1, 0, 1)) == []
    assert kinds(world.push(0)) == ["Update", "Grant", "Grant"]


def test_a_reconnect_after_the_end_is_told() -> None:
    world = make("async", samples=4, count=2)
    world.begin()
    world.push(0)
    (grant,) = world.turn(Join(1, 1, 0, 1))
    assert grant.done


@pytest.mark.parametrize("protocol", ["hardsync", "softsync"])
def test_an_end_is_an_end_whatever_comes_after_it(protocol: str) -> None:
    world = make(protocol, samples=64, count=2)
    world.begin()
    world.push(0)
    told = world.sync.handle(End(), world.now)
    assert [(g.rank, g.done, g.leases) for g in told if isinstance(g, Grant)] == [(0, True, ())] * (
        protocol == "hardsync"
    )
    assert world.sync.finished and world.sync.next_deadline() is None
    push = Push(GradientId(1, 1, 1), Clock(1, 0), world.live[1].grant.leases[0].spans, 4)
    (grant,) = world.sync.handle(push, world.now)
    assert isinstance(grant, Grant) and (grant.verdict, grant.done) == ("late", True)
    assert "Update" not in kinds(world.sync.handle(Leave(0, 1, "bye"), world.now))
    assert world.sync.clock.timestamp == 0 and world.sync.counters.applied == 0


# --------------------------------------------------------------------------------------------- fencing


def test_a_step_that_takes_too_long_is_fenced_the_first_is_exempt() -> None:
    world = make(count=2, samples=1000, step_timeout=100.0, deadline=10.0)
    world.begin()
    assert world.sync.next_deadline() == 3600.0, "it has an end of its own"
    world.tick(500.0)
    world.push(0)
    assert world.sync.next_deadline() == 600.0
    assert world.tick(599.0) == []
    assert world.tick(600.0) == [Fence(0, 1, "no gradient within step_timeout = 100 s")]
    assert world.tick(700.0) == [] and world.sync.next_deadline() == 3600.0
    world.leave(0, "fenced")
    assert world.sync.next_deadline() == 710.0
    world.push(1)
    world.join(0)
    world.leave(1, "bye")
    assert world.sync.next_deadline() == 4300.0, "the first step of the next incarnation is exempt"


@pytest.mark.parametrize(("step_timeout", "most"), [(100.0, 3600.0), (1000.0, 6000.0)])
def test_a_first_step_that_never_ends_is_told_and_ends(step_timeout: float, most: float) -> None:
    world = make(count=2, samples=1000, step_timeout=step_timeout)
    world.begin()
    world.push(0)  # it takes its second step
    assert world.sync.slow_starters(step_timeout) == []
    assert world.sync.slow_starters(step_timeout + 1) == [(1, step_timeout + 1, most)]
    world.push(1)
    world.leave(0), world.join(0)
    world.leave(1, "bye")
    assert world.sync.slow_starters(step_timeout) == []
    assert world.tick(most - 1) == []
    assert world.tick(most) == [Fence(0, 2, f"no first gradient within {most:g} s")]
    assert world.sync.slow_starters(most) == []


def test_a_learner_that_waits_is_not_timed() -> None:
    world = make("hardsync", count=2, samples=1000, step_timeout=100.0)
    world.begin()
    world.push(0), world.push(1)
    world.now = 50.0
    world.push(0)
    assert world.sync.next_deadline() == 100.0, "rank 1 alone"
    world.push(1)
    assert world.sync.next_deadline() == 150.0


def test_a_want_is_progress() -> None:
    world = make(count=2, samples=1000, step_timeout=100.0)
    world.begin()
    world.push(0)
    world.now = 50.0
    world.want(0)
    assert world.sync.next_deadline() == 150.0


# ---------------------------------------------------------------------------------------------- pushes


def test_a_repeated_push_is_answered_from_the_record() -> None:
    world = make(samples=100, n=4)
    world.begin()
    (_, grant) = world.push(0)
    world.push(1)
    (again,) = world.repeat(0)
    assert again == Grant(0, 1, 1, "accepted", Clock(1, 2), grant.leases, grant.slot)
    assert world.sync.counters.accepted == 2


def test_a_repeated_push_without_an_answer_yet_waits() -> None:
    world = make("hardsync")
    world.begin()
    world.push(0)
    assert world.repeat(0) == [] and world.sync.counters.accepted == 1


def test_a_repeated_push_whose_leases_are_gone_is_answered_later_and_may_be_followed_by_another() -> None:
    world = make("hardsync", samples=8, epochs=4, count=2, sync={"backup": 1})
    world.begin(prefetch=0)
    world.push(0)  # closes the round, and rank 0 gets what rank 1 held
    assert world.push(1) == []
    assert [g.verdict for g in world.push(0) if isinstance(g, Grant)] == ["accepted", "late"]
    world.push(0)
    assert world.repeat(1) == []
    assert world.repeat(1) == []
    assert kinds(world.push(0)) == ["Update", "EpochDone", "Grant", "Grant"]
    world.push(0)
    world.repeat(1)
    assert world.push(1) == [] and world.sync.counters.dropped == {"late": 2}
    world.finish()
    assert world.finished.complete


LIES = {
    "another incarnation": (
        Push(GradientId(0, 2, 1), Clock(1, 0), (Span(0, 0, 4),), 4),
        "this incarnation is not present",
    ),
    "another rank": (Push(GradientId(7, 1, 1), Clock(1, 0), (Span(0, 0, 4),), 4), "this incarnation is not present"),
    "the future": (
        Push(GradientId(1, 1, 1), Clock(1, 2), (Span(0, 4, 8),), 4),
        "timestamp 2 is of the future, it is 1",
    ),
    "a number left out": (Push(GradientId(0, 1, 3), Clock(1, 1), (Span(0, 16, 20),), 4), "push 3 does not follow 1"),
    "number 0": (Push(GradientId(1, 1, 0), Clock(1, 0), (Span(0, 4, 8),), 4), "push 0 does not follow 0"),
    "a negative number": (Push(GradientId(1, 1, -1), Clock(1, 0), (Span(0, 4, 8),), 4), "push -1 does not follow 0"),
    "more samples": (Push(GradientId(1, 1, 1), Clock(1, 0), (Span(0, 4, 8),), 5), "5 samples are not in the spans"),
    "fewer than none": (
        Push(GradientId(1, 1, 1), Clock(1, 0), (Span(0, 4, 8),), -1),
        "-1 samples are not in the spans",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_and_counted(lie: str) -> None:
    world = make(samples=100, n=4)
    world.begin()
    world.push(0)
    push, reason = LIES[lie]
    assert world.turn(push) == [Refuse(*push.id, reason)]
    assert world.sync.counters.dropped == {"refused": 1} and world.sync.clock.timestamp == 1
    world.finish()
    assert world.finished.complete


def test_a_push_before_the_answer_is_refused() -> None:
    world = make("hardsync")
    world.join(0)
    push = Push(GradientId(0, 1, 1), Clock(1, 0), (Span(0, 0, 4),), 4)
    assert world.turn(push)[0].reason == "the push before was not answered yet"
    for rank in (1, 2, 3):
        world.join(rank)
    world.turn(Start())
    world.push(0)
    push = Push(GradientId(0, 1, 2), Clock(1, 0), (Span(0, 16, 20),), 4)
    assert world.turn(push)[0].reason == "the push before was not answered yet"


def test_samples_that_are_not_held() -> None:
    world = make(samples=100, n=4)
    world.begin()
    (grant,) = world.push(0, spans=(Span(0, 0, 5),))
    assert grant.verdict == "unheld" and grant.leases[0] == Lease((Span(0, 0, 4),))
    assert world.sync.counters.dropped == {"unheld": 1} and world.sync.counters.accepted == 0


@pytest.mark.parametrize("protocol", ["softsync", "hardsync"])
def test_a_push_of_another_generation_is_void(protocol: str) -> None:
    world = make(protocol, samples=100, n=1, count=2)
    world.begin()
    world.live[0].seq = 41
    push = Push(GradientId(0, 1, 42), Clock(0, 30), (Span(0, 0, 4),), 4)
    world.live[0].seq = 42
    (grant,) = world.turn(push)
    assert (grant.ack, grant.verdict, grant.clock) == (42, "void", Clock(1, 0))
    assert grant.leases[0] == Lease((Span(0, 0, 4),))
    assert world.sync.counters.dropped == {"void": 1}
    world.push(0)
    assert world.sync.counters.accepted == 1


def test_void_before_the_first_grant() -> None:
    world = make(count=2)
    world.join(0)
    world.live[0].seq = 7
    assert world.turn(Push(GradientId(0, 1, 7), Clock(0, 30), (), 0)) == []
    world.join(1)
    grant = world.turn(Start())[1]
    assert (grant.rank, grant.ack, grant.verdict) == (0, 7, "void")


@pytest.mark.parametrize("how", [{"skip": True}, {"finite": False}])
def test_samples_of_a_bad_gradient_come_back_once(how: dict) -> None:
    verdict = "skipped" if "skip" in how else "nonfinite"
    world = make(samples=8, count=1)
    world.begin(prefetch=0)
    (grant,) = world.push(0, **how)
    assert grant.verdict == verdict and grant.leases == (Lease((Span(0, 0, 4),)),)
    (grant,) = world.push(0, **how)
    assert grant.leases == (Lease((Span(0, 4, 8),)),)
    assert kinds(world.push(0)) == ["Update", "EpochDone", "Finished", "Grant"]
    counters = world.sync.counters
    assert (counters.skipped, counters.dropped) == ((2, {}) if "skip" in how else (0, {"nonfinite": 2}))
    assert world.sync.samples_applied == 4


def test_a_push_of_nothing_is_a_skip() -> None:
    world = make(samples=8, count=1)
    world.begin()
    (grant,) = world.push(0, spans=())
    assert grant.verdict == "skipped" and grant.leases[0] == Lease((Span(0, 0, 4),))


# ------------------------------------------------------------------------------------------ want, drain


def test_want_adds_one_lease_and_a_push_may_take_them_all() -> None:
    world = make(samples=100, count=1)
    world.begin()
    assert len(world.live[0].grant.leases) == 2
    (grant,) = world.want(0)
    assert len(grant.leases) == 3 and (grant.ack, grant.verdict, grant.slot) == (0, "", 0)
    (grant,) = world.want(0)
    assert len(grant.leases) == 4
    made = decision(world.push(0, spans=tuple(span for lease in grant.leases for span in lease.spans)))
    assert made.samples == 16
    assert len(world.live[0].grant.leases) == 2


def test_want_is_answered_even_if_there_is_nothing_more() -> None:
    world = make(samples=8, count=1)
    world.begin()
    before = world.live[0].grant
    assert world.want(0) == [before] and world.want(0) == [before]
    world.push(0, spans=(Span(0, 0, 4), Span(0, 4, 8)))
    assert world.finished.complete


def test_want_of_one_who_waits_or_is_not_here() -> None:
    world = make("hardsync", count=2)
    world.begin()
    world.push(0)
    assert world.turn(Want(0, 1)) == []
    assert world.turn(Want(0, 2)) == [Refuse(0, 2, 0, "this incarnation is not present")]
    world.push(1)
    world.finish()
    assert world.turn(Want(1, 1))[0].done


def test_drain_lets_what_was_begun_finish_and_flushes() -> None:
    world = make(samples=100, n=1)
    world.begin()
    world.push(0)
    assert world.drain() == []
    for rank in (1, 2):
        assert world.push(rank) == []
    assert kinds(world.leave(3)) == ["Release", "Members", "Update"], "nobody waits for one who was lost"
    actions = world.push(0)
    assert kinds(actions) == ["Update", "Finished", "Grant", "Grant", "Grant"]
    assert decision(actions).c == 1 and actions[1] == Finished("stop", False)
    assert len(world.applied) == 16


def test_drain_flushes_fewer_than_c() -> None:
    world = make(samples=100, n=1)
    world.begin()
    world.push(0)
    world.drain()
    for rank in (0, 1, 2):
        world.push(rank)
    assert [d.c for d in world.decisions] == [4]
    made = decision(world.push(3, spans=world.live[3].grant.leases[0].spans))
    assert made.c == 1 and made.entries[0].coefficient == 1.0
    assert world.finished == Finished("stop", False)


def test_drain_keeps_what_a_want_began() -> None:
    for protocol in ("softsync", "hardsync"):
        world = make(protocol, samples=100, count=2)
        world.begin(prefetch=0)
        world.want(0)
        world.drain()
        leases = world.live[0].grant.leases
        world.push(0, spans=leases[0].spans + leases[1].spans)
        world.push(1)
        assert world.finished and world.sync.samples_applied == 12


def test_drain_ends_a_waiting_job() -> None:
    world = make(samples=100, count=2, min=2, deadline=10.0)
    world.begin()
    world.leave(1, "bye")
    assert world.sync.waiting
    world.drain()
    assert world.sync.waiting is None
    actions = world.push(0)
    assert kinds(actions) == ["Update", "Finished", "Grant"]


def test_drain_before_start_and_after_the_end() -> None:
    world = make()
    world.join(0)
    actions = world.turn(Drain(""))
    assert actions[0] == Finished("drained", False) and actions[1].done
    assert world.turn(Drain("again")) == []
    (grant,) = world.join(1)
    assert grant.done
    assert world.turn(Tick()) == []


def test_a_job_drained_twice_keeps_the_first_reason() -> None:
    world = make()
    world.begin()
    world.turn(Drain("first"))
    world.turn(Drain("second"))
    world.finish()
    assert world.finished.reason == "first"


# -------------------------------------------------------------------------------------- death everywhere

STEPS = 12


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
@pytest.mark.parametrize("kind", ["lost", "bye", "fenced"])
@pytest.mark.parametrize("back", [True, False])
def test_a_death_at_any_step_loses_and_doubles_no_sample(protocol: str, kind: str, back: bool) -> None:
    for at in range(STEPS):
        for rank in range(3):
            world = make(protocol, samples=22, count=3, mu=3, epochs=2, deadline=5.0)
            world.begin()
            for _ in range(at):
                world.push(world.computing[0])
            world.leave(rank, kind)
            if back:
                world.join(rank)
            world.finish()
            assert world.finished.complete and len(world.applied) == 44
            counters = world.sync.counters
            assert counters.accepted == counters.applied and world.sync.samples_applied == 44


def test_one_two_one_learners_in_mid_epoch() -> None:
    world = make(samples=60, count=1, max=2, epochs=2)
    world.begin()
    for _ in range(3):
        world.push(0)
    world.join(1)
    for _ in range(3):
        world.push(1)
        world.push(0)
    world.leave(0, "bye")
    world.finish()
    assert world.finished.complete and len(world.applied) == 120


def test_want_adds_one_lease_to_what_the_prefetch_could_not_have() -> None:
    world = make(samples=12, count=2)
    world.begin()
    assert len(world.live[1].grant.leases) == 1, "there was no more"
    world.leave(0)
    (grant,) = world.want(1)
    assert [lease.spans for lease in grant.leases] == [(Span(0, 4, 8),), (Span(0, 0, 4),)]


def test_of_what_a_want_brings_the_next_lease_alone_is_begun() -> None:
    world = make(samples=16, count=2)
    world.begin(prefetch=2)
    assert [len(world.live[rank].grant.leases) for rank in (0, 1)] == [3, 1]
    world.leave(0)
    (grant,) = world.want(1)
    assert len(grant.leases) == 3
    world.drain()
    assert world.sync._common.ledger.counts(0)["out"] == 8


def test_who_left_has_no_deadline() -> None:
    world = make(count=2, deadline=10.0)
    world.begin()
    world.leave(0, "bye")
    assert world.sync.next_deadline() == 3600.0, "of the other's first step"


def test_who_computes_who_waits_and_who_is_awaited() -> None:
    world = make("hardsync", count=3, samples=1000, step_timeout=100.0, deadline=60.0)
    world.begin()
    crew = world.sync.crew
    world.now = 5.0
    assert crew.steps(5.0) == [(rank, True, 5.0, 3600.0) for rank in range(3)] and crew.idle == []
    world.push(1)
    assert [step[0] for step in crew.steps(7.0)] == [0, 2] and crew.idle == [1]
    world.push(0), world.push(2)
    assert crew.steps(8.0) == [(rank, False, 3.0, 100.0) for rank in range(3)]
    assert crew.lost(8.0) == []
    world.leave(2)
    assert crew.lost(25.0) == [(2, 40.0)]
    world.leave(1, "bye")
    assert crew.lost(25.0) == [(2, 40.0)]
