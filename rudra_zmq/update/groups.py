"""Parameter groups: name patterns to spans of the flat vector.

Owns: how a parameter finds its factor on the rate and its weight decay. Must not know: rules, config
files, models.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rudra_zmq.update.rules import GroupSpan


class GroupPattern(NamedTuple):
    """A glob on parameter names (case matters, `*` crosses dots); weight_decay None keeps the job's."""

    match: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


def build_groups(
    parameters: Sequence[tuple[str, int, int]],
    patterns: Sequence[GroupPattern | tuple[str, float, float | None]],
    weight_decay: float,
) -> tuple[GroupSpan, ...]:
    """Spans for parameters (name, start, stop), given in the order of the flat vector and without gaps.

    The first pattern that matches a name counts; a parameter without one has factor 1 and the job's
    weight_decay. Adjacent parameters with equal settings share a span. Raises ValueError (one line) for a
    pattern that no parameter is left for, naming it and names like it, and for parameters with gaps.
    """
    rows = [GroupPattern(*pattern) for pattern in patterns]
    used: set[int] = set()
    spans: list[GroupSpan] = []
    end = 0
    for name, start, stop in parameters:
        if start != end or stop < start:
            raise ValueError(f"parameter {name!r} at [{start}, {stop}) does not follow on from {end}")
        end = stop
        hit = next((i for i, row in enumerate(rows) if fnmatchcase(name, row.match)), None)
        row = GroupPattern(name) if hit is None else rows[hit]
        if hit is not None:
            used.add(hit)
        decay = weight_decay if row.weight_decay is None else row.weight_decay
        _append(spans, start, stop, row.lr_scale, decay)
    names = [name for name, _, _ in parameters]
    for i, row in enumerate(rows):
        if i not in used:
            raise ValueError(_unused(row.match, names))
    return tuple(spans)


def _append(spans: list[GroupSpan], start: int, stop: int, lr_scale: float, weight_decay: float) -> None:
    if start == stop:
        return
    if spans and (spans[-1].lr_scale, spans[-1].weight_decay) == (lr_scale, weight_decay):
        start = spans.pop().start
    spans.append(GroupSpan(start, stop, lr_scale, weight_decay))


def _unused(pattern: str, names: Sequence[str]) -> str:
    if any(fnmatchcase(name, pattern) for name in names):
        return f"group {pattern!r}: every parameter that it matches is taken by a group before it"
    near = _near(pattern, names)
    return f"group {pattern!r} matches no parameter" + (f"; near: {', '.join(near)}" if near else "")


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three names that have the pattern's letters, or whose tail does (for "*.bais": conv1.bias)."""
    core = pattern.strip("*?.").lower()

    def likeness(name: str) -> float:
        pieces = name.lower().split(".")
        tails = [".".join(pieces[i:]) for i in range(len(pieces))]
        return max(difflib.SequenceMatcher(None, core, text).ratio() for text in [*tails, *pieces])

    ranked = sorted(names, key=likeness, reverse=True)
    return [name for name in ranked[:3] if likeness(name) >= 0.5]
