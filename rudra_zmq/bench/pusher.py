"""A learner that computes nothing: ``python -m rudra_zmq.bench.pusher CONTROL ELEMENTS``, run by a job.

Owns: rounds of push and pull, by the exchange that every learner uses. Must not know: who else is timed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rudra_zmq.bench.control import Order, Orders, stamps
from rudra_zmq.config import job_from_toml
from rudra_zmq.errors import RudraError
from rudra_zmq.learner.exchange import Answer, Gradient
from rudra_zmq.learner.process import SPEC
from rudra_zmq.learner.remote import RemoteExchange
from rudra_zmq.learner.spec import LearnerSpec, read_spec
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, TensorSpec

SAMPLES = 1 << 26
"""Of the one epoch: more than any benchmark takes."""

VALUE = 1e-3
"""Of every element of a gradient."""


class Pusher:
    """A learner of a model with one tensor. Raises RudraError as the exchange does."""

    def __init__(self, spec: LearnerSpec, elements: int) -> None:
        self._exchange = RemoteExchange(spec)
        attach = Attach(params=[TensorSpec("w", [elements], "float32")])
        layout = Layout.of(attach)
        self._own, self._weights = Vector(layout), Vector(layout)
        self._filled: list[Vector] = []
        self._exchange.attach(attach, layout, self._weights, self._own)
        self._exchange.rule(None)
        self._answer: Answer = self._exchange.begin(SAMPLES, 0, 1, 0)
        self._fill()
        for _ in range(self._exchange.job.count + 1):  # however many gradients make an update, it has seen one then
            self.round()

    @property
    def shared(self) -> bool:
        """Whether gradients are written into the node's memory."""
        return self._exchange.gradient is not self._own

    @property
    def copied(self) -> bool:
        """Whether new weights are copied into a vector of the learner's own: they began as zeros."""
        return bool(self._weights.params[0] != 0.0)

    def _fill(self) -> None:
        """What a backward pass would have written; no more than once into each slot, since it stays there.

        Whoever writes a gradient sees whether it is finite: a learner does so as it copies, here it is known.
        """
        vector = self._exchange.gradient
        if not any(vector is known for known in self._filled):
            self._filled.append(vector)
            vector.params.fill(VALUE)

    def round(self) -> None:
        """Push one gradient, pull what comes of it. RudraError where it does not count."""
        lease = self._answer.leases[0]
        count = sum(span.count for span in lease.spans)
        self._answer = self._exchange.push(Gradient(self._answer.clock, lease.spans, count, finite=True))
        if self._answer.done or self._answer.verdict != "accepted" or not self._answer.leases:
            raise RudraError(f"a gradient was answered with {self._answer.verdict or 'nothing'}")
        self._fill()

    def close(self) -> None:
        """Leave the job."""
        self._exchange.leave("drain")
        self._exchange.close()


def main() -> int:
    """Until the other end is gone."""
    path, elements = sys.argv[1:]
    orders = Orders(path)
    try:
        spec = read_spec(Path(os.environ[SPEC]))
        pusher = Pusher(spec, int(elements))
    except RudraError as error:
        orders.fail(str(error))
        return error.exit_status
    wire = job_from_toml(spec.toml, name=spec.job).job.wire

    def rounds(order: Order) -> list[float]:
        return stamps(int(order["rounds"]), pusher.round)

    try:
        orders.ready(spec.rank, shared=pusher.shared, copied=pusher.copied, encrypt=wire.encrypt)
        orders.work(rounds)
    except RudraError as error:
        print(f"rudra: {error}", file=sys.stderr)  # the other end has heard it, the job's log should too
        return error.exit_status
    finally:
        pusher.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
