"""Encoded vectors between a real node and real exchanges: fewer bytes, the same bits on every way, and after a death."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rudra_zmq.learner import line, link
from rudra_zmq.learner.exchange import Gradient
from rudra_zmq.net import bulk
from rudra_zmq.node.vectors import F32
from rudra_zmq.update import codecs
from rudra_zmq.update.rules import decode
from rudra_zmq.wire.messages import data as d
from tests.net.learner.test_shared import Rigs, Worker, job, together
from tests.net.node.conftest import rig_of  # noqa: F401
from tests.net.node.rig import gradient, toml
from tests.net.node.test_hardsync import EPOCHS, MU, SAMPLES, result

Up = Callable[[int, F32], F32]

CODECS: dict[str, Callable[[F32], F32]] = {
    "none": lambda x: x,
    "float16": lambda x: decode(codecs.to_float16(x)),
    "bfloat16": lambda x: decode(codecs.to_bfloat16(x)),
    "int8": lambda x: codecs.from_int8(*codecs.to_int8(x)),
}


class TopK:
    """Of each rank, with what was held back before."""

    def __init__(self, share: str) -> None:
        self._share = Fraction(share)
        self._held: dict[int, F32] = {}

    def __call__(self, rank: int, g: F32) -> F32:
        x = g + self._held.get(rank, np.float32(0))
        chosen = codecs.largest(x, math.ceil(self._share * x.size))
        sent = np.zeros_like(x)
        sent[chosen] = x[chosen]
        x[chosen] = 0
        self._held[rank] = x
        return sent


def up_of(codec: str) -> Up:
    return TopK(codec[5:]) if codec.startswith("topk") else lambda rank, g: CODECS[codec](g)


def plain_loop(up: str, down: str = "none", epochs: int = EPOCHS) -> F32:
    """As test_hardsync has it, but for what becomes of gradients and weights on their way."""
    w, v, encode = np.full(10, 1.0, np.float32), np.zeros(10, np.float32), up_of(up)
    for epoch in range(epochs):
        for start in range(0, SAMPLES, 2 * MU):
            cuts = [start, min(start + MU, SAMPLES), min(start + 2 * MU, SAMPLES)]
            spans = [(epoch, a, b) for a, b in pairwise(cuts) if a < b]
            count = sum(b - a for _, a, b in spans)
            g = np.zeros(10, np.float32)
            for rank, span in enumerate(spans):
                part = encode(rank, gradient(CODECS[down](w), [span]))
                g = g + np.float32((span[2] - span[1]) / count) * part
            v = np.float32(0.5) * v + g
            w = w - np.float32(0.1) * v
    return w


def coded(up: str, down: str = "none", epochs: int = EPOCHS, **other: Any) -> str:
    return toml(epochs=epochs, **other) + f'[wire]\ncompress = "{up}"\ncompress_down = "{down}"\n'


@pytest.mark.parametrize("data", ["shm", "ipc"])
@pytest.mark.parametrize(
    ("up", "down"),
    [("float16", "none"), ("bfloat16", "float16"), ("int8", "int8"), ("none", "bfloat16"), ("topk:0.3", "float16")],
)
def test_equals_the_plain_loop(rig_of: Rigs, data: str, up: str, down: str) -> None:  # noqa: F811
    rig = rig_of(coded(up, down), shared=data == "shm")
    seen, done = job(rig)
    assert seen == [data == "shm"] * 2
    np.testing.assert_array_equal(result(rig), plain_loop(up, down))
    assert done.state == "DONE" and not done.progress.drops


@pytest.mark.parametrize("data", ["shm", "ipc"])
def test_a_node_that_is_killed_gives_back_what_was_held_back(rig_of: Rigs, data: str) -> None:  # noqa: F811
    """Its learners live on, and go on from what they held back as of the snapshot."""
    rig = rig_of(coded("topk:0.3", epochs=50, snapshot="1ms"), shared=data == "shm")
    generations: set[int] = set()
    due, killed = threading.Event(), threading.Event()

    def main() -> None:
        assert due.wait(60)
        rig.kill()
        rig.start()
        killed.set()

    def each(worker: Worker, answer: Any) -> None:
        generations.add(answer.clock.generation)
        if worker.rank == 0 and not due.is_set():
            if any((rig.folder / "snapshots").glob("1-[1-9]*/manifest.json")):
                due.set()
                assert killed.wait(30)
            else:
                due.wait(0.05)  # a snapshot takes longer than all of these updates would

    job(rig, each, main)
    assert generations == {1, 2}
    np.testing.assert_array_equal(result(rig), plain_loop("topk:0.3", epochs=50))


WIDE = d.Attach(params=[d.TensorSpec("w", [600_000], "float32")], float_buffers=[d.TensorSpec("m", [5], "float32")])
P, BUFFERS = 600_000, 20
SIZES = {
    "none": 4 * P + BUFFERS, "float16": 2 * P + BUFFERS, "int8": P + 4 * 586 + BUFFERS, "topk:0.01": 8 * 6000 + BUFFERS,
}  # fmt: skip


@pytest.mark.parametrize(("up", "down"), [("none", "none"), ("float16", "int8"), ("topk:0.01", "float16")])
def test_bytes_of_the_messages(
    rig_of: Rigs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    up: str,
    down: str,
) -> None:
    """Payloads of chunks as they leave and come, without the upload of version 0 and what topk says at the end."""
    sent: list[int] = []
    received: list[int] = []
    encode, receive = bulk.encode_data, link.decode_from_node

    def encoding(message: d.Message, payload: Any = None) -> Any:
        if payload is not None:
            sent.append(len(payload))
        return encode(message, payload)

    def decoding(frames: Any) -> Any:
        message, payload = receive(frames)
        if payload is not None:
            received.append(len(payload))
        return message, payload

    monkeypatch.setattr(bulk, "encode_data", encoding)
    monkeypatch.setattr(link, "decode_from_node", decoding)
    rig = rig_of(coded(up, down, count=1, snapshot="none"))

    def life() -> None:
        worker = Worker(rig, 0, attach=WIDE)
        try:
            worker.rule(None)
            answer = worker.begin(SAMPLES, MU, 1, 1)
            assert (sum(sent), sum(received)) == (4 * P + BUFFERS, SIZES[down])
            for _ in range(3):
                sent.clear()
                received.clear()
                worker.gradient.params[:] = np.arange(P, dtype=np.float32) / P
                lease = answer.leases[0]
                answer = worker.push(Gradient(answer.clock, lease.spans, lease.count))
                assert answer.verdict == "accepted"
                assert (sum(sent), sum(received)) == (SIZES[up], SIZES[down])
            worker.leave("failed", "enough")
        finally:
            worker.close()

    together([life])


@pytest.mark.parametrize("data", ["shm", "ipc"])
def test_what_overflows_is_refused_and_given_back(rig_of: Rigs, data: str) -> None:  # noqa: F811
    """Finite as float32, infinite as float16: as a gradient that is infinite."""
    rig = rig_of(coded("float16", count=1), shared=data == "shm")

    def life() -> None:
        worker = Worker(rig, 0)
        try:
            worker.rule(None)
            answer = worker.begin(SAMPLES, MU, 1, 1)
            verdicts = []
            for factor in (1e9, 1.0):
                lease = answer.leases[0]
                worker.gradient.params[:] = gradient(worker.weights.params, [tuple(s) for s in lease.spans])  # type: ignore[misc]
                worker.gradient.params[3] = 1.0 + factor
                answer = worker.push(Gradient(answer.clock, lease.spans, lease.count, loss=1.0))
                verdicts.append(answer.verdict)
            assert verdicts == ["nonfinite", "accepted"]
            while not answer.done:
                answer = worker.step(answer)
            worker.leave("done")
        finally:
            worker.close()

    together([life])


HUGE = d.Attach(params=[d.TensorSpec("w", [1 << 22], "float32")])


def test_an_answer_that_comes_while_a_residual_is_said(rig_of: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A residual of more chunks than there is credit for: the answer to the push is in between, with its weights."""
    lost: list[str] = []
    failed = line.Line._failed
    monkeypatch.setattr(line.Line, "_failed", lambda self, reason: lost.append(reason) or failed(self, reason))
    rig = rig_of(coded("topk:0.001", count=1, snapshot="1ms"))

    def life() -> None:
        worker = Worker(rig, 0, attach=HUGE)
        try:
            worker.rule(None)
            answer = worker.begin(SAMPLES, MU, 1, 1)
            for turn in range(1, 9):
                lease = answer.leases[0]
                worker.gradient.params[:] = turn
                answer = worker.push(Gradient(answer.clock, lease.spans, lease.count))
                assert answer.verdict == "accepted" and worker.weights.params[-1] == 1.0
            worker.leave("failed", "enough")
        finally:
            worker.close()

    together([life])
    assert not lost
