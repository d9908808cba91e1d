"""A real node process, a psd that only listens, and learners that do as a test says, step by step, without threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rudra_zmq.core.events import Clock
from rudra_zmq.net.addresses import parse
from rudra_zmq.net.auth import KeyPair
from rudra_zmq.net.bulk import BulkError, BulkInbox, BulkSender
from rudra_zmq.net.channel import Channel
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.rpc import RpcServer
from rudra_zmq.net.sockets import WINDOW, Context, Dealer, make_context
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.codec import decode_from_node, encode_data
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d

M = TypeVar("M")
JOB = "abc123"
TOKEN = "t" * 64
PATIENCE_S = 20.0
EPHEMERAL = (32768, 60999)
NODE = ("-m", "rudra_zmq.node")

ATTACH = d.Attach(params=[d.TensorSpec("w", [10], "float32")])

TOML = """
[job]
name = "rig"
epochs = {epochs}
seed = 1
{job}
[{target}]
{target_line}
[learners]
count = {count}
minibatch = {minibatch}
deadline = "{deadline}"
{learners}
[sync]
protocol = "{protocol}"
{sync}
[update]
{update}
[servers]
snapshot = "{snapshot}"
{servers}
"""
RULE = 'rule = "momentum"\nlr = 0.1\nmomentum = 0.5\nschedule = {kind = "constant"}'


def toml(
    *,
    count: int = 2,
    protocol: str = "hardsync",
    epochs: int = 2,
    minibatch: int = 4,
    deadline: str = "60s",
    snapshot: str = "auto",
    update: str = RULE,
    job: str = "",
    learners: str = "",
    sync: str = "",
    servers: str = "",
    task: bool = False,
) -> str:
    """A job file. ``task``: with an evaluator."""
    text = TOML.format(
        count=count, protocol=protocol, epochs=epochs, minibatch=minibatch, deadline=deadline, snapshot=snapshot,
        update=update, job=job + ('\ntask = "no.such:task"' if task else ""), learners=learners, sync=sync,
        servers=servers,
        target="run", target_line="" if task else 'script = "train.py"',
    )  # fmt: skip
    return text.replace("[run]\n\n", "") if task else text


def wait_for(what: str, ready: Callable[[], M | None], seconds: float = PATIENCE_S) -> M:
    """Poll a condition that another process brings about."""
    end = time.monotonic() + seconds
    while True:
        found = ready()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"no {what} within {seconds:g} s")
        time.sleep(0.005)


class FakePsd:
    """Answers a node's requests and keeps what it says; a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[Any] = []
        self.deaf = False  # answers nothing
        self._path = str(folder / "psd.sock")
        self._peer: bytes | None = None
        self._server: RpcServer | None = None
        self._loop = Loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._up.wait()
        self.address = f"ipc://{self._path}"

    def _run(self) -> None:
        context = make_context("control")
        router = context.router("fake-psd")
        router.bind_ipc(self._path)
        self._server = RpcServer(self._loop, router, self._handle)
        self._up.set()
        self._loop.run()
        self._server.close()
        router.close()
        self._loop.close()
        context.close()

    def _handle(self, peer: bytes, id: str, message: Any) -> d.Message | None:
        self._peer = peer
        self.heard.append(message)
        return None if self.deaf else c.Ok()

    def tell(self, message: d.Message) -> None:
        """An order to the node."""
        assert self._server is not None and self._peer is not None
        server, peer = self._server, self._peer
        self._loop.call_soon_threadsafe(lambda: server.send(peer, message))

    def all(self, kind: type[M]) -> list[M]:
        return [m for m in list(self.heard) if isinstance(m, kind)]

    def wait(self, kind: type[M], test: Callable[[M], bool] = lambda _: True, seconds: float = PATIENCE_S) -> M:
        """The first message of a kind for which ``test`` is true."""
        return wait_for(kind.__name__, lambda: next((m for m in self.all(kind) if test(m)), None), seconds)

    def event(self, word: str, seconds: float = PATIENCE_S) -> c.NodeEvent:
        return self.wait(c.NodeEvent, lambda m: word in m.text, seconds)

    def progress(self, test: Callable[[c.Progress], bool] = lambda _: True) -> c.Progress:
        return self.wait(c.NodeReport, lambda m: test(m.progress)).progress

    def newest(self) -> c.Progress:
        """The figures of a report that is made after this call."""
        before = len(self.all(c.NodeReport))
        return wait_for("report", lambda: self.all(c.NodeReport)[before + 1 :] or None)[0].progress

    def close(self) -> None:
        self._loop.stop()
        self._thread.join()


class Rig:
    """One job. ``start`` makes a node of the next generation on the same folder."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        shared: bool = False,
        tcp: bool = False,
        program: Sequence[str] = NODE,
        **spec: Any,
    ) -> None:
        """``shared``: its memory is to be had at ``shm``. ``tcp``: it listens on loopback ports alone.

        ``program``: another way to start a node.
        """
        self.program = program
        self._tcp = tcp
        self.shm = str(folder / "m.sock") if shared else ""
        self.folder = folder / "job"
        self.folder.mkdir()
        self.toml = text
        self.psd = FakePsd(folder)
        self.context: Context = make_context("data")
        self.process: subprocess.Popen[bytes] | None = None
        self.generation = 0
        self.learners: list[Learner] = []
        self._spec = {"ping_s": 0.5, "liveness_s": 5.0} | spec
        self._path = str(folder / "n.sock")
        self.address = f"ipc://{self._path}"
        self.key = ""  # the node's public one

    def start(self, **other: Any) -> None:
        self.generation += 1
        spec = self._spec | {
            "job": JOB,
            "name": "rig",
            "generation": self.generation,
            "token": TOKEN,
            "psd_address": self.psd.address,
            "ppid": os.getpid(),
            "folder": str(self.folder),
            "toml": self.toml,
            "runtime": str(self.folder.parent),
            "bind": {"tcp": EPHEMERAL} if self._tcp else {"ipc": self._path, "shm": self.shm or None},
            "resume": self.generation > 1,
        }
        spec |= other
        with open(self.folder / "node.log", "ab") as log:
            self.process = subprocess.Popen([sys.executable, *self.program], stdin=subprocess.PIPE, stderr=log)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(spec).encode())
        self.process.stdin.close()
        generation = self.generation
        hello = self.psd.wait(c.NodeHello, lambda m: m.generation == generation)
        self.address, self.key = hello.addresses[0], hello.key

    def learner(self, rank: int, incarnation: int = 1, **other: Any) -> Learner:
        learner = Learner(self, rank, incarnation, **other)
        self.learners.append(learner)
        return learner

    def crew(self, count: int, samples: int = 32, **data: Any) -> list[Learner]:
        """Learners that are attached and have said what their data is; the job starts."""
        crew = [self.learner(rank) for rank in range(count)]
        for learner in crew:
            learner.hello()
            learner.send(ATTACH)
        for learner in crew:
            learner.ready()
        for learner in crew:
            learner.send(d.Data(**({"samples": samples, "minibatch": 0} | data)))
        for learner in crew:
            learner.grant()
        return crew

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def exit_status(self, seconds: float = PATIENCE_S) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def decisions(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "decisions.jsonl").read_text().splitlines()]

    def log(self) -> str:
        return (self.folder / "node.log").read_text()

    def close(self) -> None:
        for learner in self.learners:
            learner.close()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self.context.close()
        self.psd.close()


class Learner:
    """A connection that says Hello and what the test wants; ``weights`` are what it was sent."""

    def __init__(
        self, rig: Rig, rank: int, incarnation: int = 1, *, role: str = "learner", attach: d.Attach = ATTACH
    ) -> None:
        self.rig, self.rank, self.incarnation, self.role = rig, rank, incarnation, role
        self.layout = Layout.of(attach)
        self.weights = Vector(self.layout)
        self.gradient = Vector(self.layout)
        self.clock = Clock(0, 0)
        self.leases: list[list[tuple[int, int, int]]] = []
        self.key = 0
        self.seq = 0
        self.last: d.Grant | None = None
        self.got: list[Any] = []
        self.keys = KeyPair.new()
        self._dealer: Dealer | None = None
        self.channel: Channel | None = None

    # ------------------------------------------------------------------------------------------ plumbing

    def connect(self) -> None:
        self.close()
        curve = (self.keys, self.rig.key) if self.rig.key else None
        self.dial(self.rig.context.dealer(self.rig.address, f"l{self.rank}", curve=curve))
        self.sender = BulkSender(self._send, WINDOW)
        self.inbox = BulkInbox(self._credit, WINDOW)

    def dial(self, dealer: Dealer) -> None:
        """This socket from here on."""
        self.close()
        self._dealer = dealer
        assert dealer.wait_connected(PATIENCE_S)

    def move(self, bulk: d.Bulk) -> None:
        """To the sealed channel."""
        address = replace(parse(self.rig.address), port=bulk.port)
        self.dial(self.rig.context.dealer(str(address), f"l{self.rank}", identity=bulk.identity))
        self.channel = Channel(bulk, WINDOW, node=False)

    def _send(self, frames: Sequence[Any]) -> bool:
        dealer = self._dealer
        assert dealer is not None
        if self.channel is None:
            return dealer.send(frames)
        return self.channel.send(lambda sealed, copy: dealer.send(sealed, copy=copy), frames)

    def _credit(self, credit: d.Credit) -> None:
        self._send(encode_data(credit))

    def close(self) -> None:
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None
        self.channel = None

    def raw(self, frames: Sequence[bytes]) -> None:
        assert self._dealer is not None and self._dealer.send(list(frames))

    def send(self, message: d.Message) -> None:
        self.sender.message(message)
        self._flush()

    def send_vector(self, key: int, data: memoryview) -> None:
        self.sender.vector(key, data)
        self._flush()

    def _flush(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.sender.pump():
            self._step(0.05)
            assert time.monotonic() < end, "the node gives no credit"

    def _step(self, seconds: float) -> bool:
        assert self._dealer is not None
        if not self._dealer.wait(seconds):
            return False
        frames = self._dealer.recv()
        if frames is None:
            return False
        message, payload = decode_from_node(frames if self.channel is None else self.channel.open(frames))
        if isinstance(message, d.Chunk):
            assert payload is not None
            try:
                self.inbox.chunk(message, payload)
            except BulkError as error:
                self.got.append(error)
        elif isinstance(message, d.Credit):
            self.sender.credit(message.chunks)
        else:
            self.got.append(message)
            if isinstance(message, (d.Ready, d.Evaluate)):
                self.receiver = self.inbox.expect(message.key, self.weights.data)
            elif isinstance(message, d.Grant) and message.nbytes:
                self.receiver = self.inbox.expect(message.weights_key, self.weights.data)
        return True

    def receive(self, kind: type[M], seconds: float = PATIENCE_S) -> M:
        """The next message of a kind; what comes before it stays."""
        end = time.monotonic() + seconds
        while True:
            for at, message in enumerate(self.got):
                if isinstance(message, kind):
                    del self.got[at]
                    return message
            left = end - time.monotonic()
            if left <= 0:
                raise AssertionError(f"rank {self.rank} got no {kind.__name__} but {self.got}")
            self._step(left)

    def nothing(self, kind: type, seconds: float = 0.2) -> None:
        """No message of a kind comes for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._step(left)
        assert not any(isinstance(m, kind) for m in self.got), self.got

    def _whole(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.receiver.complete:
            self._step(0.05)
            assert time.monotonic() < end, "the weights do not come"
        self.inbox.take(self.receiver.key)

    # ------------------------------------------------------------------------------------------ protocol

    def hello(self, **other: Any) -> d.Welcome:
        self.connect()
        self.say_hello(**other)
        welcome = self.receive(d.Welcome)
        if welcome.bulk is not None:
            self.move(welcome.bulk)
        return welcome

    def say_hello(self, **other: Any) -> None:
        fields = {"job": JOB, "token": TOKEN, "host": "here", "pid": 1000 + 10 * self.rank + self.incarnation} | other
        key = self.keys.public if self.rig.key else ""
        hello = {"role": self.role, "rank": self.rank, "incarnation": self.incarnation, "key": key}
        self.send(d.Hello(**(hello | fields)))

    def upload(self, init: d.SendInit) -> None:
        self.send_vector(init.key, self.gradient.data)
        self.send(d.InitDone(key=init.key, nbytes=self.layout.nbytes))

    def ready(self) -> d.Ready:
        """The weights, after an upload if that is asked for: the rank's number in every element."""
        end = time.monotonic() + PATIENCE_S
        while not any(isinstance(m, d.Ready) for m in self.got):
            if any(isinstance(m, d.SendInit) for m in self.got):
                self.gradient.params[:] = 1.0 + self.rank
                self.upload(self.receive(d.SendInit))
            self._step(0.05)
            assert time.monotonic() < end, "no Ready"
        ready = self.receive(d.Ready)
        self._whole()
        self.clock = Clock(ready.generation, ready.timestamp)
        return ready

    def grant(self, seconds: float = PATIENCE_S) -> d.Grant:
        grant = self.receive(d.Grant, seconds)
        if grant.nbytes:
            self._whole()
        self.clock = Clock(grant.generation, grant.timestamp)
        self.leases, self.key = [list(lease) for lease in grant.leases], grant.key
        self.last = grant
        return grant

    @property
    def done(self) -> bool:
        """Whether it was told that all is done."""
        return self.last is not None and self.last.done

    def hear(self, seconds: float = 0.0) -> bool:
        """Take a grant if one is there."""
        while self._step(seconds):
            if any(isinstance(m, d.Grant) for m in self.got):
                self.grant()
                return True
        return False

    def compute(self) -> list[tuple[int, int, int]]:
        """The gradient of the first lease at the weights held."""
        lease = self.leases[0]
        self.gradient.params[:] = gradient(self.weights.params, lease)
        return lease

    def push(self, **other: Any) -> d.Push:
        """Compute the first lease, send the gradient."""
        lease = self.compute()
        self.seq += 1
        return self.say_push(lease, **other)

    def say_push(self, lease: list[tuple[int, int, int]], **other: Any) -> d.Push:
        samples = sum(stop - start for _, start, stop in lease)
        fields: dict[str, Any] = {
            "rank": self.rank, "incarnation": self.incarnation, "seq": self.seq, "generation": self.clock.generation,
            "key": self.key, "groups": [d.Group(self.clock.timestamp, 1, samples, lease)],
            "nbytes": self.layout.nbytes, "loss": 1.0, "compute_s": 0.01, "wait_s": 0.001,
        }  # fmt: skip
        push = d.Push(**(fields | other))
        if push.nbytes:
            self.send_vector(push.key, self.gradient.data)
        self.send(push)
        return push


def gradient(w: npt.NDArray[np.float32], lease: list[tuple[int, int, int]]) -> npt.NDArray[np.float32]:
    """Of a quadratic whose minimum depends on the samples: a wrong sample shows in the weights."""
    numbers = [100 * epoch + position for epoch, start, stop in lease for position in range(start, stop)]
    target = np.float32(np.mean([(n * 7 % 13) / 13 for n in numbers]))
    index = np.arange(w.size, dtype=np.float32)
    return (w - target * (index + np.float32(1))).astype(np.float32)


def run_rounds(crew: Sequence[Learner], rounds: int | None = None) -> int:
    """Hardsync by hand: who has a lease pushes, who is answered hears it; until all are done, or ``rounds`` were made.

    A rank that gets no samples in a round is answered later, so nobody's grant is waited for alone.
    """
    made = 0
    while rounds is None or made < rounds:
        busy = [learner for learner in crew if learner.leases and not learner.done]
        if not busy:
            return made
        for learner in busy:
            learner.push()
            learner.leases = []
        wait_for("grant", lambda: [x for x in crew if not x.done and not x.leases and x.hear()])
        # Grants of one turn come together: what is there is there.
        for learner in crew:
            if not learner.done and not learner.leases:
                learner.hear(0.02)
        made += 1
    return made


def say_bye(crew: Sequence[Learner]) -> None:
    """As learners do that were told that all is done."""
    for learner in crew:
        learner.send(d.Bye(reason="done"))
