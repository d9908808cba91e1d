"""What the update on a GPU must give, bit for bit: the tests that run on the CPU through the shim and on a GPU alike.

A module that imports them has a fixture ``device``, an object of update/cuda.py: tests/unit/update/test_gpu.py with
CuPy's stand-in (fake_cupy.py), tests/gpu/test_update.py with CuPy, its real twin.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rudra_zmq.update import codecs
from rudra_zmq.update.codecs import BLOCK, Quantised, Sparse
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.cuda import TILE, Device
from rudra_zmq.update.gpu import GpuUpdate
from rudra_zmq.update.gpu_codecs import GpuCodecs
from rudra_zmq.update.rules import NORM_BLOCK, RULES, GroupSpan, RuleSpec, State, Term, new_state, reference_step

N = (1 << 20) + 3 * TILE + 517
SMALL = 20_000
ENCODINGS = ("float32", "float16", "uint16", "int8")
F32 = np.finfo(np.float32)
EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x3F800000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x33000000, 0x33000001, 0x38800000, 0x387FC000,
    0x387FE000, 0x387FF000, 0x7F7F7FFF, 0x7F7F8000, 0x3F808000, 0x3F818000, 0x33800000, 0x32FFFFFF,
]  # fmt: skip
"""Zeros, subnormals, the smallest and largest normals, and what lies at and beside halfway cases of the encodings."""


def bits(x: np.ndarray) -> np.ndarray:
    """The bits, with one NaN for all NaNs: which of them an operation returns is not part of the promise."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


def finite_floats(rng: np.random.Generator, n: int) -> np.ndarray:
    """A third each of normal numbers, of any pattern that is finite, and of edges."""
    x = rng.standard_normal(n, dtype=np.float32)
    any_ = rng.integers(0, 2**32, n, dtype=np.uint32)
    any_ = np.where((any_ & 0x7F800000) == 0x7F800000, any_ & np.uint32(0xBFFFFFFF), any_)
    edges = rng.choice(np.array(EDGES, np.uint32), n)
    kind = rng.integers(0, 3, n)
    return np.where(kind == 0, x, np.where(kind == 1, any_.view(np.float32), edges.view(np.float32)))


@functools.cache
def gradients(encoding: str) -> tuple[Any, ...]:
    """Four of N elements: all finite, of any size."""
    rng = np.random.default_rng(ENCODINGS.index(encoding))
    return tuple(_gradient(rng, encoding) for _ in range(4))


def _gradient(rng: np.random.Generator, encoding: str) -> Any:
    if encoding == "float32":
        return finite_floats(rng, N)
    if encoding == "int8":
        scales = np.abs(finite_floats(rng, -(-N // BLOCK))) / np.float32(128)
        return Quantised(scales, rng.integers(-127, 128, N).astype(np.int8))
    top = 0x7C00 if encoding == "float16" else 0x7F80
    patterns = rng.integers(0, 2**16, N).astype(np.uint16)
    halves = np.where((patterns & top) == top, patterns & 0xBFFF, patterns).astype(np.uint16)
    return halves.view(np.float16) if encoding == "float16" else halves


@functools.cache
def weights() -> np.ndarray:
    w = finite_floats(np.random.default_rng(9), N)
    w.setflags(write=False)
    return w


def to_device(device: Device, given: Any) -> Any:
    if isinstance(given, Quantised):
        return Quantised(device.xp.asarray(given.scales), device.xp.asarray(given.q))
    if isinstance(given, Sparse):
        return Sparse(device.xp.asarray(given.indices), device.xp.asarray(given.values), given.size)
    return device.xp.asarray(given)


class Both:
    """An update on the device and the reference, held against each other after every step."""

    def __init__(self, device: Device, spec: RuleSpec, n: int) -> None:
        self.device, self.spec = device, spec
        self.update, self.state = GpuUpdate(spec, n, device), new_state(spec, n)
        self.out = device.xp.zeros(n, np.float32)

    def step(
        self, w: np.ndarray, direct: list[Term], folded: Term | None, *rest: float, sent: np.ndarray | None = None
    ) -> np.ndarray:
        expected = reference_step(self.spec, self.state, w, direct, folded, *rest)
        there = [(a, to_device(self.device, g)) for a, g in direct]
        ahead = None if folded is None else (folded[0], to_device(self.device, folded[1]))
        cast = None if sent is None else to_device(self.device, sent)
        report = self.update.step(to_device(self.device, w), there, ahead, *rest, self.out, cast)
        assert report.finite
        assert np.array_equal(bits(self.out.get()), bits(expected)), "weights"
        self.check_state()
        if sent is not None:
            wanted = codecs.to_float16(expected) if sent.dtype == np.float16 else codecs.to_bfloat16(expected)
            there_bits, here = cast.get().view(np.uint16), wanted.view(np.uint16)
            number = ~np.isnan(expected)
            assert np.array_equal(there_bits[number], here[number]), "weights as they are sent"
            top = 0x7C00 if sent.dtype == np.float16 else 0x7F80
            assert report.sent_finite == bool(((here & top) != top).all())
        return expected

    def check_state(self) -> None:
        state: State = self.update.state_dict()
        assert set(state) == set(self.state)
        for name, array in state.items():
            same = array == self.state[name] if name == "t" else bits(array) == bits(self.state[name])
            assert same.all(), name


def many_groups(n: int) -> list[GroupSpan]:
    kinds = [(1.0, 5e-4), (2.0, 0.0), (0.5, 0.1)]
    ends = [0, 1, 17, TILE - 1, TILE, TILE + 1, n // 2, n // 2 + 3, n - 1, n]
    return [GroupSpan(a, b, *kinds[i % 3]) for i, (a, b) in enumerate(pairwise(ends))]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_million_values_zero_ulp(rule: str, encoding: str, device: Device) -> None:
    """The first step and a later one, with weight decay in some groups; what is sent in either half."""
    a, b, c, d = gradients(encoding)
    both = Both(device, RuleSpec.of(rule, many_groups(N)), N)
    w = both.step(weights(), [(0.3, a), (0.3, b), (0.3, c)], None, 0.9, 1.0, 0.03, sent=np.zeros(N, np.float16))
    w = np.where(np.isfinite(w), w, np.float32(0.5))
    both.step(
        w, [(0.2, d)], (0.1, finite_floats(np.random.default_rng(3), N)), 0.3, 0.4, 0.02, sent=np.zeros(N, np.uint16)
    )


def test_the_data_tell_a_fused_multiply_add_apart() -> None:
    a, b = (g.astype(np.float64) for g in gradients("float32")[:2])
    first = (np.float32(0.3) * gradients("float32")[0]).astype(np.float64)
    with np.errstate(all="ignore"):
        apart = np.float32(0.3) * gradients("float32")[0] + np.float32(0.7) * gradients("float32")[1]
        fused = (first + np.float64(np.float32(0.7)) * b).astype(np.float32)
    assert a.size == N
    assert np.mean(bits(apart) != bits(fused)) > 0.01


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_every_count_of_gradients_at_every_offset(rule: str, clip: float | None, device: Device) -> None:
    """Vectors that begin anywhere, groups of any length, encodings that take turns; what lies around stays."""
    rng = np.random.default_rng(7)
    for c in range(1, 10):
        n = int(rng.integers(1, 500))
        ends = sorted({0, n, *rng.integers(1, n + 1, 4).tolist()})
        spec = RuleSpec.of(rule, [GroupSpan(a, b, 1.0 + a, 0.1 * (a % 2)) for a, b in pairwise(ends)], clip)
        starts = rng.integers(0, 16, c + 2)
        hosts = [np.full(n + 32, 7.0, np.float32 if k % 2 else np.float16) for k in range(c)]
        hosts += [np.full(n + 32, 7.0, np.float32) for _ in range(2)]
        for host, at in zip(hosts, starts, strict=True):
            host[at : at + n] = rng.standard_normal(n)
        wholes = [to_device(device, host) for host in hosts]
        *there, w, out = (whole[at : at + n] for whole, at in zip(wholes, starts, strict=True))
        update, state = GpuUpdate(spec, n, device), new_state(spec, n)
        shares = rng.random(c).tolist()
        for _ in range(2):
            terms = [(b, host[at : at + n]) for b, host, at in zip(shares, hosts, starts, strict=False)]
            expected = reference_step(spec, state, hosts[c][starts[c] :][:n], terms, None, 1.0, 0.5, 0.1)
            assert update.step(w, list(zip(shares, there, strict=True)), None, 1.0, 0.5, 0.1, out).finite
            assert np.array_equal(bits(out.get()), bits(expected))
        for whole, host, at in zip(wholes, hosts, starts, strict=True):
            around = whole.get()
            assert (around[:at] == 7.0).all() and (around[at + n :] == 7.0).all()
            assert whole is wholes[-1] or np.array_equal(around, host)


@pytest.mark.parametrize("n", [1, 5, NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK + 77])
def test_clipping_by_the_norm(n: int, device: Device) -> None:
    rng = np.random.default_rng(n)
    w, a, b = rng.standard_normal((3, n), dtype=np.float32)
    spec = RuleSpec.of("adam", [GroupSpan(0, n, 1.0, 0.1)], 0.25)
    both = Both(device, spec, n)
    both.step(w, [(0.5, a), (0.5, b)], None, 1.0, 1.0, 0.1)
    cpu, out = CpuUpdate(spec, n), np.empty(n, np.float32)
    expected = cpu.step(w, [(0.5, a), (0.5, b)], None, 1.0, 1.0, 0.1, out).grad_norm
    there = [(0.5, to_device(device, g)) for g in (a, b)]
    assert both.update.step(to_device(device, w), there, None, 1.0, 1.0, 0.1, both.out).grad_norm == expected


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("where", [0, 8191, SMALL - 1])
def test_what_is_not_finite_is_refused(clip: float | None, encoding: str, where: int, device: Device) -> None:
    spec = RuleSpec.of("adam", [GroupSpan(0, SMALL, 1.0, 0.0)], clip)
    update, out = GpuUpdate(spec, SMALL, device), device.xp.zeros(SMALL, np.float32)
    rng = np.random.default_rng(5)
    w, good = (to_device(device, rng.standard_normal(SMALL, dtype=np.float32)) for _ in range(2))
    assert update.step(w, [(1.0, good)], None, 1.0, 1.0, 0.1, out).finite
    before = update.state_dict()
    for value in (np.inf, -np.inf, np.nan):
        bad = to_device(device, _with(value, encoding, where))
        assert not update.step(w, [(0.5, good), (0.5, bad)], None, 1.0, 1.0, 0.1, out).finite
    if clip is not None:
        after = update.state_dict()
        assert all(np.array_equal(before[name], after[name]) for name in before)


def _with(value: float, encoding: str, where: int) -> Any:
    x = np.ones(SMALL, np.float32)
    if encoding == "int8":
        scales = np.ones(-(-SMALL // BLOCK), np.float32)
        scales[where // BLOCK] = value
        return Quantised(scales, x.astype(np.int8))
    x[where] = value
    return x.astype(np.float16) if encoding == "float16" else codecs.to_bfloat16(x) if encoding == "uint16" else x


def test_a_sum_that_overflows_is_reported_and_the_largest_values_are_not(device: Device) -> None:
    update = GpuUpdate(RuleSpec.of("sgd", [GroupSpan(0, 4, 1.0, 0.0)]), 4, device)
    w, out = (device.xp.zeros(4, np.float32) for _ in range(2))
    big = to_device(device, np.full(4, F32.max))
    assert update.step(w, [(0.5, big), (0.5, big)], None, 1.0, 1.0, 1.0, out).finite
    assert not update.step(w, [(1.0, big), (1.0, big)], None, 1.0, 1.0, 1.0, out).finite


def test_folding_is_the_sum_of_the_reference(device: Device) -> None:
    update = GpuUpdate(RuleSpec.of("sgd", many_groups(N)), N, device)
    acc, expected = device.xp.zeros(N, np.float32), np.zeros(N, np.float32)
    for coefficient, encoding in zip((32.0, 16.0, 7.3, 1.0), ENCODINGS, strict=True):
        g = gradients(encoding)[0]
        with np.errstate(all="ignore"):
            expected = expected + np.float32(coefficient) * codecs_decode(g)
        update.fold(acc, coefficient, to_device(device, g))
    assert np.array_equal(bits(acc.get()), bits(expected))


def codecs_decode(g: Any) -> np.ndarray:
    out = np.empty(N, np.float32)
    codecs.decode_into(g, out)
    return out


@pytest.mark.parametrize("rule", RULES)
def test_a_state_goes_to_the_cpu_and_back(rule: str, device: Device) -> None:
    spec = RuleSpec.of(rule, [GroupSpan(0, SMALL, 1.0, 0.1)])
    rng = np.random.default_rng(3)
    w, g, h, out = rng.standard_normal((4, SMALL), dtype=np.float32)
    both, cpu = Both(device, spec, SMALL), CpuUpdate(spec, SMALL, backend="numpy")
    both.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1)
    saved = both.update.state_dict()
    assert both.update.state_dict(into=saved) is saved
    cpu.load_state_dict(saved)
    cpu.step(w, [(1.0, h)], None, 1.0, 1.0, 0.1, out)
    other = Both(device, spec, SMALL)
    other.update.load_state_dict(saved)
    other.state = {name: array.copy() for name, array in saved.items()}
    assert np.array_equal(other.step(w, [(1.0, h)], None, 1.0, 1.0, 0.1), out)
    with pytest.raises(ValueError, match=f"state of rule {rule} is"):
        other.update.load_state_dict({**saved, "more": out})


def test_other_groups_leave_the_state_alone(device: Device) -> None:
    one, many = [GroupSpan(0, SMALL, 1.0, 0.1)], many_groups(SMALL)
    both = Both(device, RuleSpec.of("adam", one), SMALL)
    w, g = np.random.default_rng(1).standard_normal((2, SMALL), dtype=np.float32)
    for groups in (one, many, one):
        both.update.regroup(groups)
        both.spec = both.update.spec
        w = both.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1)
    with pytest.raises(ValueError, match="cover"):
        both.update.regroup([GroupSpan(0, SMALL - 1, 1.0, 0.0)])


def test_bad_arguments_are_refused(device: Device) -> None:
    update = GpuUpdate(RuleSpec.of("adam", [GroupSpan(0, 8, 1.0, 0.0)]), 8, device)
    w, g, out = (device.xp.zeros(8, np.float32) for _ in range(3))
    half, short, two = (device.xp.zeros(s, t) for s, t in ((8, np.float16), (7, np.float32), ((8, 1), np.float32)))
    with pytest.raises(ValueError, match="at least one gradient"):
        update.step(w, [], None, 1.0, 1.0, 0.1, out)
    with pytest.raises(ValueError, match="weight_sum"):
        update.step(w, [(1.0, g)], None, 0.0, 1.0, 0.1, out)
    for overlap in (w, g):
        with pytest.raises(ValueError, match="shares memory"):
            update.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1, overlap)
    for wrong in (device.xp.zeros(8, np.float64), short, two, device.xp.zeros(16, np.float32)[::2]):
        with pytest.raises(ValueError, match=r"of shape \(8,\), got|not contiguous"):
            update.fold(out, 1.0, wrong)
    for args in [(half, g, out), (w, g, half)]:
        with pytest.raises(ValueError, match=r"expected float32 of shape \(8,\), got float16"):
            update.step(args[0], [(1.0, args[1])], None, 1.0, 1.0, 0.1, args[2])
    with pytest.raises(ValueError, match="expected float16 or uint16"):
        update.step(w, [(1.0, g)], None, 1.0, 1.0, 0.1, out, device.xp.zeros(8, np.float32))
    for size in (7, 9):
        with pytest.raises(ValueError, match=f"of 8 elements, got one of {size}"):
            update.step(w, [(1.0, Sparse(w, w, size))], None, 1.0, 1.0, 0.1, out)
    assert update.state_dict()["t"][0] == 0
    side_by_side = device.xp.zeros(24, np.float32)
    assert update.step(side_by_side[:8], [(1.0, side_by_side[16:])], None, 1.0, 1.0, 0.1, side_by_side[8:16]).finite


def test_more_gradients_than_the_table_had_room_for(device: Device) -> None:
    rng = np.random.default_rng(2)
    w, *gs = rng.standard_normal((401, 300), dtype=np.float32)
    both = Both(device, RuleSpec.of("momentum", [GroupSpan(0, 300, 1.0, 0.1)]), 300)
    both.step(w, [(1 / 400, g) for g in gs], None, 1.0, 1.0, 0.1)


# ---- the encodings


def encoded(device: Device, x: np.ndarray, dtype: Any) -> tuple[np.ndarray, bool]:
    out = device.xp.zeros(x.size, dtype)
    finite = GpuCodecs(device, x.size).encode_halves(to_device(device, x), out)
    return out.get(), finite


@pytest.mark.parametrize("n", [1, 255, N])
def test_halves(n: int, device: Device) -> None:
    x = finite_floats(np.random.default_rng(n), n)
    for dtype, formula in ((np.float16, codecs.to_float16), (np.uint16, codecs.to_bfloat16)):
        got, finite = encoded(device, x, dtype)
        wanted = formula(x)
        assert np.array_equal(got.view(np.uint16), wanted.view(np.uint16))
        top = 0x7C00 if dtype == np.float16 else 0x7F80
        assert finite == bool(((wanted.view(np.uint16) & top) != top).all())


@pytest.mark.parametrize("bad", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001])
def test_halves_and_int8_of_what_is_not_finite(bad: int, device: Device) -> None:
    x = np.ones(5000, np.float32)
    x.view(np.uint32)[4321] = bad
    for dtype in (np.float16, np.uint16):
        got, finite = encoded(device, x, dtype)
        assert not finite
        assert np.isnan(codecs_value(got[4321:4322])[0]) == np.isnan(x[4321])
    out = Quantised(device.xp.zeros(5, np.float32), device.xp.zeros(5000, np.int8))
    assert not GpuCodecs(device, 5000).encode_int8(to_device(device, x), out)


def codecs_value(halves: np.ndarray) -> np.ndarray:
    out = np.empty(halves.size, np.float32)
    codecs.decode_into(halves, out)
    return out


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, BLOCK + 1, N])
def test_int8(n: int, device: Device) -> None:
    """Blocks of every size of value: zeros, subnormals, the largest that a scale can carry."""
    rng = np.random.default_rng(n)
    sizes = np.repeat(10.0 ** rng.uniform(-44, 38, -(-n // BLOCK)), BLOCK)[:n]
    with np.errstate(all="ignore"):
        x = (rng.uniform(-1, 1, n) * sizes).astype(np.float32)
    x[: BLOCK // 2][rng.random(min(n, BLOCK // 2)) < 0.5] = 0
    with np.errstate(all="ignore"):
        scales, q = codecs.to_int8(x)
    out = Quantised(device.xp.zeros(scales.size, np.float32), device.xp.zeros(n, np.int8))
    assert GpuCodecs(device, n).encode_int8(to_device(device, x), out) == codecs.finite_scales(scales)
    assert out.scales.get().tobytes() == scales.tobytes()
    assert out.q.get().tobytes() == q.tobytes()


def test_int8_of_what_is_nearly_too_large(device: Device) -> None:
    """127 times the scale of the first is finite, 128 times it is not, and so it is refused."""
    for value, finite in ((F32.max, False), (F32.max * np.float32(0.99), True)):
        x = np.full(BLOCK, value, np.float32)
        out = Quantised(device.xp.zeros(1, np.float32), device.xp.zeros(BLOCK, np.int8))
        assert GpuCodecs(device, BLOCK).encode_int8(to_device(device, x), out) == finite


@pytest.mark.parametrize("kind", ["normal", "few values", "mostly zeros", "all zeros", "any pattern"])
@pytest.mark.parametrize("share", [0.0001, 0.01, 1.0])
def test_topk(kind: str, share: float, device: Device) -> None:
    """As sets, of equal ones those with the lower index; the residual keeps the rest, for three gradients."""
    n = 12 * TILE + 333
    rng = np.random.default_rng(9)
    k = max(1, int(share * n))
    encoder, residual = GpuCodecs(device, n), np.zeros(n, np.float32)
    there = device.xp.zeros(n, np.float32), device.xp.zeros(n, np.float32)
    for turn in range(3):
        x = finite_floats(rng, n) / np.float32(4) if kind == "any pattern" else rng.standard_normal(n, dtype=np.float32)
        x = {"few values": np.round(x), "mostly zeros": x * (rng.random(n) < 1e-3), "all zeros": x * 0}.get(kind, x)
        x = x.astype(np.float32)
        wanted = codecs.largest(x + residual, k)
        values = (x + residual)[wanted]
        residual = x + residual
        residual[wanted] = 0
        out = Sparse(device.xp.zeros(k, np.uint32), device.xp.zeros(k, np.float32), n)
        before, after = there if turn % 2 == 0 else there[::-1]
        assert encoder.encode_topk(to_device(device, x), before, after, out)
        got = out.indices.get()
        assert set(got.tolist()) == set(wanted.tolist())
        assert (got[1:] > got[:-1]).all()
        assert out.values.get().tobytes() == values.tobytes()
        assert after.get().tobytes() == residual.tobytes()


@pytest.mark.parametrize("n", [1, 2, 255, 257, TILE, TILE + 1, N])
def test_topk_of_any_size(n: int, device: Device) -> None:
    x = np.round(4 * np.random.default_rng(n).standard_normal(n)).astype(np.float32)
    for k in {-(-n // 3)} if n == N else {1, -(-n // 3), n}:
        out = Sparse(device.xp.zeros(k, np.uint32), device.xp.zeros(k, np.float32), n)
        zero, rest = device.xp.zeros(n, np.float32), device.xp.zeros(n, np.float32)
        assert GpuCodecs(device, n).encode_topk(to_device(device, x), zero, rest, out)
        assert out.indices.get().tolist() == codecs.largest(x, k).tolist()


@pytest.mark.parametrize("where", ["gradient", "sum"])
def test_topk_of_what_is_not_finite(where: str, device: Device) -> None:
    g, residual = np.ones(9000, np.float32), np.ones(9000, np.float32)
    g[8500] = np.nan if where == "gradient" else F32.max
    residual[8500] = F32.max
    out = Sparse(device.xp.zeros(3, np.uint32), device.xp.zeros(3, np.float32), 9000)
    rest = device.xp.zeros(9000, np.float32)
    encoder = GpuCodecs(device, 9000)
    assert not encoder.encode_topk(to_device(device, g), to_device(device, residual), rest, out)
    assert encoder.encode_topk(to_device(device, residual), device.xp.zeros(9000, np.float32), rest, out)
    assert 8500 in out.indices.get()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_topk_in_the_update_among_others(clip: float | None, device: Device) -> None:
    rng = np.random.default_rng(6)
    n = 9000
    both = Both(device, RuleSpec.of("adam", many_groups(n), clip), n)
    w, a, b, c, d = rng.standard_normal((5, n), dtype=np.float32)
    first, last = (Sparse(at := codecs.largest(x, 90), x[at], n) for x in (a, b))
    quantised, half = Quantised(*codecs.to_int8(c)), codecs.to_bfloat16(d)
    for terms in ([(1.0, first)], [(0.5, first), (0.5, d)], [(0.2, quantised), (0.3, first), (0.3, half), (0.2, last)]):
        for folded in (None, (0.5, c)):
            both.step(w, terms, folded, 1.0, 0.9, 0.03)
