"""The encodings: the reference against formulas of its own, the code that jobs run against the reference, bit for bit."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rudra_zmq.update import codecs
from rudra_zmq.update.codecs import BFLOAT16_INFINITY, BLOCK, FLOAT16_INFINITY, STEP, Quantised, Scratch, Sparse
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.rules import RULES, GroupSpan, RuleSpec, decode, new_state, reference_step

F32_MAX = float(np.finfo(np.float32).max)
EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
    0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x3F800000, 0x477FE000, 0x477FEFFF, 0x477FF000,
    0x477FF001, 0x33000000, 0x33000001, 0x38800000, 0x387FC000, 0x7F7F7FFF, 0x7F7F8000, 0x3F808000, 0x3F818000,
]  # fmt: skip
"""Zeros, subnormals, the smallest and largest normals, infinities, NaNs, and what lies at and beside halfway cases."""

patterns = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1)), min_size=1, max_size=200)


def floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def rounded(value: float, significant: int, least: int, most: int) -> float:
    """To nearest, ties to even, among the multiples of 2^least with so many significant bits, below 2^most."""
    if value == 0 or math.isinf(value) or math.isnan(value):
        return value
    exact = Fraction(value)
    power = max(math.frexp(value)[1] - significant, least)
    unit = Fraction(2) ** power
    result = round(exact / unit) * unit  # Python rounds ties to even
    if abs(result) >= Fraction(2) ** most:
        return math.copysign(math.inf, value)
    return math.copysign(float(result), value)


def is_the_same(a: float, b: float) -> bool:
    return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))


@settings(max_examples=300, deadline=None)
@given(patterns)
def test_halves_are_rounded_to_nearest_even(bits: list[int]) -> None:
    x = floats(bits)
    halves, brains = codecs.to_float16(x), codecs.to_bfloat16(x)
    for value, half, brain in zip(x.tolist(), decode(halves).tolist(), decode(brains).tolist(), strict=True):
        assert is_the_same(half, rounded(value, 11, -24, 16))
        assert is_the_same(brain, rounded(value, 8, -133, 128))


@settings(max_examples=300, deadline=None)
@given(patterns)
def test_halves_in_one_pass_are_the_reference(bits: list[int]) -> None:
    x = floats(bits)
    half, brain = np.zeros(x.size, np.float16), np.zeros(x.size, np.uint16)
    assert codecs.encode_float16(x, half) == bool(np.isfinite(codecs.to_float16(x)).all())
    assert codecs.encode_bfloat16(x, brain, Scratch(x.size)) == bool(np.isfinite(decode(codecs.to_bfloat16(x))).all())
    assert np.array_equal(half, codecs.to_float16(x), equal_nan=True)
    assert np.array_equal(brain, codecs.to_bfloat16(x))
    out = np.empty(x.size, np.float32)
    codecs.decode_into(brain, out)
    assert out.tobytes() == decode(brain).tobytes()


@pytest.mark.parametrize("bad", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0x477FF000])
@pytest.mark.parametrize("at", [0, STEP - 1, STEP, STEP + 76])
def test_one_bad_value_anywhere_is_seen(bad: int, at: int) -> None:
    """The last one is finite, and infinite as float16 alone."""
    x = np.ones(STEP + 77, np.float32)
    x.view(np.uint32)[at] = bad
    n, scratch = x.size, Scratch(x.size)
    assert not codecs.encode_float16(x, np.zeros(n, np.float16))
    fits = bad == 0x477FF000
    assert codecs.encode_bfloat16(x, np.zeros(n, np.uint16), scratch) == fits
    assert codecs.encode_int8(x, np.zeros(-(-n // BLOCK), np.float32), np.zeros(n, np.int8), scratch) == fits


def test_finite_halves_of_every_pattern() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for infinity, values in ((FLOAT16_INFINITY, every.view(np.float16)), (BFLOAT16_INFINITY, decode(every))):
        for i in range(every.size):
            assert codecs.finite_halves(every[i : i + 1], infinity) == bool(np.isfinite(values[i])), i


# ---- int8

finite_patterns = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1)).filter(
    lambda b: (b & 0x7F800000) != 0x7F800000
)


def int8_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    scales, q = np.full(-(-x.size // BLOCK), 9, np.float32), np.full(x.size, 9, np.int8)
    good = codecs.encode_int8(x, scales, q, Scratch(x.size))
    return scales, q, good


@settings(max_examples=200, deadline=None)
@given(st.lists(finite_patterns, min_size=1, max_size=40), st.integers(0, 2 * BLOCK + 50), st.integers(0, 2**32 - 1))
def test_int8_is_the_formula(bits: list[int], rest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.concatenate([floats(bits), rng.standard_normal(rest, dtype=np.float32)])
    with np.errstate(all="ignore"):
        scales, q = codecs.to_int8(x)
        back = codecs.from_int8(scales, q)
    for i in range(scales.size):
        block = x[i * BLOCK : (i + 1) * BLOCK]
        largest = max(abs(v) for v in block.tolist())
        assert scales[i] == np.float32(np.float32(largest) / np.float32(127))
        for value, quotient in zip(block.tolist(), q[i * BLOCK : (i + 1) * BLOCK].tolist(), strict=True):
            exact = np.float32(value) / scales[i] if scales[i] else np.float32(0)
            assert quotient == max(-127, min(127, round(float(exact))))
    fast_scales, fast_q, good = int8_of(x)
    assert good == all(float(s) * 128 < 2**128 for s in scales)
    assert fast_scales.tobytes() == scales.tobytes() and fast_q.tobytes() == q.tobytes()
    out = np.empty(x.size, np.float32)
    Quantised(scales, q).decode(out)
    assert out.tobytes() == back.tobytes()
    assert not good or np.isfinite(back).all()


@pytest.mark.parametrize("n", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, STEP - 1, STEP, STEP + 1, 2 * STEP + 3 * BLOCK + 7])
def test_int8_of_any_size(n: int) -> None:
    x = np.random.default_rng(n).standard_normal(n, dtype=np.float32)
    x[: min(n, BLOCK)] *= 100
    scales, q, good = int8_of(x)
    assert good
    wanted = codecs.to_int8(x)
    assert scales.tobytes() == wanted[0].tobytes() and q.tobytes() == wanted[1].tobytes()
    error = np.abs(decode(Quantised(scales, q)) - x)
    assert (error <= np.repeat(scales, BLOCK)[:n] * np.float32(0.5001)).all()


def test_int8_blocks_of_zeros_and_of_what_is_too_small_or_large() -> None:
    x = np.zeros(4 * BLOCK, np.float32)
    x[BLOCK] = np.float32(1e-45)  # a 127th of it is 0
    x[2 * BLOCK] = np.float32(F32_MAX)
    x[3 * BLOCK] = np.float32(F32_MAX) * np.float32(0.99)
    scales, q, good = int8_of(x)
    assert not good and scales[0] == scales[1] == 0 and not q[: 2 * BLOCK].any()
    assert [codecs.finite_scales(scales[i : i + 1]) for i in range(4)] == [True, True, False, True]


# ---- in the update


def coded(x: np.ndarray) -> Quantised:
    return Quantised(*codecs.to_int8(x))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("backend", ["compiled", "numpy"])
def test_coded_gradients_zero_ulp(rule: str, clip: float | None, backend: str) -> None:
    """Alone, first, last and between plain ones, and behind what was folded."""
    if backend == "compiled":
        pytest.importorskip("llvmlite")
    rng = np.random.default_rng(5)
    n = 20_000
    w, a, b, c, out = (rng.standard_normal(n, dtype=np.float32) for _ in range(5))
    spec = RuleSpec.of(rule, [GroupSpan(0, 1000, 1.0, 0.1), GroupSpan(1000, n, 0.5, 0.0)], clip)
    engine, state = CpuUpdate(spec, n, backend=backend), new_state(spec, n)
    for terms in (
        [(1.0, coded(a))],
        [(0.5, coded(a)), (0.5, b)],
        [(0.5, a), (0.5, coded(b))],
        [(0.3, coded(a)), (0.3, codecs.to_bfloat16(b)), (0.4, coded(c))],
        [(0.3, codecs.to_float16(a)), (0.3, coded(b)), (0.4, c)],
    ):
        for folded in (None, (0.5, w * np.float32(0.1))):
            expected = reference_step(spec, state, w, terms, folded, 1.0, 0.9, 0.03)
            assert engine.step(w, terms, folded, 1.0, 0.9, 0.03, out).finite
            assert out.tobytes() == expected.tobytes()
    for name, array in engine.state_dict().items():
        assert array.tobytes() == state[name].tobytes(), name
    acc = np.zeros(n, np.float32)
    engine.fold(acc, 0.25, coded(a))
    engine.fold(acc, 0.5, coded(b))
    first = np.zeros(n, np.float32) + np.float32(0.25) * decode(coded(a))
    assert acc.tobytes() == (first + np.float32(0.5) * decode(coded(b))).tobytes()
    engine.close()


def test_a_coded_gradient_that_is_not_one() -> None:
    engine = CpuUpdate(RuleSpec.of("sgd", [GroupSpan(0, 10, 1.0, 0.0)]), 10)
    w, out = np.zeros(10, np.float32), np.zeros(10, np.float32)
    with pytest.raises(ValueError, match="of 10 elements, got one of 9"):
        engine.step(w, [(1.0, coded(np.ones(9, np.float32)))], None, 1.0, 1.0, 0.1, out)
    over = Quantised(np.full(1, np.inf, np.float32), np.ones(10, np.int8))
    assert not engine.step(w, [(1.0, over)], None, 1.0, 1.0, 0.1, out).finite
    assert Sparse(np.array([1, 2], np.uint32), out[:2], 10).size == 10


# ---- topk


def by_hand(x: np.ndarray, k: int) -> list[int]:
    ranked = sorted(range(x.size), key=lambda i: (-abs(float(x[i])), i))
    return sorted(ranked[:k])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(finite_patterns, st.sampled_from([0, 0x80000000, 0x3F800000, 0xBF800000])), min_size=1, max_size=60
    ),
    st.data(),
)
def test_topk_takes_the_largest_and_of_equal_ones_the_first(bits: list[int], data: st.DataObject) -> None:
    x = floats(bits)
    k = data.draw(st.integers(1, x.size))
    assert codecs.largest(x, k).tolist() == by_hand(x, k)
    assert codecs.select(x, k).tolist() == by_hand(x, k)


@pytest.mark.parametrize("kind", ["normal", "few values", "mostly zeros", "all zeros", "rising", "one large block"])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 1.0])
def test_topk_of_many(kind: str, share: float) -> None:
    """Where a sample says about where to cut, right or wrong."""
    n = 3 * codecs.SAMPLE + 1234
    rng = np.random.default_rng(9)
    x = rng.standard_normal(n, dtype=np.float32)
    if kind == "few values":
        x = np.round(x)
    elif kind == "mostly zeros":
        x[rng.random(n) < 0.99999] = 0
    elif kind == "all zeros":
        x[:] = 0
    elif kind == "rising":
        x.sort()
    elif kind == "one large block":
        x[1::3] = 1e9 + rng.integers(0, 50, x[1::3].size) * 1e5  # where the sample does not look
    k = math.ceil(share * n)
    assert codecs.select(x, k).tolist() == codecs.largest(x, k).tolist()


def test_topk_holds_back_what_it_does_not_send() -> None:
    rng = np.random.default_rng(3)
    n, k = STEP + 100, 70
    indices, values = np.zeros(k, np.uint32), np.zeros(k, np.float32)
    residual, rest, sent = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    for _ in range(5):
        g = rng.standard_normal(n, dtype=np.float32)
        before = residual.copy()
        assert codecs.encode_topk(g, residual, rest, indices, values)
        assert residual.tobytes() == before.tobytes()
        x = g + before
        assert indices.tolist() == codecs.largest(x, k).tolist() and values.tobytes() == x[indices].tobytes()
        Sparse(indices, values, n).decode(sent)
        assert np.count_nonzero(sent) == k and (sent + rest).tobytes() == x.tobytes()
        residual, rest = rest, residual


@pytest.mark.parametrize("where", ["gradient", "sum"])
def test_topk_of_what_is_not_finite(where: str) -> None:
    g, residual, rest = np.ones(100, np.float32), np.ones(100, np.float32), np.zeros(100, np.float32)
    g[50] = np.nan if where == "gradient" else F32_MAX
    residual[50] = F32_MAX
    assert not codecs.encode_topk(g, residual, rest, np.zeros(3, np.uint32), np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("indices", "sound"),
    [([0, 1, 9], True), ([0, 0, 9], False), ([1, 0, 9], False), ([0, 1, 10], False), ([0, 1, 2**32 - 1], False)],
)
def test_indices_of_a_stranger(indices: list[int], sound: bool) -> None:
    """They are seen, and hurt nobody where they came too late to be seen."""
    given_ = Sparse(np.array(indices, np.uint32), np.ones(3, np.float32), 10)
    assert given_.sound() == sound
    around = np.full(12, 7, np.float32)
    given_.decode(around[1:11])
    assert around[0] == around[11] == 7


@pytest.mark.parametrize("backend", ["compiled", "numpy"])
def test_sparse_gradients_zero_ulp(backend: str) -> None:
    if backend == "compiled":
        pytest.importorskip("llvmlite")
    rng = np.random.default_rng(6)
    n = 9000
    w, out = rng.standard_normal(n, dtype=np.float32), np.empty(n, np.float32)
    terms = []
    for share in (0.2, 0.3, 0.5):
        x = rng.standard_normal(n, dtype=np.float32)
        chosen = codecs.largest(x, 90)
        terms.append((share, Sparse(chosen, x[chosen], n)))
    spec = RuleSpec.of("adam", [GroupSpan(0, n, 1.0, 0.1)])
    engine, state = CpuUpdate(spec, n, backend=backend), new_state(spec, n)
    expected = reference_step(spec, state, w, terms, None, 1.0, 1.0, 0.1)
    assert engine.step(w, terms, None, 1.0, 1.0, 0.1, out).finite
    assert out.tobytes() == expected.tobytes()
