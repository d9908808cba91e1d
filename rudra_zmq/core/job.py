"""The life of a job: states, events, and what the head must do at each step.

Owns the one table. Must not know processes, messages or the registry: effects are names that the head carries
out. Standard library alone, so that psd stays small.

    PENDING --placed--> STARTING --running--> RUNNING <--waiting/running--> WAITING
       |                    |                    |                            |
       stop                 +---- stop, stop-now, fail ----> STOPPING <-------+
       v                                                        |
    STOPPED, FAILED, LOST --resume--> PENDING                   +--> STOPPED or FAILED, as it was asked to end

A node that exits without having reported an end is started again (its psd counts how often) and goes on from
the newest snapshot; while the job was STOPPING it ends instead, from that snapshot a resume can go on.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["PENDING", "STARTING", "RUNNING", "WAITING", "STOPPING", "STOPPED", "DONE", "FAILED", "LOST"]
Event: TypeAlias = Literal[
    "placed",  # slots for the node and every learner were found
    "node-up",  # the node is bound and serves (also a restarted one)
    "running",  # the node reports progress
    "waiting",  # the node reports that learners are missing
    "stop",  # somebody asks for a drain and a snapshot
    "stop-now",  # or for an end at once
    "fail",  # a learner raised, a task cannot be loaded, ...: the job is to end as FAILED
    "node-done",  # the node reports its end: all epochs applied or a stop condition met
    "node-stopped",  # the node reports its end: drained
    "node-failed",  # the node reports its end: failed
    "node-exit",  # the node ended without a report
    "node-hopeless",  # ... more often than it may
    "orphaned",  # the head starts, and finds a job that nobody runs and that it may not start again
    "resume",
    "remove",
]
Effect: TypeAlias = Literal[
    "start-node",  # with resume if the job ran before
    "start-learners",
    "tell-learners",  # where the node is now
    "drain-node",
    "end-node",  # at once; the last snapshot stays
    "stop-learners",  # all of them and the evaluator
    "free-slots",
    "forget",  # remove row and folder
]

ENDED: frozenset[State] = frozenset({"STOPPED", "DONE", "FAILED", "LOST"})
LIVE: frozenset[State] = frozenset({"PENDING", "STARTING", "RUNNING", "WAITING", "STOPPING"})


class Step(NamedTuple):
    """The state that follows, and what the head does, in order."""

    state: State
    effects: tuple[Effect, ...] = ()


_END: tuple[Effect, ...] = ("stop-learners", "free-slots")

TABLE: dict[tuple[State, Event], Step] = {
    ("PENDING", "placed"): Step("STARTING", ("start-node",)),
    ("PENDING", "stop"): Step("STOPPED"),
    ("PENDING", "stop-now"): Step("STOPPED"),
    ("PENDING", "fail"): Step("FAILED"),
    ("STARTING", "node-up"): Step("STARTING", ("start-learners",)),
    ("STARTING", "running"): Step("RUNNING"),
    ("STARTING", "waiting"): Step("WAITING"),
    ("RUNNING", "waiting"): Step("WAITING"),
    ("WAITING", "running"): Step("RUNNING"),
    ("RUNNING", "node-up"): Step("RUNNING", ("tell-learners",)),
    ("WAITING", "node-up"): Step("WAITING", ("tell-learners",)),
    ("STOPPING", "stop-now"): Step("STOPPING", ("end-node",)),
    ("STOPPING", "fail"): Step("STOPPING", ("end-node",)),
    ("STOPPING", "node-hopeless"): Step("FAILED", _END),
    ("STOPPED", "resume"): Step("PENDING"),
    ("FAILED", "resume"): Step("PENDING"),
    ("LOST", "resume"): Step("PENDING"),
}
_PLACED: tuple[State, ...] = ("STARTING", "RUNNING", "WAITING")
for _state in _PLACED:
    TABLE[_state, "stop"] = Step("STOPPING", ("drain-node",))
    TABLE[_state, "stop-now"] = Step("STOPPING", ("end-node",))
    TABLE[_state, "fail"] = Step("STOPPING", ("end-node",))
    TABLE[_state, "node-exit"] = Step("STARTING" if _state == "STARTING" else "WAITING", ("start-node",))
    TABLE[_state, "node-hopeless"] = Step("FAILED", _END)
for _state in (*_PLACED, "STOPPING"):
    TABLE[_state, "node-done"] = Step("DONE", _END)
    TABLE[_state, "node-stopped"] = Step("STOPPED", _END)
    TABLE[_state, "node-failed"] = Step("FAILED", _END)
for _state in LIVE:
    TABLE[_state, "orphaned"] = Step("LOST", ("free-slots",))
for _state in ENDED:
    TABLE[_state, "remove"] = Step(_state, ("forget",))


def step(state: State, event: Event, ending: Literal["STOPPED", "FAILED"] = "STOPPED") -> Step | None:
    """What ``event`` means in ``state``; None if it means nothing there (late news, or a request to refuse).

    ``ending`` is how a STOPPING job was asked to end: a node that dies on the way ends it so.
    """
    if state == "STOPPING" and event == "node-exit":
        return Step(ending, _END)
    return TABLE.get((state, event))


def refusal(state: State, event: Event) -> str:
    """Why a person's request cannot be met: one clause, without the job's id."""
    if event == "resume":
        return "it is DONE, there is nothing left to do" if state == "DONE" else f"it is {state} already"
    if event == "remove":
        return f"it is {state}, stop it first"
    return f"it is {state}"
