"""Both back ends of the update against the reference, bit for bit; promises about memory, threads and state."""

from __future__ import annotations

import functools
import threading
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from rudra_zmq.update import blocks, compiled, ir_step
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.cpu_kernels import KERNELS
from rudra_zmq.update.rules import RULES, GroupSpan, RuleSpec, State, Term, new_state, reference_step

N = 200_003
SMALL = 20_000
MANY = (0, 1, 17, 8191, 8192, 8193, 70_000, 70_016, 131_072, 180_000, 200_002, N)


@pytest.fixture(params=["compiled", "numpy"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each back end, with threads for small vectors too."""
    if request.param == "compiled":
        pytest.importorskip("llvmlite")
    for module in (blocks, compiled):
        monkeypatch.setattr(module, "MIN_PER_THREAD", 8192)
    return request.param


def bits(x: np.ndarray) -> np.ndarray:
    """The bits, with one NaN for all NaNs: which of them an operation returns is not part of the promise."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


@functools.cache
def vectors() -> list[np.ndarray]:
    """Six vectors over 40 orders of magnitude with zeros, subnormals, the tiniest and largest normals."""
    rng = np.random.default_rng(11)
    info = np.finfo(np.float32)
    edges = [0.0, -0.0, info.tiny, -info.tiny, info.smallest_subnormal, info.max, -info.max]
    special = np.array(edges, np.float32)
    out = []
    for _ in range(6):
        x = rng.standard_normal(N) * 10.0 ** rng.uniform(-20, 3, N)
        x = np.where(rng.random(N) < 0.7, rng.standard_normal(N), x).astype(np.float32)
        x[rng.integers(0, N, 500)] = rng.choice(special, 500)
        x.setflags(write=False)
        out.append(x)
    return out


def make_spec(rule: str, layout: str, clip: float | None, n: int = N) -> RuleSpec:
    if layout == "one":
        return RuleSpec.of(rule, [GroupSpan(0, n, 1.0, 5e-4)], clip)
    kinds = [(1.0, 5e-4), (2.0, 0.0), (0.5, 0.1)]
    ends = pairwise(MANY)
    return RuleSpec.of(rule, [GroupSpan(a, b, *kinds[i % 3]) for i, (a, b) in enumerate(ends)], clip)


def updates() -> list[tuple[list[Term], Term | None, float, float, float]]:
    """direct, folded, weight_sum, s_bar, lr: c = 4, folded and direct, folded alone, c = 1."""
    a, b, c, d, e, _ = vectors()
    return [
        ([(0.3, a), (0.25, b), (0.2, c), (0.25, d)], None, 1.0, 1.0, 0.03),
        ([(0.1, b), (0.05, d)], (1 / 96, e), 0.35, 0.4, 0.02),
        ([], (0.2, c), 0.21, 1 / 3, 0.01),
        ([(1 / 29, d)], None, 1 / 29, 1 / 29, 0.003),
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["one", "many"])
@pytest.mark.parametrize("clip", [None, 1e38])  # the norm is about 2e39: there are largest normals in it
def test_zero_ulp(rule: str, layout: str, clip: float | None, backend: str) -> None:
    spec = make_spec(rule, layout, clip)
    alone = CpuUpdate(spec, N, backend=backend)
    several = CpuUpdate(spec, N, threads=3, block=16384, backend=backend)
    assert alone.backend == several.backend == backend
    assert (alone.threads, several.threads) == (1, 3)
    state: State = new_state(spec, N)
    w = vectors()[5]
    out = [np.empty(N, np.float32) for _ in range(2)]
    for i, update in enumerate(updates()):
        expected = reference_step(spec, state, w, *update)
        for engine in (alone, several):
            out[0].fill(np.nan)
            report = engine.step(w, *update, out[0])
            assert report.finite
            assert report.grad_norm is None if clip is None else report.grad_norm > clip
            assert np.array_equal(bits(out[0]), bits(expected)), f"weights of update {i}"
            for name, array in engine.state_dict().items():
                same = array == state[name] if name == "t" else bits(array) == bits(state[name])
                assert same.all(), f"{name} after update {i}"
        w = expected
        w.setflags(write=False)
    several.close()


def test_the_data_tell_a_fused_multiply_add_apart() -> None:
    a, b = (x.astype(np.float64) for x in vectors()[:2])
    apart = np.float32(0.3) * vectors()[0] + np.float32(0.7) * vectors()[1]
    first = (np.float32(0.3) * vectors()[0]).astype(np.float64)
    fused = (first + np.float64(np.float32(0.7)) * b).astype(np.float32)
    assert a.size == N
    assert np.mean(bits(apart) != bits(fused)) > 0.03


def test_a_kernel_for_every_rule() -> None:
    assert list(KERNELS) == list(ir_step.RULES_TEXT) == list(RULES)


@pytest.mark.parametrize("past_cache", [0.0, 0.75])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_count_of_gradients_at_every_offset(
    past_cache: float, rule: str, clip: float | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors that begin anywhere in a cache line, groups of any length, new weights in and past the cache."""
    monkeypatch.setattr(compiled, "PAST_CACHE", past_cache)
    rng = np.random.default_rng(7)
    for c in range(1, 8):
        n = int(rng.integers(1, 500))
        ends = sorted({0, n, *rng.integers(1, n + 1, 4).tolist()})
        spans = [GroupSpan(a, b, 1.0 + a, 0.1 * (a % 2)) for a, b in pairwise(ends)]
        spec = RuleSpec.of(rule, spans, clip)
        guarded = [np.full(n + 32, 7.0, np.float32) for _ in range(c + 2)]
        starts = rng.integers(0, 16, c + 2)
        w, out, *gradients = (whole[at : at + n] for whole, at in zip(guarded, starts, strict=True))
        for vector in (w, *gradients):
            vector[:] = rng.standard_normal(n, dtype=np.float32)
        terms = [(float(b), g) for b, g in zip(rng.random(c), gradients, strict=True)]
        engine, state = CpuUpdate(spec, n, backend=backend), new_state(spec, n)
        for _ in range(2):
            expected = reference_step(spec, state, w, terms, None, 1.0, 0.5, 0.1)
            assert engine.step(w, terms, None, 1.0, 0.5, 0.1, out).finite
            assert np.array_equal(bits(out), bits(expected))
        for whole, at in zip(guarded, starts, strict=True):
            assert (whole[:at] == 7.0).all()
            assert (whole[at + n :] == 7.0).all()


@pytest.mark.parametrize("n", [1, 7, 8192, 8193, 65_536, 65_537])
def test_small_and_odd_sizes(n: int, backend: str) -> None:
    rng = np.random.default_rng(n)
    w, g = rng.standard_normal((2, n), dtype=np.float32)
    spec = RuleSpec.of("adam", [GroupSpan(0, n, 1.0, 0.1)], 1.0)
    engine, out = CpuUpdate(spec, n, threads=4, backend=backend), np.empty(n, np.float32)
    engine.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1, out)
    expected = reference_step(spec, new_state(spec, n), w, [(1.0, g)], None, 1.0, 1.0, 0.1)
    assert np.array_equal(bits(out), bits(expected))


def test_grad_norm_is_the_norm_of_the_sum(backend: str) -> None:
    engine = CpuUpdate(make_spec("sgd", "one", 1.0), N, backend=backend)
    g = np.random.default_rng(0).standard_normal(N, dtype=np.float32)
    out = np.empty(N, np.float32)
    report = engine.step(g, [(0.5, g), (0.5, g)], None, 1.0, 1.0, 0.1, out)
    assert report.grad_norm == pytest.approx(np.linalg.norm(g.astype(np.float64)), rel=1e-6)


@pytest.mark.parametrize("c", [1, 5])
def test_a_factor_of_clipping_that_is_zero(c: int, backend: str) -> None:
    spec = RuleSpec.of("momentum", [GroupSpan(0, SMALL, 1.0, 0.0)], 1e-30)
    w, g, out = np.random.default_rng(4).standard_normal((3, SMALL), dtype=np.float32)
    terms = [(1.0, g * np.float32(1e20))] * c
    engine = CpuUpdate(spec, SMALL, backend=backend)
    engine.step(w, terms, None, 1.0, 1.0, 0.1, out)
    assert np.array_equal(out, w)
    assert np.array_equal(bits(out), bits(reference_step(spec, new_state(spec, SMALL), w, terms, None, 1.0, 1.0, 0.1)))


def test_fold_is_the_sum_of_the_reference(backend: str) -> None:
    engine = CpuUpdate(make_spec("sgd", "one", None), N, threads=2, backend=backend)
    acc = np.zeros(N, np.float32)
    expected = np.zeros(N, np.float32)
    for coefficient, g in zip((32.0, 16.0, 7.3), vectors(), strict=False):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = expected + np.float32(coefficient) * g
        engine.fold(acc, coefficient, g)
    assert np.array_equal(bits(acc), bits(expected))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 8191, 16384, SMALL - 1])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_value_that_is_not_finite_is_reported(
    clip: float | None, value: float, where: int, threads: int, backend: str
) -> None:
    spec = RuleSpec.of("adam", [GroupSpan(0, SMALL, 1.0, 0.0)], clip)
    engine = CpuUpdate(spec, SMALL, threads, 8192, backend=backend)
    assert engine.threads == threads
    rng = np.random.default_rng(5)
    w, good, bad, out = rng.standard_normal((4, SMALL), dtype=np.float32)
    assert engine.step(w, [(0.5, good), (0.5, bad)], None, 1.0, 1.0, 0.1, out).finite
    before = engine.state_dict()
    bad[where] = value
    assert not engine.step(w, [(0.5, good), (0.5, bad)], None, 1.0, 1.0, 0.1, out).finite
    assert not engine.step(w, [(0.5, good)], (0.5, bad), 1.0, 1.0, 0.1, out).finite
    if clip is not None:
        after = engine.state_dict()
        assert all(np.array_equal(before[name], after[name]) for name in before)
    engine.close()


def test_a_sum_that_overflows_is_reported_and_the_largest_values_are_not(backend: str) -> None:
    spec = RuleSpec.of("sgd", [GroupSpan(0, 4, 1.0, 0.0)])
    engine, out = CpuUpdate(spec, 4, backend=backend), np.empty(4, np.float32)
    w, big = np.zeros(4, np.float32), np.full(4, np.finfo(np.float32).max)
    assert engine.step(w, [(0.5, big), (0.5, big)], None, 1.0, 1.0, 1.0, out).finite
    assert not engine.step(w, [(1.0, big), (1.0, big)], None, 1.0, 1.0, 1.0, out).finite


@pytest.mark.parametrize("rule", RULES)
def test_a_loaded_state_goes_on_with_the_same_bits(rule: str, backend: str) -> None:
    spec = RuleSpec.of(rule, [GroupSpan(0, SMALL, 1.0, 0.1)])
    rng = np.random.default_rng(3)
    w, g, h, kept, again = rng.standard_normal((5, SMALL), dtype=np.float32)
    first, second = CpuUpdate(spec, SMALL, backend=backend), CpuUpdate(spec, SMALL, backend="numpy")
    first.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1, kept)
    saved = first.state_dict()
    second.load_state_dict(saved)
    frozen = {name: array.copy() for name, array in saved.items()}
    first.step(w, [(1.0, h)], None, 1.0, 1.0, 0.1, kept)
    second.step(w, [(1.0, h)], None, 1.0, 1.0, 0.1, again)
    assert np.array_equal(kept, again)
    assert all(np.array_equal(saved[name], frozen[name]) for name in saved), "state_dict is a copy"
    arrays = dict(saved)
    assert first.state_dict(into=saved) is saved
    assert all(saved[name] is arrays[name] for name in saved)
    assert all(np.array_equal(saved[name], value) for name, value in second.state_dict().items())


def test_a_state_of_another_rule_or_size_is_refused() -> None:
    engine = CpuUpdate(RuleSpec.of("adam", [GroupSpan(0, 8, 1.0, 0.0)]), 8)
    good = engine.state_dict()
    for name, value, text in [
        ("mean", np.zeros(9, np.float32), r"'mean' is float32 of shape \(8,\), got float32 of shape \(9,\)"),
        ("mean", np.zeros(8, np.float64), r"got float64"),
        ("t", np.zeros(1, np.int32), r"state 't' is int64 of shape \(1,\), got int32"),
        ("velocity", np.zeros(8, np.float32), r"state of rule adam is \['mean', 'square_mean', 't'\], got"),
    ]:
        bad = {"square_mean": np.ones(8, np.float32), **{k: v for k, v in good.items() if k != "square_mean"}}
        with pytest.raises(ValueError, match=text):
            engine.load_state_dict({**bad, name: value})
        assert not engine.state_dict()["square_mean"].any(), "a refused state changes nothing"


@pytest.mark.parametrize("threads", [1, 2])
def test_other_groups_leave_the_state_alone(threads: int, backend: str) -> None:
    one, many = make_spec("adam", "one", 1.0), make_spec("adam", "many", 1.0)
    direct, folded, *rest = updates()[0]
    back_end = CpuUpdate(one, N, threads, backend=backend)
    state = new_state(one, N)
    w, out = vectors()[5], np.empty(N, np.float32)
    for spec in (one, many, one):
        back_end.regroup(spec.groups)
        expected = reference_step(spec, state, w, direct, folded, *rest)
        back_end.step(w, direct, folded, *rest, out)
        np.testing.assert_array_equal(bits(out), bits(expected))
        w = out.copy()
    assert back_end.spec == one and back_end.threads == threads
    with pytest.raises(ValueError, match="cover"):
        back_end.regroup([GroupSpan(0, N - 1, 1.0, 0.0)])
    back_end.close()


def test_bad_arguments_are_refused(backend: str) -> None:
    spec = RuleSpec.of("adam", [GroupSpan(0, 8, 1.0, 0.0)])
    engine = CpuUpdate(spec, 8, backend=backend)
    w, g, out = np.zeros((3, 8), np.float32)
    with pytest.raises(ValueError, match="at least one gradient"):
        engine.step(w, [], None, 1.0, 1.0, 0.1, out)
    with pytest.raises(ValueError, match="weight_sum"):
        engine.step(w, [(1.0, g)], None, 0.0, 1.0, 0.1, out)
    with pytest.raises(ValueError, match="shares memory"):
        engine.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1, w)
    with pytest.raises(ValueError, match="shares memory"):
        engine.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1, g)
    with pytest.raises(ValueError, match="shares memory"):
        engine.fold(w, 1.0, w)
    for wrong in (np.zeros(8), np.zeros(7, np.float32), np.zeros((8, 1), np.float32), np.zeros(8, ">f4")):
        expected = r"expected float32 or float16 or uint16 of shape \(8,\), got"
        with pytest.raises(ValueError, match=expected):
            engine.step(w, [(1.0, g), (1.0, wrong)], None, 1.0, 1.0, 0.1, out)
        with pytest.raises(ValueError, match=expected):
            engine.fold(w, 1.0, wrong)
    half = np.zeros(8, np.float16)
    for args in [(half, g, out), (w, g, half)]:
        with pytest.raises(ValueError, match=r"expected float32 of shape \(8,\), got float16"):
            engine.step(args[0], [(1.0, args[1])], None, 1.0, 1.0, 0.1, args[2])
    for odd in (np.zeros(16, np.float32)[::2], np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float32)):
        with pytest.raises(ValueError, match="not contiguous, or not aligned"):
            engine.step(w, [(1.0, odd)], None, 1.0, 1.0, 0.1, out)
    sealed = np.zeros(8, np.float32)
    sealed.setflags(write=False)
    with pytest.raises(ValueError, match="cannot be written"):
        engine.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1, sealed)
    with pytest.raises(ValueError, match="cannot be written"):
        engine.fold(sealed, 1.0, g)
    assert engine.state_dict()["t"][0] == 0
    with pytest.raises(ValueError, match="groups cover"):
        CpuUpdate(spec, 9)
    for threads, block in ((0, 8192), (1, 0), (1, 8191)):
        with pytest.raises(ValueError, match="below 1, or block"):
            CpuUpdate(spec, 8, threads, block)
    with pytest.raises(ValueError, match=r"backend 'fast' is unknown; known ones: auto, compiled, numpy"):
        CpuUpdate(spec, 8, backend="fast")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_no_vector_is_allocated_in_steady_state(rule: str, clip: float | None, backend: str) -> None:
    engine = CpuUpdate(make_spec(rule, "many", clip), N, backend=backend)
    w, g, h, acc, out = np.random.default_rng(0).standard_normal((5, N), dtype=np.float32)

    def turn() -> None:
        engine.fold(acc, 1.0, h)
        engine.step(w, [(0.5, g)], (0.5, acc), 1.0, 1.0, 0.1, out)

    turn()
    tracemalloc.start()
    try:
        turn()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40_000, "a block is 262,144 bytes, the float64 of a norm's 65,536"


@pytest.mark.parametrize("name", ["compiled", "numpy"])
def test_threads_only_for_large_vectors_and_none_left(name: str) -> None:
    if name == "compiled":
        pytest.importorskip("llvmlite")
    per_thread = {"compiled": compiled, "numpy": blocks}[name].MIN_PER_THREAD
    spec = RuleSpec.of("sgd", [GroupSpan(0, SMALL, 1.0, 0.0)])
    assert CpuUpdate(spec, SMALL, threads=8, backend=name).threads == 1
    n = 3 * per_thread
    engine = CpuUpdate(RuleSpec.of("sgd", [GroupSpan(0, n, 1.0, 0.0)]), n, threads=2, backend=name)
    w, g, out = np.ones(n, np.float32), np.ones(n, np.float32), np.empty(n, np.float32)
    engine.step(w, [(1.0, g)], None, 1.0, 1.0, 1.0, out)
    assert engine.threads == 2
    assert not out.any()
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rudra-update")]
