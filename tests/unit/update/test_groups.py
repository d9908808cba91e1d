"""Name patterns to spans."""

from __future__ import annotations

import pytest

from rudra_zmq.update.groups import GroupPattern, build_groups
from rudra_zmq.update.rules import GroupSpan, RuleSpec

PARAMETERS = [
    ("conv1.weight", 0, 10),
    ("conv1.bias", 10, 12),
    ("bn.weight", 12, 14),
    ("bn.bias", 14, 16),
    ("fc.weight", 16, 30),
    ("fc.bias", 30, 33),
]


def test_without_patterns_one_span() -> None:
    assert build_groups(PARAMETERS, [], 0.5) == (GroupSpan(0, 33, 1.0, 0.5),)


def test_the_first_match_wins_and_equal_neighbours_merge() -> None:
    patterns = [GroupPattern("bn.*", 1.0, 0.0), GroupPattern("*.bias", 2.0, 0.0), ("fc.*", 3.0, None)]
    spans = build_groups(PARAMETERS, patterns, 0.5)
    assert spans == (
        GroupSpan(0, 10, 1.0, 0.5),
        GroupSpan(10, 12, 2.0, 0.0),
        GroupSpan(12, 16, 1.0, 0.0),
        GroupSpan(16, 30, 3.0, 0.5),
        GroupSpan(30, 33, 2.0, 0.0),
    )
    RuleSpec("sgd", groups=spans).validate(33)


def test_neighbours_that_differ_in_one_setting_stay_apart() -> None:
    spans = build_groups(PARAMETERS[:3], [("*.bias", 1.0, 0.0), ("bn.weight", 2.0, 0.0)], 0.5)
    assert spans == (GroupSpan(0, 10, 1.0, 0.5), GroupSpan(10, 12, 1.0, 0.0), GroupSpan(12, 14, 2.0, 0.0))


def test_a_pattern_may_repeat_the_defaults() -> None:
    assert build_groups(PARAMETERS, [GroupPattern("*.bias")], 0.5) == (GroupSpan(0, 33, 1.0, 0.5),)


def test_a_parameter_without_elements_takes_its_pattern_and_no_span() -> None:
    spans = build_groups([("a", 0, 4), ("none", 4, 4), ("b", 4, 6)], [GroupPattern("none", 2.0)], 0.0)
    assert spans == (GroupSpan(0, 6, 1.0, 0.0),)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("*.bais", r"^group '\*.bais' matches no parameter; near: conv1.bias, bn.bias, fc.bias$"),
        ("con1.weight", r"^group 'con1.weight' matches no parameter; near: conv1.weight"),
        ("*.Bias", r"near: conv1.bias, bn.bias, fc.bias$"),
        ("zzz", r"^group 'zzz' matches no parameter$"),
    ],
)
def test_a_pattern_without_a_match_names_its_neighbours(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build_groups(PARAMETERS, [GroupPattern("*.weight"), GroupPattern(pattern)], 0.0)


def test_a_pattern_that_comes_too_late_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^group 'fc.bias': every parameter that it matches is taken by"):
        build_groups(PARAMETERS, [GroupPattern("*.bias"), GroupPattern("fc.bias", 2.0)], 0.0)


@pytest.mark.parametrize("rows", [[("a", 1, 2)], [("a", 0, 2), ("b", 3, 4)], [("a", 0, 2), ("b", 1, 4)]])
def test_gaps_and_overlaps_are_refused(rows: list[tuple[str, int, int]]) -> None:
    with pytest.raises(ValueError, match="does not follow on from"):
        build_groups(rows, [], 0.0)
