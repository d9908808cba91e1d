"""Encoded gradients and weights: hardsync's bits are those of a plain loop with the same encoding, on every way."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudra_zmq.update import codecs
from rudra_zmq.update.rules import decode

from .harness import Rudra, decisions, job_file, wait_for
from .test_hardsync import arguments, plain_loop, same, weights

REFERENCE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "float16": lambda x: decode(codecs.to_float16(x)),
    "bfloat16": lambda x: decode(codecs.to_bfloat16(x)),
    "int8": lambda x: codecs.from_int8(*codecs.to_int8(x)),
}


class TopK:
    """The k largest of each rank's gradient and what was held back of those before."""

    def __init__(self, share: Fraction) -> None:
        self._share = share
        self._residuals: dict[int, np.ndarray] = {}

    def __call__(self, rank: int, gradient: np.ndarray) -> np.ndarray:
        x = gradient + self._residuals.get(rank, np.float32(0))
        sent = np.zeros_like(x)
        chosen = codecs.largest(x, math.ceil(self._share * x.size))
        sent[chosen] = x[chosen]
        x[chosen] = 0
        self._residuals[rank] = x
        return sent


def topk_reference(epochs: int = 2) -> dict[str, np.ndarray]:
    return plain_loop(epochs=epochs, up=TopK(Fraction("0.05")))


def encoded(rudra: Rudra, up: str, down: str, *more: str, epochs: int = 2, protocol: str = "hardsync") -> Any:
    sets = ["-s", f"wire.compress={up}", "-s", f"wire.compress_down={down}", *more]
    first, *rest = arguments(protocol, epochs=epochs)
    return rudra(first, *sets, *rest).json


def reference(up: str, down: str, epochs: int = 2) -> dict[str, np.ndarray]:
    return plain_loop(epochs=epochs, up=lambda rank, x: REFERENCE[up](x), down=REFERENCE[down])


@pytest.mark.parametrize("data", ["shm", "ipc", "tcp"])
def test_equal_however_the_vectors_travel(rudra: Rudra, data: str) -> None:
    rudra.env["RUDRA_PSD_DATA"] = data
    expected = reference("float16", "bfloat16")
    same(weights(encoded(rudra, "float16", "bfloat16")), expected)
    assert any(expected[k].tobytes() != v.tobytes() for k, v in plain_loop(epochs=2).items())


@pytest.mark.parametrize(("up", "down"), [("bfloat16", "float16"), ("int8", "int8"), ("none", "float16")])
def test_equal_to_a_plain_loop(rudra: Rudra, up: str, down: str) -> None:
    same(weights(encoded(rudra, up, down)), reference(up, down))


@pytest.mark.parametrize("data", ["shm", "tcp"])
def test_topk_equal_however_the_vectors_travel(rudra: Rudra, data: str) -> None:
    rudra.env["RUDRA_PSD_DATA"] = data
    same(weights(encoded(rudra, "topk:0.05", "none")), topk_reference())


def test_topk_equal_when_stopped_and_resumed(rudra: Rudra) -> None:
    """Twice, at any moment: what is held back at each learner goes on too."""
    first, *rest = arguments(epochs=12)
    with rudra.start(first, "-s", "wire.compress=topk:0.05", *rest) as run:
        wait_for("an update", lambda: [f for f in rudra.logs() if f.stat().st_size], 60, run)
        rudra("stop")
        run.communicate(timeout=60)
    assert run.returncode == 0
    (log,) = rudra.logs()
    assert 0 < len(decisions(log)) < 12 * 15
    resumed = rudra("resume", "--json").json
    assert resumed["state"] == "DONE"
    same(weights(resumed), topk_reference(epochs=12))


def test_topk_equal_when_everything_is_killed_and_resumed(rudra: Rudra) -> None:
    """The newest snapshot is of the end of an epoch in mid-job."""
    first, *rest = arguments(epochs=6)
    with rudra.start(first, "-s", "wire.compress=topk:0.05", "-s", "servers.snapshot=20ms", *rest) as run:

        def past_two_epochs() -> bool:
            logs = rudra.logs()
            return any(any(r["update"] >= 35 for r in decisions(log)) for log in logs)

        wait_for("update 35", past_two_epochs, 60, run)
        for pid in rudra.processes():
            os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=30)
    wait_for("everything dead", lambda: not rudra.processes(), 10)
    (job,) = rudra("jobs", "--json").json["jobs"]
    resumed = rudra("resume", job["job"], "--json").json
    assert resumed["state"] == "DONE" and resumed["generation"] >= 2
    same(weights(resumed), topk_reference(epochs=6))


CNN = """
[job]
name = "coded"
task = "rudra_zmq.tasks.fashion_mnist:cnn"
task_args = {{limit = 6000}}
epochs = 1
[learners]
count = 2
minibatch = 32
[sync]
protocol = "softsync"
[update]
rule = "momentum"
lr = 0.03
[wire]
compress = "{up}"
compress_down = "{down}"
"""


@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("int8", "int8"),
        ("topk:0.05", "none"),
        pytest.param("float16", "float16", marks=pytest.mark.long),
        pytest.param("bfloat16", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_task_learns(rudra: Rudra, tmp_path: Path, up: str, down: str) -> None:
    done = rudra("run", "--json", job_file(tmp_path, CNN.format(up=up, down=down))).json
    assert done["state"] == "DONE"
    assert done["accuracy"] > 0.6
