"""Updates as the node carries them out, against the reference formulas; buffers, folding, rates of a script."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rudra_zmq.config.job import Group, Schedule, UpdateSection
from rudra_zmq.core.events import Decision, Entry, Fold, GradientId
from rudra_zmq.errors import Rejected
from rudra_zmq.node import rule as rules
from rudra_zmq.node.apply import Applier, NotFinite
from rudra_zmq.node.slots import SlotTable
from rudra_zmq.node.vectors import F32, Vector
from rudra_zmq.node.versions import Versions
from rudra_zmq.update.codecs import Scratch
from rudra_zmq.update.rules import RuleSpec, decode, new_state, reference_step
from rudra_zmq.wire.compress import Form
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, GroupRates, Rule, TensorSpec

LAYOUT = Layout.of(
    Attach(
        params=[TensorSpec("w", [6], "float32"), TensorSpec("b", [2], "float32")],
        float_buffers=[TensorSpec("mean", [2], "float32")],
        int_buffers=[TensorSpec("steps", [1], "int64")],
    )
)


class _Bench:
    """Versions, slots for two learners and an applier."""

    def __init__(self, spec: RuleSpec, form: Form | None = None, **options: Any) -> None:
        self.slots = SlotTable(LAYOUT, 2, form=form)
        for rank in range(3):
            self.slots.open(rank, 1)
        self.versions = Versions(LAYOUT, 5)
        self.versions.current.params[:] = np.arange(8, dtype=np.float32) / 7
        self.applier = Applier(LAYOUT, spec, self.versions, self.slots, **options)
        self.rng = np.random.Generator(np.random.PCG64(3))

    def gradient(self, rank: int, slot: int, count: int, mean: float = 0.0, steps: int = 0) -> F32:
        """A gradient in its slot; what it decodes to."""
        vector, place = Vector(LAYOUT), self.slots.slot(rank, 1, slot)
        vector.params[:] = self.rng.standard_normal(8).astype(np.float32)
        vector.floats[:] = mean
        vector.ints[:] = steps
        place.count = count
        if isinstance(place.vector, Vector):
            place.vector.copy_from(vector)
        elif place.vector.form.codec == "topk":
            place.vector.encode_largest(vector, np.zeros(8, np.float32), np.zeros(8, np.float32))
        else:
            place.vector.encode(vector, Scratch(8))
        return decode(place.vector.gradient).copy()


def _entry(rank: int, slot: int, count: int, coefficient: float, folded: bool = False) -> Entry:
    return Entry(GradientId(rank, 1, 1), slot, 0, (), count, 0, 1.0, coefficient, folded)


def _decision(entries: list[Entry], update: int = 1, fold: float = 0.0, **other: Any) -> Decision:
    weight_sum = sum(e.coefficient for e in entries)
    given: dict[str, Any] = {"s_bar": 1.0, "progress": 0.0, "rates": None} | other
    return Decision(
        update=update,
        generation=1,
        entries=tuple(entries),
        fold_coefficient=fold,
        weight_sum=weight_sum,
        mean_sigma=0.0,
        samples=sum(e.count for e in entries),
        c=len(entries),
        **given,
    )


def _job(**settings: Any) -> UpdateSection:
    return UpdateSection(**({"rule": "momentum", "lr": 0.1, "schedule": Schedule(kind="constant")} | settings))


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam", "rudra-adagrad"])
def test_an_update_is_the_reference_bit_for_bit(rule: str) -> None:
    job = _job(rule=rule, weight_decay=0.01, groups=(Group(match="b", lr_scale=2.0, weight_decay=0.0),))
    spec = rules.job_spec(job, LAYOUT)
    bench = _Bench(spec, rates=rules.JobRates(job, 3))
    state = new_state(spec, 8)
    w = bench.versions.current.params.copy()
    for update in range(1, 4):
        g = [bench.gradient(rank, 0, 32) for rank in (0, 1)]
        decision = _decision([_entry(0, 0, 32, 0.5), _entry(1, 0, 32, 0.25)], update, s_bar=0.75)
        assert bench.applier.update(decision, "softsync", 64) == 0.1
        w = reference_step(spec, state, w, [(0.5, g[0]), (0.25, g[1])], None, 0.75, 0.75, 0.1)
        np.testing.assert_array_equal(bench.versions.current.params, w)
    for name, value in bench.applier.state().items():
        np.testing.assert_array_equal(value, state[name])


def test_folded_gradients_come_first() -> None:
    spec = rules.job_spec(_job(), LAYOUT)
    bench = _Bench(spec, rates=rules.JobRates(_job(), 1))
    w = bench.versions.current.params.copy()
    state = new_state(spec, 8)
    for update in (1, 2):  # twice: the accumulator begins anew
        first, second = bench.gradient(0, 0, 8, mean=1.0, steps=5), bench.gradient(0, 1, 24, mean=2.0, steps=9)
        bench.applier.fold(Fold(GradientId(0, 1, 1), 0, 8.0, True))
        bench.applier.fold(Fold(GradientId(0, 1, 2), 1, 12.0, False))
        third = bench.gradient(0, 0, 32, mean=4.0, steps=7)
        entries = [_entry(0, 0, 8, 0.1, True), _entry(0, 1, 24, 0.1, True), _entry(0, 0, 32, 0.5)]
        bench.applier.update(_decision(entries, update, fold=1 / 64), "async", 32)
        accumulator = np.float32(8.0) * first + np.float32(12.0) * second
        w = reference_step(spec, state, w, [(0.5, third)], (1 / 64, accumulator), 0.7, 1.0, 0.1)
        np.testing.assert_array_equal(bench.versions.current.params, w)
        np.testing.assert_array_equal(bench.versions.current.floats, (8 * 1.0 + 24 * 2.0 + 32 * 4.0) / 64)
        np.testing.assert_array_equal(bench.versions.current.ints, 9)


@pytest.mark.parametrize("codec", ["float16", "bfloat16", "int8", "topk"])
def test_encoded_gradients_are_folded_and_summed_as_what_they_decode_to(codec: str) -> None:
    """Buffers ride along as they are."""
    spec = rules.job_spec(_job(clip_norm=1.0), LAYOUT)
    bench = _Bench(spec, form=Form.of(LAYOUT, codec, Fraction(1, 2)), rates=rules.JobRates(_job(clip_norm=1.0), 1))
    w = bench.versions.current.params.copy()
    state = new_state(spec, 8)
    for update in (1, 2):
        folded = bench.gradient(0, 1, 8, mean=1.0, steps=5)
        bench.applier.fold(Fold(GradientId(0, 1, 1), 1, 8.0, True))
        second, third = bench.gradient(0, 0, 24, mean=2.0, steps=9), bench.gradient(1, 0, 32, mean=4.0, steps=7)
        entries = [_entry(0, 1, 8, 0.1, True), _entry(0, 0, 24, 0.25), _entry(1, 0, 32, 0.5)]
        bench.applier.update(_decision(entries, update, fold=1 / 64), "async", 32)
        accumulator = np.zeros(8, np.float32) + np.float32(8.0) * folded
        w = reference_step(spec, state, w, [(0.25, second), (0.5, third)], (1 / 64, accumulator), 0.85, 1.0, 0.1)
        np.testing.assert_array_equal(bench.versions.current.params, w)
        np.testing.assert_array_equal(bench.versions.current.floats, (8 * 1.0 + 24 * 2.0 + 32 * 4.0) / 64)
        np.testing.assert_array_equal(bench.versions.current.ints, 9)


def test_buffers_are_weighted_by_samples_and_taken_from_the_update_alone() -> None:
    spec = rules.job_spec(_job(), LAYOUT)
    bench = _Bench(spec, rates=rules.JobRates(_job(), 1))
    bench.versions.current.floats[:] = 100.0
    bench.versions.current.ints[:] = 100
    bench.gradient(0, 0, 30, mean=1.0, steps=-4)
    bench.gradient(1, 0, 10, mean=5.0, steps=-3)
    bench.applier.update(_decision([_entry(0, 0, 30, 0.5), _entry(1, 0, 10, 0.5)]), "hardsync", 40)
    np.testing.assert_array_equal(bench.versions.current.floats, 2.0)
    np.testing.assert_array_equal(bench.versions.current.ints, -3)
    bench.gradient(2, 0, 10, mean=7.0, steps=1)
    bench.applier.update(_decision([_entry(2, 0, 10, 0.5)], 2), "hardsync", 10)
    np.testing.assert_array_equal(bench.versions.current.floats, 7.0)


def test_a_version_that_is_read_is_not_overwritten() -> None:
    spec = rules.job_spec(_job(), LAYOUT)
    bench = _Bench(spec, rates=rules.JobRates(_job(), 1))
    held = [bench.versions.hold(f"r{rank}", brief=False) for rank in range(1)]
    before = held[0].params.copy()
    for update in range(1, 8):
        bench.gradient(0, 0, 32)
        bench.applier.update(_decision([_entry(0, 0, 32, 1.0)], update), "async", 32)
        if update < 3:
            held.append(bench.versions.hold(f"r{update}", brief=False))
    np.testing.assert_array_equal(held[0].params, before)
    assert len({id(v) for v in held}) == 3
    assert bench.versions.allocated <= bench.versions.count


def test_a_sum_that_overflows_is_told() -> None:
    spec = rules.job_spec(_job(), LAYOUT)
    bench = _Bench(spec, rates=rules.JobRates(_job(), 1))
    for rank in (0, 1):
        bench.gradient(rank, 0, 32)
        bench.slots.slot(rank, 1, 0).vector.params[:] = 3e38
    with pytest.raises(NotFinite):
        bench.applier.update(_decision([_entry(0, 0, 32, 1.0), _entry(1, 0, 32, 1.0)]), "async", 64)


@pytest.mark.parametrize(
    ("protocol", "scaling", "batch", "expected"),
    [
        ("hardsync", "sqrt", 512, 0.2),
        ("hardsync", "linear", 512, 0.4),
        ("hardsync", "none", 512, 0.1),
        ("softsync", "sqrt", 512, 0.1),
    ],
)
def test_the_rate_grows_with_the_global_batch(protocol: str, scaling: str, batch: int, expected: float) -> None:
    rates = rules.JobRates(_job(scaling=scaling, reference_batch=128), 3)
    assert rates.at(0.0, protocol, batch) == pytest.approx(expected)


def test_the_schedule_moves_with_the_samples() -> None:
    rates = rules.JobRates(_job(schedule=Schedule(kind="cosine")), 4)
    assert rates.at(0.0, "async", 32) == 0.1
    assert rates.at(2.0, "async", 32) == pytest.approx(0.05)
    assert rates.at(4.0, "async", 32) == pytest.approx(0.0)
    step = rules.JobRates(_job(schedule=Schedule(kind="step", epochs=(1.0, 2.0), gamma=0.1)), 4)
    assert [step.at(e, "async", 32) for e in (0.5, 1.0, 2.5)] == pytest.approx([0.1, 0.01, 0.001])
    power = rules.JobRates(_job(schedule=Schedule(kind="power", power=2.0, gamma=0.5)), 4)
    assert power.at(2.0, "async", 32) == pytest.approx(0.1 / 4)  # (1 + gamma*t)^-power
    exponential = rules.JobRates(_job(schedule=Schedule(kind="exponential", gamma=0.5)), 4)
    assert exponential.at(2.0, "async", 32) == pytest.approx(0.1 / 4)


def test_a_group_that_matches_nothing_is_refused_with_the_fix() -> None:
    with pytest.raises(Rejected, match=r"'bias' matches no parameter.*Fix: change update.groups"):
        rules.job_spec(_job(groups=(Group(match="bias"),)), LAYOUT)


# ------------------------------------------------------------------------------------------- of a script


def _rule(*groups: tuple[int, int, float, float], rule: str = "momentum", **constants: float) -> Rule:
    return Rule(rule=rule, groups=[GroupRates(*g) for g in groups], **({"momentum": 0.9} | constants))


def test_rates_of_the_chief_act_per_group_and_may_move_apart() -> None:
    spec, first = rules.script_spec(_rule((0, 6, 0.1, 0.01), (6, 8, 0.2, 0.0)), LAYOUT)
    assert first == (0.1, 0.2)
    bench = _Bench(spec, rates=None, script_rates=first)
    w = bench.versions.current.params.copy()
    velocity = np.zeros(8, np.float32)
    for update, sent in enumerate([None, (0.1, 0.2), (0.05, 0.1), (0.04, 0.0), (0.0, 0.0), (0.3, 0.3)], start=1):
        rates = sent or first
        g = bench.gradient(0, 0, 32)
        bench.applier.update(_decision([_entry(0, 0, 32, 1.0)], update, rates=sent), "async", 32)
        g[:6] += np.float32(0.01) * w[:6]
        velocity = np.float32(0.9) * velocity + g
        w = w - velocity * np.repeat(np.array(rates, np.float32), [6, 2])
        np.testing.assert_array_equal(bench.versions.current.params, w)
        assert bench.applier.script_rates == rates


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        (_rule((0, 6, 0.1, 0.0)), r"cover \[0, 6\)"),
        (_rule((0, 8, 0.1, 0.0), rule="lion"), "unknown"),
        (_rule((0, 8, 0.1, -1.0)), "weight_decay"),
        (_rule((0, 8, 0.1, 0.0), momentum=1.5), "momentum"),
        (_rule(), "cover"),
    ],
)
def test_an_optimizer_that_cannot_rule_is_refused(rule: Rule, word: str) -> None:
    with pytest.raises(Rejected, match=word):
        rules.script_spec(rule, LAYOUT)


def test_rules_of_two_learners_may_differ_in_their_rates_alone() -> None:
    mine, _ = rules.script_spec(_rule((0, 8, 0.1, 0.0)), LAYOUT)
    assert rules.differs(mine, rules.script_spec(_rule((0, 8, 0.5, 0.0)), LAYOUT)[0]) == ""
    assert "momentum is 0.5" in rules.differs(mine, rules.script_spec(_rule((0, 8, 0.1, 0.0), momentum=0.5), LAYOUT)[0])
    assert "rule is sgd" in rules.differs(mine, rules.script_spec(_rule((0, 8, 0.1, 0.0), rule="sgd"), LAYOUT)[0])
    split = rules.script_spec(_rule((0, 4, 0.1, 0.0), (4, 8, 0.1, 0.0)), LAYOUT)[0]
    assert "other parameters" in rules.differs(mine, split)


@pytest.mark.parametrize("rule", ["sgd", "nesterov", "adamw", "rmsprop"])
def test_a_rule_in_a_snapshot(rule: str) -> None:
    job = _job(rule=rule, weight_decay=0.01, groups=(Group(match="b", lr_scale=2.0, weight_decay=0.0),), clip_norm=1.0)
    spec = rules.job_spec(job, LAYOUT)
    assert rules.spec_from_json(json.loads(json.dumps(rules.spec_to_json(spec)))) == spec


def test_slots_of_the_dead_are_used_again() -> None:
    slots = SlotTable(LAYOUT, 2)
    seen = set()
    for incarnation in range(50):
        slots.open(0, incarnation)
        slots.open(0, incarnation)
        seen |= {id(slots.slot(0, incarnation, n).vector) for n in (0, 1)}
        slots.release(0, incarnation)
        slots.release(0, incarnation)
    assert len(seen) == 2 and slots.sessions == 0
    with pytest.raises(KeyError):
        slots.slot(0, 49, 0)


def test_frozen_parameters_do_not_move_whatever_the_rule() -> None:
    job = _job(rule="adamw", weight_decay=0.1)
    three = Layout.of(Attach(params=[TensorSpec(name, [2], "float32") for name in "abc"]))
    spec = rules.job_spec(job, three, frozen=["b"])
    assert [(g.start, g.stop, g.lr_scale, g.weight_decay) for g in spec.groups] == [
        (0, 2, 1.0, 0.1), (2, 4, 0.0, 0.0), (4, 6, 1.0, 0.1),
    ]  # fmt: skip
    all_frozen = rules.job_spec(job, three, frozen=["a", "b", "c"])
    assert [g.lr_scale for g in all_frozen.groups] == [0.0, 0.0, 0.0]
    slots, versions = SlotTable(three, 1), Versions(three, 2)
    slots.open(0, 1)
    versions.current.params[:] = 5.0
    applier = Applier(three, spec, versions, slots, rates=rules.JobRates(job, 1))
    slots.slot(0, 1, 0).vector.params[:] = 1.0
    slots.slot(0, 1, 0).count = 32
    applier.update(_decision([_entry(0, 0, 32, 1.0)]), "async", 32)
    moved = versions.current.params != 5.0
    assert list(moved) == [True, True, False, False, True, True]
