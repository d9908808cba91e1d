"""The lines that say why there is no GPU, where there is one: the real twins of tests/unit/update/test_cuda_device.py.

That a device is busy (exclusive compute mode) takes an administrator to bring about, and has no twin here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from rudra_zmq.errors import RudraError
from rudra_zmq.update.cuda import Device


def bench(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rudra_zmq.bench", "update", *args]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)


def test_a_device_that_is_not_there(device: Device) -> None:
    with pytest.raises(RudraError, match=r"^there is no cuda:99: CuPy sees \d+ GPUs?\. Fix: name cuda:0$"):
        Device(99)


def test_hidden_devices_are_one_line(device: Device) -> None:
    done = bench("--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert "finds no NVIDIA driver with a GPU: cudaErrorNoDevice" in line and ". Fix: " in line


def test_memory_that_is_taken(device: Device) -> None:
    with pytest.raises(RudraError, match=r"^the GPU's memory is taken: .* GB are needed, .* GB are free \(cuda:0\)"):
        device.need(2 * device.total)
    with pytest.raises(RudraError, match=r"^the GPU's memory is taken: Out of memory"), device.errors():
        device.xp.zeros(2 * device.total, np.uint8)


def test_the_benchmark_ends_with_rows(device: Device) -> None:
    for more in ([], ["--encoding", "int8", "--sent", "bfloat16"], ["--encoding", "topk", "--clip", "--sent", "int8"]):
        size = ["--size", "25MB", "--rule", "momentum", "--c", "4", "--turns", "3"]
        done = bench("--device", "cuda", *size, *more, "--json")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout.splitlines()[-1])["rows"]
        assert rows[0]["against"] == "device copy" and all(row["ratio"] > 0 for row in rows)
