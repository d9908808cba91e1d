"""S51: what the servers of a job would need is computed first; what does not fit is refused, and nothing dies of it."""

from __future__ import annotations

import resource
from pathlib import Path

from .harness import Rudra
from .test_scenarios import EVERYDAY, sets


def test_a_job_that_does_not_fit_into_its_cap(rudra: Rudra, tmp_path: Path) -> None:
    args = sets(sync__protocol="hardsync", learners__count=2, servers__memory="1kB")
    result = rudra("run", "--json", *args, EVERYDAY, tmp_path, status=8)
    assert result.json["state"] == "FAILED"
    reason = result.json["reason"]
    # Told by the node, or by the learner that it refused, whichever the head hears first.
    assert "the servers of this job need " in reason and "3 versions" in reason and "2 slots" in reason
    assert "servers.memory allows 1.0 kB. Fix: raise servers.memory" in reason


def test_what_is_planned_is_said(rudra: Rudra, tmp_path: Path) -> None:
    result = rudra("run", "--json", *sets(learners__count=1, job__epochs=1), EVERYDAY, tmp_path)
    assert "the servers of this job need" in result.err and "2 versions" in result.err
    assert 0 < result.json["memory_budget"] < resource.getpagesize() ** 2
