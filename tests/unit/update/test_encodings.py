"""Gradients in float16 and bfloat16, decoded in the pass: the reference against exact values, both back ends against it."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.rules import RULES, GroupSpan, RuleSpec, decode, new_state, reference_step

ALL = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


@pytest.fixture(params=["compiled", "numpy"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "compiled":
        pytest.importorskip("llvmlite")
    return request.param


def bits(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


def finite_values(dtype: str) -> np.ndarray:
    """Every finite value of an encoding, subnormals and both zeros too, in an order that mixes them."""
    values = ALL.view(np.float16) if dtype == "float16" else ALL
    values = values[np.isfinite(decode(values))]
    return values[np.random.default_rng(0).permutation(values.size)]


def test_decode_is_exact_for_every_bit_pattern() -> None:
    for pattern, value in zip(ALL.tolist(), decode(ALL.view(np.float16)).tolist(), strict=True):
        (expected,) = struct.unpack("<e", struct.pack("<H", pattern))
        assert value == expected or (value != value and expected != expected)
    for pattern, value in zip(ALL.tolist(), decode(ALL).tolist(), strict=True):
        (expected,) = struct.unpack("<f", struct.pack("<HH", 0, pattern))
        assert value == expected or (value != value and expected != expected)
    real = np.ones(3, np.float32)
    assert decode(real) is real


@pytest.mark.parametrize("dtype", ["float16", "uint16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_every_bit_pattern_through_the_pass(dtype: str, shift: int, backend: str) -> None:
    """With shift the same patterns meet other lanes, and the last ones the loop over single elements."""
    values = np.roll(ALL, shift)[shift:].copy()
    values = values.view(np.float16) if dtype == "float16" else values
    n = values.size
    engine = CpuUpdate(RuleSpec.of("sgd", [GroupSpan(0, n, 1.0, 0.0)]), n, backend=backend)
    acc = np.zeros(n, np.float32)
    engine.fold(acc, 1.0, values)
    with np.errstate(all="ignore"):
        assert np.array_equal(bits(acc), bits(np.zeros(n, np.float32) + decode(values)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_mixed_encodings_zero_ulp(rule: str, clip: float | None, backend: str) -> None:
    halves, brains = finite_values("float16"), finite_values("uint16")
    n = min(halves.size, brains.size)
    rng = np.random.default_rng(2)
    w, real, out = (rng.standard_normal(n, dtype=np.float32) for _ in range(3))
    scale = np.float32(2.0**-60)
    brains = ((decode(brains) * scale).view(np.uint32) >> 16).astype(np.uint16)  # so that no square overflows
    terms = [(0.25, halves[:n].copy()), (0.3, real), (0.2, brains[:n].copy()), (0.25, halves[-n:].copy())]
    spec = RuleSpec.of(rule, [GroupSpan(0, 1000, 1.0, 0.1), GroupSpan(1000, n, 0.5, 0.0)], clip)
    engine, state = CpuUpdate(spec, n, threads=2, block=8192, backend=backend), new_state(spec, n)
    for folded in (None, (0.5, w * np.float32(0.1))):
        expected = reference_step(spec, state, w, terms, folded, 1.0, 1.0, 0.03)
        assert engine.step(w, terms, folded, 1.0, 1.0, 0.03, out).finite
        assert np.array_equal(bits(out), bits(expected))
        for name, array in engine.state_dict().items():
            assert np.array_equal(array, state[name], equal_nan=True), name
    engine.close()


@pytest.mark.parametrize(
    ("dtype", "pattern"), [("float16", 0x7C00), ("float16", 0xFE01), ("uint16", 0xFF80), ("uint16", 0x7FC1)]
)
def test_infinity_and_nan_are_reported(dtype: str, pattern: int, backend: str) -> None:
    n = 100
    values = np.zeros(n, np.uint16)
    values[77] = pattern
    spec = RuleSpec.of("momentum", [GroupSpan(0, n, 1.0, 0.0)])
    engine, w, out = CpuUpdate(spec, n, backend=backend), np.zeros(n, np.float32), np.zeros(n, np.float32)
    assert not engine.step(w, [(1.0, values.view(dtype))], None, 1.0, 1.0, 0.1, out).finite
