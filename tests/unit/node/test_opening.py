"""From the first Hello to the first lease: signatures, version 0, rules, data, who is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rudra_zmq.node import export
from rudra_zmq.node.work import Diverged
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.unit.node.stage import ATTACH, Peer, Stage

StageOf = Callable[..., Stage]


def _attached(stage: Stage, rank: int, incarnation: int = 1) -> Peer:
    peer = Peer(stage, rank, incarnation)
    peer.hello()
    peer.say(ATTACH)
    return peer


# ---------------------------------------------------------------------------------------------- hello


def test_welcome_says_what_a_session_needs(stage_of: StageOf) -> None:
    stage = stage_of()
    peer = Peer(stage, 1)
    peer.hello()
    welcome = peer.take(d.Welcome)
    assert (welcome.generation, welcome.lam) == (1, 2)
    assert welcome.job == stage.spec.toml and not welcome.chief
    first = Peer(stage, 0)
    first.hello()
    assert first.take(d.Welcome).chief


def test_who_is_turned_away_hears_why_and_is_counted(stage_of: StageOf) -> None:
    stage = stage_of()
    for n, (other, code, reason) in enumerate(
        [({"token": "x"}, "security", "bad-token"), ({"job": "ffffff"}, "rejected", "wrong-job")]
    ):
        peer = Peer(stage, n, name=f"stranger-{n}")
        peer.hello(**other)
        assert peer.take(d.Refused).code == code
        assert stage.drops()[reason] == 1
        peer.say(ATTACH)
        peer.say(d.Ping())
    assert stage.drops()["unknown-peer"] == 4
    assert len(stage.lead.work.post) == 0 and stage.lead.work.model is None


# ------------------------------------------------------------------------------------------ version 0


def test_the_lowest_rank_uploads_once_all_are_here(stage_of: StageOf) -> None:
    stage = stage_of(count=3)
    two, one = _attached(stage, 2), _attached(stage, 1)
    assert two.none(d.SendInit) and one.none(d.SendInit)
    zero = _attached(stage, 0)
    assert two.none(d.SendInit) and one.none(d.SendInit)
    zero.upload(7.0)
    for peer in (zero, one, two):
        ready = peer.ready()
        assert (ready.generation, ready.timestamp, ready.nbytes) == (1, 0, 16)
        np.testing.assert_array_equal(peer.vector(), 7.0)
    assert stage.events("version 0 from rank 0")


def test_the_next_rank_uploads_if_the_first_dies(stage_of: StageOf) -> None:
    stage = stage_of(count=3, learners="min = 2")
    peers = [_attached(stage, rank) for rank in range(3)]
    init = peers[0].take(d.SendInit)
    peers[0].say(d.Chunk(key=init.key, offset=0), b"x" * 8)
    stage.lead.command(c.LearnerGone(rank=0, incarnation=1, kind="lost", respawn=True))
    assert peers[1].none(d.SendInit)  # one is missing again
    again = _attached(stage, 0, incarnation=2)
    again.upload(3.0)
    np.testing.assert_array_equal(peers[1].ready() and peers[1].vector(), 3.0)


def test_an_uploader_that_reconnects_is_asked_again(stage_of: StageOf) -> None:
    stage = stage_of(count=1)
    first = _attached(stage, 0)
    first.take(d.SendInit)
    other = Peer(stage, 0, name="second-socket")
    other.hello()
    other.say(ATTACH)
    other.upload(5.0)
    other.ready()
    np.testing.assert_array_equal(other.vector(), 5.0)


def test_weights_with_a_nan_are_no_version_0(stage_of: StageOf) -> None:
    stage = stage_of(count=2)
    peers = [_attached(stage, rank) for rank in range(2)]
    peers[0].upload(float("nan"))
    refused = peers[0].take(d.Refused)
    assert "w of rank 0 is NaN or infinite" in refused.message
    peers[1].upload(2.0)
    np.testing.assert_array_equal(peers[1].ready() and peers[1].vector(), 2.0)


def test_version_0_from_a_file(stage_of: StageOf, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"w": np.arange(4, dtype=np.float32)}, path)
    stage = stage_of(job=f'init = "{path}"')
    peer = _attached(stage, 1)
    other = _attached(stage, 0)
    assert peer.none(d.Ready) and other.none(d.SendInit)  # it is read while the node hears everybody
    stage.settle()
    for learner in (peer, other):
        learner.ready()
        np.testing.assert_array_equal(learner.vector(), [0, 1, 2, 3])


def test_a_file_that_is_not_read_in_time_fails_the_job(stage_of: StageOf, monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Event()
    monkeypatch.setattr(export, "load", lambda *_: read.wait(20))
    stage = stage_of(count=1, job='init = "/mnt/dead.safetensors"', learners='step_timeout = "40s"')
    peer = _attached(stage, 0)
    stage.pass_time(39.0, alive=[peer])
    assert stage.lead.report.state == ("WAITING", "/mnt/dead.safetensors is read, 39 s of 40 s")
    stage.pass_time(6.0, alive=[peer])
    read.set()
    (done,) = stage.all(c.NodeDone)
    assert done.state == "FAILED" and "/mnt/dead.safetensors was not read within 40 s" in done.reason
    stage.settle()  # what comes late is nobody's
    assert not stage.events("version 0")


def test_a_file_that_is_not_there_fails_the_job(stage_of: StageOf, tmp_path: Path) -> None:
    stage = stage_of(job=f'init = "{tmp_path}/absent.safetensors"')
    crew = [_attached(stage, 0), _attached(stage, 1)]
    stage.settle()
    assert len(stage.events("absent.safetensors")) == 1 and crew[0].none(d.SendInit)
    stage.pass_time(6.0)
    done = stage.all(c.NodeDone)
    assert [m.state for m in done] == ["FAILED"] and "No such file" in done[0].reason and "Fix:" in done[0].reason


def test_another_model_is_refused_with_the_difference(stage_of: StageOf) -> None:
    stage = stage_of()
    _attached(stage, 0)
    other = Peer(stage, 1)
    other.hello()
    other.say(d.Attach(params=[d.TensorSpec("w", [2, 2], "float32"), d.TensorSpec("b", [1], "float32")]))
    refused = other.take(d.Refused)
    assert "shape [2, 2] here, [4] there" in refused.message and "parameter b: here alone" in refused.message
    assert stage.events("rank 1 is refused")


def test_the_memory_that_is_needed_is_said_beforehand(stage_of: StageOf) -> None:
    stage = stage_of(count=4, snapshot="auto", task=True)
    _attached(stage, 0)
    (text,) = stage.events("the servers of this job need")
    # each vector has 16 B; sgd has no state; two queues for each of 4; one copy aside
    assert "need 288 B: 3 versions 48 B, 4 slots 64 B, connections 128 B, evaluator 32 B, snapshot 16 B" in text


# ---------------------------------------------------------------------------------------- rule and data


def test_a_script_brings_its_rule(stage_of: StageOf) -> None:
    stage = stage_of(update="")
    crew = [_attached(stage, rank) for rank in range(2)]
    crew[0].upload(1.0)
    for peer in crew:
        peer.ready()
    crew[0].say(d.Data(samples=32, minibatch=0))
    assert "there is no rule" in crew[0].take(d.Refused).message
    rule = d.Rule(rule="momentum", momentum=0.5, groups=[d.GroupRates(0, 4, 0.25, 0.0)])
    for peer in crew:
        peer.say(rule)
        assert peer.take(d.RuleReply) == d.RuleReply(accepted=True, rule="momentum")
    third = d.Rule(rule="sgd", groups=[d.GroupRates(0, 4, 0.25, 0.0)])
    crew[1].say(third)
    assert "another optimizer" in crew[1].take(d.Refused).message
    for peer in crew:
        peer.say(d.Data(samples=32, minibatch=0))
    assert stage.events("global batch 8, rate 0.25")
    crew[0].push(1.0, rates=[0.125])
    crew[1].push(1.0)
    crew[0].hear()
    np.testing.assert_array_equal(crew[0].vector(), 1.0 - 0.125)
    crew[0].push(1.0, rates=[0.1, 0.2])  # not one for each group
    assert stage.drops()["bad-rates"] == 1


def test_the_job_files_rule_wins_and_that_is_said(stage_of: StageOf) -> None:
    stage = stage_of(count=1)
    peer = _attached(stage, 0)
    peer.upload()
    peer.ready()
    peer.say(d.Rule(rule="adam", groups=[d.GroupRates(0, 4, 0.001, 0.0)]))
    assert peer.take(d.RuleReply) == d.RuleReply(accepted=False, rule="sgd")
    assert len(stage.events("the job file's rule sgd wins")) == 1


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({"samples": 3}, "mini-batch of 4 samples is larger than the data (3)"),
        ({"samples": 32, "minibatch": 40}, "mini-batch of 40 samples is larger"),
        ({"samples": 32, "minibatch": 10, "accumulate": 4}, "mini-batch of 40 samples is larger"),
        ({"samples": 31}, "31 samples here, 32 at the learners before"),
    ],
)
def test_data_that_does_not_fit(stage_of: StageOf, data: dict[str, int], word: str) -> None:
    stage = stage_of()
    peers = [_attached(stage, rank) for rank in range(2)]
    peers[0].upload()
    for peer in peers:
        peer.ready()
    peers[0].say(d.Data(samples=32, minibatch=0))
    peers[1].say(d.Data(**({"minibatch": 0} | data)))
    assert word in peers[1].take(d.Refused).message


def test_accumulation_makes_the_mini_batch_larger(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2")
    one, _ = stage.crew(2, minibatch=2, accumulate=3, prefetch=0)
    assert one.hear().leases == [[(0, 0, 6)]]


# ---------------------------------------------------------------------------------------------- start


def test_all_are_waited_for_then_it_starts_with_those_who_are_here(stage_of: StageOf) -> None:
    stage = stage_of(count=3, protocol="softsync", learners='deadline = "30s"\nmin = 2')
    stage.pass_time(2.0)
    assert stage.state() == "STARTING"
    peers = [_attached(stage, rank) for rank in (0, 2)]
    stage.pass_time(10.0, alive=peers)
    assert stage.state() == "WAITING"
    assert stage.lead.report.state[1] == "2/3 learners (rank 1 missing, 10 s of 30 s)"
    assert len(stage.events("waits: 2/3 learners (rank 1 missing")) == 1
    assert peers[0].none(d.SendInit)
    stage.pass_time(20.5, alive=peers)
    peers[0].upload()
    for peer in peers:
        peer.ready()
        peer.say(d.Data(samples=32, minibatch=0))
    assert all(peer.hear().lam == 2 for peer in peers)
    assert stage.state() == "RUNNING"
    late = _attached(stage, 1)
    late.ready()
    late.say(d.Data(samples=32, minibatch=0))
    assert late.hear().lam == 3 and stage.events("lambda 3, n 1, c 3")


def test_too_few_at_the_deadline_is_a_failure_with_who_is_missing(stage_of: StageOf) -> None:
    stage = stage_of(count=3, learners='deadline = "30s"\nmin = 2')
    one = _attached(stage, 0)
    stage.pass_time(36.0, alive=[one])
    done = stage.all(c.NodeDone)
    assert [m.state for m in done] == ["FAILED"]
    assert done[0].reason.startswith("1 of at least 2 learners came: ranks 1, 2 missing, 30 s of 30 s. Fix: ")


def test_an_upload_that_never_comes_is_asked_of_the_next_rank(stage_of: StageOf) -> None:
    stage = stage_of(count=2, learners='deadline = "30s"')
    crew = [_attached(stage, 0), _attached(stage, 1)]
    init = crew[0].take(d.SendInit)
    stage.pass_time(20.0, alive=crew)
    crew[0].say(d.Chunk(key=init.key, offset=0), b"\0" * 16)  # all of it, but for the word that it is
    stage.pass_time(29.0, alive=crew)
    reason = "rank 0 uploads version 0, 28 s of 30 s without a part of it"
    assert stage.lead.report.state == ("WAITING", reason) and crew[1].none(d.SendInit)
    stage.pass_time(1.5, alive=crew)
    assert stage.events("rank 0 was asked for it and sent no part of it for 30 s")
    second = crew[1].take(d.SendInit)
    crew[1].say(d.Chunk(key=second.key, offset=0), np.full(4, 5.0, np.float32).tobytes())
    crew[0].say(d.Chunk(key=init.key, offset=0), b"x" * 16)  # it wakes up: version 0 is another's by now
    crew[0].say(d.InitDone(key=init.key, nbytes=16))
    assert (stage.drops()["foreign-chunk"], stage.drops()["foreign-init"]) == (1, 1)
    crew[1].say(d.InitDone(key=second.key, nbytes=16))
    for peer in crew:
        peer.ready()
        np.testing.assert_array_equal(peer.vector(), 5.0)


def test_nobody_who_uploads_is_a_failure(stage_of: StageOf) -> None:
    stage = stage_of(count=2, learners='deadline = "30s"')
    crew = [_attached(stage, 0), _attached(stage, 1)]
    stage.pass_time(70.0, alive=crew)
    (done,) = stage.all(c.NodeDone)
    assert done.state == "FAILED" and "rank 0 was asked for it" in done.reason and "rank 1 was" in done.reason


def test_who_never_says_its_data_is_ended_and_what_comes_in_its_place_is_waited_for(stage_of: StageOf) -> None:
    stage = stage_of(count=2, learners='deadline = "30s"\nstep_timeout = "100s"\nmin = 2')
    crew = [_attached(stage, 0), _attached(stage, 1)]
    crew[0].upload()
    for peer in crew:
        peer.ready()
    crew[0].say(d.Data(samples=32, minibatch=0))
    stage.pass_time(99.0, alive=crew)
    assert stage.lead.report.state == ("WAITING", "1/2 learners have their data (rank 1 missing, 99 s of 100 s)")
    assert not stage.all(c.NodeFence)
    stage.pass_time(1.0, alive=crew)
    (fence,) = stage.all(c.NodeFence)
    assert (fence.rank, fence.reason) == (1, "it has not said its data within step_timeout = 100 s")
    stage.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="fenced", respawn=True))
    stage.pass_time(20.0, alive=crew[:1])
    assert stage.lead.report.state == ("WAITING", "1/2 learners (rank 1 missing, 20 s of 30 s)")
    again = _attached(stage, 1, incarnation=2)
    again.ready()
    again.say(d.Data(samples=32, minibatch=0))
    assert again.hear().lam == 2 and stage.state() == "RUNNING"


def test_a_script_that_stops_short_of_its_model_is_ended_too(stage_of: StageOf) -> None:
    """Also of a rank that comes back to a job that waits for it, and for nothing else."""
    stage = stage_of(count=2, learners='step_timeout = "100s"\ndeadline = "5s"\non_lost = "wait"')
    crew = stage.crew(2)
    stage.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="lost", respawn=True))
    again = Peer(stage, 1, incarnation=2)
    again.hello()
    stage.pass_time(99.0, alive=[crew[0], again])
    assert not stage.all(c.NodeFence)
    stage.pass_time(1.5, alive=[crew[0], again])
    (fence,) = stage.all(c.NodeFence)
    assert (fence.rank, fence.incarnation) == (1, 2) and "attached its model" in fence.reason


@pytest.mark.parametrize("attached", [0, 1])
def test_a_script_that_takes_its_time_before_its_model_is_waited_for(stage_of: StageOf, attached: int) -> None:
    """It reads its data first, say: that is the script's own code, which step_timeout bounds and no deadline."""
    stage = stage_of(count=2, learners='deadline = "30s"\nmin = 2')
    crew = [Peer(stage, rank) for rank in range(2)]
    for peer in crew:
        peer.hello()
    for peer in crew[:attached]:
        peer.say(ATTACH)
    stage.pass_time(90.0, alive=crew)
    assert stage.state() == "WAITING" and not stage.all(c.NodeDone)
    assert stage.lead.opening.reason().endswith(" without a model yet, 90 s of 600 s)")
    for peer in crew[attached:]:
        peer.say(ATTACH)
    crew[0].upload()


def test_what_comes_in_the_place_of_a_script_that_never_came_to_its_model_is_waited_for(stage_of: StageOf) -> None:
    stage = stage_of(count=2, learners='deadline = "30s"\nstep_timeout = "100s"\nmin = 2')
    crew = [_attached(stage, 0), Peer(stage, 1)]
    crew[1].hello()
    stage.pass_time(101.0, alive=crew)
    assert len(stage.all(c.NodeFence)) == 1
    stage.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="fenced", respawn=True))
    stage.pass_time(29.0, alive=crew[:1])
    assert stage.lead.opening.reason() == "1/2 learners (rank 1 missing, 29 s of 30 s)"
    stage.pass_time(1.0, alive=crew[:1])
    assert stage.lead.ending.over


def test_who_is_missing_is_not_waited_for_longer_because_others_take_their_time(stage_of: StageOf) -> None:
    stage = stage_of(count=3, learners='deadline = "30s"\nstep_timeout = "100s"')
    crew = [_attached(stage, 0), Peer(stage, 1)]
    crew[1].hello()
    stage.pass_time(31.0, alive=crew)
    assert crew[0].none(d.SendInit)  # rank 2 is given up, rank 1 is not
    crew[1].say(ATTACH)
    assert crew[0].take(d.SendInit)


def test_who_is_here_without_a_model_is_not_called_missing(stage_of: StageOf) -> None:
    stage = stage_of(count=3, learners='deadline = "30s"')
    peers = [_attached(stage, 0), Peer(stage, 2)]
    peers[1].hello()
    stage.pass_time(12.0, alive=peers)
    assert stage.lead.report.state[1] == "1/3 learners (rank 1 missing, rank 2 without a model yet, 12 s of 30 s)"


def test_a_first_mini_batch_that_does_not_end_is_said(stage_of: StageOf) -> None:
    stage = stage_of(count=2, protocol="async", sync="n = 2", epochs=99, learners='step_timeout = "5m"')
    crew = stage.crew(2)
    crew[0].push()
    crew[0].push()
    stage.pass_time(290.0, step=10.0, alive=crew)
    assert stage.lead.report.state == ("RUNNING", "") and not stage.events("first mini-batch")
    for _ in range(5):
        crew[0].push()
        stage.pass_time(90.0, step=10.0, alive=crew)
    text = "learner 1 has computed its first mini-batch for 12 min; step_timeout does not apply to the first"
    assert stage.lead.report.state == ("RUNNING", f"{text}, it is waited for 60 min")
    assert len(stage.events("learner 1 has computed its first mini-batch for")) == 2  # 5 min, 10 min
    crew[1].push()
    assert stage.lead.report.state == ("RUNNING", "") and not stage.all(c.NodeFence)


def test_a_restarted_node_waits_for_those_who_were_members(stage_of: StageOf) -> None:
    job = {"count": 3, "protocol": "softsync", "snapshot": "1ms", "learners": 'deadline = "30s"'}
    one = stage_of(**job)
    crew = one.crew(3)
    one.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="lost", respawn=False))
    one.pass_time(31.0, alive=[crew[0], crew[2]])
    one.settle()
    crew[0].push()
    crew[2].push()
    one.settle()
    two = stage_of(**job, generation=2, resume=True)
    zero = _attached(two, 0)
    two.pass_time(6.0, alive=[zero])
    assert two.lead.report.state == ("WAITING", "1/2 learners (rank 2 missing, 6 s of 30 s)")
    peers = [zero, _attached(two, 2)]
    for peer in peers:
        peer.ready()
        peer.say(d.Data(samples=32, minibatch=0))
    assert all(peer.hear().lam == 2 for peer in peers)


def test_a_job_that_was_stopped_waits_for_all_again(stage_of: StageOf) -> None:
    job = {"count": 2, "snapshot": "auto", "learners": 'deadline = "30s"'}
    one = stage_of(**job)
    zero, other = one.crew(2)
    one.settle()
    one.lead.command(c.NodeStop(now=False, state="STOPPED", reason="asked to"))
    zero.push()
    zero.say(d.Bye(reason="drain"))
    other.push()
    one.settle()
    two = stage_of(**job, generation=2, resume=True)
    _attached(two, 1)
    assert two.lead.opening.reason() == "1/2 learners (rank 0 missing, 0 s of 30 s)"


def test_who_will_not_come_again_is_not_waited_for(stage_of: StageOf) -> None:
    stage = stage_of(count=3)
    crew = [_attached(stage, 0), _attached(stage, 2)]
    stage.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="lost", respawn=False))
    stage.pass_time(0.5, alive=crew)
    assert crew[0].take(d.SendInit)


def test_who_came_again_all_the_same_is_waited_for_again(stage_of: StageOf) -> None:
    stage = stage_of(count=3)
    crew = [_attached(stage, 0), _attached(stage, 1)]
    stage.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="lost", respawn=False))
    _attached(stage, 1, incarnation=9)  # on another host
    stage.lead.command(c.LearnerGone(rank=1, incarnation=9, kind="lost", respawn=True))
    stage.pass_time(2.0, alive=crew[:1])
    assert stage.lead.opening.missing() == "ranks 1, 2 missing, 2 s of 60 s"


def test_nobody_at_all_is_waited_for_twice_as_long(stage_of: StageOf) -> None:
    stage = stage_of(learners='deadline = "30s"')
    stage.pass_time(59.0)
    assert not stage.all(c.NodeDone)
    stage.pass_time(7.0)
    assert [m.state for m in stage.all(c.NodeDone)] == ["FAILED"]


def test_the_global_batch_and_rate_are_said_at_start(stage_of: StageOf) -> None:
    stage = stage_of(
        update='rule = "sgd"\nlr = 0.1\nreference_batch = 2\nscaling = "sqrt"\nschedule = {kind = "constant"}'
    )
    stage.crew(2)
    assert stage.events("hardsync: lambda 2, n 1, c 2; global batch 8, rate 0.2")


def test_what_came_before_all_left_is_applied_at_its_own_rate(stage_of: StageOf) -> None:
    stage = stage_of(
        update='rule = "sgd"\nlr = 0.1\nreference_batch = 1\nscaling = "sqrt"\nschedule = {kind = "constant"}'
    )
    zero, one = stage.crew(2)
    zero.push()
    zero.say(d.Bye(reason="drain"))
    one.say(d.Bye(reason="drain"))
    figures = stage.lead.work.figures
    assert figures is not None and (figures.updates, figures.applied, figures.lr) == (1, 4, 0.2)


def test_a_script_that_ends_before_training_fails_the_job_at_once(stage_of: StageOf) -> None:
    stage = stage_of(count=2)
    Peer(stage, 1).hello()
    stage.lead.command(c.LearnerGone(rank=0, incarnation=1, kind="bye", respawn=False))
    stage.pass_time(6.0)  # rank 1 is given the time to leave
    (done,) = stage.all(c.NodeDone)
    assert done.state == "FAILED" and "script of rank 0 ended before training" in done.reason and "Fix: " in done.reason


def test_a_good_bye_while_a_restarted_node_waits_for_the_others_fails_nothing(stage_of: StageOf) -> None:
    one = stage_of(count=2, snapshot="auto")
    zero, other = one.crew(2)
    one.settle()
    zero.push()
    other.push()
    one.lead.saving.save()
    one.settle()
    two = stage_of(count=2, snapshot="auto", generation=2, resume=True)
    back = Peer(two, 1)
    back.hello()
    back.say(ATTACH)
    back.say(d.Bye(reason="drain"))
    two.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="bye", respawn=False))
    assert not two.lead.ending.over


@pytest.mark.parametrize("kinds", [("bye", "bye"), ("lost", "bye"), ("lost", "lost")])
def test_nobody_left_and_nobody_to_come_ends_the_job_at_once(stage_of: StageOf, kinds: tuple[str, str]) -> None:
    stage = stage_of(count=2, learners='on_lost = "wait"')
    crew = stage.crew(2)
    crew[0].push(1.0)
    for rank, kind in enumerate(kinds):
        assert not stage.all(c.NodeDone)
        if kind == "bye":
            crew[rank].say(d.Bye(reason="drain"))
        stage.lead.command(c.LearnerGone(rank=rank, incarnation=1, kind=kind, respawn=False))  # type: ignore[arg-type]
    stage.settle()
    (done,) = stage.all(c.NodeDone)
    assert done.state == "FAILED" and "every learner has ended" in done.reason and "Fix: " in done.reason


def test_who_is_started_elsewhere_is_waited_for(stage_of: StageOf) -> None:
    stage = stage_of(count=1)
    (peer,) = stage.crew(1)
    peer.push(1.0)
    stage.lead.command(c.LearnerGone(rank=0, incarnation=1, kind="lost", respawn=True))
    stage.settle()
    assert not stage.all(c.NodeDone)


def test_a_version_0_that_cannot_be_sent_fails_the_job_with_the_fix(stage_of: StageOf) -> None:
    stage = stage_of(count=1, update=HALF)
    peer = Peer(stage, 0)
    peer.hello()
    peer.say(ATTACH)
    peer.upload(70000.0)
    peer.say(d.Bye(reason="done"))
    stage.settle()
    stage.lead.tick()
    (done,) = stage.all(c.NodeDone)
    assert done.state == "FAILED"
    assert done.reason == ("version 0 from rank 0 is too large for float16. Fix: give wire.compress_down another value")


def test_weights_that_grow_too_large_to_be_sent_end_the_node(stage_of: StageOf) -> None:
    stage = stage_of(count=1, update=HALF)
    (peer,) = stage.crew(1)
    with pytest.raises(Diverged, match="at update 1 the weights are too large for float16; back to the last snapshot"):
        peer.push(-1e6)


HALF = 'rule = "sgd"\nlr = 0.5\nschedule = {kind = "constant"}\n[wire]\ncompress_down = "float16"'


def test_a_pulse_that_comes_up_after_the_good_bye_is_no_news(stage_of: StageOf) -> None:
    stage = stage_of(count=2)
    peer = Peer(stage, 0)
    peer.hello()
    stage.lead.command(c.LearnerGone(rank=0, incarnation=1, kind="lost", respawn=True))
    Peer(stage, 0, role="pulse").hello(pid=1)
    assert stage.drops()["old-incarnation"] == 1 and not stage.events("turned away")
    peer.hello()
    assert len(stage.events("a learner is turned away")) == 1
