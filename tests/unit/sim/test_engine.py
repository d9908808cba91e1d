"""The engine's own arithmetic: time, links, deaths, folding; what the rules say is tested elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from rudra_zmq.core.events import Decision, Failed, Finished, Span
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.sim.compute import Compute, Link
from rudra_zmq.sim.engine import Change, Engine
from rudra_zmq.sim.training import CpuTraining, Vector
from rudra_zmq.update.rules import GroupSpan, RuleSpec

SECOND = Compute("constant", 1.0)


def test_time_of_one_learner() -> None:
    result = Engine(SyncParams(), LearnerParams(count=1, minibatch=5), DataParams(20, 2), SECOND).run()
    assert (result.seconds, result.gradients, result.updates, result.samples) == (8.0, 8, 8, 40)
    assert [(e.epoch, e.seconds, e.samples) for e in result.epochs] == [(0, 4.0, 20), (1, 8.0, 40)]
    assert (result.gradients_per_s, result.samples_per_s, result.overlap) == (1.0, 5.0, 1.0)
    assert result.ended == Finished("all epochs are applied", True)


def test_it_stops_after_so_many_gradients_and_discards_the_first() -> None:
    result = Engine(SyncParams(protocol="async"), LearnerParams(count=2), DataParams(10_000, 1), SECOND).run(
        gradients=10, discard=4
    )
    assert result.gradients == 10 and result.staleness.total == 6 and result.ended is None
    assert result.per_learner == {0: 5, 1: 5}


def test_an_unused_run_has_no_figures() -> None:
    result = Engine(
        SyncParams(), LearnerParams(count=1), DataParams(10, 1), SECOND, changes=[Change(0.5, 0, "bye")]
    ).run()
    assert result.gradients == 0 and result.samples_per_s == result.gradients_per_s == 0.0 and result.overlap == 1.0


def test_slow_learners_give_fewer_gradients() -> None:
    result = Engine(
        SyncParams(protocol="async"), LearnerParams(count=3), DataParams(100_000, 1), SECOND, slowness=(1.0, 2.0)
    ).run(gradients=250)
    assert result.per_learner[0] == result.per_learner[2] == 2 * result.per_learner[1]


def test_hardsync_waits_for_the_slowest() -> None:
    result = Engine(
        SyncParams(protocol="hardsync"),
        LearnerParams(count=2, minibatch=1),
        DataParams(8, 1),
        SECOND,
        slowness=(1.0, 3.0),
    ).run()
    assert result.seconds == 12.0
    assert (result.busy, result.waited) == (16.0, 6.0), "the last wait has no end"
    assert result.overlap == pytest.approx(16 / 22)


def test_a_link_carries_a_vector_up_and_one_down_one_after_the_other() -> None:
    link = Link(rate=1000.0, latency=0.125)
    params = SyncParams(protocol="hardsync"), LearnerParams(count=2, minibatch=1)
    result = Engine(*params, DataParams(4, 1), SECOND, link=link, size=500).run()
    # Two rounds. Down: two vectors of 0.5 s through one line, so the second learner begins 0.5 s later and is
    # behind the first one on the way up as well: round 1 ends at 1.125 + 1 + 0.625.
    assert result.seconds == pytest.approx(2 * (1.125 + 1.0 + 0.625))
    assert result.busy == 4.0


def test_held_weights_are_not_sent_again() -> None:
    # n = 1 of two: the answer to the first push of a round names the version that its learner holds.
    link = Link(rate=1.0, latency=0.0)
    made = Engine(SyncParams(), LearnerParams(count=2, minibatch=1), DataParams(100, 1), SECOND, link=link, size=1)
    free = Engine(
        SyncParams(protocol="async"), LearnerParams(count=2, minibatch=1), DataParams(100, 1), SECOND, link=link, size=1
    )
    assert made.run().waited < free.run().waited


def test_the_same_seed_gives_the_same_times() -> None:
    def run(seed: int) -> tuple[float, dict[int, int]]:
        result = Engine(
            SyncParams(), LearnerParams(count=3), DataParams(5000, 1), Compute("exponential", 1.0), seed=seed
        ).run()
        return result.seconds, result.staleness.counts

    assert run(1) == run(1) != run(2)


# ------------------------------------------------------------------------------------ deaths and joins


def test_a_dead_learner_pushes_nothing_and_a_new_one_joins() -> None:
    decisions: list[Decision] = []
    made = Engine(
        SyncParams(protocol="async"),
        LearnerParams(count=2, minibatch=1, max=3, deadline=2.5),
        DataParams(40, 1),
        SECOND,
        changes=[Change(3.5, 0, "lost"), Change(4.0, 2, "join"), Change(4.0, 1, "join"), Change(9.0, 7, "lost")],
        on_decision=decisions.append,
    )
    result = made.run()
    assert result.samples == 40 and result.per_learner[0] == 3
    assert made.sync.lam == 2 and [m[2] for m in made.sync.members()] == ["lost", "present", "present"]
    assert {d.c for d in decisions} == {1}


def test_one_that_comes_back_is_another_incarnation() -> None:
    ids = []
    Engine(
        SyncParams(protocol="async"),
        LearnerParams(count=1, minibatch=1),
        DataParams(6, 1),
        SECOND,
        changes=[Change(2.5, 0, "lost"), Change(4.0, 0, "join")],
        on_decision=lambda d: ids.extend(e.id for e in d.entries),
    ).run()
    assert [tuple(i) for i in ids] == [(0, 1, 1), (0, 1, 2), (0, 2, 1), (0, 2, 2), (0, 2, 3), (0, 2, 4)]


def test_a_fenced_learner_is_back_at_once() -> None:
    made = Engine(
        SyncParams(protocol="async"), LearnerParams(count=1, minibatch=1, step_timeout=0.5), DataParams(4, 1), SECOND
    )
    result = made.run()
    # The first step of an incarnation is exempt, every second one is cut short after half a second.
    assert result.samples == 4 and result.seconds == pytest.approx(1 + 0.5 + 1 + 0.5 + 1 + 0.5 + 1)
    assert made.sync.members() == [(0, 4, "present", 4)]


def test_a_loss_is_noticed_at_its_deadline() -> None:
    result = Engine(
        SyncParams(protocol="hardsync"),
        LearnerParams(count=2, minibatch=1, deadline=5.0),
        DataParams(8, 1),
        SECOND,
        changes=[Change(1.5, 1, "lost")],
    ).run()
    assert result.samples == 8 and result.seconds == 6.5 + 5.0


def test_a_job_that_waits_for_ever_or_fails_ends() -> None:
    for on_lost, ended in [("wait", type(None)), ("fail", Failed)]:
        result = Engine(
            SyncParams(protocol="hardsync"),
            LearnerParams(count=2, minibatch=1, deadline=5.0, on_lost=on_lost),
            DataParams(8, 1),
            SECOND,
            changes=[Change(1.5, 1, "lost")],
        ).run()
        assert isinstance(result.ended, ended) and result.samples == 2


# -------------------------------------------------------------------------------------- real gradients


def descend(gradient: object, decisions: list[Decision], count: int = 2, **more: object) -> Vector:
    spec = RuleSpec("sgd", groups=(GroupSpan(0, 3, 1.0, 0.0),))
    training = CpuTraining(spec, np.zeros(3, np.float32), gradient, lambda progress: 0.5)  # type: ignore[arg-type]
    Engine(
        SyncParams(modulation="staleness"),
        LearnerParams(count=count, minibatch=1),
        DataParams(40, 1),
        SECOND,
        training=training,
        on_decision=decisions.append,
        **more,  # type: ignore[arg-type]
    ).run()
    return training.weights()


def test_gradients_are_of_the_weights_that_the_learner_held() -> None:
    seen: list[tuple[float, tuple[Span, ...]]] = []

    def gradient(weights: Vector, spans: tuple[Span, ...]) -> Vector:
        seen.append((float(weights[0]), spans))
        return np.full(3, -2.0, np.float32)

    decisions: list[Decision] = []
    weights = descend(gradient, decisions)
    history = [0.0]
    for decision in decisions:
        history.append(history[-1] + decision.weight_sum)
    assert weights == pytest.approx([history[-1]] * 3)
    stamps = {entry.spans: entry.timestamp for decision in decisions for entry in decision.entries}
    assert len(seen) == 40
    for value, spans in seen:
        assert value == pytest.approx(history[stamps[spans]])


def test_folded_gradients_count_like_the_others() -> None:
    decisions: list[Decision] = []
    weights = descend(
        lambda weights, spans: np.full(3, -2.0 * (1 + spans[0].start), np.float32),
        decisions,
        count=4,
        slowness=(1.0, 5.0, 5.0, 5.0),
    )
    assert any(entry.folded for decision in decisions for entry in decision.entries)
    total = sum(e.coefficient * (1 + e.spans[0].start) for decision in decisions for e in decision.entries)
    assert weights == pytest.approx([total] * 3, rel=1e-5)


def test_gradients_of_the_dead_and_of_the_stale_are_forgotten() -> None:
    spec = RuleSpec("sgd", groups=(GroupSpan(0, 3, 1.0, 0.0),))
    training = CpuTraining(spec, np.zeros(3, np.float32), lambda w, s: np.ones(3, np.float32), lambda progress: 0.1)
    made = Engine(
        SyncParams(protocol="async", max_staleness=1),
        LearnerParams(count=4, minibatch=1),
        DataParams(80, 1),
        Compute("exponential", 1.0),
        training=training,
        changes=[Change(5.0, 1, "lost")],
    )
    made.run()
    assert made.sync.counters.dropped["stale"] > 0 and made._gradients == {}


def test_a_gradient_that_is_not_finite_is_said() -> None:
    with pytest.raises(FloatingPointError, match="update 1 is not finite"):
        descend(lambda weights, spans: np.full(3, np.nan, np.float32), [])
