"""Silence, kills that are confirmed or not, incarnations that come back: on a clock that the test moves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from rudra_zmq.node import life
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


class _Host:
    """The processes of the node's host, as a test wants them to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stats: dict[int, life.Stat | None] = {}
        monkeypatch.setattr(life.Process.__init__, "__defaults__", (self.read,))

    def read(self, pid: int) -> life.Stat | None:
        return self.stats.get(pid)

    def work(self, pid: int) -> None:
        stat = self.stats[pid]
        assert stat is not None
        self.stats[pid] = stat._replace(cpu=stat.cpu + 40)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> _Host:
    return _Host(monkeypatch)


def _silent_one(stage_of: StageOf, host: _Host, here: str = "h") -> tuple[Stage, Peer]:
    """A stage whose host is the learners', and rank 0; rank 1 (PID 101) is heard no more."""
    host.stats = {1: life.Stat("S", 50, 0), 101: life.Stat("R", 50, 1000)}
    stage = stage_of(protocol="async", sync="n = 2", host=here)
    alive, _ = stage.crew(2)
    stage.pass_time(0.5, alive=[alive])
    return stage, alive


def _pass(stage: Stage, host: _Host, alive: Peer, seconds: float) -> None:
    for _ in range(int(seconds)):
        host.work(101)
        stage.pass_time(1.0, alive=[alive])


def test_who_is_silent_and_computes_is_left_to_step_timeout(stage_of: StageOf, host: _Host) -> None:
    stage, alive = _silent_one(stage_of, host)
    _pass(stage, host, alive, 60)
    assert not stage.all(c.NodeFence)
    assert len(stage.events("rank 1 is silent for 10 s, but its process (PID 101) computes: step_timeout = 10m")) == 1
    assert stage.lead.report.learners()[1].state == "torpid"
    other = stage.lead.work.sessions.at(1)
    assert other is not None and other.peer is not None
    stage.say(other.peer, d.Ping())
    host.work(101)
    stage.pass_time(1.0, alive=[alive])
    assert stage.events("rank 1 is heard again")
    stage.pass_time(11.0, alive=[alive])  # and the next silence is one without work
    assert len(stage.all(c.NodeFence)) == 1


def test_who_computes_for_longer_than_step_timeout_is_fenced_all_the_same(stage_of: StageOf, host: _Host) -> None:
    host.stats = {1: life.Stat("S", 50, 0), 101: life.Stat("R", 50, 1000)}
    stage = stage_of(protocol="async", sync="n = 2", host="h", learners='step_timeout = "40s"')
    alive, other = stage.crew(2)
    other.push()
    _pass(stage, host, alive, 42)
    (fence,) = stage.all(c.NodeFence)
    assert (fence.rank, fence.reason) == (1, "no gradient within step_timeout = 40 s")


@pytest.mark.parametrize(
    ("stat", "works"),
    [
        (None, False),
        (life.Stat("T", 50, 10**6), True),
        (life.Stat("t", 50, 10**6), True),
        (life.Stat("Z", 50, 10**6), True),
        (life.Stat("R", 51, 10**6), True),  # the number is another process's by now
        (life.Stat("S", 50, 10**6), False),  # it does nothing
    ],
)
def test_who_is_stopped_gone_or_idle_is_as_silent_as_it_seems(
    stage_of: StageOf, host: _Host, stat: life.Stat | None, works: bool
) -> None:
    stage, alive = _silent_one(stage_of, host)
    host.stats[101] = stat
    for second in range(1, 11):
        if works:
            host.work(101)
        stage.pass_time(1.0, alive=[alive])
        assert len(stage.all(c.NodeFence)) == (second == 10)


def test_a_process_that_is_stopped_in_its_work_is_fenced_at_once(stage_of: StageOf, host: _Host) -> None:
    stage, alive = _silent_one(stage_of, host)
    _pass(stage, host, alive, 20)
    host.stats[101] = life.Stat("T", 50, 10**6)
    stage.pass_time(0.5, alive=[alive])
    assert len(stage.all(c.NodeFence)) == 1


@pytest.mark.parametrize("here", ["", "elsewhere"])
def test_of_another_host_only_silence_is_known(stage_of: StageOf, host: _Host, here: str) -> None:
    stage, alive = _silent_one(stage_of, host, here)
    _pass(stage, host, alive, 11)
    assert len(stage.all(c.NodeFence)) == 1


@pytest.mark.parametrize("unknown", [False, True])
def test_a_number_of_another_namespace_is_another_process(
    stage_of: StageOf, host: _Host, monkeypatch: pytest.MonkeyPatch, unknown: bool
) -> None:
    """Containers that share a host's name: what has that number here may be busy for ever."""
    stage, alive = _silent_one(stage_of, host)
    assert life.space() > 0
    if unknown:
        monkeypatch.setattr(os, "readlink", lambda _: "1")  # the /proc of another namespace
    newer = Peer(stage, 1, incarnation=2)
    host.stats[102] = life.Stat("R", 50, 1000)
    newer.hello(space=life.space() if unknown else 1)
    for _ in range(11):
        host.work(102)
        stage.pass_time(1.0, alive=[alive])
    assert [(fence.rank, fence.incarnation) for fence in stage.all(c.NodeFence)] == [(1, 2)]


def test_what_this_host_tells_of_a_process() -> None:
    """A thread of its own that computes counts; a stopped one is told as such."""
    child = subprocess.Popen([sys.executable, "-c", "import sys\nprint(1, flush=True)\nwhile True: pass"], stdout=-1)
    try:
        assert child.stdout is not None and child.stdout.readline()
        first = life.read(child.pid)
        assert first is not None
        while (later := life.read(child.pid)) == first or later is None or later.cpu <= first.cpu:
            pass
        assert later.started == first.started
        child.send_signal(signal.SIGSTOP)
        while (stat := life.read(child.pid)) is not None and stat.state not in life.STOPPED:
            pass
        assert stat is not None
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert life.read(child.pid) is None


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


def test_a_node_that_hung_itself_judges_nobody(stage_of: StageOf) -> None:
    """What they said meanwhile may lie behind other messages: the tick can come before it is read."""
    stage = stage_of(protocol="async", sync="n = 2")
    alive, _ = stage.crew(2)
    stage.pass_time(5.0, alive=[alive])
    stage.pass_time(40.0, step=40.0)
    assert not stage.all(c.NodeFence)
    stage.pass_time(4.0, alive=[alive])
    assert not stage.all(c.NodeFence)
    stage.pass_time(2.0, alive=[alive])  # 10 s of the node's own time in all
    assert [fence.rank for fence in stage.all(c.NodeFence)] == [1]


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


def test_what_a_shut_out_host_starts_by_itself_is_not_let_in(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    stage.crew(2)
    second = Peer(stage, 1, incarnation=2)
    second.hello()  # its host was faster than the word of its end
    gone = c.LearnerGone(rank=1, incarnation=1, kind="lost", respawn=True, lowest=5)
    assert isinstance(stage.lead.command(gone), c.Ok)
    assert [row.state for row in stage.lead.report.learners()] == ["present", "lost"]
    third = Peer(stage, 1, incarnation=3)
    for peer in (second, third):
        peer.hello()
        assert peer.take(d.Refused).code == "not-running"
    ours = Peer(stage, 1, incarnation=5)
    ours.hello()
    ours.say(ATTACH)
    ours.ready()
