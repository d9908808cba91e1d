"""A node takes the memory that it announced, and what it cannot have it does not try to take (S51)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rudra_zmq.errors import Rejected
from rudra_zmq.learner.exchange import Gradient
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.net.learner.test_shared import Worker
from tests.net.node.conftest import rig_of  # noqa: F401
from tests.net.node.rig import Rig, toml, wait_for

Rigs = Callable[..., Rig]
LARGE = d.Attach(params=[d.TensorSpec("w", [25_000_000], "float32")])
COMPILER = 60e6
"""What the compiler of the update takes, whatever the model: it is not the job's."""


def resident(rig: Rig) -> int:
    assert rig.process is not None
    return int(Path(f"/proc/{rig.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("data", ["shm", "ipc"])
def test_it_takes_what_it_said(rig_of: Rigs, data: str) -> None:  # noqa: F811
    """lambda 1 and momentum: two versions, one slot, the velocity, both aside for the snapshot."""
    rig = rig_of(toml(count=1, protocol="async", snapshot="1ms"), shared=data == "shm")
    rig.psd.newest()
    before = resident(rig)
    worker = Worker(rig, 0, attach=LARGE)
    try:
        assert worker.is_shared == (data == "shm")
        worker.rule(None)
        answer = worker.begin(40, 4, 1, 1)
        for _ in range(4):
            answer = worker.step(answer)
        wait_for("snapshot", lambda: any((rig.folder / "snapshots").glob("1-[1-9]*/manifest.json")))
        grown = resident(rig) - before
        said = rig.psd.newest().budget
        assert said == 600 * 10**6 + 2 * 8 * 2**20
        assert "2 versions 200.0 MB, 1 slot 100.0 MB, momentum 100.0 MB" in rig.psd.event("need 616.8 MB").text
        assert 0.9 * said <= grown <= 1.1 * said + COMPILER
        worker.leave("done")
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("up", "down", "tcp", "parts"),
    [
        (
            "int8",
            "float16",
            True,
            ("2 versions 100.0 MB, float32 weights 200.0 MB", "1 slot 25.1 MB", "decoded gradient 100.0 MB"),
        ),
        (
            "topk:0.01",
            "none",
            False,
            ("2 versions 200.0 MB, residuals 200.0 MB", "1 slot 2.0 MB", "decoded gradient 100.0 MB"),
        ),
    ],
)
def test_it_takes_what_it_said_with_encodings(
    rig_of: Rigs,  # noqa: F811
    up: str,
    down: str,
    tcp: bool,
    parts: tuple[str, ...],
) -> None:
    """In chunks: sealed, and over a socket of this host."""
    text = toml(count=1, protocol="async", snapshot="1ms") + f'[wire]\ncompress = "{up}"\ncompress_down = "{down}"\n'
    rig = rig_of(text, tcp=tcp)
    rig.psd.newest()
    before = resident(rig)
    worker = Worker(rig, 0, attach=LARGE)
    try:
        worker.rule(None)
        answer = worker.begin(4000, 4, 1, 1)
        while answer.ack < 4 or not any((rig.folder / "snapshots").glob("1-[2-9]*/manifest.json")):
            worker.gradient.params[:] = 0.001
            lease = answer.leases[0]
            answer = worker.push(Gradient(answer.clock, lease.spans, lease.count))
            assert answer.verdict == "accepted" and answer.ack < 500
        grown = resident(rig) - before
        said = rig.psd.newest().budget
        text = rig.psd.event("the servers of this job need").text
        assert all(part in text for part in parts), text
        assert 0.9 * said <= grown <= 1.1 * said + COMPILER, (said, grown)
        worker.leave("done")
    finally:
        worker.close()


LIMITED = (
    "-c",
    "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000)); "
    "runpy.run_module('rudra_zmq.node', run_name='__main__')",
)


def test_what_it_may_not_have_it_does_not_take(rig_of: Rigs) -> None:  # noqa: F811
    """Under a limit of the kernel: no MemoryError, no signal; one line with the numbers, and the node's good end."""
    rig = rig_of(toml(count=1, protocol="async"), shared=True, program=LIMITED)
    with pytest.raises(Rejected, match=r"need 4\.2 GB: .* the limit of its address space leaves .*Fix: raise RLIMIT"):
        Worker(rig, 0, attach=d.Attach(params=[d.TensorSpec("w", [175_000_000], "float32")]))
    done = rig.psd.wait(c.NodeDone)
    assert done.state == "FAILED" and "address space" in done.reason
    assert rig.exit_status() == 0 and "Traceback" not in rig.log()
