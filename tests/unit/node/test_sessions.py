"""Who is let in, who takes whose place, and that nothing grows with connects and disconnects."""

from __future__ import annotations

import pytest

from rudra_zmq.node.sessions import Sessions, Turned
from rudra_zmq.wire.messages.data import Hello


def _hello(role: str = "learner", rank: int = 0, incarnation: int = 1, **other: object) -> Hello:
    fields = {"job": "abc123", "token": "secret", "host": "h", "pid": 10 + incarnation} | other
    return Hello(role=role, rank=rank, incarnation=incarnation, **fields)  # type: ignore[arg-type]


@pytest.fixture
def sessions() -> Sessions:
    return Sessions("abc123", "secret", most=4)


@pytest.mark.parametrize(
    ("hello", "reason", "code"),
    [
        (_hello(token="guess"), "bad-token", "security"),
        (_hello(token="sécret"), "bad-token", "security"),
        (_hello(job="fff000"), "wrong-job", "rejected"),
        (_hello(job="fff000", token="guess"), "bad-token", "security"),
        (_hello(rank=4), "wrong-rank", "rejected"),
        (_hello("pulse", rank=4), "wrong-rank", "rejected"),
    ],
)
def test_who_is_turned_away(sessions: Sessions, hello: Hello, reason: str, code: str) -> None:
    with pytest.raises(Turned) as turned:
        sessions.hello(b"x", hello, 0.0)
    assert turned.value.reason == reason and turned.value.error.code == code
    assert sessions.connection(b"x") is None and not sessions.all


def test_versions_are_told_once_and_with_their_owners_where_they_differ(sessions: Sessions) -> None:
    old, new = {"python": "3.11.2", "torch": "2.12.0"}, {"python": "3.11.2", "torch": "2.13.0"}
    sessions.hello(b"a", _hello(versions=old), 0.0)
    sessions.hello(b"p", _hello("pulse", versions={"python": "?"}), 0.0)
    assert sessions.versions() == old
    sessions.hello(b"b", _hello(rank=1, versions=new), 0.0)
    sessions.hello(b"e", _hello("evaluator", versions=new), 0.0)
    assert sessions.versions() == {
        "python": "3.11.2",
        "torch": "2.12.0 (learner 0); 2.13.0 (learner 1, evaluator)",
    }
    sessions.hello(b"c", _hello(incarnation=2, versions=new), 0.0)
    assert sessions.versions() == new


def test_the_evaluators_pulse_tells_no_learners_versions(sessions: Sessions) -> None:
    sessions.hello(b"0", _hello(versions={"torch": "2.1"}), 0.0)
    for role in ("evaluator", "evaluator-pulse"):
        sessions.hello(role.encode(), _hello(role, versions={"torch": "2.2"}), 0.0)
    assert sessions.versions() == {"torch": "2.1 (learner 0); 2.2 (evaluator)"}


def test_versions_are_bounded(sessions: Sessions) -> None:
    many = {f"v{i}": "x" * 256 for i in range(256)}
    for rank in range(4):
        sessions.hello(b"%d" % rank, _hello(rank=rank, versions={k: f"{v[:250]}{rank}" for k, v in many.items()}), 0.0)
    found = sessions.versions()
    assert len(found) == 16 and all(len(value) <= 256 for value in found.values())


def test_the_same_process_may_come_back_on_another_socket(sessions: Sessions) -> None:
    _, first = sessions.hello(b"a", _hello(), 0.0)
    assert first is not None
    first.attached = first.joined = True
    _, second = sessions.hello(b"b", _hello(), 5.0)
    assert second is first and first.peer == b"b" and first.joined and not first.attached
    assert sessions.connection(b"a") is None


def test_another_process_cannot_take_the_place_of_the_same_incarnation(sessions: Sessions) -> None:
    sessions.hello(b"a", _hello(), 0.0)
    for other in (_hello(pid=99), _hello(host="elsewhere"), _hello("pulse", pid=99)):
        with pytest.raises(Turned, match="duplicate"):
            sessions.hello(b"b", other, 0.0)
    assert sessions.connection(b"a") is not None and sessions.session(0, 1) is not None


def test_a_higher_incarnation_takes_the_place(sessions: Sessions) -> None:
    _, old = sessions.hello(b"a", _hello(), 0.0)
    sessions.hello(b"ap", _hello("pulse"), 0.0)
    newer = _hello(incarnation=2)
    assert sessions.replaces(newer) is old and old is not None
    sessions.end(old)
    _, new = sessions.hello(b"b", newer, 1.0)
    assert new is not old and sessions.connection(b"a") is None and sessions.connection(b"ap") is None
    with pytest.raises(Turned, match="old-incarnation"):
        sessions.hello(b"c", _hello(), 2.0)


def test_an_incarnation_that_was_given_up_does_not_come_back(sessions: Sessions) -> None:
    _, session = sessions.hello(b"a", _hello(), 0.0)
    assert session is not None
    sessions.end(session)
    with pytest.raises(Turned, match="old-incarnation") as turned:
        sessions.hello(b"b", _hello(), 1.0)
    assert turned.value.error.code == "not-running"
    assert sessions.replaces(_hello(incarnation=2)) is None
    sessions.hello(b"b", _hello(incarnation=2), 1.0)


def test_a_pulse_may_come_before_its_learner(sessions: Sessions) -> None:
    connection, none = sessions.hello(b"p", _hello("pulse"), 0.0)
    assert none is None and sessions.heard(connection, 1.0) is None
    _, session = sessions.hello(b"a", _hello(), 2.0)
    assert session is not None
    assert sessions.heard(connection, 7.0) is session and session.heard == 7.0


def test_the_chief_moves_on_death(sessions: Sessions) -> None:
    made = {}
    for rank in (2, 0, 3):
        _, session = sessions.hello(b"%d" % rank, _hello(rank=rank), 0.0)
        assert session is not None
        made[rank] = session
        session.attached = True
    assert sessions.chief == 0
    made[2].joined = made[3].joined = True
    assert sessions.chief == 2
    made[0].joined = True
    sessions.end(made[0])
    assert sessions.chief == 2


def test_a_newer_evaluator_takes_the_place(sessions: Sessions) -> None:
    sessions.hello(b"e1", _hello("evaluator"), 0.0)
    sessions.hello(b"e2", _hello("evaluator", incarnation=2), 0.0)
    assert sessions.evaluator == b"e2" and sessions.connection(b"e1") is None
    with pytest.raises(Turned, match="old-incarnation"):
        sessions.hello(b"e1", _hello("evaluator"), 0.0)
    sessions.gone(b"e2")
    assert sessions.evaluator is None


def test_a_second_hello_on_one_socket_moves_it(sessions: Sessions) -> None:
    _, first = sessions.hello(b"a", _hello(rank=0), 0.0)
    sessions.hello(b"a", _hello(rank=1), 0.0)
    assert first is not None and first.peer is None
    connection = sessions.connection(b"a")
    assert connection is not None and connection.rank == 1
    sessions.gone(b"a")
    assert sessions.connection(b"a") is None


def test_a_thousand_connects_leave_nothing(sessions: Sessions) -> None:
    for i in range(1000):
        sessions.hello(b"a%d" % i, _hello(), float(i))
        sessions.hello(b"p%d" % i, _hello("pulse"), float(i))
        sessions.hello(b"e%d" % i, _hello("evaluator"), float(i))
        if i % 7 == 0:
            sessions.gone(b"a%d" % i)
            sessions.gone(b"a%d" % i)
    assert len(sessions._connections) <= 3 and len(sessions._places) <= 3 and len(sessions.all) == 1


def test_below_the_bar_nobody_comes_in(sessions: Sessions) -> None:
    sessions.bar(1, 5)
    sessions.bar(None, 3)
    for hello in (_hello(rank=1, incarnation=4), _hello("pulse", rank=1), _hello("evaluator", incarnation=2)):
        with pytest.raises(Turned, match="old-incarnation"):
            sessions.hello(b"x", hello, 0.0)
    sessions.bar(1, 2)  # told late
    for name, hello in {
        b"0": _hello(),
        b"1": _hello(rank=1, incarnation=5),
        b"e": _hello("evaluator", incarnation=3),
    }.items():
        sessions.hello(name, hello, 0.0)
