"""S43: a tensor beyond 2 GiB. Needs some 13 GB of memory; what is free decides, and it is said."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rudra_zmq.learner.exchange import Gradient
from rudra_zmq.node import tensors
from rudra_zmq.node.headroom import limit
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.long.crew import sample
from tests.net.learner.test_shared import Worker
from tests.net.node.conftest import rig_of  # noqa: F401
from tests.net.node.rig import Rig, toml

pytestmark = pytest.mark.long
Rigs = Callable[..., Rig]
SGD = 'rule = "sgd"\nlr = 1.0\nschedule = {kind = "constant"}'
SMALL = 1000
STEP = 1 << 24


def attach(large: int) -> d.Attach:
    """A small tensor, a large one of so many elements, and one that ends the vector."""
    rest = large // 8
    specs = [("first", SMALL), ("large", large), ("rest", rest)]
    return d.Attach(params=[d.TensorSpec(name, [size], "float32") for name, size in specs])


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], None]]:
    lines: list[str] = []
    yield lines.append
    with capsys.disabled():
        print("", *lines, sep="\n  ")


@pytest.mark.parametrize("data", ["shm", "ipc", "tcp"])
@pytest.mark.timeout(900)
def test_a_tensor_of_more_than_2_gib(rig_of: Rigs, data: str, figures: Callable[[str], None]) -> None:  # noqa: F811
    """2.2 GB in 2.5 GB, sgd, lambda 1: every element of version 2, and the file at the end, are what they must be."""
    gc.collect()  # of the case before
    message = attach(550_000_000)
    free = limit(None)
    if free.nbytes < 13.5e9:
        pytest.skip(f"13.5 GB are needed, {free.text}")
    text = toml(count=1, protocol="async", snapshot="none", update=SGD, epochs=1)
    rig = rig_of(text, start=False, shared=data == "shm", liveness_s=120.0)
    rig.start(**({"bind": {"tcp": [20000, 60000]}} if data == "tcp" else {}))
    rig.address = rig.psd.all(c.NodeHello)[-1].addresses[0]
    worker = Worker(rig, 0, attach=message)
    try:
        assert worker.is_shared == (data == "shm")
        worker.rule(None)
        answer = worker.begin(8, 4, 1, 1)
        for _ in range(2):
            lease = answer.leases[0]
            _ramp(worker.gradient)
            assert rig.process is not None  # its largest so far: before the last push it has taken all it will
            node, own = sample(rig.process.pid), sample(os.getpid())
            answer = worker.push(Gradient(answer.clock, lease.spans, lease.count, loss=1.0))
        assert answer.done and answer.clock.timestamp == 2
        _check(worker.weights)
        figures(f"{data}: {rig.psd.event('the servers of this job need').text}")
        figures(f"{data}: node {node.rss / 1e9:.2f} GB resident, learner {own.rss / 1e9:.2f} GB")
        worker.leave("done")
    finally:
        worker.close()
    done = rig.psd.wait(c.NodeDone, seconds=300)
    assert done.state == "DONE", done
    path = Path(done.progress.weights)
    found, _ = tensors.read_header(path)
    assert found["large"].nbytes == 2_200_000_000
    _check_part(
        tensors.read(path, found["rest"], found["rest"].nbytes // 4 - STEP), SMALL + 550_000_000 + 68_750_000 - STEP
    )
    path.unlink()


@pytest.mark.timeout(300)
def test_one_that_does_not_fit_is_refused(rig_of: Rigs) -> None:  # noqa: F811
    """4.5 GB, where the servers may take 8: two versions alone are more. Nothing of it was allocated."""
    text = toml(count=1, protocol="async", snapshot="none", update=SGD, servers='memory = "8GB"')
    for shared in (True, False):
        rig = rig_of(text, shared=shared)
        learner = rig.learner(0)
        learner.hello()
        learner.send(attach(1_000_000_000))
        refused = learner.receive(d.Refused)
        assert "need 13.5 GB: 2 versions 9.0 GB, 1 slot 4.5 GB" in refused.message
        assert "servers.memory allows 8.0 GB" in refused.message
        assert rig.process is not None and sample(rig.process.pid).rss < 250e6
        done = rig.psd.wait(c.NodeDone)
        assert done.state == "FAILED" and "Fix: raise servers.memory" in done.reason
        learner.close()
        rig.close()


def _ramp(vector: Vector) -> None:
    """Element i is i mod 65536: exact, and another one wherever an index wraps."""
    pattern = np.arange(STEP, dtype=np.float32) % 65536
    for start in range(0, vector.params.size, STEP):
        part = vector.params[start : start + STEP]
        part[:] = pattern[: part.size]


def _check(vector: Vector) -> None:
    for start in range(0, vector.params.size, STEP):
        _check_part(vector.params[start : start + STEP], start)


def _check_part(part: tensors.Array, start: int) -> None:
    expected = 1.0 - 2.0 * ((start + np.arange(part.size)) % 65536)
    np.testing.assert_array_equal(part, expected.astype(np.float32), err_msg=f"from element {start}")
