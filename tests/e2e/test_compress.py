"""Encoded gradients and weights: hardsync's bits are those of a plain loop with the same encoding, on every way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudra_zmq.update import codecs
from rudra_zmq.update.rules import decode

from .harness import Rudra, job_file
from .test_hardsync import arguments, plain_loop, same, weights

REFERENCE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "float16": lambda x: decode(codecs.to_float16(x)),
    "bfloat16": lambda x: decode(codecs.to_bfloat16(x)),
    "int8": lambda x: codecs.from_int8(*codecs.to_int8(x)),
}


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


@pytest.mark.parametrize(("up", "down"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("int8", "int8")])
def test_a_task_learns(rudra: Rudra, tmp_path: Path, up: str, down: str) -> None:
    done = rudra("run", "--json", job_file(tmp_path, CNN.format(up=up, down=down))).json
    assert done["state"] == "DONE"
    assert done["accuracy"] > 0.6
