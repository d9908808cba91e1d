"""What topk holds back, on a stage: in snapshots, with who leaves and comes back, and lost with who dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rudra_zmq.node import snapshot
from rudra_zmq.wire.messages import data as d

from .stage import ATTACH, Peer, Stage

JOB = """
[job]
epochs = 4
[run]
script = "x.py"
[learners]
count = 2
minibatch = 4
[sync]
protocol = "hardsync"
[update]
rule = "sgd"
lr = 0.1
schedule = {kind = "constant"}
[servers]
snapshot = "1h"
[wire]
compress = "topk:0.5"
"""


def push(peer: Peer, *values: float, indices: tuple[int, int] = (0, 1), **other: Any) -> None:
    """The gradient of the first lease, as topk of two elements sends it."""
    grant = peer.hear() if peer.grant is None or not peer.none(d.Grant) else peer.grant
    peer.seq = max(peer.seq, grant.ack) + 1
    payload = np.array(indices, np.uint32).tobytes() + np.array(values, np.float32).tobytes()
    lease = grant.leases[0]
    count = sum(stop - start for _, start, stop in lease)
    fields: dict[str, Any] = {
        "rank": peer.rank, "incarnation": peer.incarnation, "seq": peer.seq, "generation": grant.generation,
        "key": grant.key, "nbytes": len(payload), "loss": 1.0,
        "groups": [d.Group(timestamp=grant.timestamp, count=1, samples=count, spans=lease)],
    }  # fmt: skip
    peer.say(d.Chunk(key=grant.key, offset=0), payload)
    peer.say(d.Push(**(fields | other)))


def residual(peer: Peer, value: float, seq: int, key: int = 77) -> None:
    peer.say(d.Residual(key=key, seq=seq))
    peer.say(d.Chunk(key=key, offset=0), np.full(4, value, np.float32).tobytes())


def saved(stage: Stage) -> dict[str, np.ndarray]:
    stage.settle()
    loaded = snapshot.Store(stage.folder / "snapshots", 2).newest(lambda text: None)
    assert loaded is not None
    return {name: array for name, array in snapshot.vectors(loaded).items() if name.startswith("residual.")}


def begun(folder: Path, **spec: Any) -> tuple[Stage, list[Peer]]:
    stage = Stage(folder, JOB, **spec)
    crew = stage.crew(2)
    for peer in crew:
        peer.hear()
    stage.settle()
    return stage, crew


def a_round(crew: list[Peer]) -> None:
    for peer in crew:
        push(peer, 1.0, 2.0)
    for peer in crew:
        peer.hear()


def test_a_snapshot_waits_for_what_is_held_back(tmp_path: Path) -> None:
    stage, crew = begun(tmp_path)
    a_round(crew)
    assert stage.lead.saving.save()
    assert [peer.take(d.SendResidual).seq for peer in crew] == [1, 1]
    residual(crew[0], 0.25, 1)
    stage.settle()
    assert stage.lead.saving.busy and stage.lead.saving.saved == 0
    push(crew[1], 1.0, 2.0)  # the next gradient is on its way already
    residual(crew[1], 0.5, 1)
    found = saved(stage)
    assert {name: array.tolist() for name, array in found.items()} == {
        "residual.0": [0.25] * 4, "residual.1": [0.5] * 4,
    }  # fmt: skip
    assert not stage.lead.saving.busy
    stage.close()


def test_with_a_gradient_pending_it_is_the_one_before_it(tmp_path: Path) -> None:
    """The pending one is computed anew by who goes on from the snapshot."""
    stage, crew = begun(tmp_path)
    a_round(crew)
    push(crew[0], 1.0, 2.0)
    assert stage.lead.saving.save()
    assert crew[0].take(d.SendResidual).seq == 1
    residual(crew[0], 0.25, 1)
    residual(crew[1], 0.5, 1)
    assert sorted(saved(stage)) == ["residual.0", "residual.1"]
    stage.close()


def test_a_restored_rank_gets_it_back_and_so_does_its_next_snapshot(tmp_path: Path) -> None:
    stage, crew = begun(tmp_path)
    a_round(crew)
    stage.lead.saving.save()
    residual(crew[0], 0.25, 1)
    residual(crew[1], 0.5, 1)
    saved(stage)
    stage.close()

    stage = Stage(tmp_path, JOB, generation=2, resume=True)
    crew = [Peer(stage, rank, 2) for rank in range(2)]
    for peer in crew:
        peer.hello()
        peer.say(ATTACH)
        ready = peer.take(d.Ready)
        assert ready.residual
        (_, weights), (chunk, held) = peer.box
        assert len(weights) == 16 and chunk.key == ready.residual
        assert np.frombuffer(held, np.float32).tolist() == [0.25 * (peer.rank + 1)] * 4
        peer.box.clear()
        peer.say(d.Data(samples=32, minibatch=0))
    assert stage.lead.saving.save(finished="for the test")  # nobody is asked: it is all here
    assert sorted(saved(stage)) == ["residual.0", "residual.1"]
    for peer in crew:
        peer.hear()
    a_round(crew)
    assert stage.lead.saving.save()
    assert [peer.take(d.SendResidual).seq for peer in crew] == [1, 1]
    stage.close()


def test_who_leaves_in_peace_finds_it_again(tmp_path: Path) -> None:
    stage, crew = begun(tmp_path)
    a_round(crew)
    residual(crew[1], 0.5, 1)
    crew[1].say(d.Bye(reason="drain"))
    assert not stage.events("lost with its process")
    back = Peer(stage, 1, 2)
    back.hello()
    back.say(ATTACH)
    assert back.take(d.Ready).residual
    stage.close()


def test_with_who_dies_it_is_lost_and_that_is_said(tmp_path: Path) -> None:
    stage, crew = begun(tmp_path)
    a_round(crew)
    assert stage.lead.saving.save()
    residual(crew[0], 0.25, 1)
    stage.lead.end(stage.lead.work.sessions.at(1), "lost", "it was killed")  # type: ignore[arg-type]
    assert stage.events("what topk held back at rank 1 is lost with its process")
    assert stage.events("a snapshot is without what topk holds back at rank 1: it left")
    assert sorted(saved(stage)) == ["residual.0"]
    back = Peer(stage, 1, 2)
    back.hello()
    back.say(ATTACH)
    assert back.take(d.Ready).residual == 0
    stage.close()


def test_who_does_not_answer_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    stage, crew = begun(tmp_path)
    a_round(crew)
    assert stage.lead.saving.save()
    residual(crew[0], 0.25, 1)
    stage.pass_time(601, step=5, alive=crew)
    assert stage.events("it did not answer in 600 s") or stage.events("rank 1: it left")
    assert sorted(saved(stage)) == ["residual.0"]
    stage.close()


def test_a_new_connection_is_asked_again(tmp_path: Path) -> None:
    stage, crew = begun(tmp_path)
    a_round(crew)
    assert stage.lead.saving.save()
    residual(crew[0], 0.25, 1)
    crew[1].box.clear()
    crew[1].peer = b"another-socket"
    crew[1].hello()
    crew[1].say(ATTACH)
    assert crew[1].take(d.Ready).residual == 0  # it has it itself
    crew[1].say(d.Data(samples=32, minibatch=0))
    stage.lead.tick()
    assert crew[1].take(d.SendResidual).seq == 1
    residual(crew[1], 0.5, 1)
    assert sorted(saved(stage)) == ["residual.0", "residual.1"]
    stage.close()


def test_what_no_honest_learner_says_is_dropped(tmp_path: Path) -> None:
    stage, crew = begun(tmp_path)
    a_round(crew)
    residual(crew[0], 0.25, 9)
    residual(crew[0], np.nan, 1)
    residual(crew[0], 0.25, 1, key=crew[0].grant.key)  # type: ignore[union-attr]
    assert stage.drops()["foreign-residual"] == 3
    push(crew[0], 1.0, 2.0, indices=(1, 0))
    push(crew[1], 1.0, 2.0, indices=(1, 4))
    assert stage.drops()["unsound-push"] == 2
    assert stage.lead.work.sync is not None and stage.lead.work.sync.clock.timestamp == 1
    stage.close()


def test_without_topk_nobody_is_asked(tmp_path: Path) -> None:
    stage = Stage(tmp_path, JOB.replace("topk:0.5", "none"))
    crew = stage.crew(2)
    for peer in crew:
        peer.hear()
        peer.push()
    stage.settle()
    assert stage.lead.saving.save()
    assert all(peer.none(d.SendResidual) for peer in crew)
    residual(crew[0], 0.25, 1)
    assert stage.drops()["foreign-residual"] == 1
    assert saved(stage) == {}
    stage.close()
