"""The lines of a result: their fields, the table, the advice.

Owns: what a figure is called and counted in, and what is said where one is far from its limit. Must not know: how it
was measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rudra_zmq.bench.limits import KERNEL
from rudra_zmq.bench.product import Product
from rudra_zmq.bench.timing import Blocks

OURS = "ours"

LARGE = 20_000_000
"""Bytes of a model from which the memory, not the waking of processes, is the bound."""

ENOUGH = 1 / 1.15
"""Of the fused kernel's speed, in shared memory."""

FEW_FAULTS = 8.0
"""Page faults per round trip: below it, what a growing log or a timer's first call costs."""


@dataclass(frozen=True)
class Row:
    """One of ours against one other. ratio: the other's time over ours, the median over the turns.

    size: bytes of the model. median_ms: of a round trip; where learners are not in step, of c gradients; of a job's
    step of all its learners. gb_per_s and cpu_s_per_gb count the gradients and the weights that pass, faults are those
    of a round trip; both are over all processes, the node's included.
    """

    what: str
    rule: str
    c: int
    size: int
    learners: int
    transport: str
    protocol: str
    weights: str
    encrypted: bool
    median_ms: float
    gb_per_s: float
    faults: float
    cpu_s_per_gb: float
    against: str
    against_ms: float
    ratio: float
    samples_per_s: float | None = None

    def as_object(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def row(what: str, job: Product, blocks: Blocks, label: str, against: str, *, name: str = OURS) -> Row:
    """Of what was done in turns: ``name`` is the job there, ``against`` the other."""
    setting, times = job.setting, blocks.times
    median = times.median(name)
    cpu, faults = blocks.per_update(name)
    batch = setting.minibatch * setting.learners if what == "job" else None
    gigabytes = setting.traffic / 1e9
    return Row(
        what=what,
        rule=setting.rule,
        c=setting.c,
        size=setting.size,
        learners=setting.learners,
        transport=job.transport,
        protocol=setting.protocol,
        weights=job.weights,
        encrypted=job.encrypted,
        median_ms=1e3 * median,
        gb_per_s=gigabytes / median,
        faults=faults,
        cpu_s_per_gb=cpu / gigabytes,
        against=label,
        against_ms=1e3 * times.median(against),
        ratio=times.ratio(name, against),
        samples_per_s=None if batch is None else batch / median,
    )


# ---- for people

COLUMNS = (
    "size", "learners", "transport", "protocol", "weights", "ms", "GB/s", "faults", "CPU s/GB", "against", "its ms",
    "ratio",
)  # fmt: skip
TEXT_COLUMNS = ("transport", "protocol", "weights", "against")


def cells(one: Row) -> list[str]:
    """A line of the table."""
    kind = f"{one.protocol} c={one.c}"
    return [
        size_text(one.size),
        str(one.learners),
        f"{one.transport}, encrypted" if one.encrypted else one.transport,
        kind,
        one.weights,
        figure(one.median_ms),
        figure(one.gb_per_s),
        f"{one.faults:.1f}",
        figure(one.cpu_s_per_gb),
        one.against,
        figure(one.against_ms),
        figure(one.ratio),
    ] + ([] if one.samples_per_s is None else [f"{one.samples_per_s:.0f}"])


def size_text(size: int) -> str:
    """350 kB, 25 MB, 2.2 GB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def show(rows: Sequence[Row]) -> None:
    """A table on a terminal, aligned columns without ornament elsewhere."""
    heads = list(COLUMNS) + (["samples/s"] if any(one.samples_per_s is not None for one in rows) else [])
    body = [cells(one) for one in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for head in heads:
            table.add_column(head, justify="left" if head in TEXT_COLUMNS else "right", overflow="fold")
        for line in body:
            table.add_row(*line)
        Console().print(table)
        return
    widths = [max(len(text) for text in column) for column in zip(heads, *body, strict=True)]
    for line in [[head.upper() for head in heads], *body]:
        padded = [
            text.ljust(width) if head in TEXT_COLUMNS else text.rjust(width)
            for text, width, head in zip(line, widths, heads, strict=True)
        ]
        print("  ".join(padded).rstrip())


def advice(rows: Sequence[Row], asked: Sequence[str], backend: str, cores: int | None = None) -> list[str]:
    """A line for each thing that holds figures back, as far as the rows show it.

    ``asked``: the transports that were asked for; ``backend``: who makes the updates.
    """
    cores = cores or len(os.sched_getaffinity(0))
    lines = []
    if backend == "numpy":
        lines.append("NumPy makes the updates; compiled code is faster: pip install 'rudra-zmq[fast]'")
    if "shm" in asked and any(one.transport == "ipc" for one in rows) and "ipc" not in asked:
        lines.append("memory was not shared, a Unix socket was used: learners need memfd and the node's user")
    if any(one.faults > FEW_FAULTS and one.what != "job" for one in rows):
        most = max(one.faults for one in rows if one.what != "job")
        why = "; LD_PRELOAD may replace glibc's malloc, which is tuned" if os.environ.get("LD_PRELOAD") else ""
        lines.append(f"up to {most:.0f} page faults per round trip: memory is given back and taken anew{why}")
    slow = [one for one in rows if one.against == KERNEL and one.transport == "shm" and one.ratio < ENOUGH]
    large = [one for one in slow if one.size >= LARGE]
    if large:
        share = min(one.ratio for one in large)
        why = " (weights = copy: each learner copies them)" if all(one.weights == "copy" for one in large) else ""
        lines.append(f"in shared memory the update alone is {100 * share:.0f} % of a round trip, and could be 91{why}")
    crowd = max((one.learners for one in rows), default=0)
    if crowd + 1 > cores and (slow or any(one.transport == "tcp" for one in rows)):
        lines.append(f"{crowd} learners and a node share {cores} cores: they wait for each other")
    return lines
