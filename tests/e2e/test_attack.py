"""Messages that are random, truncated, replayed or well-formed but wrong, at every socket of a job that trains.

Its weights are those of a job that was left alone, and the drops are counted in status.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zmq

from rudra_zmq.net.addresses import parse, port_owner
from rudra_zmq.wire import codec
from rudra_zmq.wire.messages import control, data

from .harness import Rudra, decisions, wait_for
from .test_hardsync import SCRIPT, same, weights

EPOCHS, LAM = 12, 3


def arguments(limit: int = EPOCHS) -> list[str | Path]:
    return [
        "run", "--json", "-s", "sync.protocol=hardsync", "-s", f"job.epochs={limit}", "-s", f"learners.count={LAM}",
        "-s", "learners.threads=1", SCRIPT, "8",
    ]  # fmt: skip


def sockets(runtime: Path) -> list[tuple[str, Any]]:
    """Every Unix socket below the runtime folder, and every port that a node listens at, as ZeroMQ and Python name it."""
    found: list[tuple[str, Any]] = [(f"ipc://{p}", str(p)) for p in runtime.rglob("*") if p.is_socket()]
    return found + [(f"tcp://127.0.0.1:{port}", ("127.0.0.1", port)) for port in ports(runtime)]


def ports(runtime: Path) -> list[int]:
    """Where the nodes listen that the runtime folder has an address of: both of their ports."""
    known = [parse(text) for file in node_files(runtime) for text in file["addresses"]]
    return [port for address in known if address.kind == "tcp" for port in ports_beside(address.port)]


@cache
def ports_beside(port: int) -> list[int]:
    """All of the process that listens at one."""
    pid = port_owner(port)
    if pid is None:
        return []
    mine = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]]
    return [int(f[1].rpartition(":")[2], 16) for f in lines if f[3] == "0A" and f"socket:[{f[9]}]" in mine]


def node_files(runtime: Path) -> list[dict[str, Any]]:
    found = []
    for path in runtime.rglob("n-*.json"):
        with contextlib.suppress(OSError, ValueError):  # the job has just ended
            found.append(json.loads(path.read_text()))
    return found


def wrong_messages(spec: dict[str, Any]) -> Iterator[list[bytes]]:
    """Well-formed frames that no honest peer sends, each on a connection of its own order."""
    hello = {"job": spec["job"], "token": spec["token"], "rank": 1, "incarnation": 1}
    group = data.Group(0, 1, 8, [(0, 0, 8)])
    push = {"rank": 2, "incarnation": 1, "seq": 1, "generation": 1, "key": 7, "groups": [group], "nbytes": 0}
    future = {**push, "groups": [data.Group(10**6, 1, 8, [(0, 0, 8)])]}
    many = {**push, "groups": [group, data.Group(1, 9, 8, [(0, 8, 16)])]}

    def frames(*messages: data.Message) -> Iterator[list[bytes]]:
        for message in messages:
            yield [bytes(f) for f in codec.encode_data(message)]

    yield from frames(data.Push(**push))  # nobody has said hello
    yield from frames(data.Hello(role="learner", **{**hello, "token": "0" * 64}), data.Push(**push))
    yield from frames(data.Hello(role="learner", **{**hello, "job": "ffffff"}), data.Push(**push))
    yield from frames(data.Hello(role="pulse", **hello), data.Push(**push), data.InitDone(key=1, nbytes=4))
    yield from frames(data.Hello(role="pulse", **{**hello, "incarnation": 77}), data.Ping())
    yield from frames(data.Hello(role="learner", **{**hello, "rank": 60000}), data.Push(**push))
    yield from frames(data.Hello(role="learner", **{**hello, "incarnation": 0}), data.Push(**future), data.Push(**many))
    envelope = control.Envelope("x", False)
    for message in (
        control.Whoami(token="0" * 64),
        control.StopJob(job=spec["job"], now=True),
        control.RemoveJob(job=spec["job"]),
        control.NodeDone(job=spec["job"], state="DONE", reason="", progress=control.Progress(state="DONE")),
    ):
        yield [bytes(f) for f in codec.encode_control(envelope, message)]


def attack(runtime: Path, spec: dict[str, Any], stop: threading.Event) -> int:
    """Until told to stop; returns how many messages were sent."""
    rng = random.Random(0)
    sent = 0
    with zmq.Context() as context:
        context.linger = 0
        while not stop.wait(0.05):
            wrong = list(wrong_messages(spec))
            keys = [None, *(known["key"] for known in node_files(runtime) if known["key"])]
            for (address, place), key in itertools.product(sockets(runtime), keys):
                with socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET) as raw:
                    raw.settimeout(1)
                    try:
                        raw.connect(place)
                        raw.sendall(rng.randbytes(300))
                    except OSError:
                        continue  # the job has just ended
                with context.socket(zmq.DEALER) as dealer:
                    if key:  # it is no secret: whoever has it is let in as far as CURVE goes
                        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
                        dealer.curve_serverkey = key.encode()
                    dealer.connect(address)
                    for frames in wrong:
                        sent += _send(dealer, frames)
                        cut = [f[: rng.randrange(len(f) + 1)] for f in frames]
                        sent += _send(dealer, cut)
                        sent += _send(dealer, frames)  # replayed
                    for _ in range(20):
                        sent += _send(dealer, [rng.randbytes(rng.randrange(80)) for _ in range(rng.randrange(1, 5))])
                    dealer.poll(20)
    return sent


def _send(dealer: zmq.Socket[bytes], frames: list[bytes]) -> int:
    try:
        dealer.send_multipart(frames, zmq.DONTWAIT)
        return 1
    except zmq.Again:
        return 0


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_job_under_attack_gives_the_same_bits(rudra: Rudra, way: str) -> None:
    alone = rudra(*arguments()).json
    rudra.env["RUDRA_PSD_DATA"] = way
    runtime = Path(rudra.env["XDG_RUNTIME_DIR"])
    with rudra.start(*arguments()) as run:
        specs = wait_for("a learner's spec", lambda: list(runtime.rglob("l-*-0.json")), 60, run)
        spec = json.loads(specs[0].read_text())
        stop = threading.Event()
        sent: list[int] = []
        thread = threading.Thread(target=lambda: sent.append(attack(runtime, spec, stop)))
        thread.start()
        try:
            out, err = run.communicate(timeout=200)
        finally:
            stop.set()
            thread.join(30)
    assert run.returncode == 0, err
    done = json.loads(out.strip().splitlines()[-1])
    assert sent[0] > 500
    assert done["state"] == "DONE"
    dropped = done["gradients"]["dropped"]
    assert sum(dropped.values()) > 50, dropped
    if way == "tcp":  # at either port
        assert dropped["bulk-unknown"] > 20 and dropped["wrong-key"] > 2, dropped
    same(weights(alone), weights(done))
    log = decisions(Path(done["folder"]) / "decisions.jsonl")
    assert len(log) == alone["updates"]
