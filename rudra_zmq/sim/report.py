"""What a simulation showed, as one JSON object and as lines for a person.

Owns names and rounding. Must not know how it was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rudra_zmq.core.events import Failed, Members
from rudra_zmq.sim.engine import Result

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Setting:
    """What was simulated; texts are as given on the command line."""

    name: str
    samples: int
    compute: str
    stragglers: tuple[str, ...]
    link: str
    rounds: int
    discard: int


def as_object(setting: Setting, force: Members, result: Result) -> dict[str, Any]:
    """The object of ``--json``: the names of every job's report, accuracy and weights null (times only)."""
    starts = [0.0, *(epoch.seconds for epoch in result.epochs)]
    return {
        "schema_version": SCHEMA_VERSION,
        "job": setting.name,
        "state": "FAILED" if isinstance(result.ended, Failed) else "DONE",
        "reason": "" if result.ended is None else result.ended.reason,
        "protocol": force.protocol,
        "n": force.n,
        "lambda": force.lam,
        "mu": _whole(force.global_batch / force.lam),
        "c": force.c,
        "global_batch": force.global_batch,
        "seconds": result.seconds,
        "samples_per_s": result.samples_per_s,
        "gradients_per_s": result.gradients_per_s,
        "updates": result.updates,
        "gradients": result.gradients,
        "samples": result.samples,
        "accuracy": None,
        "staleness": {
            "mean": result.staleness.mean,
            "p95": result.staleness.p95,
            "max": result.staleness.max,
            "histogram": result.staleness.to_json(),
        },
        "overlap": result.overlap,
        "epochs": [
            {
                "epoch": epoch.epoch,
                "samples": setting.samples,
                "distinct": setting.samples,
                "accuracy": None,
                "seconds": epoch.seconds - start,
            }
            for epoch, start in zip(result.epochs, starts, strict=False)
        ],
        "weights": None,
        "gradients_by_rank": {str(rank): result.per_learner[rank] for rank in sorted(result.per_learner)},
        "compute": setting.compute,
        "stragglers": list(setting.stragglers),
        "link": setting.link,
        "rounds": setting.rounds,
        "discard": setting.discard,
    }


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def as_lines(setting: Setting, force: Members, result: Result) -> list[tuple[str, str]]:
    """(what, value) for a person."""
    sigma = result.staleness
    rows = [
        ("job", setting.name),
        ("protocol", f"{force.protocol}, n = {force.n}, lambda = {force.lam}, c = {force.c}"),
        ("global batch", f"{force.global_batch} samples (mu = {force.global_batch / force.lam:g})"),
        ("compute", " ".join([setting.compute, *(f"straggler {text}" for text in setting.stragglers)])),
    ]
    if setting.link:
        rows.append(("link", setting.link))
    rows += [
        ("virtual time", f"{result.seconds:.3f} s"),
        ("throughput", f"{result.samples_per_s:,.0f} samples/s, {result.gradients_per_s:,.1f} gradients/s"),
        ("updates", f"{result.updates:,} of {result.gradients:,} gradients"),
        (
            "staleness",
            f"mean {sigma.mean:.3f}, p95 {sigma.p95}, max {sigma.max} (first {setting.discard} rounds left out)",
        ),
        ("law", f"(lambda-1)/c = {(force.lam - 1) / force.c:.3f}" if force.protocol != "hardsync" else "hardsync: 0"),
        ("overlap", f"{100 * result.overlap:.1f} %"),
    ]
    if isinstance(result.ended, Failed):
        rows.append(("failed", result.ended.reason))
    return rows


def histogram_rows(result: Result, width: int = 40) -> list[tuple[str, str, str]]:
    """(sigma, share, bar) of every sigma that was seen."""
    total = result.staleness.total
    most = max(result.staleness.counts.values(), default=1)
    return [
        (str(sigma), f"{100 * count / total:.2f} %", "#" * max(1, round(width * count / most)))
        for sigma, count in sorted(result.staleness.counts.items())
    ]
