"""The laws of staleness, from the decision log of real jobs (RUDRA.md, facts 1, 7 and 12)."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from .harness import Rudra, decisions

JOB = Path(__file__).parents[2] / "etc" / "rudra" / "jobs" / "fashion-softsync.toml"
LAM = 4


def run(rudra: Rudra, protocol: str, n: int) -> list[dict[str, Any]]:
    done = rudra(
        "run", "--json", "-s", f"sync.protocol={protocol}", *(["-s", f"sync.n={n}"] if protocol == "softsync" else []),
        "-s", "job.epochs=2", "-s", "job.task=rudra_zmq.tasks.fashion_mnist:small", "-s", "job.task_args.limit=24000", JOB,
    ).json  # fmt: skip
    return decisions(Path(done["folder"]) / "decisions.jsonl")


def sigmas(records: list[dict[str, Any]]) -> list[int]:
    """sigma of each gradient: (i-1) - i_k."""
    return [record["update"] - 1 - t for record in records for t in record["timestamps"]]


def test_hardsync_is_never_stale(rudra: Rudra) -> None:
    records = run(rudra, "hardsync", 1)
    assert set(sigmas(records)) == {0}
    assert all(sorted(g[0] for g in r["ids"]) == list(range(LAM)) for r in records if sum(r["counts"]) == LAM * 32)


@pytest.mark.parametrize(("protocol", "n", "c"), [("softsync", 1, 4), ("softsync", 2, 2), ("async", 1, 1)])
def test_mean_staleness_follows_the_law(rudra: Rudra, protocol: str, n: int, c: int) -> None:
    records = run(rudra, protocol, n)
    for record in records:
        assert max(record["timestamps"]) < record["update"]
        assert record["mean_sigma"] == pytest.approx(record["update"] - 1 - mean(record["timestamps"]))
    steady = records[2 * LAM // c :]  # the first two rounds apart
    assert mean(sigmas(steady)) == pytest.approx((LAM - 1) / c, rel=0.02)
