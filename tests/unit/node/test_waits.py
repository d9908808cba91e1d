"""`rudra why`, the node's part: each process, its wait or its work, how long and how long at most."""

from __future__ import annotations

from collections.abc import Callable

from rudra_zmq.wire.messages import control as c
from tests.unit.node.stage import ATTACH, Peer, Stage

StageOf = Callable[..., Stage]


def waits(stage: Stage) -> dict[str, c.WaitRow]:
    rows = stage.lead.report.progress().waits
    assert all(row.since is None or row.since >= 0 for row in rows) and all(
        row.left is None or row.left >= 0 for row in rows
    )
    return {row.who: row for row in rows}


def test_from_nobody_to_version_0(stage_of: StageOf) -> None:
    stage = stage_of()
    stage.pass_time(10.0)
    row = waits(stage)["node"]
    assert row.what == "for ranks 0, 1, not here yet" and (row.since, row.left) == (10.0, 110.0)
    assert row.then == "the job fails"
    zero, one = Peer(stage, 0), Peer(stage, 1)
    zero.hello()
    stage.pass_time(5.0, alive=[zero])
    rows = waits(stage)
    assert rows["learner 0"].what == "its script has not attached its model yet"
    assert (rows["learner 0"].since, rows["learner 0"].left) == (5.0, 595.0)
    assert rows["node"].what == "for rank 1, not here yet"
    zero.say(ATTACH)
    one.hello()
    one.say(ATTACH)
    stage.pass_time(2.0, alive=[zero, one])
    rows = waits(stage)
    assert rows["node"].what == "for version 0 from rank 0" and (rows["node"].since, rows["node"].left) == (2.0, 58.0)
    assert rows["learner 1"].what == "for the others"
    zero.upload()
    zero.ready()
    one.ready()
    stage.pass_time(3.0, alive=[zero, one])
    assert waits(stage)["learner 1"].what == "its script has not said its data yet" and "node" not in waits(stage)


def test_a_round_of_hardsync_and_one_that_is_lost(stage_of: StageOf) -> None:
    stage = stage_of()
    zero, one = stage.crew(2)
    zero.hear(), one.hear()
    stage.pass_time(4.0, alive=[zero, one])
    rows = waits(stage)
    assert {row.what for row in rows.values()} == {"computes its first mini-batch"}
    assert (rows["learner 0"].since, rows["learner 0"].left) == (4.0, 3596.0) and "killed" in rows["learner 0"].then
    zero.push()
    rows = waits(stage)
    assert rows["learner 0"].what == "for the gradients of this round: of rank 1" and rows["learner 0"].left == 3596.0
    stage.lead.command(c.LearnerGone(rank=1, incarnation=1, kind="lost", respawn=True))
    stage.pass_time(6.0, alive=[zero])
    row = waits(stage)["learner 1"]
    assert "lost" in row.what and (row.since, row.left) == (6.0, 54.0) and row.then == "the job goes on without it"
