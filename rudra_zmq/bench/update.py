"""``rudra bench update``: one update as a node makes it, against the stream kernel with as many streams.

Owns: the cases, their vectors, the rows. Two versions of the weights take turns, as with a node: what one update writes
the next one reads. A case's traffic is counted as the memory sees it: w, c gradients and the state read, state and new
weights written, and the new weights' lines fetched before they are written (the write-allocate).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rudra_zmq.bench.stream import MULTIPLE, SHAPES, Stream
from rudra_zmq.bench.timing import clock_for, in_turns
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.jit import Unavailable
from rudra_zmq.update.rules import RULES, Gradient, GroupSpan, RuleSpec, Term, aligned

ENCODINGS = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}
LIMIT = "stream kernel"


@dataclass(frozen=True)
class Case:
    """What is timed. size: bytes of the model in float32. clip: whether a clip_norm is set."""

    rule: str
    c: int
    size: int
    threads: int
    backend: str = "auto"
    encoding: str = "float32"
    clip: bool = False

    @property
    def elements(self) -> int:
        """Of the model, rounded to what the stream kernel can take."""
        return max(1, self.size // 4 // MULTIPLE) * MULTIPLE

    @property
    def traffic(self) -> int:
        """Bytes of one update; the second sweep of clipping is not counted, since the limit makes none."""
        states = len(RULES[self.rule].state)
        width = np.dtype(ENCODINGS[self.encoding]).itemsize
        return self.elements * (4 * (1 + 2 * states + 2) + self.c * width)


@dataclass(frozen=True)
class Row:
    """A line of the result. ratio: the other's time over ours; None where there is nothing to hold it against."""

    what: str
    rule: str
    c: int
    size: int
    threads: int
    backend: str
    encoding: str
    clip: bool
    median_ms: float
    gb_per_s: float
    against: str | None
    ratio: float | None

    def as_object(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def measure(case: Case, turns: int) -> Row:
    """One row. Raises ValueError (one line) for a back end that is not to be had."""
    n, states = case.elements, len(RULES[case.rule].state)
    rng = np.random.default_rng(1)
    versions = (aligned(n), aligned(n))
    versions[0][:] = rng.standard_normal(n, dtype=np.float32)
    gradients = [_gradient(rng, n, case.encoding) for _ in range(case.c)]
    spec = RuleSpec.of(case.rule, [GroupSpan(0, n, 1.0, 1e-4)], 1.0 if case.clip else None)
    with ExitStack() as stack:
        update = CpuUpdate(spec, n, case.threads, backend=case.backend)
        stack.callback(update.close)
        terms: list[Term] = [(1.0 / case.c, g) for g in gradients]
        contenders: dict[str, Callable[[], object]] = {
            "ours": Alternating(lambda w, out: update.step(w, terms, None, 1.0, 1.0, 1e-3, out), versions)
        }
        for stream in streams(gradients, [aligned(n) for _ in range(states)], case.threads):
            stack.callback(stream.close)
            contenders[f"{LIMIT} {len(contenders)}"] = Alternating(stream, versions)
        times = in_turns(contenders, clock_for(case.threads), turns)
    limits = sorted(set(contenders) - {"ours"}, key=times.median)
    median = times.median("ours")
    return Row(
        what="update",
        rule=case.rule,
        c=case.c,
        size=4 * n,
        threads=case.threads,
        backend=update.backend,
        encoding=case.encoding,
        clip=case.clip,
        median_ms=1e3 * median,
        gb_per_s=case.traffic / median / 1e9,
        against=LIMIT if limits else None,
        ratio=times.ratio("ours", limits[0]) if limits else None,
    )


def _gradient(rng: np.random.Generator, n: int, encoding: str) -> Gradient:
    vector = aligned(n, ENCODINGS[encoding])
    values = rng.standard_normal(n, dtype=np.float32)
    vector[:] = values.view(np.uint32) >> 16 if encoding == "bfloat16" else values
    return vector


def streams(gradients: list[Gradient], states: list[Gradient], threads: int) -> Iterator[Stream]:
    """The kernel in all its shapes; none where nothing can be compiled."""
    for shape in SHAPES:
        try:
            yield Stream(gradients, states, threads, shape)
        except Unavailable:
            return


class Alternating:
    """Work on (weights, new weights), which change places each time."""

    def __init__(self, work: Callable[[Gradient, Gradient], object], versions: tuple[Gradient, Gradient]) -> None:
        self._work = work
        self._versions = versions

    def __call__(self) -> None:
        self._work(*self._versions)
        self._versions = self._versions[::-1]
