"""The table of errors: one line each, the same on both sides of the wire, the exit statuses of the design."""

from __future__ import annotations

import pickle

import pytest

from rudra_zmq import errors
from rudra_zmq.errors import CLASSES, ConfigError, RudraError, from_wire, of_daemon

STATUSES = {
    "failed": 1,
    "usage": 2,
    "config": 2,
    "rejected": 2,
    "not-found": 3,
    "not-running": 3,
    "unreachable": 4,
    "security": 5,
    "timed-out": 6,
    "some-hosts-failed": 7,
    "job-failed": 8,
    "already-running": 1,
    "interrupted": 130,
}


def test_codes_and_statuses_are_the_table() -> None:
    assert {code: cls.exit_status for code, cls in CLASSES.items()} == STATUSES
    assert (errors.EXIT_OK, errors.EXIT_FORCED, errors.EXIT_CONFIG_DAEMON) == (0, 70, 78)


def test_every_class_is_in_the_table_and_in_the_drawn_tree() -> None:
    def below(cls: type[RudraError]) -> set[type[RudraError]]:
        return {cls}.union(*(below(sub) for sub in cls.__subclasses__()))

    # A module may narrow one for its own use; on the wire and in exit statuses it is its parent.
    assert set(CLASSES.values()) == {cls for cls in below(RudraError) if cls.__module__ == errors.__name__}
    assert all(CLASSES[cls.code] in cls.__mro__ for cls in below(RudraError))
    assert errors.__doc__ is not None
    for code, cls in CLASSES.items():
        row = next(line for line in errors.__doc__.splitlines() if f" {code} " in line)
        assert cls.__name__ in row
        assert f" {cls.exit_status} " in row


@pytest.mark.parametrize("cls", CLASSES.values())
def test_daemons_exit_78_where_a_restart_cannot_help(cls: type[RudraError]) -> None:
    expected = 78 if cls.code in ("usage", "config") else cls.exit_status
    assert cls("x").daemon_exit_status == expected


@pytest.mark.parametrize(
    ("message", "where", "fix", "line"),
    [
        ("it broke", "", "", "it broke"),
        ("it broke.", "host b", "", "it broke (host b)"),
        ("it broke", "", "mend it.", "it broke. Fix: mend it"),
        ("it\nbroke", "a\tb", "mend\r\n it", "it broke (a b). Fix: mend it"),
        ("red \x1b[31m text\0", "", "", "red \\x1b[31m text\\x00"),
        ("half \udc80", "", "", "half \\udc80"),
        ("x" * 3000, "", "", "x" * 1997 + "..."),
    ],
)
def test_an_error_is_one_printable_line(message: str, where: str, fix: str, line: str) -> None:
    assert str(RudraError(message, where=where, fix=fix)) == line


@pytest.mark.parametrize("cls", CLASSES.values())
def test_the_wire_keeps_class_and_texts(cls: type[RudraError]) -> None:
    error = cls("what", where="host a", fix="do this")
    back = from_wire(*error.to_wire())
    assert type(back) is cls
    assert str(back) == str(error) == "what (host a). Fix: do this"


def test_a_code_of_a_newer_version_still_says_what_happened() -> None:
    error = from_wire("quota", "too many jobs", "head", "wait")
    assert type(error) is RudraError
    assert str(error) == "too many jobs [quota] (head). Fix: wait"
    assert error.exit_status == 1


def test_an_error_survives_a_copy_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a", where="b", fix="c")))  # noqa: S301
    assert (type(error), str(error)) == (ConfigError, "a (b). Fix: c")


def test_what_ended_a_daemon_is_the_status_of_who_started_it() -> None:
    for cls in CLASSES.values():
        error = cls("x", fix="y")
        back = of_daemon(error.daemon_exit_status, "it did not start: x", fix="y")
        assert back.exit_status == error.exit_status
    assert of_daemon(-9, "killed").exit_status == of_daemon(70, "forced").exit_status == 1
