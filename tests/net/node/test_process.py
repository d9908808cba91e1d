"""A node as a process: strangers at its socket, peers that stop reading, signals, psd that dies or comes back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rudra_zmq.net.sockets import Dealer
from rudra_zmq.wire.codec import encode_data
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.net.node.rig import ATTACH, JOB, TOKEN, FakePsd, Learner, Rig, run_rounds, say_bye, toml, wait_for
from tests.net.node.test_hardsync import EPOCHS, SAMPLES, finish, plain_loop, result

RigOf = Callable[..., Rig]


# ------------------------------------------------------------------------------------------ strangers


def _stranger(rig: Rig) -> Dealer:
    dealer = rig.context.dealer(rig.address, "stranger")
    assert dealer.wait_connected(10.0)
    return dealer


def _rubbish(rng: random.Random) -> list[bytes]:
    good = [bytes(frame) for frame in encode_data(d.Hello(role="learner", job=JOB, token=TOKEN, rank=0, incarnation=1))]
    kind = rng.randrange(6)
    if kind == 0:
        return [rng.randbytes(rng.randrange(1, 200))]
    if kind == 1:
        return [good[0][: rng.randrange(1, len(good[0]))]]
    if kind == 2:
        return [b"RZ\x01" + rng.randbytes(rng.randrange(1, 100))]
    if kind == 3:
        return [rng.randbytes(5) for _ in range(rng.randrange(3, 9))]
    if kind == 4:
        return [b"RZ\x07" + good[0][3:]]
    return [b"\x80\x04\x95cos\nsystem\n(S'touch /tmp/owned'\ntR."]


def test_a_job_is_unaffected_by_what_strangers_send(rig_of: RigOf) -> None:
    rig = rig_of(toml(epochs=EPOCHS))
    rng = random.Random(7)
    dealer = _stranger(rig)
    push = d.Push(rank=0, incarnation=1, seq=1, generation=1, key=1, groups=[d.Group(0, 1, 4, [(0, 0, 4)])], nbytes=40)
    learned = [
        d.Hello(role="learner", job=JOB, token="wrong", rank=0, incarnation=1),
        d.Hello(role="learner", job="ffffff", token=TOKEN, rank=0, incarnation=1),
        d.Hello(role="learner", job=JOB, token=TOKEN, rank=0, incarnation=1, pid=4711),
        d.Hello(role="pulse", job=JOB, token=TOKEN, rank=1, incarnation=1, pid=4711),
        d.Hello(role="learner", job=JOB, token=TOKEN, rank=9, incarnation=1),
        push, d.Ping(), d.Want(), d.Bye(reason="drain"), ATTACH, d.Data(samples=30, minibatch=0),
    ]  # fmt: skip
    crew = rig.crew(2, SAMPLES)
    made = 0
    while made < EPOCHS * 4:
        for _ in range(20):
            dealer.send(_rubbish(rng))
        for message in learned:
            dealer.send(encode_data(message))
        dealer.send(encode_data(d.Chunk(key=1, offset=0), b"x" * 40))
        made += run_rounds(crew, 1)
    dealer.close()
    done = finish(rig, crew)
    np.testing.assert_array_equal(result(rig), plain_loop())
    drops = done.progress.drops
    for reason in ("bad-token", "wrong-job", "wrong-rank", "duplicate", "unknown-peer", "prefix", "version", "frames"):
        assert drops[reason] > 0, drops
    assert not Path("/tmp/owned").exists()


def test_a_thousand_connections_leave_nothing(rig_of: RigOf) -> None:
    rig = rig_of(toml(count=1, protocol="async"))
    crew = rig.crew(1)

    def connect(times: int) -> None:
        for i in range(times):
            dealer = _stranger(rig)
            hello = d.Hello(role="pulse", job=JOB, token=TOKEN, rank=0, incarnation=1, host="here", pid=1001)
            dealer.send(encode_data(hello if i % 2 else d.Ping()))
            if i % 2:
                assert dealer.wait(10.0)
            dealer.close()

    sizes = []
    for _ in range(7):
        connect(160)
        crew[0].push()  # and the learner is still served
        crew[0].grant()
        sizes.append(rig.psd.newest().memory)
    # A burst may cost memory once; what every connection left would show each time (1 kB each: 160 kB).
    assert min(b - a for a, b in pairwise(sizes)) < 80_000, sizes


# ------------------------------------------------------------------------------------- slow and stopped

BIG = d.Attach(params=[d.TensorSpec("w", [5_000_000], "float32")])


def test_a_learner_that_stops_reading_holds_up_nobody(rig_of: RigOf) -> None:
    rig = rig_of(toml(count=2, protocol="async", epochs=50))
    crew = [rig.learner(rank, attach=BIG) for rank in range(2)]
    for learner in crew:
        learner.hello()
        learner.send(BIG)
    for learner in crew:
        learner.ready()
        learner.send(d.Data(samples=64, minibatch=0))
    for learner in crew:
        learner.grant()
    slow, fast = crew
    slow.gradient.params[:] = 1e-3
    fast.gradient.params[:] = 1e-3
    slow.seq += 1
    slow.say_push(slow.leases[0])  # and from here on it reads nothing: 20 MB wait for it
    weights = []
    began = time.monotonic()
    for _ in range(12):
        fast.seq += 1
        fast.say_push(fast.leases[0])
        fast.grant()
        weights.append(float(fast.weights.params[0]))
    assert time.monotonic() - began < 10.0
    assert all(a > b for a, b in pairwise(weights))
    grant = slow.grant()  # what it was promised is still there, untouched by the updates since
    assert grant.timestamp == 1
    np.testing.assert_array_equal(slow.weights.params, np.float32(1.0) - np.float32(0.1) * np.float32(1e-3))
    memory = rig.psd.newest().memory
    assert memory < (4 * 20 + 4 * 20 + 3 * 20 + 3 * 20 + 120) << 20


# ---------------------------------------------------------------------------------------------- signals


def test_sigterm_drains_and_a_second_one_is_at_once(rig_of: RigOf) -> None:
    rig = rig_of(toml(epochs=50))
    crew = rig.crew(2, SAMPLES)
    run_rounds(crew, 3)
    assert rig.process is not None
    rig.process.send_signal(signal.SIGTERM)
    rig.psd.event("waits for the steps that are under way")
    assert rig.process.poll() is None
    rig.process.send_signal(signal.SIGTERM)
    done = rig.psd.wait(c.NodeDone)
    assert (done.state, rig.exit_status(5.0)) == ("STOPPED", 0)
    assert not list(rig.folder.parent.glob("n.sock*"))


def test_a_node_that_diverges_exits_and_its_successor_goes_on(rig_of: RigOf) -> None:
    rig = rig_of(toml(count=1, protocol="async", snapshot="1ms", epochs=50))
    (learner,) = rig.crew(1)
    for _ in range(3):
        learner.push()
        learner.grant()
    wait_for("snapshot", lambda: list((rig.folder / "snapshots").glob("1-[1-9]/manifest.json")))
    learner.gradient.params[:] = 3e38
    for _ in range(20):
        learner.seq += 1
        learner.say_push(learner.leases[0])
        try:
            learner.grant(seconds=1.0)
        except AssertionError:
            break
        learner.gradient.params[:] = np.nan if np.isinf(learner.weights.params).any() else 3e38
    assert rig.exit_status() == 1
    assert rig.psd.event("the weights are not finite").level == "E"
    rig.start()
    rig.psd.event("goes on from update")


# -------------------------------------------------------------------------------------------------- psd


def test_a_node_dies_with_its_psd(rig_of: RigOf, tmp_path: Path) -> None:
    """kill -9 of psd: the successor starts nodes of its own on the same folders."""
    rig = rig_of(toml(), start=False)
    spec = {
        "job": JOB, "name": "rig", "generation": 1, "token": TOKEN, "psd_address": rig.psd.address,
        "folder": str(rig.folder), "toml": rig.toml, "runtime": str(tmp_path), "bind": {"ipc": str(rig.folder / "n")},
    }  # fmt: skip
    program = (
        "import json, os, subprocess, sys, time\n"
        "spec = json.loads(sys.argv[1]) | {'ppid': os.getpid()}\n"
        "child = subprocess.Popen([sys.executable, '-m', 'rudra_zmq.node'], stdin=subprocess.PIPE)\n"
        "child.stdin.write(json.dumps(spec).encode()); child.stdin.close(); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, json.dumps(spec)])
    pid = rig.psd.wait(c.NodeHello).pid
    parent.kill()
    parent.wait()
    wait_for("death", lambda: not Path(f"/proc/{pid}").exists() or _zombie(pid), 5.0)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_line_to_psd_that_breaks_is_made_anew_and_nothing_is_lost(rig_of: RigOf) -> None:
    rig = rig_of(toml(epochs=1))
    crew = rig.crew(2, SAMPLES)
    rig.psd.close()
    run_rounds(crew)
    say_bye(crew)
    rig.psd = FakePsd(rig.folder.parent)
    done = rig.psd.wait(c.NodeDone)
    assert next(type(m) for m in rig.psd.heard if not isinstance(m, c.NodeReport)) is c.NodeHello
    assert rig.psd.event("epoch 1") and done.state == "DONE" and rig.exit_status() == 0


def test_the_ports_of_the_node_before_come_first(rig_of: RigOf) -> None:
    rig = rig_of(toml(), start=False)
    rig.start(bind={"tcp": [0, 0]})
    (address,) = rig.psd.wait(c.NodeHello).addresses
    assert address.startswith("tcp://127.0.0.1:")
    rig.kill()
    rig.start(bind={"tcp": [0, 0], "previous": [address]})
    assert rig.psd.wait(c.NodeHello, lambda m: m.generation == 2).addresses == [address]
    crew = rig.crew(2)
    run_rounds(crew, 2)


@pytest.mark.parametrize(
    ("spec", "word", "status"),
    [
        (b"", "no spec of a node on stdin", 78),
        (b'{"job": "abc123"}', "no spec of a node on stdin", 78),
        (b"\xff\xfe", "no spec of a node on stdin", 78),
    ],
)
def test_a_spec_that_is_none_is_one_line(spec: bytes, word: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-m", "rudra_zmq.node"], input=spec, capture_output=True, timeout=30)
    lines = done.stderr.decode().strip().splitlines()
    assert done.returncode == status and len(lines) == 1 and word in lines[0] and "Fix:" in lines[0]


def test_a_node_imports_no_torch(rig_of: RigOf) -> None:
    rig = rig_of(toml())
    assert rig.process is not None
    maps = Path(f"/proc/{rig.process.pid}/maps").read_text()
    assert "torch" not in maps and "cupy" not in maps
    assert rig.psd.newest().memory < 60 << 20


def test_an_idle_node_uses_next_to_nothing(rig_of: RigOf) -> None:
    rig = rig_of(toml())
    assert rig.process is not None
    stat = Path(f"/proc/{rig.process.pid}/stat")

    def spent() -> float:
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    rig.psd.newest()
    before, began = spent(), time.monotonic()
    rig.psd.newest()
    rig.psd.newest()
    assert (spent() - before) / (time.monotonic() - began) < 0.02


def test_learners_are_told_the_final_weights_over_the_wire(rig_of: RigOf) -> None:
    rig = rig_of(toml(epochs=1))
    crew: list[Learner] = rig.crew(2, SAMPLES)
    run_rounds(crew)
    for learner in crew:
        np.testing.assert_array_equal(learner.weights.params, crew[0].weights.params)
    say_bye(crew)
    rig.psd.wait(c.NodeDone)
    np.testing.assert_array_equal(crew[0].weights.params, result(rig))
