"""Well-formed messages at the limits of their fields: whatever they ask for, the node serves the others afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rudra_zmq.node.work import NodeEnds
from rudra_zmq.wire.codec import WireError, encode_data
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.unit.node.stage import ATTACH, JOB, TOKEN, Peer, Stage
from tests.unit.wire.extremes import extreme

TEXT = """
[job]
name = "stage"
epochs = 2
{job}
{run}
[learners]
count = 2
max = 4
minibatch = 4
[sync]
protocol = "async"
n = 2
[update]
{update}
[servers]
snapshot = "none"
"""
SGD = 'rule = "sgd"\nlr = 0.5\nschedule = {kind = "constant"}'
SCRIPT = {"job": "", "run": '[run]\nscript = "train.py"'}
TASK = {"job": 'task = "no.such:task"', "run": ""}


def _unattached(stage: Stage) -> tuple[Peer, Peer | None]:
    peer = Peer(stage, 0)
    peer.hello()
    return peer, None


def _ready(stage: Stage) -> tuple[Peer, Peer | None]:
    """Both have the weights; the other one has its data."""
    crew = [Peer(stage, rank) for rank in range(2)]
    for peer in crew:
        peer.hello()
        peer.say(ATTACH)
    crew[0].upload()
    for peer in crew:
        peer.ready()
    return crew[0], crew[1]


def _joined(stage: Stage) -> tuple[Peer, Peer | None]:
    zero, one = stage.crew(2)
    zero.hear()
    return zero, one


def _evaluator(stage: Stage) -> tuple[Peer, Peer | None]:
    _, one = stage.crew(2)
    peer = Peer(stage, 0, role="evaluator")
    peer.hello()
    peer.say(ATTACH)
    return peer, one


def _pulse(stage: Stage) -> tuple[Peer, Peer | None]:
    zero, one = stage.crew(2)
    zero.hello(pulse=True)
    zero.peer = zero.pulse
    return zero, one


# What is looked at closely in a state comes more often.
SAID: dict[str, list[type]] = {
    "unattached": [*get_args(d.ToNode), d.Attach, d.Attach, d.Hello],
    "ready": [*get_args(d.ToNode), d.Rule, d.Data, d.Data],
    "joined": [*get_args(d.ToNode), *[d.Push] * 8],
    "evaluator": [*get_args(d.ToNode), d.TestResult, d.Attach],
    "pulse": list(get_args(d.ToNode)),
}

STATES: dict[str, Callable[[Stage], tuple[Peer, Peer | None]]] = {
    "unattached": _unattached, "ready": _ready, "joined": _joined, "evaluator": _evaluator, "pulse": _pulse,
}  # fmt: skip


def mostly(cls: type, right: dict[str, Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages of a kind with at most two of the ``right`` fields wrong: with more a message does not get far."""
    names = sorted(right)

    def with_wrong(wrong: list[str]) -> st.SearchStrategy[Any]:
        rest = {name: st.just(right[name]) for name in names if name not in wrong}
        return extreme(cls, **{name: strategy for name, strategy in fields.items() if name in wrong} | rest)

    return st.lists(st.sampled_from(names), max_size=2, unique=True).flatmap(with_wrong) if names else extreme(cls)


def spoken(cls: type, peer: Peer) -> st.SearchStrategy[Any]:
    """Messages of a kind as ``peer`` might send them now, and others."""
    grant = peer.grant or d.Grant(ack=0, verdict="", generation=1, timestamp=0, leases=[[(0, 0, 4)]], slot=0, key=1)
    group = {"timestamp": grant.timestamp, "count": 1, "samples": 4, "spans": grant.leases[0]}
    known: dict[str, Any] = {
        "rank": peer.rank, "incarnation": peer.incarnation, "generation": 1, "key": grant.key, "seq": grant.ack + 1,
        "job": JOB, "token": TOKEN, "nbytes": 16, "samples": 32, "minibatch": 4, "groups": [d.Group(**group)],
    }  # fmt: skip
    right = {name: known[name] for name in cls.__struct_fields__ if name in known}
    return mostly(cls, right, groups=st.lists(mostly(d.Group, group), min_size=1, max_size=2))


@pytest.mark.parametrize("state", STATES)
@settings(max_examples=60)
@given(st.data())
def test_nothing_that_is_said_ends_the_node(state: str, draw: st.DataObject) -> None:
    update = draw.draw(st.sampled_from([SGD, ""])) if state in ("unattached", "ready") else SGD
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), TEXT.format(**(TASK if state == "evaluator" else SCRIPT), update=update))
        try:
            peer, other = STATES[state](stage)
            for cls in draw.draw(st.lists(st.sampled_from(SAID[state]), min_size=1, max_size=4)):
                message = draw.draw(spoken(cls, peer))
                payload = draw.draw(st.sampled_from([b"x", b"\0" * 16, b"\x01" * 16])) if cls is d.Chunk else None
                try:
                    encode_data(message, payload)
                except WireError:
                    continue  # longer than a frame may be
                peer.say(message, payload)
                stage.lead.tick()
                stage.report()
            if other is not None and not stage.lead.ending.over:
                serves(stage, other)
        finally:
            stage.close()


def serves(stage: Stage, other: Peer) -> None:
    """The other learner, which said nothing out of order, is served, as far as there is something to do for it."""
    work = stage.lead.work
    session = work.sessions.at(other.rank)
    if session is None or session.peer != other.peer:
        return  # somebody with the token said that it is the next incarnation
    if not work.started and work.model is not None and work.model.applier is not None:
        samples = work.figures.samples if work.figures else 32
        other.say(d.Data(samples=samples, minibatch=min(4, samples)))
    other.ping()
    assert not other.none(d.Pong) and other.none(d.Refused)
    if work.sync is not None and not other.none(d.Grant):  # else the first one holds all samples
        accepted = work.sync.counters.accepted
        other.push(1.0)
        assert work.sync.counters.accepted == accepted + 1
    stage.report()


@pytest.mark.parametrize("samples", [2**37 + 1, 2**53])
def test_more_samples_than_can_be_counted_are_refused(stage_of: Callable[..., Stage], samples: int) -> None:
    stage = stage_of(count=1)
    (peer,) = stage.crew(1, samples=samples, minibatch=samples)
    refused = peer.take(d.Refused)
    assert refused.where == "data" and refused.fix and f"{samples} samples are more than" in refused.message
    assert stage.drops() == {"refused": 1}
    peer.say(d.Data(samples=32, minibatch=0))  # nothing was settled by what was refused
    assert peer.hear().leases[0] == [(0, 0, 4)]


def test_the_largest_data_in_batches_of_all_of_it(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of(count=1, epochs=2)
    (peer,) = stage.crew(1, samples=2**37, minibatch=2**37)
    for _ in range(2):
        peer.push(1.0)
        stage.report()
    assert peer.hear().done
    assert [row.distinct for row in stage.lead.report.progress().rows] == [2**37, 2**37]


# ---------------------------------------------------------------------------------------------- memory


def _without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    def none(*_: Any) -> None:
        raise MemoryError("Unable to allocate 4.00 TiB")

    monkeypatch.setattr(f"rudra_zmq.node.{module}.carrier", none)


def test_a_learner_for_whom_there_is_no_memory_is_refused(
    stage_of: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(count=1)
    peer = Peer(stage, 0)
    peer.hello()
    with monkeypatch.context() as without:
        _without(without, "slots")
        peer.say(ATTACH)
    refused = peer.take(d.Refused)
    assert refused.message == "the node is out of memory: Unable to allocate 4.00 TiB"
    assert (refused.where, stage.drops()) == ("attach", {"refused": 1}) and "memory" in refused.fix
    assert stage.events("rank 0 is refused: the node is out of memory")
    peer.say(ATTACH)
    peer.upload()
    peer.ready()
    peer.say(d.Data(samples=32, minibatch=0))
    peer.push(1.0)
    assert peer.hear().verdict == "accepted"


def test_no_memory_for_version_0_fails_the_job(stage_of: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(count=1)
    _without(monkeypatch, "versions")
    peer = Peer(stage, 0)
    peer.hello()
    peer.say(ATTACH)
    peer.say(d.Bye(reason="done"))
    stage.settle()
    stage.lead.tick()
    (done,) = stage.all(c.NodeDone)
    assert done.state == "FAILED" and done.reason.startswith("out of memory for version 0 of the weights: Unable")


def test_no_memory_in_the_middle_of_an_update_ends_the_node(
    stage_of: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(count=1)
    (peer,) = stage.crew(1)
    _without(monkeypatch, "versions")  # the second buffer of the ring is needed now
    with pytest.raises(NodeEnds, match="out of memory in the middle of a turn; back to the last snapshot: Unable"):
        peer.push(1.0)
