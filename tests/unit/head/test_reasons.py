"""`rudra why`, the head's part: who waits for what, since when, until when."""

from __future__ import annotations

import pytest

from rudra_zmq.head.course import HELLO_S, HUNG_S
from rudra_zmq.wire.messages import control as c
from tests.unit.head.world import World


def why(world: World, job: str) -> dict[str, c.WaitRow]:
    reply = world.cli(c.Why(job=job))
    assert isinstance(reply, c.Waits), reply
    assert reply.job.job == job and reply.job.progress is None
    assert len({(row.who, row.what) for row in reply.rows}) == len(reply.rows)
    return {row.who: row for row in reply.rows}


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=1.3)


def test_a_queue(world: World) -> None:
    world.register(slots=4)
    first = world.running(3)
    second, third = world.submit(2), world.submit(1)
    world.wait(30.0)
    world.report(first)
    row = why(world, second)["job"]
    assert row.what == "needs 2 slots, 1 free" and row.since == about(30.0) and row.left is None
    assert f"behind job {second}" in why(world, third)["job"].what
    assert why(world, first) == {}


def test_a_node_that_starts_comes_back_and_is_silent(world: World) -> None:
    world.register()
    job = world.submit(2)
    world.wait(10.0)
    rows = why(world, job)
    assert rows["node"].what == "starts" and rows["node"].since == about(10.0)
    assert rows["node"].left == about(HELLO_S - 10.0) and "killed" in rows["node"].then
    assert rows["learner 0"].what == rows["learner 1"].what == "for the node, which does not serve yet"
    world.hello(job)
    assert "for learnerd on a to start it" in why(world, job)["learner 0"].what and "node" not in why(world, job)
    for rank in (0, 1, 65535):
        world.started(job, rank)
    waits = [c.WaitRow(who="learner 0", what="computes", since=3.0, left=7.0, then="killed")]
    world.report(job, waits=waits)
    assert why(world, job) == {"learner 0": waits[0]}
    world.wait(20.0)
    row = why(world, job)["node"]
    assert row.what == "is silent" and row.since == about(20.0) and row.left == about(HUNG_S - 20.0)
    world.node_exit(job, -9)
    rows = why(world, job)
    assert rows["node"].what == "to be started again" and "learner 0" not in rows  # what a dead node said is over
    world.wait(3.0)
    assert "newest snapshot" in why(world, job)["node"].what


def test_learners_whose_host_is_away_or_that_start_again(world: World) -> None:
    job = world.running(2)
    world.exit(job, 1, "signal", respawn=True)
    assert why(world, job)["learner 1"].what == "for learnerd on a to start it again"
    world.dead.add(500)
    world.wait(5.0, alive=())
    row = why(world, job)["learner 0"]
    assert "its host a, which is away" in row.what and row.since == about(5.0) and row.left == about(5.0)
    assert "moves" in row.then


def test_a_learner_that_may_run_on_its_host_alone(world: World) -> None:
    job = world.running(1, toml='[run]\nscript = "/x"\n[learners]\ncount = {count}\nhosts = ["a"]\n')
    world.dead.add(500)
    world.wait(5.0, alive=())
    row = why(world, job)["learner 0"]
    assert "its host a, which is away" in row.what and row.left is None and "nowhere else" in row.then


def test_an_end(world: World) -> None:
    job = world.running(2)
    world.cli(c.StopJob(job=job))
    row = why(world, job)["job"]
    assert (
        row.what == "to be STOPPED: for the end of its node, learner 0, learner 1, the evaluator" and row.left == 30.0
    )
    world.node_done(job, "STOPPED")
    world.node_exit(job)
    for rank in (0, 1, 65535):
        world.exit(job, rank, "ok")
    assert why(world, job) == {} and world.state_of(job) == "STOPPED"
    reply = world.cli(c.Why(job="ffffff"))
    assert isinstance(reply, c.Error) and reply.code == "not-found"
