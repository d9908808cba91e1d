"""How jobs end: complete, by a condition, by request; the evaluator's part in it; limits of every wait."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rudra_zmq.node import export, life, snapshot
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.unit.node.stage import ATTACH, JOB, TOKEN, Peer, Stage

StageOf = Callable[..., Stage]


def _evaluator(stage: Stage, incarnation: int = 1) -> Peer:
    peer = Peer(stage, 0, incarnation, role="evaluator")
    peer.hello()
    peer.say(ATTACH)
    return peer


def _verdict(peer: Peer, evaluate: d.Evaluate, accuracy: float, seconds: float = 1.0) -> None:
    peer.say(
        d.TestResult(
            epoch=evaluate.epoch,
            generation=evaluate.generation,
            timestamp=evaluate.timestamp,
            metrics={"accuracy": accuracy},
            seconds=seconds,
        )
    )


def _epoch(stage: Stage, peer: Peer) -> None:
    """All of an epoch by one learner."""
    assert stage.lead.work.sync is not None
    epoch = stage.lead.work.sync.epoch
    while stage.lead.work.sync.epoch == epoch:
        peer.push(1.0)


def _done(stage: Stage) -> c.NodeDone:
    stage.settle()
    (done,) = stage.all(c.NodeDone)
    return done


def test_the_report_names_the_weights_however_early_their_writer_is_idle(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=1)
    (peer,) = stage.crew(1, samples=8)
    _epoch(stage, peer)
    peer.say(d.Bye(reason="done"))
    exporter = stage.lead.ending._exporter
    while exporter._thread is None:  # the snapshot comes first
        assert stage.lead.saving.wait(10)
        stage._soon.get()()
    assert exporter.join(10)
    stage.lead.tick()
    assert not stage.all(c.NodeDone)
    assert _done(stage).progress.weights


# ------------------------------------------------------------------------------------------ evaluator


def test_newest_wins_the_last_always_and_rows_are_written_as_they_settle(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=5, task=True)
    (peer,) = stage.crew(1, samples=8)
    evaluator = _evaluator(stage)
    csv = stage.folder / "metrics.csv"
    _epoch(stage, peer)
    first = evaluator.take(d.Evaluate)
    assert first.epoch == 0
    weights = evaluator.vector()
    for _ in range(3):
        _epoch(stage, peer)
    assert evaluator.none(d.Evaluate) and not csv.exists()
    np.testing.assert_array_equal(evaluator.vector(), weights)
    _verdict(evaluator, first, 0.5)
    assert csv.read_text().splitlines()[1].split(",")[3] == "0.5"
    third = evaluator.take(d.Evaluate)
    assert third.epoch == 3
    _epoch(stage, peer)
    assert evaluator.none(d.Evaluate)
    peer.say(d.Bye(reason="done"))
    stage.settle()
    stage.pass_time(20.0)
    assert not stage.all(c.NodeDone)
    _verdict(evaluator, third, 0.75)
    assert [line.split(",")[3] for line in csv.read_text().splitlines()[1:]] == ["0.5", "", "", "0.25"]
    last = evaluator.take(d.Evaluate)
    assert last.epoch == 4
    evaluator.vector()
    assert len(evaluator.weights) == last.nbytes
    _verdict(evaluator, last, 0.875)
    done = _done(stage)
    assert done.state == "DONE" and done.progress.accuracy == 0.875
    assert [row.accuracy for row in done.progress.rows] == [0.5, None, None, 0.75, 0.875]
    assert len(csv.read_text().splitlines()) == 6
    evaluator.take(d.Finish)


def test_a_result_of_nothing_is_dropped(stage_of: StageOf) -> None:
    stage = stage_of(count=1, task=True)
    (peer,) = stage.crew(1, samples=8)
    evaluator = _evaluator(stage)
    _epoch(stage, peer)
    evaluate = evaluator.take(d.Evaluate)
    wrong = d.TestResult(epoch=0, generation=1, timestamp=99, metrics={"accuracy": 1.0}, seconds=1.0)
    evaluator.say(wrong)
    assert stage.drops()["foreign-result"] == 1
    _verdict(evaluator, evaluate, 0.5)
    _verdict(evaluator, evaluate, 1.0)
    assert stage.drops()["foreign-result"] == 2
    assert stage.lead.report.progress().accuracy == 0.5


def test_an_evaluator_that_dies_is_replaced(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=1, task=True)
    (peer,) = stage.crew(1, samples=8)
    old = _evaluator(stage)
    _epoch(stage, peer)
    old.take(d.Evaluate)
    peer.say(d.Bye(reason="done"))
    stage.lead.command(c.LearnerGone(rank=0, incarnation=1, kind="lost", respawn=True, evaluator=True))
    stage.settle()
    stage.pass_time(15.0)
    assert not stage.all(c.NodeDone)
    new = _evaluator(stage, incarnation=2)
    _verdict(new, new.take(d.Evaluate), 0.5)
    assert _done(stage).progress.accuracy == 0.5


def test_word_of_the_death_of_an_evaluator_that_was_replaced_concerns_nobody(stage_of: StageOf) -> None:
    """The new one's Hello may be faster: it comes straight from there, the word by way of learnerd and psd."""
    stage = stage_of(count=1, epochs=1, task=True)
    (peer,) = stage.crew(1, samples=8)
    _evaluator(stage)
    _epoch(stage, peer)
    new = _evaluator(stage, incarnation=2)
    evaluate = new.take(d.Evaluate)
    stage.lead.command(c.LearnerGone(rank=0, incarnation=1, kind="lost", respawn=True, evaluator=True))
    _verdict(new, evaluate, 0.5)
    peer.say(d.Bye(reason="done"))
    assert _done(stage).progress.accuracy == 0.5


@pytest.mark.parametrize("how", ["gone", "silent", "never came"])
def test_an_evaluator_that_says_nothing_does_not_hold_the_end_for_ever(stage_of: StageOf, how: str) -> None:
    stage = stage_of(count=1, epochs=1, task=True)
    (peer,) = stage.crew(1, samples=8)
    if how != "never came":
        _evaluator(stage)
    _epoch(stage, peer)
    peer.say(d.Bye(reason="done"))
    stage.settle()
    if how == "gone":
        stage.lead.command(c.LearnerGone(rank=0, incarnation=1, kind="lost", respawn=False, evaluator=True))
        assert stage.events("the evaluator is gone for good")
    else:
        stage.pass_time(29.0)
        assert not stage.all(c.NodeDone)
        stage.pass_time(2.0)
        assert stage.events("no test result of epoch 1")
    stage.pass_time(1.0)
    assert _done(stage).state == "DONE"


def _trained(stage: Stage, pulse: bool = True) -> tuple[Peer, d.Evaluate]:
    """An evaluator that tests the only epoch of a job whose learner has left."""
    (peer,) = stage.crew(1, samples=8)
    evaluator = _evaluator(stage)
    if pulse:
        stage.say(evaluator.pulse, d.Hello(role="evaluator-pulse", rank=0, incarnation=1, job=JOB, token=TOKEN))
    _epoch(stage, peer)
    peer.say(d.Bye(reason="done"))
    stage.settle()
    return evaluator, evaluator.take(d.Evaluate)


def _beat(stage: Stage, evaluator: Peer, seconds: float) -> None:
    for _ in range(int(seconds)):
        stage.say(evaluator.pulse, d.Ping())
        stage.pass_time(1.0)


def test_a_test_may_take_as_long_as_its_pulse_is_heard(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=1, task=True)
    evaluator, evaluate = _trained(stage)
    _beat(stage, evaluator, 300)
    assert stage.lead.report.state == ("RUNNING", "epoch 1 is tested, 300 s of at most 600 s")
    assert stage.events("waits for the test of epoch 1") and not stage.all(c.NodeDone)
    _verdict(evaluator, evaluate, 0.5, seconds=300.0)
    assert _done(stage).progress.accuracy == 0.5


def test_a_test_that_never_ends_is_given_up(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=1, task=True, learners='step_timeout = "100s"')
    evaluator, _ = _trained(stage)
    _beat(stage, evaluator, 99)
    assert not stage.all(c.NodeDone)
    _beat(stage, evaluator, 3)
    assert stage.events("no test result of epoch 1: its test takes longer than 100 s")
    assert _done(stage).state == "DONE"


def test_who_was_given_up_and_tells_its_result_is_awaited_again(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=2, task=True, learners='step_timeout = "100s"')
    (peer,) = stage.crew(1, samples=8)
    evaluator = _evaluator(stage)
    _epoch(stage, peer)
    evaluate = evaluator.take(d.Evaluate)
    stage.pass_time(101.0, alive=[peer, evaluator])
    assert stage.events("no test result of epoch 1: its test takes longer than 100 s")
    _verdict(evaluator, evaluate, 0.25, seconds=101.0)
    _epoch(stage, peer)
    evaluator.vector()
    _verdict(evaluator, evaluator.take(d.Evaluate), 0.5)
    peer.say(d.Bye(reason="done"))
    assert [row.accuracy for row in _done(stage).progress.rows] == [0.25, 0.5]


def test_silence_before_a_test_is_no_silence_of_the_test(stage_of: StageOf) -> None:
    """The evaluator may have been kept from its turn by the learners of its host, say."""
    stage = stage_of(count=1, epochs=1, task=True)
    (peer,) = stage.crew(1, samples=8)
    evaluator = _evaluator(stage)
    stage.pass_time(60.0, alive=[peer])
    _epoch(stage, peer)
    peer.say(d.Bye(reason="done"))
    stage.settle()
    stage.pass_time(29.0)
    assert not stage.all(c.NodeDone)
    _verdict(evaluator, evaluator.take(d.Evaluate), 0.5)
    assert _done(stage).progress.accuracy == 0.5


def test_a_long_test_before_makes_the_last_one_waited_for(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=2, task=True, learners='step_timeout = "20s"')
    (peer,) = stage.crew(1, samples=8)
    evaluator = _evaluator(stage)
    _epoch(stage, peer)
    _verdict(evaluator, evaluator.take(d.Evaluate), 0.25, seconds=15.0)
    _epoch(stage, peer)
    peer.say(d.Bye(reason="done"))
    stage.settle()
    evaluate = evaluator.take(d.Evaluate)
    for _ in range(120):
        evaluator.ping()
        stage.pass_time(1.0)
    _verdict(evaluator, evaluate, 0.5)
    assert _done(stage).progress.accuracy == 0.5


def test_an_evaluator_that_was_silent_for_a_while_is_awaited_again(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=3, task=True)
    (peer,) = stage.crew(1, samples=8)
    evaluator = _evaluator(stage)
    _epoch(stage, peer)
    first = evaluator.take(d.Evaluate)
    stage.pass_time(31.0, alive=[peer])
    assert stage.events("no test result of epoch 1: the evaluator is silent for")
    evaluator.ping()
    assert stage.events("the evaluator is heard again")
    _epoch(stage, peer)
    _verdict(evaluator, first, 0.25)
    assert evaluator.take(d.Evaluate).epoch == 1
    assert stage.lead.report.progress().rows[0].accuracy == 0.25


def test_a_silent_evaluator_of_this_host_that_computes_is_waited_for(
    stage_of: StageOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(count=1, epochs=1, task=True, host="here")
    monkeypatch.setattr(life.Process.__init__, "__defaults__", (lambda pid: life.Stat("R", 7, int(100 * stage.now)),))
    evaluator = Peer(stage, 0, role="evaluator")
    evaluator.hello(host="here", pid=5)
    evaluator.say(ATTACH)
    (peer,) = stage.crew(1, samples=8)
    _epoch(stage, peer)
    peer.say(d.Bye(reason="done"))
    stage.settle()
    stage.pass_time(200.0)
    assert not stage.all(c.NodeDone)
    _verdict(evaluator, evaluator.take(d.Evaluate), 0.5)
    assert _done(stage).progress.accuracy == 0.5


@pytest.mark.parametrize("comes", [True, False])
def test_a_stop_waits_for_the_test_under_way_or_says_that_it_does_not(stage_of: StageOf, comes: bool) -> None:
    stage = stage_of(count=1, epochs=9, task=True, snapshot="auto")
    (peer,) = stage.crew(1, samples=8)
    evaluator = _evaluator(stage)
    _epoch(stage, peer)
    evaluate = evaluator.take(d.Evaluate)
    stage.lead.command(c.NodeStop(now=False, state="STOPPED", reason="asked to"))
    peer.push()
    peer.say(d.Bye(reason="drain"))
    stage.settle()
    for _ in range(24):
        evaluator.ping()
        stage.pass_time(1.0)
    assert not stage.all(c.NodeDone)
    if comes:
        _verdict(evaluator, evaluate, 0.5)
    else:
        stage.pass_time(1.5)  # within the half minute after which the head kills the node
        assert stage.events("no test result of epoch 1: the job stops")
    done = _done(stage)
    assert (done.state, done.progress.rows[0].accuracy) == ("STOPPED", 0.5 if comes else None)


def test_an_evaluators_death_is_not_a_learners(stage_of: StageOf) -> None:
    stage = stage_of(count=1, task=True)
    (peer,) = stage.crew(1, samples=8)
    _evaluator(stage)
    stage.lead.command(c.LearnerGone(rank=0, incarnation=1, kind="lost", respawn=True, evaluator=True))
    stage.pass_time(20.0, alive=[peer])
    assert stage.lead.work.sessions.at(0) is not None and not stage.all(c.NodeFence)


def test_a_chatty_evaluator_is_no_sign_of_life_of_rank_0(stage_of: StageOf) -> None:
    stage = stage_of(count=1, task=True)
    stage.crew(1)
    evaluator = _evaluator(stage)
    stage.pass_time(12.0, alive=[evaluator])
    assert len(stage.all(c.NodeFence)) == 1


# ---------------------------------------------------------------------------------------- conditions


def test_the_chief_of_a_script_tests_by_itself(stage_of: StageOf) -> None:
    stage = stage_of(protocol="async", sync="n = 2", epochs=3, job="stop = {accuracy = 0.9}")
    zero, one = stage.crew(2, samples=8, prefetch=0)
    zero.push()
    one.push()
    one.say(d.Log(metrics={"accuracy": 0.99}, epoch=0))  # not the chief
    zero.say(d.Log(metrics={"accuracy": 0.5, "loss": 2.0}, epoch=0))
    assert stage.lead.report.progress().rows[0].accuracy == 0.5
    assert not stage.lead.ending.draining
    zero.say(d.Log(metrics={"accuracy": 0.95}, epoch=1))
    assert stage.events("ends: accuracy 0.9500 reached 0.9")


def test_a_condition_drains_and_the_end_is_done(stage_of: StageOf) -> None:
    stage = stage_of(count=2, epochs=9, protocol="async", sync="n = 2", job='stop = {time = "30s"}', task=True)
    evaluator = _evaluator(stage)
    zero, one = stage.crew(2, samples=16)
    zero.push()
    stage.pass_time(30.5, alive=[zero, one])
    assert stage.events("ends: time is up (30s)")
    assert isinstance(zero.box[-1], d.Pong) and zero.box[-1].stop
    assert not stage.lead.ending.over  # two steps are under way
    zero.push()
    one.push()
    assert zero.hear().done and one.hear().done
    stage.settle()
    zero.say(d.Bye(reason="done"))
    one.say(d.Bye(reason="done"))
    evaluate = evaluator.take(d.Evaluate)  # the weights of the end are tested though the epoch was cut short
    _verdict(evaluator, evaluate, 0.5)
    done = _done(stage)
    assert (done.state, done.reason) == ("DONE", "time is up (30s)")
    assert done.progress.accuracy == 0.5 and 30.0 <= done.progress.seconds < 31.0
    assert [(row.epoch, row.samples) for row in done.progress.rows] == [(0, 12)]


def test_a_condition_does_not_wait_for_a_step_that_hangs(stage_of: StageOf) -> None:
    stage = stage_of(protocol="softsync", epochs=9, job='stop = {time = "30s"}')
    crew = stage.crew(2)
    stage.pass_time(59.0, alive=crew)  # nobody's first step ends, and it has no deadline of its own
    assert stage.events("ends: time is up") and not stage.lead.ending.over
    stage.pass_time(8.0, alive=crew)
    stage.settle()
    stage.pass_time(1.0, alive=crew)
    done = _done(stage)
    assert (done.state, done.reason) == ("DONE", "time is up (30s)")
    assert stage.events("takes longer than 30 s")


def test_a_job_that_failed_with_weights_that_are_not_finite_stays_failed(stage_of: StageOf) -> None:
    diverging = 'rule = "sgd"\nlr = 1e6\nschedule = {kind = "constant"}'
    limits = 'on_lost = "fail"\ndeadline = "5s"'
    stage = stage_of(protocol="async", sync="n = 2", snapshot="auto", update=diverging, learners=limits)
    zero, _ = stage.crew(2)
    stage.settle()
    zero.push(3e38)
    zero.push(1.0)
    stage.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="lost", respawn=False))
    stage.pass_time(6.0, alive=[zero])
    zero.push(np.nan)  # was under way
    zero.say(d.Bye(reason="drain"))
    stage.settle()
    stage.pass_time(1.0)
    done = _done(stage)
    assert done.state == "FAILED" and "learner 1 was lost" in done.reason
    assert [path.name for path in (stage.folder / "snapshots").iterdir()] == ["1-0"]


def test_updates_are_a_condition(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=9, job="stop = {updates = 3}")
    (peer,) = stage.crew(1)
    for _ in range(3):
        peer.push()
    assert peer.hear().done
    stage.settle()
    peer.say(d.Bye(reason="done"))
    done = _done(stage)
    assert (done.state, done.reason, done.progress.updates) == ("DONE", "3 updates are made", 3)
    weights = safetensors.numpy.load_file(stage.folder / "weights.safetensors")["w"]
    np.testing.assert_array_equal(weights, 1.0 - 3 * 0.5)


# ------------------------------------------------------------------------------------------- requests


def test_a_stop_waits_for_the_step_and_the_snapshot(stage_of: StageOf) -> None:
    stage = stage_of(snapshot="auto")
    zero, one = stage.crew(2)
    zero.push()
    stage.lead.command(c.NodeStop(now=False, state="STOPPED", reason="asked to"))
    stage.settle()
    assert not stage.lead.ending.over
    one.push()
    assert zero.hear().done and one.hear().done
    stage.settle()
    zero.say(d.Bye(reason="done"))
    one.say(d.Bye(reason="done"))
    done = _done(stage)
    assert (done.state, done.reason, done.progress.updates) == ("STOPPED", "asked to", 1)
    assert (stage.folder / "snapshots" / "1-1" / "manifest.json").exists()
    assert (stage.folder / "weights.safetensors").exists()


def test_a_step_that_never_ends_leaves_a_stop_the_time_for_its_snapshot(stage_of: StageOf) -> None:
    stage = stage_of(snapshot="auto")
    zero, one = stage.crew(2)
    zero.push()
    stage.lead.command(c.NodeStop(now=False, state="STOPPED", reason="asked to"))
    stage.pass_time(19.0, alive=[zero, one])
    assert not stage.lead.ending.over
    stage.pass_time(1.5, alive=[zero, one])
    assert stage.events("a step takes longer than 20 s")
    stage.settle()
    stage.pass_time(5.5, alive=[zero, one])
    done = _done(stage)
    assert (done.state, done.progress.updates) == ("STOPPED", 0)
    names = [p.name for p in (stage.folder / "snapshots").iterdir()]
    assert names == ["1-0"]
    state = json.loads((stage.folder / "snapshots/1-0/state.json").read_text())
    assert state["sync"]["samples_applied"] == 0 and not state["finished"]


@pytest.mark.parametrize("second", [True, False])
def test_now_is_at_once(stage_of: StageOf, second: bool) -> None:
    stage = stage_of(snapshot="auto")
    zero, _ = stage.crew(2)
    zero.push()
    stage.settle()
    if second:
        stage.lead.command(c.NodeStop(now=False, state="STOPPED", reason="asked to"))
    stage.lead.command(c.NodeStop(now=not second, state="FAILED", reason="learner 1: ValueError"))
    (done,) = stage.all(c.NodeDone)
    assert (done.state, done.reason) == ("FAILED", "learner 1: ValueError")
    assert [p.name for p in (stage.folder / "snapshots").iterdir()] == ["1-0"]
    assert not (stage.folder / "weights.safetensors").exists()


def test_now_waits_for_no_snapshot_that_takes_long(stage_of: StageOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head kills the node after two seconds: until then the loop has to serve."""
    written, write = threading.Event(), snapshot.Store.write
    monkeypatch.setattr(snapshot.Store, "write", lambda store, content: written.wait(20) and write(store, content))
    stage = stage_of(snapshot="auto")
    stage.crew(2)
    assert stage.lead.saving.busy
    stage.lead.command(c.NodeStop(now=True, state="STOPPED", reason="asked to"))
    assert stage.lead.ending.over and not stage.all(c.NodeDone)
    stage.pass_time(1.0)
    (done,) = stage.all(c.NodeDone)
    assert done.state == "STOPPED" and not written.is_set()
    written.set()


def test_a_step_that_ends_after_all_changes_nothing_any_more(stage_of: StageOf) -> None:
    stage = stage_of(protocol="softsync", sync="n = 2", epochs=9, job='stop = {time = "5s"}')
    zero, one = stage.crew(2)
    zero.push()
    stage.pass_time(40.0, alive=[zero, one])
    assert stage.events("takes longer than 30 s")
    model, sync = stage.lead.work.model, stage.lead.work.sync
    assert model is not None and sync is not None
    weights, updates = model.versions.current.params.copy(), sync.clock.timestamp
    one.push(9.0)
    grant = one.hear()
    assert (grant.verdict, grant.done) == ("late", True)
    one.say(d.Bye(reason="done"))
    assert sync.clock.timestamp == updates
    np.testing.assert_array_equal(model.versions.current.params, weights)
    stage.settle()
    stage.pass_time(6.0)
    assert _done(stage).progress.updates == updates


@pytest.mark.parametrize("how", ["hangs", "raises"])
def test_weights_that_cannot_be_written_fail_the_job_and_do_not_hold_its_end(
    stage_of: StageOf, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    answers = threading.Event()

    def write(*_: object) -> int:
        if how == "raises":
            raise MemoryError
        return int(answers.wait(20))

    monkeypatch.setattr(export, "write", write)
    stage = stage_of(count=1, epochs=1, learners='step_timeout = "90s"')
    (peer,) = stage.crew(1, samples=8)
    _epoch(stage, peer)
    peer.say(d.Bye(reason="done"))
    if how == "hangs":
        stage.pass_time(89.0)
        assert not stage.all(c.NodeDone)
        stage.pass_time(1.5)
        assert stage.events("the weights were not written within 90 s")
        answers.set()
    done = _done(stage)
    assert done.state == "FAILED" and not done.progress.weights
    assert ("not written within 90 s" if how == "hangs" else "MemoryError") in done.reason


def test_a_job_whose_weights_were_not_written_is_gone_on_with_and_done(
    stage_of: StageOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "write", full)
        one = stage_of(count=1, epochs=1, snapshot="auto")
        (peer,) = one.crew(1, samples=8)
        _epoch(one, peer)
        peer.say(d.Bye(reason="done"))
        done = _done(one)
        assert done.state == "FAILED" and "No space left on device. Fix: make room, then resume" in done.reason
    two = stage_of(count=1, epochs=1, snapshot="auto", generation=2, resume=True)
    done = _done(two)
    assert done.state == "DONE" and Path(done.progress.weights).exists()


def test_a_job_that_trained_nothing_has_failed(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=2)
    (peer,) = stage.crew(1, samples=8)
    for _ in range(4):
        peer.push(float("nan"))
    assert peer.hear().done
    peer.say(d.Bye(reason="done"))
    done = _done(stage)
    assert done.state == "FAILED" and done.reason.startswith("epoch 1 applied 0 samples and skipped 8: ")


def test_a_stop_before_anything_began(stage_of: StageOf) -> None:
    stage = stage_of()
    stage.lead.command(c.NodeStop(now=False, state="STOPPED", reason="asked to"))
    assert _done(stage).state == "STOPPED"


def test_learners_that_do_not_leave_are_not_waited_for(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=1)
    (peer,) = stage.crew(1, samples=8)
    _epoch(stage, peer)
    stage.settle()
    stage.pass_time(4.0, alive=[peer])
    assert not stage.all(c.NodeDone)
    stage.pass_time(1.5, alive=[peer])
    assert _done(stage).state == "DONE"


def test_the_final_weights_go_to_every_learner(stage_of: StageOf) -> None:
    """A script may test what it trained after its loop."""
    stage = stage_of(epochs=1)
    zero, one = stage.crew(2, samples=8)
    zero.push(1.0)
    one.push(3.0)
    for peer in (zero, one):
        grant = peer.hear()
        assert grant.done and not grant.leases
        np.testing.assert_array_equal(peer.vector(), 0.0)


# ------------------------------------------------------------------------------------------- snapshots


def test_snapshots_of_auto(stage_of: StageOf) -> None:
    stage = stage_of(count=1, snapshot="auto", epochs=3)
    (peer,) = stage.crew(1, samples=8)
    stage.settle()
    saved = stage.lead.saving
    assert saved.saved == 0  # version 0
    saved._cost = 0.2
    _epoch(stage, peer)
    stage.settle()
    assert saved.saved == 0  # not within fifty times what one costs
    stage.now += 11
    peer.ping()
    _epoch(stage, peer)
    stage.settle()
    assert saved.saved == 4
    saved._cost = 0.2
    peer.push()
    stage.pass_time(290.0, alive=[peer])
    assert saved.saved == 4
    stage.pass_time(12.0, alive=[peer])
    stage.settle()
    assert saved.saved == 5 and stage.lead.report.progress().snapshot_age is not None


def test_none_is_none(stage_of: StageOf) -> None:
    stage = stage_of(count=1, snapshot="none", epochs=1)
    (peer,) = stage.crew(1, samples=8)
    _epoch(stage, peer)
    stage.settle()
    peer.say(d.Bye(reason="done"))
    assert _done(stage).progress.snapshot_age is None
    assert not (stage.folder / "snapshots").exists()


def test_a_restart_goes_on_where_the_snapshot_was(stage_of: StageOf) -> None:
    one = stage_of(count=2, protocol="softsync", snapshot="1ms", epochs=2, task=True)
    zero, other = one.crew(2, samples=16)
    for _ in range(3):
        zero.push(1.0)
        one.settle()
        one.now += 1
        other.push(2.0)
        one.settle()
    assert one.lead.work.model is not None
    weights = one.lead.work.model.versions.current.params.copy()
    figures = one.lead.report.progress()
    two = stage_of(count=2, protocol="softsync", snapshot="1ms", epochs=2, task=True, generation=2, resume=True)
    assert two.events("goes on from update 3 (snapshot 1-3)")
    peer = Peer(two, 0, incarnation=2)
    peer.hello()
    welcome = peer.take(d.Welcome)
    assert welcome.generation == 2
    peer.say(ATTACH)
    ready = peer.ready()
    assert (ready.generation, ready.timestamp) == (2, 3)
    np.testing.assert_array_equal(peer.vector(), weights)
    again = two.lead.report.progress()
    for name in ("updates", "samples", "applied", "lr", "loss", "staleness_mean", "seconds", "rows", "histogram"):
        assert getattr(again, name) == getattr(figures, name), name
    line = json.loads((one.folder / "decisions.jsonl").read_text().splitlines()[-1])
    assert line == {"restored": 3, "generation": 2}
    peer.say(d.Data(samples=17, minibatch=0))
    assert "17 samples here, 16" in peer.take(d.Refused).message
    stranger = Peer(two, 1, incarnation=2)
    stranger.hello()
    stranger.say(d.Attach(params=[d.TensorSpec("v", [4], "float32")]))
    assert "parameter v: here alone" in stranger.take(d.Refused).message


def test_no_snapshot_at_all_begins_anew(stage_of: StageOf) -> None:
    stage = stage_of(generation=3, resume=True)
    assert stage.events("no snapshot: the job begins anew")
    assert json.loads((stage.folder / "decisions.jsonl").read_text()) == {"restored": 0, "generation": 3}
    crew = stage.crew(2)
    assert crew[0].hear().generation == 3


def test_a_full_disk_is_a_warning(stage_of: StageOf, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(count=1, snapshot="auto")
    folder = Path(stage.folder / "snapshots")
    folder.write_text("in the way")
    (peer,) = stage.crew(1)
    stage.settle()
    assert stage.events("snapshot at update 0 not written") and stage.events("training goes on")
    peer.push()
    assert peer.hear().verdict == "accepted"
    assert stage.lead.saving.saved is None


@pytest.mark.parametrize("known", [True, False])
def test_a_result_that_came_after_the_snapshot_is_not_lost(stage_of: StageOf, known: bool) -> None:
    one = stage_of(count=1, snapshot="auto", epochs=2, task=True)
    (peer,) = one.crew(1, samples=8)
    one.settle()
    evaluator = _evaluator(one)
    one.now += 60
    peer.ping()
    _epoch(one, peer)
    one.settle()
    assert one.lead.saving.saved == 2
    evaluate = evaluator.take(d.Evaluate)
    if known:
        _verdict(evaluator, evaluate, 0.75)
    two = stage_of(count=1, snapshot="auto", epochs=2, task=True, generation=2, resume=True)
    again = _evaluator(two)
    if known:
        assert two.lead.report.progress().rows[0].accuracy == 0.75 == two.lead.report.progress().accuracy
        assert again.none(d.Evaluate)
        return
    due = again.take(d.Evaluate)
    assert (due.epoch, due.generation, due.timestamp) == (0, 2, 2)
    _verdict(again, due, 0.5)
    assert two.lead.report.progress().rows[0].accuracy == 0.5


def test_a_node_that_died_before_the_last_result_has_the_weights_tested(stage_of: StageOf) -> None:
    one = stage_of(count=1, snapshot="auto", epochs=1, task=True)
    (peer,) = one.crew(1, samples=8)
    one.settle()
    _epoch(one, peer)
    one.settle()
    two = stage_of(count=1, snapshot="auto", epochs=1, task=True, generation=2, resume=True)
    assert not two.all(c.NodeDone)
    evaluator = _evaluator(two)
    due = evaluator.take(d.Evaluate)
    assert due.epoch == 0
    _verdict(evaluator, due, 0.5)
    done = _done(two)
    assert (done.state, done.reason, done.progress.accuracy) == ("DONE", "", 0.5)
    assert (two.folder / "weights.safetensors").exists()


def test_an_epoch_that_was_cut_short_is_tested_after_a_restart_too(stage_of: StageOf) -> None:
    job = {"count": 1, "snapshot": "auto", "epochs": 9, "task": True, "job": "stop = {updates = 3}"}
    one = stage_of(**job)
    (peer,) = one.crew(1, samples=32)
    one.settle()
    for _ in range(3):
        peer.push()
    one.settle()
    two = stage_of(**job, generation=2, resume=True)
    evaluator = _evaluator(two)
    due = evaluator.take(d.Evaluate)
    assert (due.epoch, due.timestamp) == (0, 3)
    _verdict(evaluator, due, 0.5)
    done = _done(two)
    assert (done.state, done.reason) == ("DONE", "3 updates are made")
    assert [(row.samples, row.accuracy) for row in done.progress.rows] == [(12, 0.5)]
