"""A job as one JSON object and as one screen. Knows the records of the wire, asks nobody."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rudra_zmq.cli.output import ago, fitted, local, percent, say, size, span, table, utc
from rudra_zmq.cli.places import ENDED
from rudra_zmq.wire.messages.control import EpochRow, JobRow, LearnerRow, Progress

# What fits a screen of 24 rows beside the figures, and a report that is still read.
EPOCHS_OF_STATUS = 4
LEARNERS_OF_STATUS = 8
EPOCHS_OF_SUMMARY = 20
FAILED_PROCESS = re.compile(r"(?:(?:learner|rank) (\d+)|evaluator) failed")  # in a reason, and in the story


def job_object(row: JobRow) -> dict[str, Any]:
    """The object of ``run --json`` and ``status --json``: stable names, None for what is not known yet."""
    p = row.progress or Progress(state=row.state)
    return {
        "job": row.job,
        "name": row.name,
        "state": row.state,
        "reason": row.reason or p.reason,
        "protocol": p.protocol or None,
        "rule": p.rule or None,
        "n": p.n or None,
        "lambda": p.lam or None,
        "declared": p.declared or None,
        "mu": p.mu or None,
        "c": p.c or None,
        "global_batch": p.global_batch or None,
        "generation": p.generation or None,
        "seconds": p.seconds,
        "samples_per_s": p.samples_per_s,
        "updates_per_s": p.updates_per_s,
        "updates": p.updates,
        "samples": p.samples,
        "loss": p.loss,
        "accuracy": p.accuracy,
        "staleness": {
            "mean": p.staleness_mean,
            "p95": p.staleness_p95,
            "max": p.staleness_max,
            "histogram": p.histogram,
        },
        "overlap": p.overlap,
        "gradients": {
            "accepted": p.accepted,
            "applied": p.applied,
            "pending": p.pending,
            "skipped": p.skipped,
            "dropped": p.drops,
        },
        "parameters": p.parameters or None,
        "memory": p.memory or None,
        "memory_budget": p.budget or None,
        "snapshot_age": p.snapshot_age,
        "limited_by": p.limited_by or None,
        "epochs": [msgspec.to_builtins(e) for e in p.rows],
        "learners": [msgspec.to_builtins(e) for e in p.learners],
        "weights": p.weights or None,
        "folder": row.folder,
        "owner": row.owner,
        "created": utc(row.created),
        "started": utc(row.started),
        "ended": utc(row.ended),
    }


def print_epochs(rows: list[EpochRow], of: int, most: int) -> None:
    """The table of the last ``most`` epochs, with the samples counted in each."""
    if not rows:
        return
    table(
        ["epoch", "samples", "loss", "accuracy", "sigma", "updates", "rate", "time"],
        [
            [
                str(r.epoch + 1),
                f"{r.distinct:,} of {of:,}",
                "-" if r.train_loss is None else f"{r.train_loss:.4f}",
                percent(r.accuracy),
                f"{r.staleness_mean:.3f}",
                str(r.updates),
                f"{r.lr:.3g}",
                span(r.seconds),
            ]
            for r in rows[-most:]
        ],
    )
    if len(rows) > most:
        say(f"(the last {most} of {len(rows)} epochs; metrics.csv has them all)")


def print_histogram(p: Progress) -> None:
    """Staleness as bars: sigma, share, count."""
    counts = sorted(((int(k), v) for k, v in p.histogram.items()))
    total = sum(v for _, v in counts)
    if not total:
        return
    say(
        f"staleness of {total:,} gradients: mean {p.staleness_mean:.3f}, p95 {p.staleness_p95:g}, max {p.staleness_max}"
    )
    for sigma, count in counts[:12]:
        say(f"  {sigma:>4} {'#' * max(1, round(40 * count / total)):<40} {100 * count / total:5.1f} % {count:>9,}")
    if len(counts) > 12:
        rest = sum(v for _, v in counts[12:])
        say(f"   >{counts[11][0]:<3} {'#' * round(40 * rest / total):<40} {100 * rest / total:5.1f} % {rest:>9,}")


def print_summary(row: JobRow) -> None:
    """What a person wants to know of an ended job."""
    p = row.progress or Progress(state=row.state)
    say(f"job {row.job} {row.name}: {row.state}" + (f" ({row.reason})" if row.reason else ""))
    if p.protocol:
        say(f"{_protocol(p)}, {p.lam} learners x {p.mu} samples, {p.rule}, {p.parameters:,} parameters")
    print_epochs(p.rows, p.samples_per_epoch, EPOCHS_OF_SUMMARY)
    print_histogram(p)
    if p.updates:
        say(
            f"accuracy {percent(p.accuracy)}  time {span(p.seconds)}  {p.samples_per_s:,.0f} samples/s  "
            f"overlap {100 * p.overlap:.0f} %"
        )
    if p.weights:
        say(f"weights  {p.weights}")
    if row.folder:
        say(f"folder   {row.folder}")


def failure(row: JobRow, told: bool = False) -> str:
    """The line about a job that came to nothing, "" for any other; without its reason where that was ``told``."""
    if row.state not in ("FAILED", "LOST"):
        return ""
    why = f": {row.reason}" if row.reason and not told else ""
    whose = " --learner failed" if FAILED_PROCESS.search(row.reason) else ""
    fix = f"`rudra logs {row.job}{whose}` shows more, `rudra resume {row.job}` goes on from the newest snapshot"
    return f"job {row.job} is {row.state}{why}. Fix: {fix}"


def _protocol(p: Progress) -> str:
    return f"{p.n}-softsync" if p.protocol == "softsync" else p.protocol


def print_status(row: JobRow, last_events: list[str], refused: dict[str, int] | None = None) -> None:
    """One screen of a job. ``refused``: what psd did not let in, by reason."""
    p = row.progress or Progress(state=row.state)
    ended = row.state in ENDED
    say(f"job       {row.job} {row.name}")
    say(f"state     {row.state}" + (f" - {row.reason or p.reason}" if row.reason or p.reason else ""))
    say(f"created   {local(row.created)} ({ago(row.created)})")
    if ended and row.ended:
        say(f"ended     {local(row.ended)} ({ago(row.ended)})")
    if p.protocol:
        _print_figures(p, ended)
    if row.owner:
        say(f"owner     {row.owner}")
    if row.folder:
        say(f"folder    {row.folder}")
    if refused:
        say("psd       refused " + ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items())))
    if last_events:
        say()
        for line in last_events:
            say(fitted(line))
    if p.learners:
        say()
        _print_learners(p)
    if p.rows:
        say()
        print_epochs(p.rows, p.samples_per_epoch, EPOCHS_OF_STATUS)


def _print_figures(p: Progress, ended: bool) -> None:
    alive = sum(e.state in ("present", "torpid") for e in p.learners)
    say(f"protocol  {_protocol(p)}, c = {p.c}, rule {p.rule}, rate {p.lr:.3g}, global batch {p.global_batch}")
    say(f"learners  {alive} of {p.declared}, lambda = {p.lam}, mu = {p.mu}")
    done = f"{min(1.0, p.samples / max(1, p.samples_per_epoch * p.epochs)):.0%}"
    left = "" if ended else time_left(p)
    say(
        f"progress  epoch {min(p.epoch + 1, p.epochs)} of {p.epochs} ({done}), update {p.updates:,}, {span(p.seconds)}"
        + (f", {left} left" if left else "")
    )
    say(
        f"speed     {p.samples_per_s:,.0f} samples/s, {p.updates_per_s:,.1f} updates/s, overlap {100 * p.overlap:.0f} %"
    )
    loss = "-" if p.loss is None else f"{p.loss:.4f}"
    say(f"quality   loss {loss}, test accuracy {percent(p.accuracy)}")
    say(f"staleness mean {p.staleness_mean:.3f}, p95 {p.staleness_p95:g}, max {p.staleness_max}")
    say(f"gradients {p.accepted:,} accepted, {p.applied:,} applied, {p.pending} pending, {p.skipped} skipped")
    if p.drops:
        say("dropped   " + ", ".join(f"{k} {v:,}" for k, v in sorted(p.drops.items())))
    if not ended:
        age = "none" if p.snapshot_age is None else f"{span(p.snapshot_age)} old"
        planned = f" ({size(p.budget)} planned for the model)" if p.budget else ""
        say(f"server    {size(p.memory)} of memory{planned}, generation {p.generation}, snapshot {age}")
    if p.limited_by:
        say(f"limited by {p.limited_by}")
    if p.weights:
        say(f"weights   {p.weights}")


def time_left(p: Progress) -> str:
    """What is left at the speed of the last seconds; "" while that is not known."""
    left = p.samples_per_epoch * p.epochs - p.samples
    return span(left / p.samples_per_s) if left > 0 and p.samples_per_s > 0 else ""


def _print_learners(p: Progress) -> None:
    """Those that are not at work first; not more than fit a screen."""
    rows = sorted(p.learners, key=lambda e: (e.state == "present", e.rank))
    shown = sorted(rows[:LEARNERS_OF_STATUS], key=lambda e: e.rank)
    table(
        ["rank", "incarnation", "state", "host", "pid", "gradients", "samples/s", "heard"],
        [_learner(e) for e in shown],
    )
    if len(rows) > len(shown):
        say(f"({len(shown)} of {len(rows)} learners; --json has them all)")


def _learner(e: LearnerRow) -> list[str]:
    here = [e.host, str(e.pid)] if e.pid else ["-", "-"]
    now = [f"{e.samples_per_s:,.0f}", f"{span(e.silent)} ago"] if e.pid else ["-", "-"]
    return [str(e.rank), str(e.incarnation), e.state, *here, f"{e.gradients:,}", *now]
