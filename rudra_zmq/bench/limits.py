"""What the machine's memory allows, as contenders: the update alone, a stream kernel with its traffic, a plain copy.

Owns: their vectors. Must not know: processes, transports. An update as the node makes it is rudra_zmq.update's, with as
many threads as a node's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from rudra_zmq.bench.control import stamps
from rudra_zmq.bench.stream import MULTIPLE
from rudra_zmq.bench.timing import Block
from rudra_zmq.bench.update import Alternating, streams
from rudra_zmq.node.model import update_threads
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.rules import RULES, GroupSpan, RuleSpec, Term, aligned

KERNEL, COPY, STREAM = "fused kernel", "memcpy", "stream kernel"

Contender = Callable[[int], Block]


def elements_of(size: int) -> int:
    """Of a model of so many bytes, rounded to what the stream kernel can take."""
    return max(1, size // 4 // MULTIPLE) * MULTIPLE


class Limits:
    """``contenders`` by name; the shapes of the stream kernel have names that begin with STREAM."""

    def __init__(self, rule: str, c: int, size: int, all_of_them: bool) -> None:
        """c gradients and a model of so many bytes. Without ``all_of_them`` there is the update alone."""
        n = elements_of(size)
        self._stack = ExitStack()
        versions = (aligned(n), aligned(n))
        gradients = [aligned(n) for _ in range(c)]
        for vector in (*versions, *gradients):
            vector.fill(1e-3)
        update = CpuUpdate(RuleSpec.of(rule, [GroupSpan(0, n, 1.0, 0.0)]), n, update_threads())
        self._stack.callback(update.close)
        self.backend = update.backend
        terms: list[Term] = [(1.0, g) for g in gradients]
        works: dict[str, Callable[[], object]] = {
            KERNEL: Alternating(lambda w, out: update.step(w, terms, None, float(c), 1.0, 1e-6, out), versions)
        }
        if all_of_them:
            works[COPY] = Alternating(lambda w, out: np.copyto(out, w), versions)
            states = [aligned(n) for _ in RULES[rule].state]
            for i, stream in enumerate(streams(gradients, states, update_threads())):
                self._stack.callback(stream.close)
                works[f"{STREAM} {i}"] = Alternating(stream, versions)
        self.contenders: dict[str, Contender] = {name: _blocks(work) for name, work in works.items()}

    def __enter__(self) -> Limits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _blocks(work: Callable[[], object]) -> Contender:
    return lambda rounds: Block.alone(stamps(rounds, work))
