"""Which rule updates the weights, and at which rate: the job file's, or the optimizer of a script.

Owns: the two sources of a rule and of its rates. Must not know: gradients, versions, messages other than Rule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rudra_zmq.config.job import Schedule, UpdateSection
from rudra_zmq.errors import Rejected
from rudra_zmq.update.groups import GroupPattern, build_groups
from rudra_zmq.update.rules import RULES, GroupSpan, RuleSpec
from rudra_zmq.update.schedule import ScheduleSpec, rate, scaled_lr
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Rule


class JobRates:
    """The rate of a job file: its schedule over the epochs, scaled with the global batch under hardsync."""

    def __init__(self, update: UpdateSection, epochs: int) -> None:
        self._update = update
        self._epochs = epochs
        self._schedule = schedule_of(update.schedule)

    def first(self, protocol: str, global_batch: int) -> float:
        """lr0 for a global batch in samples."""
        update = self._update
        if protocol != "hardsync" or update.scaling == "none":
            return update.lr
        return scaled_lr(update.lr, global_batch, 1, update.reference_batch, update.scaling)

    def at(self, progress: float, protocol: str, global_batch: int) -> float:
        """The rate at ``progress`` epochs."""
        return rate(self._schedule, self.first(protocol, global_batch), progress, self._epochs)


def schedule_of(schedule: Schedule) -> ScheduleSpec:
    """A job file's schedule: what its kind does not read is None in it."""
    return ScheduleSpec(schedule.kind or "constant", schedule.epochs, schedule.gamma, schedule.power)


def job_spec(update: UpdateSection, layout: Layout, frozen: Collection[str] = ()) -> RuleSpec:
    """The rule of a job file for a model; ``frozen`` parameters have rate 0 and no decay, whatever it says.

    Rejected (one line) where a group matches none of the parameters.
    """
    patterns = [GroupPattern(g.match, g.lr_scale, g.weight_decay) for g in update.groups]
    parameters = [(p.name, p.start, p.stop) for p in layout.params]
    reads = {name: getattr(update, name) for name in RULES[update.rule].parameters}
    try:
        groups = _freeze(build_groups(parameters, patterns, update.weight_decay), layout, frozen)
        spec = RuleSpec.of(update.rule, groups, update.clip_norm, **reads)
        spec.validate(layout.P)
    except ValueError as error:
        raise Rejected(str(error), where="[update]", fix="change update.groups in the job file") from None
    return spec


def _freeze(groups: Sequence[GroupSpan], layout: Layout, frozen: Collection[str]) -> tuple[GroupSpan, ...]:
    """The same spans, cut at the frozen parameters."""
    held = sorted((p.start, p.stop) for p in layout.params if p.name in frozen and p.start < p.stop)
    out: list[GroupSpan] = []
    for group in groups:
        at = group.start
        for start, stop in held:
            low, high = max(start, at), min(stop, group.stop)
            if low < high:
                out += [replace(group, start=at, stop=low)] if at < low else []
                out.append(GroupSpan(low, high, 0.0, 0.0))
                at = high
        out += [replace(group, start=at)] if at < group.stop else []
    return tuple(out)


def script_spec(rule: Rule, layout: Layout) -> tuple[RuleSpec, tuple[float, ...]]:
    """The rule that a script's optimizer is, and the rate of each of its groups. Rejected (one line)."""
    rates = tuple(group.lr for group in rule.groups)
    try:
        _, groups = scaled_groups(rates, [(g.start, g.stop, g.weight_decay) for g in rule.groups])
        reads = {name: getattr(rule, name) for name in RULES[rule.rule].parameters} if rule.rule in RULES else {}
        spec = RuleSpec.of(rule.rule, groups, **reads)
        spec.validate(layout.P)
    except ValueError as error:
        fix = f"use an optimizer whose rule is one of {', '.join(RULES)}"
        raise Rejected(f"the optimizer cannot be the job's rule: {error}", fix=fix) from None
    return spec, rates


def scaled_groups(
    rates: Sequence[float], spans: Sequence[tuple[int, int, float]]
) -> tuple[float, tuple[GroupSpan, ...]]:
    """A rate for all, and spans (start, stop, weight decay) with factors on it that make each one's own rate."""
    if len(rates) != len(spans):
        raise ValueError(f"{len(rates)} rates for {len(spans)} groups")
    top = max(rates, default=0.0)
    scales = [r / top if top > 0 else 1.0 for r in rates]
    rows = zip(spans, scales, strict=True)
    return top, tuple(GroupSpan(start, stop, scale, decay) for (start, stop, decay), scale in rows)


def differs(mine: RuleSpec, theirs: RuleSpec) -> str:
    """What differs between the rule in force and another learner's, rates apart; "" if nothing does."""
    for name in ("rule", *RULES[mine.rule].parameters):
        if getattr(mine, name) != getattr(theirs, name):
            return f"{name} is {getattr(theirs, name)}, the job's is {getattr(mine, name)}"
    if [(g.start, g.stop) for g in mine.groups] != [(g.start, g.stop) for g in theirs.groups]:
        return "its groups hold other parameters than the job's"
    return ""


def spec_to_json(spec: RuleSpec) -> dict[str, Any]:
    """For a snapshot."""
    table = {name: getattr(spec, name) for name in ("rule", *RULES[spec.rule].parameters, "clip_norm")}
    table["groups"] = [[g.start, g.stop, g.lr_scale, g.weight_decay] for g in spec.groups]
    return table


def spec_from_json(table: Mapping[str, Any]) -> RuleSpec:
    """Of a snapshot. KeyError, TypeError or ValueError where it is none."""
    constants = {k: v for k, v in table.items() if k not in ("rule", "groups", "clip_norm")}
    groups = [GroupSpan(int(a), int(b), float(s), float(d)) for a, b, s, d in table["groups"]]
    return RuleSpec.of(str(table["rule"]), groups, table["clip_norm"], **constants)
