"""What ``roundtrip``, ``peers`` and ``job`` do: contenders are started, take turns, and end.

Owns: who is held against whom. Must not know: flags, tables, torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rudra_zmq.bench.limits import COPY, KERNEL, STREAM, Limits, elements_of
from rudra_zmq.bench.peers import CONSISTENT_ANYWAY, LABELS, Peer
from rudra_zmq.bench.place import Place
from rudra_zmq.bench.product import Product, Setting
from rudra_zmq.bench.rows import OURS, Row, row, size_text
from rudra_zmq.bench.timing import Block, Blocks, blocks_in_turns
from rudra_zmq.errors import UsageError

Contenders = dict[str, Callable[[int], Block]]
PUSHER = "rudra_zmq.bench.pusher"
TRAINER = "rudra_zmq.bench.trainer"

IMAGES = 60_000
CNN_BYTES = 4 * 99_550
MINIBATCH = 32
SPARE = 8
"""Mini-batches of a learner that are left of the epoch: no block ends in another one."""


@dataclass(frozen=True)
class Effort:
    """How long it may take: turns, and seconds of a block."""

    turns: int
    seconds: float


FULL, QUICK = Effort(11, 0.5), Effort(5, 0.1)


def ours(setting: Setting) -> Product:
    """A job whose learners compute nothing."""
    n = elements_of(setting.size)
    return Product(OURS, replace(setting, size=4 * n), PUSHER, [str(n)])


def room(settings: Sequence[Setting], peer: bool) -> None:
    """UsageError where the memory that is free would not do."""
    need = 0
    for one in settings:
        slots, own, state = 2 * one.learners, 2 * one.learners, 2
        versions = 2 if one.protocol == "hardsync" else one.learners + 2
        need += one.size * (slots + own + versions + state)
    largest = max(settings, key=lambda one: one.size * one.learners)
    need += largest.size * ((3 * largest.learners if peer else 0) + largest.c + 6)
    free = available()
    if need > free:
        raise UsageError(
            f"{size_text(largest.size)} with {largest.learners} learners takes about {size_text(need)} of memory, "
            f"{size_text(free)} are free",
            where="rudra bench",
            fix="choose a smaller --size, fewer --learners or one --transport",
        )


def available() -> int:
    """Bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UsageError("/proc/meminfo says nothing about free memory", where="rudra bench", fix="mount /proc")


def roundtrip(setting: Setting, others: Sequence[str], effort: Effort) -> tuple[list[Row], str]:
    """Ours against the update alone, and against the same job with each of the other settings; who makes updates."""
    settings = [setting, *(replace(setting, sets=(*setting.sets, other)) for other in others)]
    room(settings, peer=False)
    with ExitStack() as stack:
        limits = stack.enter_context(Limits(setting.rule, setting.c, setting.size, all_of_them=False))
        jobs = [stack.enter_context(ours(one)) for one in settings]
        names = [OURS, *(f"with {other}" for other in others)]
        contenders = {name: job.block for name, job in zip(names, jobs, strict=True)} | limits.contenders
        blocks = blocks_in_turns(contenders, effort.turns, effort.seconds)
        return [row("roundtrip", jobs[0], blocks, name, name) for name in (KERNEL, *names[1:])], limits.backend


def peers(settings: Sequence[Setting], kinds: Sequence[str], effort: Effort) -> list[Row]:
    """Ours, over every transport, against each of the kinds. Settings differ in the transport alone."""
    room(settings, peer=True)
    rows = []
    with ExitStack() as stack:
        jobs = {f"{OURS} {one.transport}": stack.enter_context(ours(one)) for one in settings}
        mine: Contenders = {name: job.block for name, job in jobs.items()}
        for kind in kinds:
            if kind == "limits":
                blocks, labels = _limits(settings[0], mine, effort)
            else:
                blocks, labels = _peer(kind, settings[0], mine, effort)
            for name, job in jobs.items():
                rows += [
                    row("peers", job, blocks, label, blocks.best(names), name=name) for label, names in labels.items()
                ]
    return rows


Labels = dict[str, list[str]]
"""What a row is against, and the contenders of which the best is meant."""


def _limits(setting: Setting, mine: Contenders, effort: Effort) -> tuple[Blocks, Labels]:
    with Limits(setting.rule, setting.c, setting.size, all_of_them=True) as limits:
        blocks = blocks_in_turns({**mine, **limits.contenders}, effort.turns, effort.seconds)
        labels = {KERNEL: [KERNEL], COPY: [COPY]}
        streams = [name for name in limits.contenders if name.startswith(STREAM)]
        if streams:
            labels[STREAM] = streams
        return blocks, labels


def _peer(kind: str, setting: Setting, mine: Contenders, effort: Effort) -> tuple[Blocks, Labels]:
    place = Place("", "", 0, 0, setting.learners, elements=elements_of(setting.size), rule=setting.rule)
    labels: Labels = {}
    with Peer(kind, place) as peer:
        theirs: Contenders = {}
        for consistent in (False,) if kind in CONSISTENT_ANYWAY else (False, True):
            label = f"{LABELS[kind]}, consistent" if consistent else LABELS[kind]
            labels[label] = []
            for threads in (1, 2):
                labels[label].append(f"{label} {threads}")
                theirs[f"{label} {threads}"] = partial(peer.block, threads=threads, consistent=consistent)
        return blocks_in_turns({**mine, **theirs}, effort.turns, effort.seconds), labels


def job(learners: int, protocols: Sequence[str], kind: str, workers: int, rounds: int, turns: int) -> list[Row]:
    """Training through jobs of these protocols, against ``kind``: "plain" (of one learner) or "ddp"."""
    samples = IMAGES // (learners * MINIBATCH) * learners * MINIBATCH
    most = (samples // (learners * MINIBATCH) - SPARE) // (turns + 1)
    if most < 1:
        raise UsageError(f"{turns} turns do not fit into an epoch", where="--turns", fix="choose fewer")
    rounds = min(rounds, most)
    place = Place("", "", 0, 0, learners, samples=samples, minibatch=MINIBATCH, workers=workers)
    with ExitStack() as stack:
        jobs = {}
        for protocol in protocols:
            setting = Setting(CNN_BYTES, learners, protocol=protocol, minibatch=MINIBATCH, lr=0.03)
            made = Product(f"{OURS} {protocol}", setting, TRAINER, [str(workers), str(samples)])
            jobs[f"{OURS} {protocol}"] = stack.enter_context(made)
        other = stack.enter_context(Peer(kind, place))
        contenders: Contenders = {name: made.steps for name, made in jobs.items()}
        contenders[kind] = other.steps
        blocks = blocks_in_turns(contenders, turns, rounds=rounds)
        return [row("job", made, blocks, LABELS[kind], kind, name=name) for name, made in jobs.items()]
