"""Hosts that leave, come back or stay away: what was decided about them holds, and no rank is forgotten."""

from __future__ import annotations

import pytest

from rudra_zmq.wire.messages import control as c
from tests.unit.head.test_hosts import DAY, join, rows
from tests.unit.head.world import SCRIPT, TOKEN, World

SOME = 30.0


@pytest.fixture
def job(world: World) -> str:
    """A job of two learners on a; b has room for as many."""
    join(world, "a")
    join(world, "b")
    job = world.submit(2, toml=SCRIPT)
    world.hello(job)
    for rank in range(2):
        world.started(job, rank)
    world.report(job)
    world.take()
    return job


def decide(world: World, host: str, state: c.Standing) -> None:
    assert isinstance(world.cli(c.SetHost(host=host, state=state)), c.Ok)


def test_a_host_that_was_banned_while_it_was_silent_has_its_learners_leave_when_it_is_back(
    world: World, job: str
) -> None:
    world.wait(5, alive=(b"b",))
    decide(world, "a", "banned")
    assert world.sent(c.StopLearners) == []
    join(world, "a", running=[(job, 0, 1, 7), (job, 1, 1, 8)])
    (stop,) = world.sent(c.StopLearners, b"a")
    assert (stop.ranks, stop.leave) == ([0, 1], True)


def test_ranks_that_leave_a_host_come_back_where_it_is_unbanned_meanwhile(world: World, job: str) -> None:
    decide(world, "b", "drained")
    decide(world, "a", "banned")
    decide(world, "a", "ready")
    world.take()
    for rank in range(2):
        world.exit(job, rank, "ok", respawn=True)
    starts = world.sent(c.StartLearners, b"a")
    assert [start.ranks for start in starts] == [[0], [1]]


def test_ranks_that_leave_a_learnerd_that_ends_are_not_asked_of_it(world: World, job: str) -> None:
    world.exit(job, 0, "ok", respawn=True)
    world.wait(1, alive=(b"a", b"b"))
    assert world.sent(c.StartLearners) == []


def test_ranks_of_a_host_that_stays_silent_move_once_the_node_has_given_them_up(world: World, job: str) -> None:
    world.wait(5, alive=(b"b",))
    world.take()
    for rank in range(2):
        world.send(b"node", c.NodeFence(job=job, rank=rank, incarnation=1, reason="silent"))
        world.send(b"node", c.NodeFence(job=job, rank=rank, incarnation=1, reason="silent"))
    told = world.sent(c.LearnerGone, b"node")
    assert [(gone.rank, gone.kind, gone.respawn) for gone in told] == [(r, "fenced", True) for r in (0, 0, 1, 1)]
    world.wait(SOME, alive=(b"b",))
    (start,) = world.sent(c.StartLearners, b"b")
    assert (start.ranks, start.incarnation > 1) == ([0, 1], True)
    join(world, "a", running=[(job, 0, 1, 7), (job, 1, 1, 8)])
    assert [stop.ranks for stop in world.sent(c.StopLearners, b"a")] == [[0], [1]]


def test_who_was_given_up_and_is_back_before_it_moved_starts_anew(world: World, job: str) -> None:
    world.wait(5, alive=(b"b",))
    world.send(b"node", c.NodeFence(job=job, rank=0, incarnation=1, reason="silent"))
    join(world, "a", running=[(job, 0, 1, 7), (job, 1, 1, 8)])
    (kill,) = world.sent(c.KillLearner, b"a")
    assert (kill.rank, kill.incarnation) == (0, 1)
    assert world.sent(c.StartLearners) == []


def test_a_decision_about_a_host_outlives_seven_days(world: World) -> None:
    join(world, "a")
    decide(world, "a", "banned")
    join(world, "b")
    decide(world, "b", "drained")
    for _ in range(2):  # a goes on pinging, b is off
        world.now += 8 * DAY
        world.wait(1)
    join(world, "c")
    world.restart_head()
    join(world, "a")
    join(world, "b")
    assert [row.state for row in rows(world).values()] == ["banned", "drained", "ready"]


def test_a_second_machine_of_the_same_name_is_refused_though_its_pid_is_the_same(world: World) -> None:
    join(world, "a", boot="one")
    twin = c.Register(token=TOKEN, name="a", slots=2, pid=500, boot="two")
    refused = world.send(b"twin", twin)
    assert isinstance(refused, c.Error)
    assert refused.message == "a learnerd is registered as a already, with PID 500 on another machine"
    join(world, "a", boot="one")


def test_a_job_that_can_no_longer_fit_holds_up_nobody(world: World) -> None:
    for name, slots in (("a", 2), ("b", 4)):
        join(world, name, slots=slots)
        decide(world, name, "drained")
    wide, small = world.submit(6), world.submit(1)
    assert world.job(small).reason == f"behind job {wide} in the queue"
    decide(world, "b", "banned")
    decide(world, "a", "ready")
    assert world.job(wide).reason == "the job needs 6 slots, the cluster has 2"
    assert world.state_of(small) == "STARTING"
    decide(world, "b", "ready")
    assert world.job(wide).reason == "needs 6 slots, 5 free"


def test_a_host_that_is_forgotten_is_a_new_one_when_it_comes_again(world: World) -> None:
    join(world, "a")
    decide(world, "a", "banned")
    world.restart_head()
    assert isinstance(world.cli(c.ForgetHost(name="a")), c.Ok)
    assert rows(world) == {}
    join(world, "a")
    assert rows(world)["a"].state == "ready"
