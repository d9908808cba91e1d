"""The flags of ``rudra bench roundtrip``, ``peers`` and ``job``.

Owns: defaults, what is refused before anything is started, how the result is said. Must not know: how it is measured.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import click

from rudra_zmq.bench import measure
from rudra_zmq.bench.measure import FULL, QUICK, Effort
from rudra_zmq.bench.peers import LABELS, need
from rudra_zmq.bench.product import PROTOCOLS, TRANSPORTS, Setting
from rudra_zmq.bench.rows import Row, advice, show, size_text
from rudra_zmq.commands import Command
from rudra_zmq.config import parse_size
from rudra_zmq.errors import EXIT_OK, UsageError
from rudra_zmq.update.rules import RULES

SIZES, QUICK_SIZES = ("350kB", "25MB"), ("350kB", "25MB")
KINDS = ("limits", "all-reduce", "send-recv", "sockets", "rpc")
PEER_RULES = ("sgd", "momentum", "nesterov")
TORCH = "'rudra-zmq[torch]'"

F = TypeVar("F", bound=Callable[..., object])


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


sizes_option = click.option("--size", "sizes", multiple=True, metavar="SIZE", help="Of the model; 350kB and 25MB.")
learners_option = click.option(
    "--learners",
    "lambdas",
    multiple=True,
    type=click.IntRange(1, 256),
    help="How many; 4 (roundtrip: 1 too), 2 with --quick.",
)
transport_option = click.option(
    "--transport", "transports", multiple=True, type=click.Choice(TRANSPORTS), help="shm and tcp."
)
protocol_option = click.option("--protocol", "protocols", multiple=True, type=click.Choice(PROTOCOLS), help="hardsync.")
sets_option = click.option(
    "-s", "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Of the job file, as with `rudra run`."
)
turns_option = click.option("--turns", type=click.IntRange(1, 1000), help="Blocks of rounds that each is measured in.")
quick_option = click.option("--quick", is_flag=True, help="Under a minute: fewer and shorter blocks.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
common = _options(turns_option, quick_option, json_option)


@click.command("roundtrip", cls=Command)
@transport_option
@sizes_option
@learners_option
@protocol_option
@click.option("--n", type=click.IntRange(1, 256), default=1, show_default=True, help="Of softsync.")
@click.option("--rule", type=click.Choice(list(RULES)), default="momentum", show_default=True)
@sets_option
@click.option(
    "--against", "others", multiple=True, metavar="KEY=VALUE", help="Also against the same job with this setting."
)
@common
def roundtrip(
    transports: tuple[str, ...],
    sizes: tuple[str, ...],
    lambdas: tuple[int, ...],
    protocols: tuple[str, ...],
    n: int,
    rule: str,
    sets: tuple[str, ...],
    others: tuple[str, ...],
    turns: int | None,
    quick: bool,
    as_json: bool,
) -> int:
    """Push, update and pull by real learners of a real job that compute nothing, against the update alone.

    \b
      rudra bench roundtrip --quick
      rudra bench roundtrip --transport shm --transport tcp --size 25MB --size 289MB --learners 4

    With --against learners.weights=copy there is a second row, whose ratio is what that setting costs. A round trip
    is that of all learners under hardsync; under softsync and async it is the time per update.
    """
    cases = [
        Setting(size, count, transport, protocol, n, rule, sets=sets)
        for size, count, transport, protocol in itertools.product(
            _sizes(sizes, QUICK_SIZES if quick else SIZES),
            lambdas or ((2,) if quick else (1, 4)),
            transports or ("shm", "tcp"),
            protocols or ("hardsync",),
        )
    ]
    for case in cases:
        if case.protocol == "softsync" and case.n > case.learners:
            raise UsageError(f"--n {n} is more than {case.learners} learners", where="bench roundtrip", fix="lower it")
    rows: list[Row] = []
    backend = ""
    for case in cases:
        _tell(f"{size_text(case.size)}, {case.learners} learners, {case.transport}, {case.protocol}")
        told, backend = measure.roundtrip(case, others, _effort(turns, quick))
        rows += told
    return _done(rows, as_json, [case.transport for case in cases], backend)


@click.command("peers", cls=Command)
@click.option("--peer", "kinds", multiple=True, type=click.Choice(KINDS), help="All, if none is given.")
@click.option("--with", "others", multiple=True, type=click.Choice(["ray"]), help="Beside them, where installed.")
@transport_option
@sizes_option
@learners_option
@click.option("--rule", type=click.Choice(PEER_RULES), default="momentum", show_default=True)
@sets_option
@common
def peers(
    kinds: tuple[str, ...],
    others: tuple[str, ...],
    transports: tuple[str, ...],
    sizes: tuple[str, ...],
    lambdas: tuple[int, ...],
    rule: str,
    sets: tuple[str, ...],
    turns: int | None,
    quick: bool,
    as_json: bool,
) -> int:
    """The same round trip by other systems, in turns with ours: hardsync over each transport.

    \b
      rudra bench peers --quick
      rudra bench peers --peer all-reduce --transport shm --size 25MB --size 289MB --learners 4

    Each is at its best of one and two threads, with malloc tuned, once as it is and once with a copy out of the
    weights, so that what a learner reads is of one version. `limits`: the update alone, a copy of the weights, and
    a kernel that moves as much memory as the update.
    """
    chosen = [*(kinds or (() if others else KINDS)), *others]
    if set(chosen) - {"limits"}:
        need("torch", TORCH)
    if "ray" in chosen:
        need("ray", "ray")
    asked = tuple(dict.fromkeys(transports)) or ("shm", "tcp")
    rows: list[Row] = []
    for size, count in itertools.product(
        _sizes(sizes, QUICK_SIZES[1:] if quick else SIZES), lambdas or ((2,) if quick else (4,))
    ):
        _tell(f"{size_text(size)}, {count} learners: {', '.join(asked)} against {', '.join(chosen)}")
        settings = [Setting(size, count, transport, rule=rule, sets=sets) for transport in asked]
        rows += measure.peers(settings, chosen, _effort(turns, quick))
    return _done(rows, as_json, asked, "")


@click.command("job", cls=Command)
@click.option("--learners", "lambdas", multiple=True, type=click.Choice(["1", "4"]), help="Both; 1 alone with --quick.")
@click.option(
    "--workers", type=click.IntRange(0, 16), default=1, show_default=True, help="That load data, on each side."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=150, show_default=True, help="Mini-batches of a block, at most."
)
@common
def job(lambdas: tuple[str, ...], workers: int, rounds: int, turns: int | None, quick: bool, as_json: bool) -> int:
    """Samples per second of real training: Fashion-MNIST's small CNN, mini-batches of 32, one thread a process.

    \b
      rudra bench job --quick
      rudra bench job --learners 1 --turns 21

    One learner is held against a plain PyTorch loop, four (hardsync and softsync) against DistributedDataParallel over
    gloo. Both sides have the same model, batches and number of workers that load data.
    """
    need("torch", TORCH)
    effort = _effort(turns, quick)
    rows: list[Row] = []
    for text in lambdas or (("1",) if quick else ("1", "4")):
        _tell(f"{text} learner{'s' if text != '1' else ''} against {LABELS['plain' if text == '1' else 'ddp']}")
        count = min(rounds, 50) if quick else rounds
        if text == "1":
            rows += measure.job(1, ["hardsync"], "plain", workers, count, effort.turns)
        else:
            rows += measure.job(4, ["hardsync", "softsync"], "ddp", workers, count, effort.turns)
    return _done(rows, as_json, ["shm"], "")


def _sizes(given: Sequence[str], default: Sequence[str]) -> list[int]:
    sizes = [parse_size(text) for text in given or default]
    for text, size in zip(given, sizes, strict=False):
        if size < 4:
            raise UsageError(f"--size {text} holds no number", where="rudra bench", fix="give 4 bytes or more")
    return sizes


def _effort(turns: int | None, quick: bool) -> Effort:
    effort = QUICK if quick else FULL
    return replace(effort, turns=turns) if turns else effort


def _tell(text: str) -> None:
    click.echo(f"{text} ...", err=True)


def _done(rows: Sequence[Row], as_json: bool, asked: Sequence[str], backend: str) -> int:
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "rows": [row.as_object() for row in rows]}))
    else:
        show(rows)
    for line in advice(rows, asked, backend):
        click.echo(f"note: {line}", err=True)
    return EXIT_OK
