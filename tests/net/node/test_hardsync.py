"""A whole hardsync job against the plain loop that it must equal bit for bit, also when it is killed or stopped."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rudra_zmq.node.vectors import F32
from rudra_zmq.wire.messages import control as c
from tests.net.node.rig import Learner, Rig, gradient, run_rounds, say_bye, toml, wait_for

SAMPLES, EPOCHS, MU = 30, 3, 4  # 30 = 8 + 8 + 8 + 6: the last round of an epoch deals 4 and 2


def plain_loop() -> F32:
    """One process that averages the same micro-batches in rank order, weighted by samples; torch's momentum."""
    w = np.full(10, 1.0, np.float32)
    v = np.zeros(10, np.float32)
    for epoch in range(EPOCHS):
        for start in range(0, SAMPLES, 2 * MU):
            cuts = [start, min(start + MU, SAMPLES), min(start + 2 * MU, SAMPLES)]
            spans = [(epoch, a, b) for a, b in pairwise(cuts) if a < b]
            count = sum(b - a for _, a, b in spans)
            g = np.zeros(10, np.float32)
            for span in spans:
                g = g + np.float32((span[2] - span[1]) / count) * gradient(w, [span])
            v = np.float32(0.5) * v + g
            w = w - np.float32(0.1) * v
    return w


def result(rig: Rig) -> F32:
    loaded: F32 = safetensors.numpy.load_file(rig.folder / "weights.safetensors")["w"]
    return loaded


def finish(rig: Rig, crew: list[Learner]) -> c.NodeDone:
    run_rounds(crew)
    say_bye(crew)
    done = rig.psd.wait(c.NodeDone, lambda m: m.progress.generation == rig.generation)
    assert rig.exit_status() == 0, rig.log()
    return done


def counted(rig: Rig) -> dict[int, list[int]]:
    """Positions of each epoch in the records that count."""
    records: list[dict[str, Any]] = []
    for line in rig.decisions():
        if "restored" in line:
            records = [r for r in records if r["update"] <= line["restored"]]
        else:
            records.append(line)
    seen: dict[int, list[int]] = {}
    for record in records:
        for ranges in record["ranges"]:
            for epoch, start, stop in ranges:
                seen.setdefault(epoch, []).extend(range(start, stop))
    assert [r["update"] for r in records] == list(range(1, len(records) + 1))
    return {epoch: sorted(positions) for epoch, positions in seen.items()}


def test_equals_the_plain_loop(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(toml(epochs=EPOCHS))
    done = finish(rig, rig.crew(2, SAMPLES))
    np.testing.assert_array_equal(result(rig), plain_loop())
    assert counted(rig) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    assert (done.state, done.reason) == ("DONE", "")
    p = done.progress
    assert (p.updates, p.samples, p.lam, p.c, p.global_batch) == (12, 90, 2, 2, 8)
    assert p.histogram == {"0": 24} and p.staleness_max == 0 and not p.drops
    assert [(r.samples, r.distinct, r.updates) for r in p.rows] == [(30, 30, 4)] * 3
    assert p.weights == str(rig.folder / "weights.safetensors") and p.seconds > 0 and p.samples_per_s > 0
    lines = (rig.folder / "metrics.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[1].startswith("0,")
    assert rig.decisions()[0]["coefficients"] == [0.5, 0.5]
    assert rig.decisions()[3]["counts"] == [4, 2]


@pytest.mark.parametrize("same_processes", [True, False])
def test_killed_in_mid_epoch_and_resumed(rig_of: Callable[..., Rig], same_processes: bool) -> None:
    """kill -9 of the node: the learners live on and come back, or everything was killed and is started anew."""
    rig = rig_of(toml(epochs=EPOCHS, snapshot="1ms"))
    crew = rig.crew(2, SAMPLES)
    run_rounds(crew, 5)
    wait_for("snapshot", lambda: any((rig.folder / "snapshots").glob("1-[1-9]*/manifest.json")))
    if same_processes:
        crew[0].push()  # a push that nobody will answer
    rig.kill()
    rig.start()
    if same_processes:
        again = rig.crew(2, SAMPLES)
        for old, new in zip(crew, again, strict=True):
            new.seq = old.seq + 1  # numbers go on: an id never comes twice
    else:
        again = [rig.learner(rank, incarnation=2) for rank in range(2)]
        start(again)
    done = finish(rig, again)
    np.testing.assert_array_equal(result(rig), plain_loop())
    assert counted(rig) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    assert any("restored" in line and line["generation"] == 2 for line in rig.decisions())
    assert [(r.samples, r.distinct) for r in done.progress.rows] == [(30, 30)] * 3


def start(crew: list[Learner]) -> None:
    from rudra_zmq.wire.messages import data as d
    from tests.net.node.rig import ATTACH

    for learner in crew:
        learner.hello()
        learner.send(ATTACH)
    for learner in crew:
        learner.ready()
        learner.send(d.Data(samples=SAMPLES, minibatch=0))
    for learner in crew:
        learner.grant()


def test_stopped_and_resumed(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(toml(epochs=EPOCHS))
    crew = rig.crew(2, SAMPLES)
    run_rounds(crew, 5)
    rig.psd.tell(c.NodeStop(now=False, state="STOPPED", reason="asked to"))
    rig.psd.event("stops: asked to")
    run_rounds(crew)  # the step under way
    say_bye(crew)
    done = rig.psd.wait(c.NodeDone)
    assert (done.state, done.reason, done.progress.updates) == ("STOPPED", "asked to", 6)
    assert rig.exit_status() == 0 and (rig.folder / "snapshots" / "1-6" / "manifest.json").exists()
    assert not np.array_equal(result(rig), plain_loop())
    rig.start()
    crew = [rig.learner(rank, incarnation=2) for rank in range(2)]
    start(crew)
    final = finish(rig, crew)
    assert final.state == "DONE" and final.progress.seconds > done.progress.seconds
    np.testing.assert_array_equal(result(rig), plain_loop())


def test_a_node_that_died_after_the_last_update_has_nothing_left_to_do(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(toml(epochs=1))
    crew = rig.crew(2, SAMPLES)
    rig.psd.deaf = True  # the report is never confirmed
    run_rounds(crew)
    say_bye(crew)
    rig.psd.wait(c.NodeDone)
    rig.kill()
    (rig.folder / "weights.safetensors").unlink()
    rig.psd.deaf = False
    rig.start()
    done = rig.psd.wait(c.NodeDone, lambda m: m.progress.generation == 2)
    assert (done.state, done.reason, done.progress.updates) == ("DONE", "", 4)
    assert rig.exit_status() == 0 and Path(done.progress.weights).exists()
