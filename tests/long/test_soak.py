"""What only shows after a long time or under load: memory that creeps, a slow learner that costs the others (S26, S42)."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rudra_zmq.net.sockets import WINDOW
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.long.crew import Crew, Sample, sample
from tests.net.node.conftest import rig_of  # noqa: F401
from tests.net.node.rig import ATTACH, Rig, toml

pytestmark = pytest.mark.long
Rigs = Callable[..., Rig]
DATA = pytest.mark.parametrize("data", ["shm", "tcp"])
SMALL = [50_000, 37_500]  # 350 KB
MANY = 50_000_000  # samples: no end of an epoch in the way
UPDATES = int(os.environ.get("SOAK_UPDATES", "100000"))
MB = 1 << 20


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], None]]:
    """Shown whether the test passes or not."""
    lines: list[str] = []
    yield lines.append
    with capsys.disabled():
        print("", *lines, sep="\n  ")


@DATA
@pytest.mark.timeout(3600)
def test_nothing_creeps(rig_of: Rigs, data: str, figures: Callable[[str], None]) -> None:  # noqa: F811
    """100,000 updates of 350 KB with four learners: memory, descriptors and page faults of the node stay flat."""
    text = toml(count=4, protocol="async", snapshot="none", job=f"stop = {{updates = {UPDATES}}}", epochs=1)
    rig = rig_of(text, start=False, shared=data == "shm")
    samples: list[Sample] = []
    learners: list[int] = []
    with Crew(rig, 4, data, tensors=SMALL, samples=MANY) as crew:
        crew.running()
        began = time.monotonic()
        for tenth in range(1, 11):
            crew.until(lambda at=tenth: sum(crew.gradients) >= (at - 0.5) * UPDATES / 10, 1800)  # type: ignore[misc]
            samples.append(crew.sample())
            learners.append(sum(crew.board.row(rank)[2] for rank in range(4)))
            node = samples[-1]
            figures(
                f"{data} {sum(crew.gradients):>7} updates {time.monotonic() - began:6.1f} s: rss {node.rss / MB:.1f} MiB, "
                f"vm {node.vm / MB:.1f} MiB, {node.descriptors} descriptors, faults {node.faults}, of learners {learners[-1]}"
            )
        results = crew.results(300)
    assert all(one["shared"] == (data == "shm") for one in results)
    assert rig.psd.wait(c.NodeDone).progress.updates == UPDATES
    settled, last = samples[2], samples[-1]
    assert last.descriptors == settled.descriptors
    assert last.rss - settled.rss < 2 * MB and last.vm - settled.vm < 2 * MB
    assert (last.faults - settled.faults) / (0.7 * UPDATES) < 0.05
    assert (learners[-1] - learners[2]) / (0.7 * UPDATES) < 0.1


@pytest.mark.timeout(900)
def test_a_thousand_connects(rig_of: Rigs, figures: Callable[[str], None]) -> None:  # noqa: F811
    """S42: each says hello, attaches, hears the weights, and goes, politely or not; the node is no larger."""
    rig = rig_of(toml(count=2, protocol="async", snapshot="none"))
    stays = rig.learner(0)
    stays.hello()
    stays.send(ATTACH)
    samples: list[Sample] = []
    for incarnation in range(1, 1001):
        one = rig.learner(1, incarnation)
        one.hello()
        one.send(ATTACH)
        one.ready() if incarnation > 1 else _first(stays, one)
        if incarnation % 3 == 0:
            one.send(d.Bye(reason="drain"))
        one.close()
        rig.learners.remove(one)
        if incarnation % 100 == 0:
            rig.psd.newest()
            assert rig.process is not None
            samples.append(sample(rig.process.pid))
            figures(f"{incarnation} connects: {samples[-1]}")
    assert samples[-1].descriptors <= samples[1].descriptors + 2
    assert samples[-1].rss - samples[1].rss < 2 * MB and samples[-1].vm - samples[1].vm < 2 * MB


def _first(stays: object, one: object) -> None:
    """Version 0 comes from the first."""
    stays.ready()  # type: ignore[attr-defined]
    one.ready()  # type: ignore[attr-defined]


@DATA
@pytest.mark.timeout(600)
def test_the_slow_and_the_stopped_cost_the_others_nothing(
    rig_of: Rigs,  # noqa: F811
    data: str,
    figures: Callable[[str], None],
) -> None:
    """async, lambda 4, 20 ms a mini-batch. Rank 3 as quick as the others, 3x slower, stopped: in turn, five times."""
    text = toml(count=4, protocol="async", snapshot="none")
    rig = rig_of(text, start=False, shared=data == "shm", liveness_s=120.0)
    rates: dict[str, list[float]] = {"equal": [], "slow": [], "stopped": []}
    with Crew(rig, 4, data, tensors=SMALL, samples=MANY, seconds=0.02) as crew:
        crew.until(lambda: min(crew.gradients) > 2 * WINDOW, 120)  # what a connection seals into was in use once
        before = crew.sample()
        for _ in range(5):
            for how, measured in rates.items():
                crew.board.takes(3, 0.06 if how == "slow" else 0.02)
                if how == "stopped":
                    crew.processes[3].send_signal(signal.SIGSTOP)
                measured.append(sum(crew.rates(2.0)[:3]))
                crew.processes[3].send_signal(signal.SIGCONT)
        after = crew.sample()
    medians = {how: statistics.median(measured) for how, measured in rates.items()}
    figures(f"{data}: samples/s of the other three {medians}, all {rates}")
    figures(f"{data}: node before {before}, after {after}")
    assert medians["slow"] >= 0.95 * medians["equal"] and medians["stopped"] >= 0.95 * medians["equal"]
    assert after.rss - before.rss < 5 * MB  # what the stopped one does not take waits here: a window at most


@pytest.mark.timeout(600)
def test_unequal_learners_under_softsync(rig_of: Rigs, figures: Callable[[str], None]) -> None:  # noqa: F811
    """S26: one is 3x slower and has a smaller mini-batch; together they make what they make alone."""
    seconds, batches = [0.02, 0.02, 0.02, 0.06], [6, 6, 6, 4]
    ratios = []
    for _ in range(3):
        alone = []
        for rank in (0, 3):
            rig = rig_of(toml(count=1, protocol="softsync", snapshot="none"), start=False, shared=True)
            with Crew(
                rig, 1, "shm", tensors=SMALL, samples=MANY, seconds=seconds[rank], minibatches=[batches[rank]]
            ) as crew:
                crew.running()
                alone.append(crew.rates(3.0)[0])
            rig.close()
        rig = rig_of(toml(count=4, protocol="softsync", snapshot="none"), start=False, shared=True)
        with Crew(rig, 4, "shm", tensors=SMALL, samples=MANY, minibatches=batches) as crew:
            for rank, takes in enumerate(seconds):
                crew.board.takes(rank, takes)
            crew.running()
            together = crew.rates(3.0)
        rig.close()
        ratios.append(sum(together) / (3 * alone[0] + alone[1]))
        figures(
            f"alone {[round(a) for a in alone]}, together {[round(t) for t in together]}: {ratios[-1]:.3f} of the sum"
        )
        counts = {count for record in _records(rig) for count in record["counts"]}
        assert counts == {4, 6}
    assert statistics.median(ratios) >= 0.9


def _records(rig: Rig) -> list[dict[str, list[int]]]:
    """Decisions; the last line may be cut short, for the node was killed."""
    text = Path(rig.folder / "decisions.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]
