"""The course of a job, by tables of what happens: start, losses, failures, stops, restarts of everybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from rudra_zmq.errors import RudraError
from rudra_zmq.head.effects import Send, StopNode
from rudra_zmq.wire.messages import control as c
from tests.unit.head.world import SCRIPT, World

EVALUATOR = 65535

# ------------------------------------------------------------------------------------------ start


def test_node_first_then_learners_then_running(world: World) -> None:
    job = world.submit(2)
    assert world.nodes_started() == []
    assert world.state_of(job) == "PENDING"
    assert isinstance(world.register(), c.Registered)
    (node,) = world.nodes_started()
    assert (node.spec["generation"], node.spec["resume"], node.spec["previous"]) == (1, False, [])
    assert node.spec["token"] == world.registry.stored(job).token
    assert world.sent(c.StartLearners) == []
    assert world.state_of(job) == "STARTING"
    world.hello(job)
    (start,) = world.sent(c.StartLearners, b"a")
    assert (start.ranks, start.evaluator, start.incarnation, start.addresses) == ([0, 1], True, 1, ["ipc:///n1"])
    for rank in (0, 1, EVALUATOR):
        world.started(job, rank)
    world.report(job, "WAITING", reason="learner 1 is missing")
    assert world.state_of(job) == "WAITING"
    world.report(job)
    row = world.job(job)
    assert (row.state, row.started, row.ended) == ("RUNNING", world.now, 0.0)


def test_the_answer_to_register_goes_out_before_orders(world: World) -> None:
    world.submit(1)
    kinds = [
        type(e.message if isinstance(e, Send) else e)
        for e in world.head.handle(b"a", "r", c.Register(token="t" * 64, name="a", slots=4, pid=1, boot="x"), world.now)
    ]
    assert kinds == [c.Registered, c.CheckJob]


def test_the_learners_host_says_how_many_threads(world: World) -> None:
    world.register()
    job = world.submit(2)
    world.hello(job)
    (ask,) = [e for e in world.take() if isinstance(e, Send) and isinstance(e.message, c.StartLearners)]
    world.effects += world.head.answered(b"a", ask.id, c.Ok(text="1 thread each (2 cores)"), world.now)
    assert "2 learners start on a: 1 thread each (2 cores)" in world.story(job)


def test_jobs_wait_for_slots_and_start_in_order(world: World) -> None:
    first = world.running(3)
    second, third = world.submit(2), world.submit(1)
    world.wait(0.25)
    assert world.job(second).reason == "needs 2 slots, 1 free"
    assert world.job(third).reason == f"behind job {second} in the queue"
    world.cli(c.StopJob(job=first, now=True))
    for rank in (0, 1, 2, EVALUATOR):
        world.exit(first, rank, "ok")
    world.node_exit(first)
    assert [n.job for n in world.nodes_started()] == [second, third]


# ------------------------------------------------------------------------------------------ end


def test_done_once_node_and_learners_are_gone(world: World) -> None:
    job = world.running(2)
    world.node_done(job)
    assert world.sent(c.StopLearners) == []  # they end by themselves
    assert world.job(job).reason == "trained; its learners end"
    world.node_exit(job)
    for rank in (0, 1):
        world.exit(job, rank, "ok")
        assert world.state_of(job) == "RUNNING"
    world.exit(job, EVALUATOR, "ok")
    row = world.job(job)
    assert row.state == "DONE" and row.ended == world.now and row.progress is not None
    assert row.progress.updates == 9
    assert "DONE: 0 samples in 9 updates" in world.story(job)


def test_a_script_that_raises_after_its_training_fails_the_job(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    world.node_done(job)
    world.node_exit(job)
    world.exit(job, 0, "error", text="OSError: no room")
    row = world.job(job)
    assert (row.state, row.reason) == ("FAILED", "learner 0 failed: OSError: no room")


def test_learners_that_do_not_end_after_the_training_are_stopped(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    world.node_done(job)
    world.node_exit(job)
    world.wait(599.0, step=1.0)
    assert world.sent(c.StopLearners) == []
    world.wait(2.0, step=1.0)
    assert [m.ranks for m in world.sent(c.StopLearners)] == [[]]
    world.wait(10.0, step=1.0)
    assert world.state_of(job) == "DONE"


def test_a_loss_after_the_training_is_not_made_good(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    world.node_done(job)
    world.node_exit(job)
    world.exit(job, 0, "signal", respawn=True)
    assert [m.ranks for m in world.sent(c.StopLearners)] == [[0]]
    assert world.state_of(job) == "DONE"


def test_who_comes_again_once_the_job_is_trained_is_sent_home(world: World) -> None:
    job = world.running(3, toml=SCRIPT)
    for rank in (1, 2):
        world.exit(job, rank, "signal", respawn=True)
    world.started(job, 1, incarnation=2)
    rows = [c.LearnerRow(rank=rank, incarnation=1, state="left") for rank in range(3)]
    progress = c.Progress(state="DONE", learners=rows)
    world.send(b"node", c.NodeDone(job=job, state="DONE", reason="", progress=progress))
    assert [m.ranks for m in world.sent(c.StopLearners)] == [[1], [2]]  # it runs, it waits to start
    world.started(job, 2, incarnation=2)  # it had begun to
    assert [2] in [m.ranks for m in world.sent(c.StopLearners)]


@pytest.mark.parametrize("kind", ["error", "spawn"])
def test_a_learner_that_raises_fails_the_job_within_ten_seconds(world: World, kind: str) -> None:
    job = world.running(2)
    world.exit(job, 1, kind, text="ValueError: boom", tail="Traceback...\nValueError: boom\n")
    to_node = [type(e.message) for e in world.effects if isinstance(e, Send) and e.peer == b"node" and not e.reply]
    assert to_node == [c.NodeStop, c.LearnerGone]  # in this order the node does not tell it too
    (stop,) = world.sent(c.NodeStop, b"node")
    assert (stop.now, stop.state, stop.reason) == (True, "FAILED", "learner 1 failed: ValueError: boom")
    assert [m.ranks for m in world.sent(c.StopLearners, b"a")] == [[]]
    assert world.job(job).state == "STOPPING"
    assert (world.state / "jobs" / job / "logs" / "learner-1.tail").read_text().endswith("boom\n")
    began = world.now
    world.node_done(job, "FAILED", "stopped")
    world.node_exit(job)
    for rank in (0, EVALUATOR):
        world.exit(job, rank, "ok")
    row = world.job(job)
    assert (row.state, row.reason) == ("FAILED", "learner 1 failed: ValueError: boom")
    assert world.now == began
    story = world.story(job)
    assert story.count("ValueError: boom") == 1 and "E learner 1 failed: ValueError: boom" in story
    assert "E FAILED: 0 samples in 9 updates and 0.0 s" in story.splitlines()[-1]


def test_a_failed_job_that_nobody_helps_to_end_is_over_within_ten_seconds(world: World) -> None:
    job = world.running(2)
    world.exit(job, 1, "error", text="ValueError: boom")
    world.wait(5.25)
    assert world.nodes_stopped() == [StopNode(job, 0.0)]
    world.wait(4.5)
    assert world.state_of(job) == "FAILED"


def test_the_first_failure_is_the_reason(world: World) -> None:
    job = world.running(2)
    world.exit(job, 1, "error", text="first")
    world.exit(job, 0, "error", text="second")
    world.exit(job, EVALUATOR, "ok")
    world.node_exit(job, 1)
    assert world.job(job).reason == "learner 1 failed: first"


def test_an_evaluator_that_raises_fails_the_job(world: World) -> None:
    job = world.running(1)
    world.exit(job, EVALUATOR, "error", text="KeyError: 'accuracy'")
    assert world.job(job).reason == "the evaluator failed: KeyError: 'accuracy'"
    (gone,) = world.sent(c.LearnerGone)
    assert gone.evaluator


def test_a_failure_of_the_node_itself(world: World) -> None:
    job = world.running(1)
    world.node_done(job, "FAILED", "too few learners: 0 of 1")
    assert len(world.sent(c.StopLearners)) == 1
    for rank in (0, EVALUATOR):
        world.exit(job, rank, "ok")
    world.node_exit(job)
    row = world.job(job)
    assert (row.state, row.reason) == ("FAILED", "too few learners: 0 of 1")


def test_a_host_that_cannot_start_learners_fails_the_job_at_once(world: World) -> None:
    world.register()
    job = world.submit(2)
    world.hello(job)
    (ask,) = [e for e in world.take() if isinstance(e, Send) and isinstance(e.message, c.StartLearners)]
    error = c.Error(code="config", message="there is no interpreter /no/python")
    world.effects += world.head.answered(b"a", ask.id, error, world.now)
    world.node_done(job, "FAILED", "told to")
    world.node_exit(job)
    row = world.job(job)
    assert (row.state, row.reason) == ("FAILED", "a cannot start learners: there is no interpreter /no/python")


# ------------------------------------------------------------------------------------------ losses


def test_a_killed_learner_is_a_loss_and_comes_back(world: World) -> None:
    job = world.running(2)
    world.report(job, learners=[c.LearnerRow(rank=1, incarnation=1, state="present")])
    world.exit(job, 1, "signal", respawn=True, text="killed by SIGKILL")
    (gone,) = world.sent(c.LearnerGone, b"node")
    assert (gone.rank, gone.incarnation, gone.kind, gone.respawn) == (1, 1, "lost", True)
    assert "was lost" not in world.story(job)  # the node tells it, with what follows
    world.started(job, 1, 2)
    assert "learner 1 runs again as incarnation 2" in world.story(job)
    assert world.state_of(job) == "RUNNING"


def test_a_learner_lost_for_good_is_the_nodes_to_judge(world: World) -> None:
    job = world.running(2)
    world.exit(job, 1, "signal", 4, respawn=False)
    (gone,) = world.sent(c.LearnerGone)
    assert (gone.incarnation, gone.kind, gone.respawn) == (4, "lost", False)
    assert world.state_of(job) == "RUNNING"


def test_a_loss_that_no_node_can_tell_is_told(world: World) -> None:
    job = world.running(2)
    world.exit(job, EVALUATOR, "signal", respawn=True, text="killed by SIGKILL")
    assert "W the evaluator was lost: killed by SIGKILL; it is started again" in world.story(job)
    world.exit(job, 1, "signal", 4, respawn=False, text="killed by SIGKILL")
    assert "W learner 1 was lost: killed by SIGKILL; its 3 restarts are used up" in world.story(job)


def test_a_report_that_comes_twice_or_late_counts_once(world: World) -> None:
    job = world.running(2)
    for _ in range(2):
        world.exit(job, 1, "signal", 1, respawn=True)
    assert len(world.sent(c.LearnerGone)) == 1
    world.started(job, 1, 2)
    world.exit(job, 1, "error", 1, text="old news")
    assert world.sent(c.LearnerGone) == []
    assert world.state_of(job) == "RUNNING"


def test_a_fenced_learner_is_killed_and_the_node_hears_of_it(world: World) -> None:
    job = world.running(2)
    world.send(b"node", c.NodeFence(job=job, rank=1, incarnation=1, reason="no step for 600 s"))
    (kill,) = world.sent(c.KillLearner, b"a")
    assert (kill.rank, kill.incarnation) == (1, 1)
    world.exit(job, 1, "signal", respawn=True)
    (gone,) = world.sent(c.LearnerGone)
    assert gone.kind == "fenced"
    assert world.story(job).count("no step for 600 s") == 1


@pytest.mark.parametrize("incarnation", [1, 3])
def test_fencing_what_is_dead_already_is_answered_at_once(world: World, incarnation: int) -> None:
    job = world.running(2)
    world.exit(job, 1, "signal", 1, respawn=True)
    world.started(job, 1, 2)
    world.take()
    world.send(b"node", c.NodeFence(job=job, rank=1, incarnation=incarnation, reason="replaced"))
    assert world.sent(c.KillLearner) == []
    (gone,) = world.sent(c.LearnerGone)
    assert (gone.kind, gone.incarnation) == ("fenced", incarnation)


def test_a_drained_learner_leaves_and_comes_back_with_its_daemon(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    world.exit(job, 0, "ok", respawn=True)
    (gone,) = world.sent(c.LearnerGone)
    assert gone.kind == "bye"
    assert world.sent(c.StartLearners) == []
    world.dead.add(500)
    world.register(pid=501)
    (start,) = world.sent(c.StartLearners)
    assert start.ranks == [0] and start.incarnation > 1


def test_a_script_that_ends_early_is_not_started_again(world: World) -> None:
    job = world.running(2, toml=SCRIPT)
    world.exit(job, 0, "ok")
    world.dead.add(500)
    world.register(pid=501)
    (start,) = world.sent(c.StartLearners)
    assert start.ranks == [1]


# ------------------------------------------------------------------------------------------ node deaths


def test_a_dead_node_is_started_again_and_learners_are_told(world: World) -> None:
    job = world.running(2)
    world.node_exit(job, -9)
    row = world.job(job)
    assert (row.state, row.reason) == ("WAITING", "its node is started again")
    world.wait(0.25)
    (node,) = world.nodes_started()
    assert (node.spec["generation"], node.spec["resume"]) == (2, True)
    assert node.spec["previous"] == ["ipc:///n1"]
    world.hello(job, 2, b"node2")
    (moved,) = world.sent(c.NodeMoved, b"a")
    assert (moved.generation, moved.addresses) == (2, ["ipc:///n2"])
    assert world.sent(c.StartLearners) == []
    assert world.send(b"node", c.NodeEvent(job=job, level="I", text="a ghost")).code == "security"  # type: ignore[union-attr]
    world.report(job, peer=b"node2")
    assert world.state_of(job) == "RUNNING"


def test_learners_that_had_finished_come_back_to_a_restored_node(world: World) -> None:
    """It died between its last update and its last snapshot: their good-byes are as void as the update."""
    job = world.running(2, toml=SCRIPT)
    world.exit(job, 0, "ok")
    world.node_exit(job, -9)
    world.exit(job, 1, "ok")
    world.wait(0.25)
    world.hello(job, 2, b"node2")
    (start,) = world.sent(c.StartLearners)
    assert start.ranks == [0, 1] and start.incarnation > 1
    for rank in start.ranks:
        world.started(job, rank, start.incarnation)
    world.report(job, peer=b"node2")
    assert world.state_of(job) == "RUNNING"
    world.node_done(job, peer=b"node2")
    for rank in start.ranks:
        world.exit(job, rank, "ok", start.incarnation)
    world.node_exit(job)
    assert world.state_of(job) == "DONE"
    assert world.sent(c.StartLearners) == []


def test_a_node_that_dies_again_and_again_fails_the_job(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    for death in range(1, 6):
        world.node_exit(job, 1, "OSError: port taken")
        assert world.nodes_started() == []
        world.wait(5.25)
        assert len(world.nodes_started()) == 1, death
    world.node_exit(job, 1, "OSError: port taken")
    assert len(world.sent(c.StopLearners)) == 1
    world.exit(job, 0, "ok")
    row = world.job(job)
    assert row.state == "FAILED"
    assert row.reason == "its node ended 6 times in 10 minutes, last with status 1: OSError: port taken"
    assert world.nodes_started() == []


def test_deaths_far_apart_are_forgiven(world: World) -> None:
    job = world.running(1)
    for _ in range(12):
        world.node_exit(job, -9)
        world.wait(150.0, step=3.0)
        assert len(world.nodes_started()) == 1


def test_a_node_that_never_serves_is_killed(world: World) -> None:
    world.register()
    job = world.submit(1)
    world.wait(60.5)
    assert world.nodes_stopped() == [StopNode(job, 0.0)]


# ------------------------------------------------------------------------------------------ stop


def test_stop_drains_and_ends_as_stopped(world: World) -> None:
    job = world.running(2)
    assert isinstance(world.cli(c.StopJob(job=job)), c.Ok)
    (stop,) = world.sent(c.NodeStop)
    assert (stop.now, stop.state) == (False, "STOPPED")
    assert world.sent(c.StopLearners) == []
    assert world.state_of(job) == "STOPPING"
    world.report(job, "RUNNING")
    assert world.state_of(job) == "STOPPING"
    again = world.cli(c.StopJob(job=job))
    assert isinstance(again, c.Ok) and "already" in again.text
    world.node_done(job, "STOPPED", "drained")
    world.node_exit(job)
    for rank in (0, 1, EVALUATOR):
        world.exit(job, rank, "ok")
    row = world.job(job)
    assert (row.state, row.reason) == ("STOPPED", "stopped on request")
    reply = world.cli(c.StopJob(job=job))
    assert isinstance(reply, c.Error) and reply.code == "not-running"


def test_a_job_that_finishes_while_it_drains_is_done(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    world.cli(c.StopJob(job=job))
    world.node_done(job, "DONE")
    world.node_exit(job)
    world.exit(job, 0, "ok")
    assert world.state_of(job) == "DONE"


def test_a_drain_that_takes_too_long_is_cut(world: World) -> None:
    job = world.running(1)
    world.cli(c.StopJob(job=job))
    world.wait(29.5)
    assert world.nodes_stopped() == []
    world.wait(0.75)
    assert world.nodes_stopped() == [StopNode(job, 0.0)]
    assert len(world.sent(c.StopLearners)) == 1
    world.node_exit(job, -9)
    for rank in (0, EVALUATOR):
        world.exit(job, rank, "ok")
    assert world.state_of(job) == "STOPPED"


def test_stop_now_and_the_second_stop(world: World) -> None:
    job = world.running(1)
    world.cli(c.StopJob(job=job))
    world.take()
    world.cli(c.StopJob(job=job, now=True))
    (stop,) = world.sent(c.NodeStop)
    assert stop.now
    assert [m.grace for m in world.sent(c.StopLearners)] == [2.0]
    world.wait(2.25)
    assert world.nodes_stopped() == [StopNode(job, 0.0)]
    world.wait(4.25)
    assert world.state_of(job) == "STOPPED"


def test_stop_of_what_waits_and_of_what_starts(world: World) -> None:
    waits = world.submit(1)
    world.cli(c.StopJob(job=waits))
    assert world.state_of(waits) == "STOPPED"
    world.register()
    starts = world.submit(1)
    world.take()
    world.cli(c.StopJob(job=starts))
    assert world.nodes_stopped() == [StopNode(starts, 1.0)]
    world.node_exit(starts, -15)
    assert world.state_of(starts) == "STOPPED"
    assert world.sent(c.StartLearners) == []


def test_a_node_that_serves_too_late_is_told_to_end(world: World) -> None:
    world.register()
    job = world.submit(1)
    world.cli(c.StopJob(job=job))
    world.hello(job)
    assert [m.now for m in world.sent(c.NodeStop)] == [True]
    assert world.sent(c.StartLearners) == []


def test_stop_between_two_nodes(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    world.node_exit(job, -9)
    world.cli(c.StopJob(job=job))
    world.exit(job, 0, "ok")
    assert world.state_of(job) == "STOPPED"
    world.wait(10.0)
    assert world.nodes_started() == []


def test_resume_goes_on_with_a_new_generation_and_new_incarnations(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    assert isinstance(world.cli(c.ResumeJob(job=job)), c.Ok)  # it runs already
    world.cli(c.StopJob(job=job))
    world.node_done(job, "STOPPED")
    world.node_exit(job)
    world.exit(job, 0, "ok")
    world.take()
    world.now += 60
    world.register()
    assert isinstance(world.cli(c.ResumeJob(job=job)), c.Ok)
    (node,) = world.nodes_started()
    assert (node.spec["generation"], node.spec["resume"]) == (2, True)
    world.hello(job, 2, b"node2")
    (start,) = world.sent(c.StartLearners)
    assert start.incarnation == 5
    row = world.job(job)
    assert row.ended == 0.0 and row.started == row.created


def test_what_is_done_cannot_be_resumed(world: World) -> None:
    job = world.running(1, toml=SCRIPT)
    world.node_done(job)
    world.node_exit(job)
    world.exit(job, 0, "ok")
    reply = world.cli(c.ResumeJob(job=job))
    assert isinstance(reply, c.Error) and reply.code == "not-running" and "again" in reply.fix


# ------------------------------------------------------------------------------------------ hosts


def test_a_dead_learnerd_takes_its_learners_along_and_starts_them_again(world: World) -> None:
    job = world.running(2)
    world.dead.add(500)
    world.wait(3.5, alive=())
    assert {(g.rank, g.kind, g.evaluator) for g in world.sent(c.LearnerGone)} == {
        (0, "lost", False), (1, "lost", False), (EVALUATOR, "lost", True),
    }  # fmt: skip
    assert "learnerd on a is gone (PID 500)" in world.story(job)
    world.register(pid=501)
    (start,) = world.sent(c.StartLearners)
    assert (start.ranks, start.evaluator, start.incarnation) == ([0, 1], True, 5)


def test_a_silent_learnerd_costs_no_learner(world: World) -> None:
    job = world.running(2)
    world.wait(60.0, alive=())
    assert world.sent(c.LearnerGone) == []
    assert "learnerd on a is silent for 3 s" in world.story(job)
    assert world.send(b"a", c.HostPing()).code == "not-found"  # type: ignore[union-attr]
    world.register(running=[(job, 0, 1, 700), (job, 1, 1, 701), (job, EVALUATOR, 1, 702)])
    assert world.sent(c.StartLearners) == []
    assert len(world.sent(c.NodeMoved)) == 1


def test_a_learnerd_that_reconnects_with_some_missing(world: World) -> None:
    job = world.running(2)
    world.register(running=[(job, 1, 1, 701), (job, EVALUATOR, 2, 0)])
    assert [(g.rank, g.kind) for g in world.sent(c.LearnerGone)] == [(0, "lost")]
    (start,) = world.sent(c.StartLearners)
    assert (start.ranks, start.evaluator) == ([0], False)


def test_learners_that_nobody_wants_are_ended(world: World) -> None:
    job = world.running(1)
    world.register(running=[("ffffff", 0, 1, 9), (job, 7, 1, 9), (job, 0, 1, 700), (job, EVALUATOR, 1, 9)])
    assert [(m.job, m.ranks) for m in world.sent(c.StopLearners)] == [("ffffff", [0]), (job, [7])]
    world.started("ffffff", 3)
    assert [(m.job, m.ranks) for m in world.sent(c.StopLearners)] == [("ffffff", [3])]


def test_one_name_is_one_living_learnerd(world: World) -> None:
    world.register(pid=500)
    reply = world.send(b"a2", c.Register(token="t" * 64, name="a", slots=9, pid=501, boot="boot-1"))
    assert isinstance(reply, c.Error) and "PID 500" in reply.message
    world.dead.add(500)
    reply = world.send(b"a2", c.Register(token="t" * 64, name="a", slots=9, pid=501, boot="boot-1"))
    assert isinstance(reply, c.Registered)


def test_ranks_of_a_host_that_stays_away_move(world: World) -> None:
    job = world.running(2)
    world.register("b", slots=2, pid=800)
    world.take()
    world.dead.add(500)
    world.wait(9.0, alive=(b"b",))
    assert world.sent(c.StartLearners) == []
    world.wait(5.0, alive=(b"b",))
    (start,) = world.sent(c.StartLearners, b"b")
    assert (start.ranks, start.evaluator, start.incarnation) == ([0, 1], True, 5)
    assert "learner 0 moves from a to b" in world.story(job)
    world.register("a", pid=501, running=[])
    assert world.sent(c.StartLearners) == []


# ------------------------------------------------------------------------------------------ a node that hangs


def test_a_node_that_says_nothing_is_told_of_and_killed(world: World) -> None:
    """A process that is stopped or in a deadlock does not end by itself, and its job would never."""
    job = world.running(2)
    world.wait(9.0)
    assert "silent" not in world.story(job)
    world.wait(2.0)
    assert "W node is silent for 10 s; at 60 s it is killed" in world.story(job)
    world.take()
    world.wait(48.0)
    assert not [e for e in world.take() if isinstance(e, StopNode)]
    world.wait(2.0)
    assert [e for e in world.take() if isinstance(e, StopNode)] == [StopNode(job, 0.0)]
    world.node_exit(job, -9)
    world.wait(1.0)
    (start,) = world.nodes_started()
    assert start.spec["generation"] == 2
    world.hello(job, 2, b"node2")
    world.wait(9.0)
    assert world.story(job).count("is silent") == 2  # said, killed; its successor has a time of its own


def test_a_node_that_is_heard_again_goes_on(world: World) -> None:
    job = world.running(2)
    world.wait(40.0)
    world.report(job)
    assert "I node is heard again" in world.story(job)
    world.take()
    world.wait(50.0)
    assert not [e for e in world.take() if isinstance(e, StopNode)]


def test_a_head_that_slept_blames_no_node(world: World) -> None:
    job = world.running(2)
    world.wait(1.0)
    world.now += 300.0
    world.wait(5.0)
    assert "node is silent" not in world.story(job)


# ------------------------------------------------------------------------------------------ psd's own restarts


def test_nothing_stays_running_that_nobody_runs(world: World) -> None:
    job = world.running(2)
    waiting = world.submit(4)
    world.restart_head()
    (node,) = world.nodes_started()
    assert (node.job, node.spec["generation"], node.spec["resume"]) == (job, 2, True)
    world.hello(job, 2, b"node2")
    assert world.sent(c.StartLearners) == []  # nobody is registered yet
    world.register(running=[(job, 0, 1, 700), (job, EVALUATOR, 1, 702)])
    assert [m.addresses for m in world.sent(c.NodeMoved)] == [["ipc:///n2"]]
    (start,) = world.sent(c.StartLearners)
    assert (start.ranks, start.evaluator, start.incarnation) == ([1], False, 5)
    assert world.state_of(waiting) == "PENDING"
    assert "psd was started again" in world.story(job)


def test_a_job_that_was_stopping_is_stopped(world: World) -> None:
    job = world.running(1)
    world.cli(c.StopJob(job=job))
    world.restart_head()
    assert world.nodes_started() == []
    assert world.state_of(job) == "STOPPED"


def test_a_job_that_cannot_be_taken_up_is_lost(world: World) -> None:
    job = world.running(1)
    folder = world.state / "jobs" / job
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder.rmdir()
    folder.write_text("in the way")
    world.restart_head()
    row = world.job(job)
    assert row.state == "LOST" and "cannot be taken up" in row.reason
    assert world.nodes_started() == []


@pytest.mark.parametrize(("suspend_as", "after"), [("PENDING", "PENDING"), ("STOPPED", "STOPPED")])
def test_psd_ends_cleanly_and_takes_its_jobs_up_again(tmp_path: Path, suspend_as: c.JobState, after: str) -> None:
    world = World(tmp_path, suspend_as=suspend_as)
    job = world.running(1, toml=SCRIPT)
    waiting = world.submit(4)
    world.effects += world.head.suspend(world.now)
    assert world.head.busy
    assert [m.now for m in world.sent(c.NodeStop)] == [False]
    world.node_done(job, "STOPPED")
    world.exit(job, 0, "ok")
    world.node_exit(job)
    assert not world.head.busy
    assert world.nodes_started() == []
    assert world.registry.stored(job).state == after
    assert world.registry.stored(waiting).state == after
    world.restart_head()
    world.register()
    started = [(n.job, n.spec["generation"], n.spec["resume"]) for n in world.nodes_started()]
    assert started == ([(job, 2, True)] if after == "PENDING" else [])
    world.close()


def test_a_lost_connection_of_the_node_is_not_its_death(world: World) -> None:
    job = world.running(1)
    world.effects += world.head.gone(b"node", world.now)
    assert world.nodes_started() == [] and world.state_of(job) == "RUNNING"
    world.hello(job, 1, b"node-again")
    world.report(job, peer=b"node-again")
    assert world.state_of(job) == "RUNNING"


def test_an_end_that_the_disk_has_no_room_for_is_seen_and_written_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = world.running(1)

    def full(*_: object, **__: object) -> None:
        raise RudraError("the registry cannot be written: database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(world.registry, "update", full)
        patch.setattr(world.registry, "add_event", full)
        world.node_done(job, "DONE")
        world.node_exit(job)
        for rank in (0, EVALUATOR):
            world.exit(job, rank, "ok")
        row = world.job(job)
        assert (row.state, row.ended) == ("DONE", world.now)  # so that a follower comes to an end
        world.wait(5.0)
        assert world.job(job).state == "DONE"
        assert world.registry.get(job).row.state != "DONE"
    world.wait(3.0)
    assert world.registry.get(job).row.state == "DONE"
    assert isinstance(world.cli(c.RemoveJob(job=job)), c.Ok)
