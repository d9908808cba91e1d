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

from rudra_zmq.bench import update_cuda
from rudra_zmq.bench.commands import job, peers, roundtrip
from rudra_zmq.bench.update import ENCODINGS, Case, Row, measure
from rudra_zmq.commands import CONTEXT, Group, run
from rudra_zmq.config import parse_size
from rudra_zmq.errors import EXIT_OK, UsageError
from rudra_zmq.update.cpu import BACKENDS
from rudra_zmq.update.cuda import Device
from rudra_zmq.update.rules import RULES

SIZES, QUICK_SIZES = ("350kB", "25MB", "100MB"), ("350kB", "25MB")
CUDA_SIZES, QUICK_CUDA_SIZES = ("25MB", "289MB"), ("25MB",)
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
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda|cuda:N", help="Where.")
@click.option("--rule", "rules", multiple=True, type=click.Choice(list(RULES)), help="All, if none is given.")
@click.option("--c", "counts", multiple=True, type=click.IntRange(1, 1024), help="Gradients per update; 1 and 4.")
@click.option("--size", "sizes", multiple=True, metavar="SIZE", help="350kB, 25MB and 100MB; GPU: 25MB, 289MB.")
@click.option("--threads", "threads", multiple=True, type=click.IntRange(1, 1024), help="1, and 2 where there are 2.")
@click.option("--backend", type=click.Choice(BACKENDS), help="Who does it on a CPU; auto.")
@click.option(
    "--encoding",
    type=click.Choice(update_cuda.ENCODINGS),
    default="float32",
    show_default=True,
    help="Of gradients; int8 and topk on a GPU alone.",
)
@click.option("--sent", type=click.Choice(update_cuda.SENT), help="The weights cast as they go down; on a GPU alone.")
@click.option("--clip", is_flag=True, help="With a clip_norm: a second sweep over the sum.")
@click.option("--turns", type=click.IntRange(1), help=f"Times that each is measured; {TURNS}.")
@click.option("--quick", is_flag=True, help="Under a minute: three rules, two sizes, one thread.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
def update(
    device: str,
    rules: tuple[str, ...],
    counts: tuple[int, ...],
    sizes: tuple[str, ...],
    threads: tuple[int, ...],
    backend: str | None,
    encoding: str,
    sent: str | None,
    clip: bool,
    turns: int | None,
    quick: bool,
    as_json: bool,
) -> int:
    """One update as a node makes it, against a kernel that only moves as much memory.

    \b
      rudra bench update --quick
      rudra bench update --rule adam --c 4 --size 100MB --threads 2 --json
      rudra bench update --device cuda --rule momentum --c 4 --size 289MB

    On a GPU: against a copy of as many bytes on the device, and against torch.optim, fused and foreach, with the
    additions that it needs.
    """
    if device != "cpu":
        if threads or backend:
            raise UsageError("--threads and --backend are of a CPU", where="bench update", fix="leave them out")
        cuda_cases = [
            update_cuda.CudaCase(rule, c, size, encoding, clip, sent or "float32")
            for size, c, rule in itertools.product(
                [parse_size(text) for text in sizes or (QUICK_CUDA_SIZES if quick else CUDA_SIZES)],
                counts or (1, 4),
                rules or (QUICK_RULES if quick else tuple(RULES)),
            )
        ]
        return _update_cuda(cuda_cases, _device(device), turns or (QUICK_TURNS if quick else TURNS), as_json)
    if encoding not in ENCODINGS or sent:
        text = f"--sent {sent}" if sent else f"--encoding {encoding}"
        raise UsageError(f"{text} is timed on a GPU alone", where="bench update", fix="add --device cuda")
    cores = len(os.sched_getaffinity(0))
    cases = [
        Case(rule, c, size, count, backend or "auto", encoding, clip)
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


def _device(text: str) -> Device:
    """The device of ``cuda`` or ``cuda:N``, found ready. RudraError, in one line, where it is not."""
    kind, _, index = text.partition(":")
    if kind != "cuda" or (":" in text and not (index.isascii() and index.isdigit())):
        raise UsageError(f"--device {text} is no device", where="bench update", fix="give cpu, cuda or cuda:N")
    return Device(int(index or 0))


def _update_cuda(cases: Sequence[update_cuda.CudaCase], device: Device, turns: int, as_json: bool) -> int:
    rows: list[update_cuda.CudaRow] = []
    for case in cases:
        for row in update_cuda.measure(case, turns, device):
            rows.append(row)
            if not as_json:
                click.echo(update_cuda.line(row, head=len(rows) == 1))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "rows": [row.as_object() for row in rows]}))
    for advice in update_cuda.advice(rows):
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
