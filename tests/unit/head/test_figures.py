"""psd's metrics: every name in the table, on the page of names, by Prometheus' conventions, with the right values."""

from __future__ import annotations

import re
from pathlib import Path

from rudra_zmq.daemons.metrics import buckets
from rudra_zmq.head.figures import METRICS, Bins
from rudra_zmq.wire.messages import control as c
from tests.unit.head.world import World

PAGE = Path(__file__).parents[3] / "docs" / "METRICS.rst"


def values(world: World) -> dict[tuple[str, ...], float | Bins]:
    found = world.head.figures({"prefix": 3}, world.now)
    table = {metric.name: metric for metric in METRICS}
    assert all(len(figure.labels) == len(table[figure.name].labels) for figure in found)
    assert len({figure[:2] for figure in found}) == len(found), "a series twice"
    return {(figure.name.removeprefix("rudra_"), *figure.labels): figure.value for figure in found}


def test_names_follow_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"rudra_[a-z]+(_[a-z]+)*", metric.name) and metric.help and not metric.help.endswith(".")
        assert not metric.name.endswith(("_total", "_bucket", "_count", "_sum"))
        assert not {"job", "instance", "le", "quantile"} & set(metric.labels)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_page_of_names_is_the_table() -> None:
    rows = [line.split() for line in PAGE.read_text().splitlines() if line.startswith("rudra_")]
    names = [metric.name + ("_total" if metric.kind == "counter" else "") for metric in METRICS]
    assert [row[:2] for row in rows] == [[name, metric.kind] for name, metric in zip(names, METRICS, strict=True)]
    text = " ".join(PAGE.read_text().split())
    for name, metric in zip(names, METRICS, strict=True):
        assert " ".join([name, metric.kind, ", ".join(metric.labels), metric.help]).replace("  ", " ") in text


def test_values_of_a_cluster(world: World) -> None:
    job = world.running(2)
    world.submit(2, name="waits")
    world.submit(2, name="waits too")
    learners = [
        c.LearnerRow(rank=0, incarnation=1, state="present"), c.LearnerRow(rank=1, incarnation=1, state="torpid"),
    ]  # fmt: skip
    world.report(
        job, updates=12, samples=345, learners=learners, histogram={"0": 5, "2": 3}, drops={"stale": 2}, accuracy=0.5,
        protocol="softsync", rule="momentum", seconds=9.5, accepted=14, applied=12, epoch=1, lr=0.25,
    )  # fmt: skip
    world.send(b"stranger", c.ListJobs())
    world.now += 10
    world.wait(1.0, alive=())
    now = values(world)
    of = (job, "demo")
    expected = {
        ("psd_messages_dropped", "prefix"): 3, ("psd_messages_refused",): 1, ("jobs", "RUNNING"): 1,
        ("jobs", "PENDING"): 1, ("jobs", "DONE"): 0, ("host_up", "a"): False, ("host_slots", "a"): 4,
        ("host_slots_free", "a"): 0, ("job_info", *of, "RUNNING", "softsync", "momentum"): 1,
        ("job_learners", *of, "present"): 1, ("job_learners", *of, "torpid"): 1, ("job_learners_declared", *of): 2,
        ("job_updates", *of): 12, ("job_samples", *of): 345, ("job_running_seconds", *of): 9.5,
        ("job_gradients_dropped", *of, "stale"): 2, ("job_accuracy_ratio", *of): 0.5, ("job_learning_rate", *of): 0.25,
        ("job_epochs_completed", *of): 1, ("job_staleness", *of): ((0, 5), (2, 3)),
    }  # fmt: skip
    assert {key: now.get(key) for key in expected} == expected
    assert ("job_loss", *of) not in now and ("job_snapshot_age_seconds", *of) not in now
    world.register(running=[(job, rank, 1, 700) for rank in (0, 1, 65535)])
    world.node_done(job)
    world.node_exit(job)
    for rank in (0, 1, 65535):
        world.exit(job, rank, "ok")
    gone = values(world)
    assert gone["jobs", "DONE"] == 1 and gone["host_up", "a"] and not [key for key in gone if job in key]


def test_buckets_are_cumulative() -> None:
    rows = dict(buckets(((0, 5), (2, 3), (5, 1), (5000, 2))))
    assert [rows[f"{bound}.0"] for bound in (0, 1, 2, 4, 8, 1024)] == [5, 5, 8, 8, 9, 9] and rows["+Inf"] == 11
