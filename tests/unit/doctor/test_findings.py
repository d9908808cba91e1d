"""All checks run at once under one deadline; the exit status follows from what they find."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rudra_zmq.doctor.findings import Finding, Level, examine, of_line, verdict
from rudra_zmq.errors import ConfigError


def finding(level: Level, status: int = 1) -> Finding:
    return Finding("x", level, "a", "it is so", "do it", status)


def test_findings_come_in_the_order_of_the_checks_and_failures_become_findings() -> None:
    gate = threading.Event()

    def first() -> Iterator[Finding]:
        gate.wait(10)
        yield finding("error")

    def second() -> Iterator[Finding]:
        gate.set()  # only checks that run at once get here
        yield finding("note")
        raise ConfigError("no folder", where="/x", fix="make it")

    def third() -> Iterator[Finding]:
        raise PermissionError(13, "Permission denied", "/y")

    found = examine({"1": first, "2": second, "3": third}, limit=20.0)
    assert [(one.id, one.level) for one in found] == [("x", "error"), ("2", "error"), ("3", "warning")]
    assert str(found[1]) == "error: /x: no folder. Fix: make it"
    assert "3 could not be looked at: Permission denied (/y)" in found[2].text


def test_a_check_that_does_not_end_is_named_and_the_others_are_told() -> None:
    gate = threading.Event()

    def stuck() -> Iterator[Finding]:
        gate.wait(30)
        yield finding("error")

    found = examine({"stuck": stuck, "quick": lambda: [finding("note")]}, limit=0.2)
    gate.set()
    assert [one.id for one in found] == ["stuck", "x"]
    assert found[0].text == "looking at stuck has not ended within 0.2 s" and found[0].level == "warning"


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ([], 0),
        ([finding("warning"), finding("note", 4)], 0),
        ([finding("error", 7)], 7),
        ([finding("error", 7), finding("error")], 1),
        ([finding("error", 7), finding("error"), finding("error", 4)], 4),
        ([finding("error"), finding("error", 5)], 5),
    ],
)
def test_the_exit_status(found: list[Finding], status: int) -> None:
    assert verdict(found) == status


def test_a_line_with_its_fix_and_one_of_many_lines() -> None:
    assert of_line("config", "error", "unknown key x (f:1). Fix: remove it").fix == "remove it"
    assert "\n" not in str(Finding("x", "error", "a\nb", "c\nd", "e"))
