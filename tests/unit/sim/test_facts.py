"""RUDRA.md's facts in virtual time. The number of each is in its test's name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import fmean

import numpy as np
import pytest

from rudra_zmq.core.events import Decision, Span
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.permutation import permutation
from rudra_zmq.sim.compute import Compute
from rudra_zmq.sim.engine import Change, Engine, Result
from rudra_zmq.sim.training import CpuTraining, Vector
from rudra_zmq.update.rules import GroupSpan, RuleSpec

CONSTANT = Compute("constant", 0.02)
GAUSSIAN = Compute("gaussian", 0.02, 0.2)
EXPONENTIAL = Compute("exponential", 0.02)
ONE_SLOW = (1.0,) * 29 + (3.0,)


def engine(
    protocol: str = "softsync",
    n: int = 1,
    lam: int = 30,
    compute: Compute = GAUSSIAN,
    *,
    rounds: int = 400,
    mu: int = 4,
    **more,
) -> Engine:
    data = more.pop("data", DataParams(samples=(rounds + 2) * lam * mu, epochs=1))
    sync = SyncParams(protocol=protocol, n=n, **more.pop("sync", {}))
    return Engine(sync, LearnerParams(count=lam, minibatch=mu), data, compute, **more)


@cache
def steady(n: int, compute: Compute, slowness: tuple[float, ...] = ()) -> Result:
    return engine(n=n, compute=compute, slowness=slowness, rounds=300).run(gradients=300 * 30, discard=30 * 30)


def test_1_hardsync_takes_one_gradient_of_each_learner_and_is_never_stale() -> None:
    decisions: list[Decision] = []
    data = DataParams(samples=600 * 8 + 5, epochs=2)  # the last round of an epoch deals 5 samples
    made = engine("hardsync", lam=4, mu=2, compute=EXPONENTIAL, data=data, on_decision=decisions.append)
    result = made.run()
    assert result.staleness.counts == {0: result.gradients} and result.ended and made.sync.finished
    short = [d for d in decisions if d.samples != 8]
    assert [[(e.id.rank, e.count) for e in d.entries] for d in short] == [[(0, 2), (1, 2), (2, 1)]] * 2
    assert [e.coefficient for e in short[0].entries] == pytest.approx([2 / 5, 2 / 5, 1 / 5])
    for decision in decisions:
        assert decision in short or [e.id.rank for e in decision.entries] == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------- real gradients


def plain(n: int, momentum: float = 0.9) -> RuleSpec:
    return RuleSpec("momentum" if momentum else "sgd", momentum=momentum, groups=(GroupSpan(0, n, 1.0, 0.0),))


def least_squares(samples: int, size: int) -> Callable[[Vector, tuple[Span, ...]], Vector]:
    """The mean gradient of (x.w - y)^2/2 over the samples that the spans stand for, in float32."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(samples, size)).astype(np.float32)
    y = (x @ np.ones(size, np.float32)).astype(np.float32)
    orders = {epoch: permutation(1, epoch, samples) for epoch in range(3)}

    def gradient(weights: Vector, spans: tuple[Span, ...]) -> Vector:
        rows = np.concatenate([orders[span.epoch][span.start : span.stop] for span in spans])
        return ((x[rows] @ weights - y[rows]) @ x[rows] / np.float32(len(rows))).astype(np.float32)

    return gradient


def train(protocol: str, lam: int, samples: int = 50, epochs: int = 2, compute: Compute = GAUSSIAN) -> Vector:
    start = np.zeros(6, np.float32)
    training = CpuTraining(plain(6), start, least_squares(samples, 6), lambda progress: 0.1 / (1.0 + progress))
    engine(protocol, lam=lam, compute=compute, data=DataParams(samples, epochs), training=training).run()
    return training.weights()


def test_2_hardsync_is_one_process_that_averages_the_same_batches_in_rank_order() -> None:
    lam, mu, samples = 3, 4, 50
    gradient = least_squares(samples, 6)
    weights, velocity = np.zeros(6, np.float32), np.zeros(6, np.float32)
    for epoch in range(2):
        at = 0
        while at < samples:
            progress = epoch + at / samples
            batches = []
            for _ in range(lam):
                if at < samples:
                    batches.append(Span(epoch, at, min(at + mu, samples)))
                    at = batches[-1].stop
            total = sum(batch.count for batch in batches)
            mean = np.zeros(6, np.float32)
            for batch in batches:
                mean = mean + np.float32(batch.count / total) * gradient(weights, (batch,))
            velocity = np.float32(0.9) * velocity + mean
            weights = weights - np.float32(0.1 / (1.0 + progress)) * velocity
    assert np.array_equal(train("hardsync", lam), weights)


def test_3_one_learner_trains_the_same_under_every_protocol() -> None:
    trajectories = [train(protocol, 1) for protocol in ("hardsync", "softsync", "async")]
    assert all(np.array_equal(trajectories[0], other) for other in trajectories[1:])
    assert np.linalg.norm(trajectories[0] - 1) < 1.0


@pytest.mark.parametrize("kind", ["lost", "bye"])
def test_5_every_sample_counts_once_whoever_dies(kind: str) -> None:
    decisions: list[Decision] = []
    changes = [Change(0.013 * k, k % 4, kind if k % 2 else "join") for k in range(1, 12)]
    data = DataParams(samples=200, epochs=2)
    made = engine(lam=4, compute=EXPONENTIAL, data=data, changes=changes, on_decision=decisions.append)
    result = made.run()
    applied = [(s.epoch, at) for d in decisions for e in d.entries for s in e.spans for at in range(s.start, s.stop)]
    assert sorted(applied) == [(epoch, at) for epoch in range(2) for at in range(200)]
    counters = made.sync.counters
    assert counters.accepted == counters.applied == result.gradients and made.sync.pending == 0
    assert result.samples == 400 and [epoch.epoch for epoch in result.epochs] == [0, 1]


def test_7_mean_sigma_is_that_of_the_vector_clock() -> None:
    decisions: list[Decision] = []
    engine(n=4, rounds=100, on_decision=decisions.append).run()
    for decision in decisions:
        stamps = [e.timestamp for e in decision.entries]
        assert decision.mean_sigma == pytest.approx(decision.update - 1 - fmean(stamps))
        assert max(stamps) < decision.update


def test_10_distinct_learners_draw_distinct_samples_and_the_same_seed_the_same() -> None:
    def drawn(seed: int) -> dict[int, list[int]]:
        order, taken = permutation(seed, 0, 400), dict[int, list[int]]()

        def note(decision: Decision) -> None:
            for entry in decision.entries:
                for span in entry.spans:
                    taken.setdefault(entry.id.rank, []).extend(order[span.start : span.stop].tolist())

        engine(lam=4, data=DataParams(400, 1), on_decision=note).run()
        return taken

    first = drawn(1)
    assert sorted(sample for samples in first.values() for sample in samples) == list(range(400))
    assert drawn(1) == first and drawn(2) != first


# ------------------------------------------------------------------------------------------- staleness


@pytest.mark.parametrize(("n", "law"), [(1, 0.967), (2, 1.933), (15, 14.5), (30, 29.0)])
@pytest.mark.parametrize(
    ("compute", "slowness"),
    [(CONSTANT, ()), (GAUSSIAN, ()), (EXPONENTIAL, ()), (GAUSSIAN, ONE_SLOW)],
    ids=["constant", "gaussian", "exponential", "one 3x slower"],
)
def test_12_mean_staleness_is_the_law(n: int, law: float, compute: Compute, slowness: tuple[float, ...]) -> None:
    assert steady(n, compute, slowness).staleness.mean == pytest.approx(law, rel=0.01)


@pytest.mark.parametrize("compute", [CONSTANT, Compute("gaussian", 0.02, 0.05), GAUSSIAN], ids=["0 %", "5 %", "20 %"])
def test_13_with_little_jitter_nothing_passes_2n(compute: Compute) -> None:
    assert set(steady(1, compute).staleness.counts) <= {0, 1, 2}
    for n in (2, 15):
        assert steady(n, compute).staleness.max <= 2 * n


def test_13_but_2n_is_no_guarantee() -> None:
    for n in (2, 15, 30):
        counts = steady(n, EXPONENTIAL).staleness
        above = sum(count for sigma, count in counts.counts.items() if sigma > 2 * n) / counts.total
        assert 0.06 < above < 0.15, n
    slow = steady(30, GAUSSIAN, ONE_SLOW).staleness
    assert 0.005 < sum(count for sigma, count in slow.counts.items() if sigma > 60) / slow.total < 0.02


@pytest.mark.parametrize("how", ["drop", "hold"])
def test_13_so_there_is_a_bound(how: str) -> None:
    made = engine(n=15, compute=EXPONENTIAL, rounds=60, sync={"max_staleness": 20, "on_stale": how})
    result = made.run()
    assert result.staleness.max <= 20 and result.ended and result.samples == 62 * 120
    assert (made.sync.counters.dropped.get("stale", 0) > 0) == (how == "drop")


# ------------------------------------------------------------------------------------------ convergence


def descend(alpha_l: float, lam: int, updates: int, momentum: float, far: float = 10.0, **sync: object) -> float:
    """|w| after so many updates on the quadratic L w^2/2 with L = 1, w0 = 1; infinite beyond ``far``."""
    n, compute = sync.pop("n", lam), sync.pop("compute", CONSTANT)

    class Far(Exception):
        pass

    def gradient(weights: Vector, spans: tuple[Span, ...]) -> Vector:
        if abs(weights[0]) > far:
            raise Far
        return weights

    training = CpuTraining(plain(1, momentum), np.ones(1, np.float32), gradient, lambda progress: alpha_l)
    data = DataParams(samples=(updates + 1) * lam, epochs=1, max_updates=updates)
    try:
        engine(n=n, lam=lam, mu=1, compute=compute, data=data, training=training, sync=sync).run()
    except Far:
        return math.inf
    return float(abs(training.weights()[0]))


def limit(tau: int) -> float:
    return 2 * math.sin(math.pi / (2 * (2 * tau + 1)))


@pytest.mark.parametrize(
    ("tau", "edge"), [(0, 2.0), (1, 1.0), (2, 0.618), (4, 0.348), (8, 0.185), (15, 0.101), (30, 0.052)]
)
def test_15_delayed_descent_is_stable_up_to_its_limit(tau: int, edge: float) -> None:
    # tau + 1 learners of equal speed under async: every sigma is tau.
    assert limit(tau) == pytest.approx(edge, abs=5e-3 if tau == 30 else 1e-3)
    assert descend(0.9 * limit(tau), tau + 1, 3000, 0.0, modulation="none") < 0.1
    assert descend(1.1 * limit(tau), tau + 1, 9000, 0.0, modulation="none") == math.inf


@pytest.mark.parametrize(
    ("tau", "edge"), [(0, 3.8), (1, 0.100), (2, 0.0514), (4, 0.0266), (8, 0.0139), (15, 0.0079), (30, 0.0043)]
)
def test_15_with_momentum_the_limit_is_lower(tau: int, edge: float) -> None:
    assert descend(0.85 * edge, tau + 1, 6000, 0.9, modulation="none") < 0.1
    assert descend(1.15 * edge, tau + 1, 9000, 0.9, modulation="none") == math.inf


def modulated(n: int, modulation: str) -> float:
    return descend(0.09, 30, 2000, 0.9, far=1e6, n=n, modulation=modulation, compute=GAUSSIAN)


def test_16_one_softsync_converges_at_a_fixed_rate() -> None:
    assert modulated(1, "none") < 1e-3


@pytest.mark.parametrize(
    ("n", "modulation"), [(2, "staleness"), (6, "average"), (6, "n"), (15, "staleness"), (30, "average")]
)
def test_16_modulated_rates_converge(n: int, modulation: str) -> None:
    assert modulated(n, modulation) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2, 6, 15, 30])
@pytest.mark.parametrize("modulation", ["average", "staleness", "n"])
def test_16_modulated_rates_converge_for_every_n(n: int, modulation: str) -> None:
    assert modulated(n, modulation) < 1e-3


@pytest.mark.parametrize("n", [2, 6, 15, 30])
@pytest.mark.parametrize("modulation", ["none", "inverse-sqrt"])
def test_16_a_fixed_rate_and_the_square_root_diverge(n: int, modulation: str) -> None:
    assert modulated(n, modulation) == math.inf


# ----------------------------------------------------------------------------------------------- runtime


def test_17_softsync_is_never_slower_than_hardsync_and_the_gap_is_harmonic() -> None:
    harmonic = sum(1 / k for k in range(1, 31))
    for compute, ratio in [(CONSTANT, 1.0), (EXPONENTIAL, harmonic)]:
        times = [
            engine(protocol, compute=compute).run(gradients=150 * 30).seconds for protocol in ("hardsync", "softsync")
        ]
        assert times[0] / times[1] == pytest.approx(ratio, rel=0.05)
