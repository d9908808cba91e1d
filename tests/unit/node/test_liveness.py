"""Silence, kills that are confirmed or not, incarnations that come back: on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.unit.node.stage import ATTACH, Peer, Stage

StageOf = Callable[..., Stage]


def _gone(stage: Stage, rank: int, kind: str = "lost", incarnation: int = 1) -> None:
    answer = stage.lead.command(c.LearnerGone(rank=rank, incarnation=incarnation, kind=kind, respawn=True))  # type: ignore[arg-type]
    assert isinstance(answer, c.Ok)


def test_silence_is_said_then_fenced_then_given_up(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    alive, silent = stage.crew(2)
    stage.pass_time(3.0, alive=[alive])
    assert not stage.events("silent")
    stage.pass_time(1.0, alive=[alive])
    assert stage.events("rank 1 is silent")
    assert [row.state for row in stage.lead.report.learners()] == ["present", "torpid"]
    stage.pass_time(5.5, alive=[alive])
    assert not stage.all(c.NodeFence)
    stage.pass_time(1.0, alive=[alive])
    fence = stage.all(c.NodeFence)
    assert [(f.rank, f.incarnation) for f in fence] == [(1, 1)]
    stage.pass_time(9.0, alive=[alive])
    assert not stage.events("nobody confirms")
    stage.pass_time(2.0, alive=[alive])
    assert stage.events("rank 1 (incarnation 1): nobody confirms its death")
    assert len(stage.all(c.NodeFence)) == 1
    silent.push()  # it wakes up: nothing that its socket sends is heard
    assert stage.drops()["unknown-peer"] == 2
    silent.hello()
    refused = silent.take(d.Refused)
    assert refused.code == "not-running"


def test_a_confirmed_death_comes_first(stage_of: StageOf) -> None:
    stage = stage_of(protocol="softsync", sync="n = 2")
    alive, _ = stage.crew(2)
    _gone(stage, 1)
    assert stage.lead.work.sync is not None
    assert [state for _, _, state, _ in stage.lead.work.sync.members()] == ["present", "lost"]
    stage.pass_time(60.5, alive=[alive])
    assert stage.events("lambda 1, n 1, c 1") and stage.events("clamped")


def test_one_that_only_slept_goes_on(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    alive, sleeper = stage.crew(2)
    stage.pass_time(12.0, alive=[alive])
    assert len(stage.all(c.NodeFence)) == 1
    stage.pass_time(30.0, alive=[alive, sleeper])
    assert not stage.events("nobody confirms")
    assert stage.lead.work.sessions.at(1) is not None
    sleeper.push()
    assert sleeper.hear().verdict == "accepted"


def test_the_pulse_is_a_sign_of_life(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    alive, computing = stage.crew(2)
    computing.hello(pulse=True)  # its pulse joins later
    computing.say(ATTACH)
    for _ in range(60):
        stage.say(computing.pulse, d.Ping())
        stage.pass_time(0.5, alive=[alive])
    assert not stage.events("silent")
    assert sum(isinstance(m, d.Pong) for m in stage.boxes[computing.pulse]) == 60


def test_a_step_that_takes_too_long_is_fenced_though_it_is_heard(stage_of: StageOf) -> None:
    stage = stage_of(learners='step_timeout = "5s"')
    crew = stage.crew(2)
    for peer in crew:
        peer.push()  # the first step is exempt
    crew[0].push()
    stage.pass_time(6.0, alive=crew)
    assert [(f.rank, f.reason) for f in stage.all(c.NodeFence)] == [(1, "no gradient within step_timeout = 5 s")]
    stage.pass_time(4.0, alive=crew)
    _gone(stage, 1, "fenced")
    newer = Peer(stage, 1, incarnation=2)
    newer.hello()
    newer.say(ATTACH)
    newer.ready()
    newer.say(d.Data(samples=32, minibatch=0))
    assert newer.hear().leases[0] == [(0, 12, 16)]  # the lease that its predecessor had
    newer.push()
    assert crew[0].hear().timestamp == 2


def test_a_new_incarnation_takes_the_place_at_once(stage_of: StageOf) -> None:
    """A learner that crashed and is back within 100 ms: the new one is heard, the old one is not."""
    stage = stage_of(protocol="async", sync="n = 2")
    _, old = stage.crew(2)
    newer = Peer(stage, 1, incarnation=2)
    newer.hello()
    newer.say(ATTACH)
    newer.ready()
    newer.say(d.Data(samples=32, minibatch=0))
    newer.push(2.0)
    assert newer.hear().verdict == "accepted"
    before = stage.drops()
    old.push(5.0)
    assert stage.drops()["unknown-peer"] == before.get("unknown-peer", 0) + 2
    assert stage.lead.work.sync is not None and stage.lead.work.sync.counters.accepted == 1


def test_hardsync_goes_on_without_the_lost_after_its_deadline(stage_of: StageOf) -> None:
    stage = stage_of(learners='deadline = "20s"')
    crew = stage.crew(2)
    crew[0].push()
    _gone(stage, 1)
    stage.pass_time(19.0, alive=[crew[0]])
    assert crew[0].none(d.Grant)
    stage.pass_time(2.0, alive=[crew[0]])
    grant = crew[0].hear()
    assert (grant.ack, grant.timestamp, grant.lam) == (1, 1, 1)


@pytest.mark.parametrize(("on_lost", "state"), [("wait", "WAITING"), ("fail", "RUNNING")])
def test_what_is_done_about_a_loss(stage_of: StageOf, on_lost: str, state: str) -> None:
    stage = stage_of(learners=f'deadline = "20s"\non_lost = "{on_lost}"')
    crew = stage.crew(2)
    crew[0].push()
    _gone(stage, 1)
    stage.pass_time(21.0, alive=[crew[0]])
    if on_lost == "fail":
        assert stage.events("learner 1 was lost")
        stage.settle()
        stage.pass_time(6.0, alive=[crew[0]])
        done = stage.all(c.NodeDone)
        assert [m.state for m in done] == ["FAILED"] and "learner 1 was lost" in done[0].reason
        return
    assert stage.state() == state and "rank 1 missing" in stage.lead.report.state[1]
    assert stage.all(c.NodeReport)[-1].progress.state == "WAITING"
    seconds = stage.lead.report.progress().seconds
    stage.pass_time(100.0, alive=[crew[0]])
    assert stage.lead.report.progress().seconds == seconds  # pauses are left out
    newer = Peer(stage, 1, incarnation=2)
    newer.hello()
    newer.say(ATTACH)
    newer.ready()
    newer.say(d.Data(samples=32, minibatch=0))
    newer.push()
    assert stage.state() == "RUNNING"


def test_good_bye_is_no_loss(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    alive, leaver = stage.crew(2)
    leaver.say(d.Bye(reason="drain"))
    assert stage.events("lambda 1")
    assert [row.state for row in stage.lead.report.learners()] == ["present", "left"]
    _gone(stage, 1, "bye")
    assert len(stage.events("lambda 1")) == 1
    alive.push()
    assert alive.hear().verdict == "accepted"


def test_a_socket_that_is_gone_is_no_death(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    _, peer = stage.crew(2)
    held = peer.hear().leases
    stage.lead.gone(peer.peer)
    again = Peer(stage, 1, name="other-socket")
    again.hello()
    again.say(ATTACH)
    again.ready()
    again.say(d.Data(samples=32, minibatch=0))
    assert again.hear().leases == held
    assert stage.lead.work.sync is not None and stage.lead.work.sync.lam == 2


def test_a_kill_and_a_failure_are_told_by_the_head_alone(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    alive, _ = stage.crew(2)
    stage.pass_time(11.0, alive=[alive])
    assert stage.all(c.NodeFence) and stage.events("kill") == []
    _gone(stage, 1, "fenced")
    assert stage.events("learner 1") == stage.events("rank 1 (") == []
    alive.say(d.Bye(reason="failed", text="ValueError: boom"))
    assert stage.events("boom") == []


def test_a_script_that_fails_and_ends_well_is_told(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    _, failing = stage.crew(2)
    failing.say(d.Bye(reason="failed", text="ValueError: boom"))
    stage.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="bye", respawn=False))
    assert stage.events("boom") == ["learner 1 failed, and its process ended well: ValueError: boom"]
