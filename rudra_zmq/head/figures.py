"""What psd measures, by the conventions of Prometheus: one table of names, and the values of this moment.

Owns the names, their help and labels, and where each value comes from. Must not know: HTTP, threads. What is returned
is made of plain values, so that another thread may read it. Only jobs that have not ended have figures of their own:
the number of series is bounded by what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

from rudra_zmq import __version__
from rudra_zmq.head.jobs import Job
from rudra_zmq.wire.messages.control import HostRow, JobState, Progress

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Bins: TypeAlias = tuple[tuple[int, int], ...]  # (value, how often), by value


class Metric(NamedTuple):
    """``name`` of a counter is without its _total."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


_JOB = ("job_id", "job_name")  # "job" is a label of Prometheus' own

METRICS = (
    Metric("rudra_build_info", "gauge", "1, with the version as a label", ("version",)),
    Metric("rudra_psd_messages_refused", "counter", "Messages refused: who sent them may not"),
    Metric("rudra_psd_messages_dropped", "counter", "Messages dropped because they were none", ("reason",)),
    Metric("rudra_jobs", "gauge", "Jobs in the registry", ("state",)),
    Metric("rudra_host_up", "gauge", "Whether the learnerd on the host is heard", ("host",)),
    Metric("rudra_host_slots", "gauge", "Learners that the host takes", ("host",)),
    Metric("rudra_host_slots_free", "gauge", "Learners that it takes now", ("host",)),
    Metric("rudra_host_devices", "gauge", "Devices that the host declares", ("host",)),
    Metric("rudra_host_devices_free", "gauge", "Devices that no job has", ("host",)),
    Metric("rudra_host_devices_absent", "gauge", "Devices that it declares and does not have", ("host",)),
    Metric("rudra_host_last_seen_timestamp_seconds", "gauge", "When its learnerd was heard last", ("host",)),
    Metric("rudra_job_info", "gauge", "1, for each job that has not ended", (*_JOB, "state", "protocol", "rule")),
    Metric("rudra_job_learners", "gauge", "Learners of the job as its node sees them", (*_JOB, "state")),
    Metric("rudra_job_learners_declared", "gauge", "lambda of the job file", _JOB),
    Metric("rudra_job_generation", "gauge", "1, and one more for each restore from a snapshot", _JOB),
    Metric("rudra_job_epochs_completed", "gauge", "Epochs of which every sample counted", _JOB),
    Metric("rudra_job_updates", "counter", "Updates of the weights; lower after a restore", _JOB),
    Metric("rudra_job_samples", "counter", "Samples whose gradients were applied; lower after a restore", _JOB),
    Metric("rudra_job_running_seconds", "counter", "Time that the job has run, pauses left out", _JOB),
    Metric("rudra_job_gradients_accepted", "counter", "Gradients that the lead accepted", _JOB),
    Metric("rudra_job_gradients_applied", "counter", "Gradients that are part of an update", _JOB),
    Metric("rudra_job_gradients_dropped", "counter", "Gradients that are in no update", (*_JOB, "reason")),
    Metric("rudra_job_batches_skipped", "counter", "Mini-batches that the script skipped", _JOB),
    Metric("rudra_job_staleness", "histogram", "Staleness of applied gradients, in updates", _JOB),
    Metric("rudra_job_learning_rate", "gauge", "Rate of the newest update", _JOB),
    Metric("rudra_job_loss", "gauge", "Training loss, as the learners report it", _JOB),
    Metric("rudra_job_accuracy_ratio", "gauge", "Accuracy of the newest test, 0 to 1", _JOB),
    Metric("rudra_job_overlap_ratio", "gauge", "Share of time in which no computation waits for communication", _JOB),
    Metric("rudra_job_snapshot_age_seconds", "gauge", "Age of the newest snapshot", _JOB),
    Metric("rudra_job_node_resident_memory_bytes", "gauge", "Memory of the job's node", _JOB),
)  # fmt: skip


class Figure(NamedTuple):
    """A value of a metric; ``labels`` in the order of the table."""

    name: str
    labels: tuple[str, ...]
    value: float | Bins


def figures(
    *,
    jobs: Mapping[str, int],
    live: Iterable[Job],
    hosts: Iterable[HostRow],
    refused: int,
    dropped: Mapping[str, int],
) -> list[Figure]:
    """Everything of this moment. ``jobs`` is how many there are of each state."""
    found = [Figure("rudra_build_info", (__version__,), 1), Figure("rudra_psd_messages_refused", (), refused)]
    found += [Figure("rudra_psd_messages_dropped", (reason,), count) for reason, count in sorted(dropped.items())]
    found += [Figure("rudra_jobs", (state,), jobs.get(state, 0)) for state in get_args(JobState)]
    for host in hosts:
        found += [
            Figure("rudra_host_up", (host.name,), not host.silent),
            Figure("rudra_host_slots", (host.name,), host.slots),
            Figure("rudra_host_slots_free", (host.name,), host.free),
            Figure("rudra_host_devices", (host.name,), len(host.devices)),
            Figure("rudra_host_devices_free", (host.name,), host.free_devices),
            Figure("rudra_host_devices_absent", (host.name,), len(host.absent)),
            Figure("rudra_host_last_seen_timestamp_seconds", (host.name,), host.last_seen),
        ]
    for job in live:
        of = (job.id, job.name)
        p = job.progress
        known = (p.protocol, p.rule) if p is not None else (job.file.sync.protocol, job.file.update.rule)
        found.append(Figure("rudra_job_info", (*of, job.state, *known), 1))
        found.append(Figure("rudra_job_learners_declared", of, job.count))
        if p is not None:
            found += _of_progress(of, p)
    return found


def _of_progress(of: tuple[str, str], p: Progress) -> list[Figure]:
    states = Counter(row.state for row in p.learners)
    plain: dict[str, float | None] = {
        "generation": p.generation,
        "epochs_completed": p.epoch,
        "updates": p.updates,
        "samples": p.samples,
        "running_seconds": p.seconds,
        "gradients_accepted": p.accepted,
        "gradients_applied": p.applied,
        "batches_skipped": p.skipped,
        "learning_rate": p.lr,
        "loss": p.loss,
        "accuracy_ratio": p.accuracy,
        "overlap_ratio": p.overlap,
        "snapshot_age_seconds": p.snapshot_age,
        "node_resident_memory_bytes": p.memory,
    }
    found = [Figure(f"rudra_job_{name}", of, value) for name, value in plain.items() if value is not None]
    found += [Figure("rudra_job_learners", (*of, state), count) for state, count in sorted(states.items())]
    found += [Figure("rudra_job_gradients_dropped", (*of, why), count) for why, count in sorted(p.drops.items())]
    bins = tuple(sorted((int(sigma), count) for sigma, count in p.histogram.items() if sigma.isdigit()))
    found.append(Figure("rudra_job_staleness", of, bins))
    return found
