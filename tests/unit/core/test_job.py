"""The life of a job, row by row, and that no job can get stuck."""

from __future__ import annotations

from typing import get_args

import pytest

from rudra_zmq.core.job import ENDED, LIVE, TABLE, Event, State, refusal, step

GOOD_LIFE = [
    ("placed", "STARTING", ("start-node",)),
    ("node-up", "STARTING", ("start-learners",)),
    ("running", "RUNNING", ()),
    ("waiting", "WAITING", ()),
    ("running", "RUNNING", ()),
    ("node-exit", "WAITING", ("start-node",)),
    ("node-up", "WAITING", ("tell-learners",)),
    ("running", "RUNNING", ()),
    ("node-up", "RUNNING", ("tell-learners",)),
    ("node-done", "DONE", ("stop-learners", "free-slots")),
    ("remove", "DONE", ("forget",)),
]


def test_a_good_life() -> None:
    state: State = "PENDING"
    for event, after, effects in GOOD_LIFE:
        assert step(state, event) == (after, effects), (state, event)  # type: ignore[arg-type]
        state = after  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("state", "event", "after", "effects"),
    [
        ("PENDING", "stop", "STOPPED", ()),
        ("PENDING", "stop-now", "STOPPED", ()),
        ("PENDING", "fail", "FAILED", ()),
        ("STARTING", "waiting", "WAITING", ()),
        ("STARTING", "node-exit", "STARTING", ("start-node",)),
        ("RUNNING", "stop", "STOPPING", ("drain-node",)),
        ("WAITING", "stop-now", "STOPPING", ("end-node",)),
        ("RUNNING", "fail", "STOPPING", ("end-node",)),
        ("RUNNING", "node-hopeless", "FAILED", ("stop-learners", "free-slots")),
        ("RUNNING", "node-failed", "FAILED", ("stop-learners", "free-slots")),
        ("STOPPING", "stop-now", "STOPPING", ("end-node",)),
        ("STOPPING", "fail", "STOPPING", ("end-node",)),
        ("STOPPING", "node-stopped", "STOPPED", ("stop-learners", "free-slots")),
        ("STOPPING", "node-done", "DONE", ("stop-learners", "free-slots")),
        ("STOPPING", "node-hopeless", "FAILED", ("stop-learners", "free-slots")),
        ("RUNNING", "orphaned", "LOST", ("free-slots",)),
        ("STOPPED", "resume", "PENDING", ()),
        ("FAILED", "resume", "PENDING", ()),
        ("LOST", "resume", "PENDING", ()),
    ],
)
def test_rows(state: State, event: Event, after: State, effects: tuple[str, ...]) -> None:
    assert step(state, event) == (after, effects)


def test_a_node_that_dies_while_stopping_ends_the_job_as_asked() -> None:
    assert step("STOPPING", "node-exit", "FAILED") == ("FAILED", ("stop-learners", "free-slots"))
    assert step("STOPPING", "node-exit") == ("STOPPED", ("stop-learners", "free-slots"))


@pytest.mark.parametrize(
    ("state", "event"),
    [("DONE", "stop"), ("DONE", "resume"), ("STOPPED", "running"), ("RUNNING", "resume"), ("STOPPING", "running")],
)
def test_what_means_nothing(state: State, event: Event) -> None:
    assert step(state, event) is None


def test_every_live_state_has_a_way_to_an_end_and_every_ended_one_stays() -> None:
    assert set(get_args(State)) == ENDED | LIVE and not ENDED & LIVE
    for state in LIVE:
        reached, todo = {state}, [state]
        while todo:
            here = todo.pop()
            for (start, _), after in TABLE.items():
                if start == here and after.state not in reached:
                    reached.add(after.state)
                    todo.append(after.state)
        assert reached & ENDED
        assert step(state, "orphaned") == ("LOST", ("free-slots",))
        assert any(step(state, event) for event in ("stop", "stop-now"))
    for (state, event), after in TABLE.items():
        assert state in LIVE or event in ("resume", "remove")
        if state not in ENDED and after.state in ENDED and state not in ("PENDING",) and event != "orphaned":
            assert after.effects == ("stop-learners", "free-slots")
    assert {event for _, event in TABLE} <= set(get_args(Event))


@pytest.mark.parametrize(
    ("state", "event", "text"),
    [
        ("DONE", "resume", "it is DONE, there is nothing left to do"),
        ("RUNNING", "resume", "it is RUNNING already"),
        ("RUNNING", "remove", "it is RUNNING, stop it first"),
        ("DONE", "stop", "it is DONE"),
    ],
)
def test_refusals_say_why(state: State, event: Event, text: str) -> None:
    assert step(state, event) is None
    assert refusal(state, event) == text
