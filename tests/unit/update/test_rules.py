"""The rules against their formulas in float64, written here a second time, and the facts of modulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rudra_zmq.update.rules import RULES, GroupSpan, RuleSpec, new_state, reference_step

NORMALISED = ["adagrad", "rudra-adagrad", "rmsprop", "adam", "adamw"]
PLAIN = ["sgd", "momentum", "nesterov"]
N = 257
LR = 0.03


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def whole(rule: str, n: int = N, weight_decay: float = 0.0, clip_norm: float | None = None) -> RuleSpec:
    return RuleSpec.of(rule, [GroupSpan(0, n, 1.0, weight_decay)], clip_norm)


def draw(seed: int, count: int, n: int = N) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(n, dtype=np.float32) for _ in range(count)]


def by_hand(rule: str, w: float, gradients: list[float], s_bar: float, wd: float, lr: float) -> float:
    """The rule on one number in float64; gradients are the sums of successive updates."""
    v = s = m = q = 0.0
    for t, total in enumerate(gradients, 1):
        g, step = total, lr * s_bar
        if rule in PLAIN:
            g, step = total + s_bar * wd * w, lr
        elif rule != "adamw":
            g = total + wd * w
        if rule == "sgd":
            w -= step * g
        elif rule in ("momentum", "nesterov"):
            v = 0.9 * v + g
            w -= step * (v if rule == "momentum" else 0.9 * v + g)
        elif rule == "adagrad":
            s += g * g
            w -= step * g / (math.sqrt(s) + 1e-10)
        elif rule == "rudra-adagrad":
            s += g * g
            v = 0.9 * v + g / math.sqrt(1 + s)
            w -= step * v
        elif rule == "rmsprop":
            s = 0.99 * s + 0.01 * g * g
            w -= step * g / (math.sqrt(s) + 1e-8)
        else:
            m, q = 0.9 * m + 0.1 * g, 0.999 * q + 0.001 * g * g
            decay = step * wd * w if rule == "adamw" else 0.0
            w -= decay + step * (m / (1 - 0.9**t)) / (math.sqrt(q / (1 - 0.999**t)) + 1e-8)
    return w


def test_the_by_hand_formulas_cover_the_table() -> None:
    assert list(RULES) == PLAIN + NORMALISED
    assert [name for name, rule in RULES.items() if rule.normalised] == NORMALISED


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("s_bar", [1.0, 0.25])
@pytest.mark.parametrize("wd", [0.0, 0.1])
def test_formula(rule: str, s_bar: float, wd: float) -> None:
    """Two gradients an update, of unequal weight and equal modulation s_bar, for four updates."""
    spec = whole(rule, 3, wd)
    w = f32(1.5, -0.75, 0.0)
    state = new_state(spec, 3)
    pairs = [(f32(1, -2, 0.5), f32(3, 1, -1)), (f32(0, 2, 2), f32(-1, 0.25, 1)), (f32(4, 4, 4), f32(0, 0, 1))]
    for first, second in pairs:
        terms = [(0.75 * s_bar, first), (0.5 * s_bar, second)]
        w = reference_step(spec, state, w, terms, None, 1.25 * s_bar, s_bar, LR)
    scale = 1 / 1.25 if RULES[rule].normalised else s_bar
    for i, start in enumerate([1.5, -0.75, 0.0]):
        sums = [scale * (0.75 * float(a[i]) + 0.5 * float(b[i])) for a, b in pairs]
        assert w[i] == pytest.approx(by_hand(rule, start, sums, s_bar, wd, LR), rel=3e-6, abs=1e-7)


@pytest.mark.parametrize("rule", NORMALISED)
def test_a_normalised_step_at_sigma_29_is_one_29th(rule: str) -> None:
    spec = whole(rule)
    w = np.zeros(N, np.float32)
    states = [new_state(spec, N), new_state(spec, N)]
    for g in draw(1, 3):
        plain = reference_step(spec, states[0], w, [(1.0, g)], None, 1.0, 1.0, LR)
        stale = reference_step(spec, states[1], w, [(1 / 29, g)], None, 1 / 29, 1 / 29, LR)
        np.testing.assert_allclose(stale * 29, plain, rtol=1e-6)
        for name in RULES[rule].state:
            np.testing.assert_allclose(states[1][name], states[0][name], rtol=1e-6)


@pytest.mark.parametrize("rule", PLAIN)
def test_modulation_is_inside_the_velocity_and_scales_the_decay(rule: str) -> None:
    """s on the gradient and on the decay equals an unmodulated update with s*g and s*wd."""
    stale, plain = whole(rule, weight_decay=0.1), whole(rule, weight_decay=0.1 / 8)
    states = [new_state(stale, N), new_state(plain, N)]
    w_stale = w_plain = draw(2, 1)[0]
    for g in draw(3, 3):
        w_stale = reference_step(stale, states[0], w_stale, [(1 / 8, g)], None, 1 / 8, 1 / 8, LR)
        w_plain = reference_step(plain, states[1], w_plain, [(1.0, g / 8)], None, 1.0, 1.0, LR)
    assert np.array_equal(w_stale, w_plain)


def test_the_schedule_is_outside_the_velocity() -> None:
    spec = whole("momentum", 1)
    state = new_state(spec, 1)
    w = reference_step(spec, state, f32(0), [(1.0, f32(1))], None, 1.0, 1.0, 1.0)
    w = reference_step(spec, state, w, [(1.0, f32(0))], None, 1.0, 1.0, 0.5)
    assert w[0] == np.float32(-1.45)


def test_adamw_decay_moves_with_the_modulated_step() -> None:
    spec = whole("adamw", 1, weight_decay=0.5)
    zero = f32(0)
    for s_bar in (1.0, 0.25):
        w = reference_step(spec, new_state(spec, 1), f32(4), [(s_bar, zero)], None, s_bar, s_bar, 0.125)
        assert w[0] == 4 - 0.125 * s_bar * 0.5 * 4


def test_unequal_staleness_weighs_the_direction() -> None:
    """A normalised rule sees sum(a_k*s_k*g_k) / sum(a_j*s_j)."""
    spec = whole("adagrad", 1)
    state = new_state(spec, 1)
    reference_step(spec, state, f32(0), [(0.5, f32(1)), (0.5 * 0.25, f32(6))], None, 0.625, 0.625, LR)
    assert state["square_sum"][0] == pytest.approx(4.0)


def test_lr_scale_and_weight_decay_belong_to_their_group() -> None:
    groups = [GroupSpan(0, 1, 1.0, 0.5), GroupSpan(1, 2, 2.0, 0.0), GroupSpan(2, 3, 0.0, 0.5)]
    spec = RuleSpec.of("sgd", groups)
    w = reference_step(spec, {}, f32(8, 8, 8), [(1.0, f32(1, 1, 1))], None, 1.0, 1.0, 0.25)
    assert w.tolist() == [8 - 0.25 * 5, 8 - 0.5, 8]


@pytest.mark.parametrize(("clip", "factor"), [(10.0, 1.0), (5.0, 1.0), (2.5, 0.5)])
def test_clip_by_global_norm_before_weight_decay(clip: float, factor: float) -> None:
    spec = whole("sgd", 2, weight_decay=1.0, clip_norm=clip)
    w = reference_step(spec, {}, f32(1, 1), [(1.0, f32(3, -4))], None, 1.0, 1.0, 1.0)
    np.testing.assert_allclose(w, [-3 * factor, 4 * factor], rtol=1e-6)


def test_clip_has_torchs_epsilon() -> None:
    spec = whole("sgd", 1, clip_norm=1e-6)
    assert reference_step(spec, {}, f32(0), [(1.0, f32(1e-6))], None, 1.0, 1.0, 1.0) == pytest.approx(-0.5e-6)
    assert reference_step(spec, {}, f32(2), [(1.0, f32(0))], None, 1.0, 1.0, 1.0)[0] == 2


@pytest.mark.parametrize("rule", NORMALISED)
def test_clip_of_a_normalised_rule_ignores_staleness(rule: str) -> None:
    """The direction's sum is the normalised one, so a stale gradient is clipped like a fresh one."""
    spec = whole(rule, clip_norm=0.5)
    (g,) = draw(4, 1)
    states = [new_state(spec, N) for _ in range(2)]
    for state, s in zip(states, (1.0, 1 / 16), strict=True):
        reference_step(spec, state, g, [(s, g)], None, s, s, LR)
    name = RULES[rule].state[0]
    assert np.array_equal(states[0][name], states[1][name])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(0, 12), st.floats(0.01, 1.0))
def test_folding_is_the_direct_sum_to_rounding(seed: int, c: int, folded: int, s: float) -> None:
    folded = min(folded, c)
    rng = np.random.default_rng(seed)
    gradients = [rng.standard_normal(64, dtype=np.float32) for _ in range(c)]
    mu = [int(m) for m in rng.integers(1, 64, c)]
    scale = 1 / (c * 32)
    spec = whole("sgd", 64)
    direct = [(m * s * scale, g) for m, g in zip(mu, gradients, strict=True)]
    acc = np.zeros(64, np.float32)
    for m, g in zip(mu[:folded], gradients[:folded], strict=True):
        acc = acc + np.float32(m * s) * g
    zero = np.zeros(64, np.float32)
    expected = reference_step(spec, {}, zero, direct, None, 1.0, s, 1.0)
    got = reference_step(spec, {}, zero, direct[folded:], (scale, acc) if folded else None, 1.0, s, 1.0)
    bound = (c + 3) * 2.0**-23 * sum(a * np.abs(g) for a, g in direct)
    assert (np.abs(got - expected) <= bound).all()
    exact = -sum(np.float64(a) * g.astype(np.float64) for a, g in direct)
    assert (np.abs(got - exact) <= bound).all()


def test_of_takes_the_rules_defaults_and_refuses_the_rest() -> None:
    assert RuleSpec.of("adagrad", []).eps == 1e-10
    assert RuleSpec.of("adam", []).eps == 1e-8
    assert RuleSpec.of("momentum", [], momentum=0.5).momentum == 0.5
    with pytest.raises(ValueError, match=r"^rule 'sgd' has no parameter 'momentum'; its parameters: none$"):
        RuleSpec.of("sgd", [], momentum=0.9)
    with pytest.raises(ValueError, match=r"^rule 'lion' is unknown; known rules: sgd, momentum,"):
        RuleSpec.of("lion", [])


ONE = (GroupSpan(0, 4, 1.0, 0.0),)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (RuleSpec("momentum", momentum=1.0, groups=ONE), r"momentum = 1.0 is outside \[0, 1\)"),
        (RuleSpec("adam", beta2=math.nan, groups=ONE), r"beta2 = nan is outside"),
        (RuleSpec("rmsprop", rho=-0.1, groups=ONE), r"rho = -0.1 is outside"),
        (RuleSpec("adam", beta1=1.5, groups=ONE), r"beta1 = 1.5 is outside"),
        (RuleSpec("adam", eps=-1.0, groups=ONE), r"eps = -1.0 is not"),
        (RuleSpec("sgd", clip_norm=0.0, groups=ONE), r"clip_norm = 0.0 is not"),
        (RuleSpec("sgd"), r"groups cover \[0, 0\) of a vector of 4"),
        (RuleSpec("sgd", groups=(GroupSpan(0, 3, 1.0, 0.0),)), r"groups cover \[0, 3\) of a vector of 4"),
        (RuleSpec("sgd", groups=(GroupSpan(0, 5, 1.0, 0.0),)), r"groups cover \[0, 5\) of a vector of 4"),
        (RuleSpec("sgd", groups=(GroupSpan(1, 4, 1.0, 0.0),)), r"group \[1, 4\) should start at 0"),
        (RuleSpec("sgd", groups=(*ONE, GroupSpan(4, 4, 1.0, 0.0))), r"group \[4, 4\) is empty"),
        (RuleSpec("sgd", groups=(GroupSpan(0, 4, -1.0, 0.0),)), r"lr_scale = -1.0 is not"),
        (RuleSpec("sgd", groups=(GroupSpan(0, 4, 1.0, math.inf),)), r"weight_decay = inf is not"),
        (RuleSpec("lion", groups=ONE), r"rule 'lion' is unknown"),
    ],
)
def test_validate(spec: RuleSpec, text: str) -> None:
    with pytest.raises(ValueError, match=text) as raised:
        spec.validate(4)
    assert "\n" not in str(raised.value)


def test_valid_specs_pass() -> None:
    RuleSpec("sgd", groups=ONE).validate(4)
    RuleSpec("adam", eps=0.0, clip_norm=1.0, groups=(*ONE, GroupSpan(4, 5, 0.0, 1.0))).validate(5)


def test_an_update_needs_gradients_and_weights() -> None:
    with pytest.raises(ValueError, match="at least one gradient"):
        reference_step(whole("sgd", 1), {}, f32(1), [], None, 1.0, 1.0, LR)
    spec = whole("adam", 1)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight_sum"):
            reference_step(spec, new_state(spec, 1), f32(1), [(1.0, f32(1))], None, bad, 1.0, LR)
