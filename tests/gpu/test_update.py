"""The update on a GPU: the tests of tests/cuda/cases.py with CuPy, and what a GPU alone can show."""

from __future__ import annotations

import zlib

import numpy as np

from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.cuda import Device
from rudra_zmq.update.gpu import GpuUpdate
from rudra_zmq.update.rules import GroupSpan, RuleSpec
from tests.cuda.cases import *  # noqa: F403

UPDATES = 10_000


def test_no_device_memory_is_taken_in_steady_state(device: Device) -> None:
    n = 1 << 20
    update = GpuUpdate(RuleSpec.of("adam", [GroupSpan(0, n, 1.0, 0.1)], 1.0), n, device)
    w, g, acc, out = (device.xp.zeros(n, np.float32) for _ in range(4))
    sent = device.xp.zeros(n, np.float16)

    def turn() -> int:
        update.fold(acc, 1.0, g)
        update.step(w, [(0.5, g)], (0.5, acc), 1.0, 1.0, 0.1, out, sent)
        return int(device.xp.get_default_memory_pool().used_bytes())

    first = turn()
    assert {turn() for _ in range(20)} == {first}


def test_ten_thousand_updates_from_a_side_stream(device: Device) -> None:
    """The same bits as on the CPU at the end, and at every thousandth update."""
    n = 10_007
    w, *given = np.random.default_rng(8).standard_normal((5, n), dtype=np.float32)
    spec = RuleSpec.of("adamw", [GroupSpan(0, 5000, 1.0, 0.01), GroupSpan(5000, n, 2.0, 0.0)])
    cpu, here = CpuUpdate(spec, n), [w, np.empty(n, np.float32)]
    with device.xp.cuda.Stream(non_blocking=True):
        gradients = [device.xp.asarray(g) for g in given]
        gpu, there = GpuUpdate(spec, n, device), [device.xp.asarray(w), device.xp.zeros(n, np.float32)]
        for i in range(UPDATES):
            a, b = i % 4, (i // 4) % 4
            cpu.step(here[0], [(0.4, given[a]), (0.6, given[b])], None, 1.0, 1.0, 1e-3, here[1])
            assert gpu.step(there[0], [(0.4, gradients[a]), (0.6, gradients[b])], None, 1.0, 1.0, 1e-3, there[1]).finite
            here.reverse(), there.reverse()
            if i % 1000 == 999:
                assert zlib.crc32(there[0].get()) == zlib.crc32(here[0]), i
