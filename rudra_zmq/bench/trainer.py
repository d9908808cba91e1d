"""A learner that trains Fashion-MNIST's small CNN: ``python -m rudra_zmq.bench.trainer CONTROL WORKERS SAMPLES``.

Owns: the loop of a task, as every job without a script runs it, in blocks of mini-batches. Must not know: who else is
timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rudra_zmq.bench.control import Order, Orders, stamps
from rudra_zmq.errors import RudraError
from rudra_zmq.learner.join import Learner, join
from rudra_zmq.learner.task import indexable
from rudra_zmq.tasks import fashion_mnist


def main() -> None:
    """Until the other end is gone."""
    path, workers, samples = sys.argv[1:]
    orders = Orders(path)
    with join() as learner:
        try:
            task = fashion_mnist.cnn(int(samples))
            data = indexable(task.dataset("train"))
            model = learner.attach(task.model())
        except RudraError as error:
            orders.fail(str(error))
            raise
        model.train()
        batches = _batches(learner, data, int(workers))

        def step() -> None:
            learner.step(task.loss(model, next(batches)))

        step()  # the job has begun, and the loaders have
        weights = next(model.parameters()).data_ptr()
        orders.ready(learner.rank, shared=bool(shared_memory()), copied=not any(weights in m for m in shared_memory()))
        orders.work(lambda order: _rounds(order, step))


def _rounds(order: Order, step: Any) -> list[float]:
    return stamps(int(order["rounds"]), step)


def shared_memory() -> list[range]:
    """Where memory of a node is mapped in this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:rudra" in line:
            start, _, stop = line.split()[0].partition("-")
            found.append(range(int(start, 16), int(stop, 16)))
    return found


def _batches(learner: Learner, data: Any, workers: int) -> Iterator[Any]:
    for _ in learner.epochs():
        yield from learner.batches(data, num_workers=workers)


if __name__ == "__main__":
    main()
