"""The flags of ``rudra bench``, its table and its JSON."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from rudra_zmq.bench.commands import job, peers, roundtrip
from rudra_zmq.bench.update import ENCODINGS, Case, Row, measure
from rudra_zmq.commands import CONTEXT, Group, run
from rudra_zmq.config import parse_size
from rudra_zmq.errors import EXIT_OK, UsageError
from rudra_zmq.update.cpu import BACKENDS
from rudra_zmq.update.rules import RULES

SIZES, QUICK_SIZES = ("350kB", "25MB", "100MB"), ("350kB", "25MB")
QUICK_RULES = ("sgd", "momentum", "adam")
TURNS, QUICK_TURNS = 9, 5
ENOUGH = 0.85
"""Of the stream kernel's speed: below it, a line of advice."""


@click.group("bench", cls=Group, context_settings=CONTEXT)
def bench() -> None:
    """Time the code that jobs run against what this machine allows.

    \b
      rudra bench update --quick

    All contenders of a row are timed in turns; a ratio is the other's time over ours, the median over the turns.
    """


for verb in (roundtrip, peers, job):
    bench.add_command(verb)


@bench.command("update")
@click.option("--rule", "rules", multiple=True, type=click.Choice(list(RULES)), help="All, if none is given.")
@click.option("--c", "counts", multiple=True, type=click.IntRange(1, 1024), help="Gradients per update; 1 and 4.")
@click.option("--size", "sizes", multiple=True, metavar="SIZE", help="Of the model; 350kB, 25MB and 100MB.")
@click.option("--threads", "threads", multiple=True, type=click.IntRange(1, 1024), help="1, and 2 where there are 2.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="Who does it.")
@click.option("--encoding", type=click.Choice(list(ENCODINGS)), default="float32", show_default=True)
@click.option("--clip", is_flag=True, help="With a clip_norm: a second sweep over the sum.")
@click.option("--turns", type=click.IntRange(1), help=f"Times that each is measured; {TURNS}.")
@click.option("--quick", is_flag=True, help="Under a minute: three rules, two sizes, one thread.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
def update(
    rules: tuple[str, ...],
    counts: tuple[int, ...],
    sizes: tuple[str, ...],
    threads: tuple[int, ...],
    backend: str,
    encoding: str,
    clip: bool,
    turns: int | None,
    quick: bool,
    as_json: bool,
) -> int:
    """One update as a node makes it, against a kernel that only moves as much memory.

    \b
      rudra bench update --quick
      rudra bench update --rule adam --c 4 --size 100MB --threads 2 --json
    """
    cores = len(os.sched_getaffinity(0))
    cases = [
        Case(rule, c, size, count, backend, encoding, clip)
        for size, count, c, rule in itertools.product(
            [parse_size(text) for text in sizes or (QUICK_SIZES if quick else SIZES)],
            threads or (1,) if quick or cores == 1 else threads or (1, 2),
            counts or (1, 4),
            rules or (QUICK_RULES if quick else tuple(RULES)),
        )
    ]
    rows = []
    for case in cases:
        try:
            rows.append(measure(case, turns or (QUICK_TURNS if quick else TURNS)))
        except ValueError as error:
            raise UsageError(str(error), where="bench update") from None
        if not as_json:
            click.echo(_line(rows[-1], head=len(rows) == 1))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "rows": [row.as_object() for row in rows]}))
    for advice in _advice(rows):
        click.echo(advice, err=True)
    return EXIT_OK


def _line(row: Row, head: bool) -> str:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    cells = (row.rule, str(row.c), f"{row.size / 1e6:.2f}", str(row.threads), row.backend)
    figures = (f"{row.median_ms:.3f}", f"{row.gb_per_s:.1f}", ratio)
    text = "{:<14}{:>3}{:>9}{:>9}  {:<9}{:>10}{:>8}{:>8}"
    line = text.format(*cells, *figures)
    return f"{text.format('RULE', 'C', 'MB', 'THREADS', 'BACKEND', 'MS', 'GB/S', 'RATIO')}\n{line}" if head else line


def _advice(rows: Sequence[Row]) -> list[str]:
    if any(row.backend == "numpy" for row in rows):
        return ["note: NumPy makes the updates; compiled code is faster: pip install 'rudra-zmq[fast]'"]
    slow = [row for row in rows if row.ratio is not None and row.ratio < ENOUGH]
    if slow:
        return [f"note: {len(slow)} of {len(rows)} rows below {ENOUGH} of what the memory gives (RATIO)"]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    before = signal.signal(signal.SIGTERM, _interrupt)  # what was started is ended either way
    try:
        return run(bench, argv, "rudra bench")
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
