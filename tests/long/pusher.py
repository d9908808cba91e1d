"""A learner that computes nothing: the real exchange, over shared memory or chunks, as a process of the soak tests.

Its standard input is JSON. What it has done it writes into ``board``, where the test reads it at any time; there the
test also says how long a mini-batch is to take.
"""

from __future__ import annotations

import json
import mmap
import resource
import struct
import sys
import time
from pathlib import Path
from typing import Any

from rudra_zmq.learner.exchange import Gradient
from rudra_zmq.learner.remote import RemoteExchange
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, TensorSpec
from tests.net.learner.conftest import spec_in

ROW = struct.Struct("=qqqd")  # gradients, samples, minor page faults; seconds of a mini-batch


class Board:
    """One row for each rank, in a file that test and learners map."""

    def __init__(self, path: Path, ranks: int) -> None:
        with open(path, "a+b") as file:
            if not path.stat().st_size:
                file.truncate(ranks * ROW.size)
            self._map = mmap.mmap(file.fileno(), ranks * ROW.size)

    def row(self, rank: int) -> tuple[int, int, int, float]:
        gradients, samples, faults, seconds = ROW.unpack_from(self._map, rank * ROW.size)
        return gradients, samples, faults, seconds

    def done(self, rank: int, gradients: int, samples: int, faults: int) -> None:
        struct.pack_into("=qqq", self._map, rank * ROW.size, gradients, samples, faults)

    def takes(self, rank: int, seconds: float) -> None:
        """A mini-batch of ``rank`` takes so long from here on."""
        struct.pack_into("=d", self._map, rank * ROW.size + 24, seconds)


def main(say: dict[str, Any]) -> None:
    rank = say["rank"]
    board = Board(Path(say["board"]), say["ranks"])
    attach = Attach(params=[TensorSpec(f"w{i}", [n], "float32") for i, n in enumerate(say["tensors"])])
    layout = Layout.of(attach)
    weights = Vector(layout)
    weights.params[:] = 1.0
    spec = spec_in(Path(say["folder"]), rank=rank, **say["spec"])
    exchange = RemoteExchange(spec)
    exchange.attach(attach, layout, weights, Vector(layout, touch=False))
    exchange.rule(None)
    answer = exchange.begin(say["samples"], say["minibatch"], 1, 1)
    gradients = samples = 0
    while not answer.done and not exchange.leaving:
        lease = answer.leases[0]
        seconds = board.row(rank)[3]
        if seconds:
            time.sleep(seconds)
        began = exchange.gradient.params
        if say["fill"]:
            began[:] = 1e-6
        else:
            began[:1] = 1e-6
        answer = exchange.push(Gradient(answer.clock, lease.spans, lease.count, loss=1.0, compute_s=seconds))
        assert answer.verdict == "accepted" or answer.done, answer
        gradients += 1
        samples += lease.count
        if gradients % 16 == 1 or seconds:
            board.done(rank, gradients, samples, resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    board.done(rank, gradients, samples, usage.ru_minflt)
    print(
        json.dumps(
            {"shared": exchange._shared is not None, "peak": usage.ru_maxrss * 1024, "first": float(weights.params[0])}
        )
    )
    exchange.leave("done")
    exchange.close()


if __name__ == "__main__":
    main(json.load(sys.stdin))
