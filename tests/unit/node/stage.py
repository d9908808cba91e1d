"""A lead without sockets and with a clock that the test moves; messages still go through the codec both ways."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rudra_zmq.config import job_from_toml
from rudra_zmq.node import life
from rudra_zmq.node.decisions import DecisionLog
from rudra_zmq.node.lead import Lead
from rudra_zmq.node.metrics import MetricsCsv
from rudra_zmq.node.post import Post
from rudra_zmq.node.sessions import Sessions
from rudra_zmq.node.spec import NodeSpec
from rudra_zmq.node.vectors import Vector
from rudra_zmq.node.work import Work
from rudra_zmq.wire.codec import Buffer, decode_from_node, decode_to_node, encode_control, encode_data
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d

M = TypeVar("M")
JOB, TOKEN = "abc123", "secret"
ATTACH = d.Attach(params=[d.TensorSpec("w", [4], "float32")])


class Stage:
    """One job on a stage. ``heard``: what psd would hear."""

    def __init__(self, folder: Path, text: str, **spec: Any) -> None:
        self.now = 1000.0
        self.folder = folder
        self.heard: list[Any] = []
        self.boxes: dict[bytes, list[Any]] = {}
        self.dead: set[bytes] = set()  # sockets that take nothing
        self._soon: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        fields: dict[str, Any] = {"generation": 1, "resume": False} | spec
        self.spec = NodeSpec(
            job=JOB, name="stage", token=TOKEN, psd_address="ipc:///x", folder=str(folder), toml=text,
            runtime=str(folder), **fields,
        )  # fmt: skip
        job = job_from_toml(text, name="stage").job
        warn = self._warn
        self.lead = Lead(
            Work(
                spec=self.spec,
                job=job,
                post=Post(self._send),
                head=self,
                sessions=Sessions(JOB, TOKEN, job.learners.most),
                decisions=DecisionLog(folder / "decisions.jsonl", warn),
                metrics=MetricsCsv(folder / "metrics.csv", warn),
                clock=lambda: self.now,
                off_loop=self._soon.put,
            )
        )
        self.lead.restore()

    def _warn(self, text: str) -> None:
        self.lead.work.warn(text)

    # the way to psd

    def notify(self, message: d.Message) -> None:
        encode_control(c.Envelope("", False), message)
        self.heard.append(message)

    def report(self) -> None:
        self.notify(c.NodeReport(job=JOB, progress=self.lead.report.progress()))

    def done(self, message: c.NodeDone) -> None:
        self.notify(message)

    def all(self, kind: type[M]) -> list[M]:
        return [m for m in self.heard if isinstance(m, kind)]

    def events(self, word: str) -> list[str]:
        return [m.text for m in self.all(c.NodeEvent) if word in m.text]

    # sockets

    def _send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        if peer in self.dead:
            return False
        message, payload = decode_from_node(frames)
        box = self.boxes.setdefault(peer, [])
        box.append(message if payload is None else (message, bytes(payload)))
        return True

    def say(self, peer: bytes, message: d.Message, payload: bytes | None = None) -> None:
        self.lead.receive(peer, *decode_to_node(encode_data(message, payload)))

    # time

    def pass_time(self, seconds: float, step: float = 0.5, alive: Sequence[Peer] = ()) -> None:
        """Tick by tick; ``alive`` ping meanwhile."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + step)
            for peer in alive:
                peer.ping()
            self.lead.tick()

    def settle(self) -> None:
        """Let the writer's thread finish, and hear what it says."""
        for _ in range(6):
            assert self.lead.saving.wait(10) and self.lead.ending._exporter.join(10)
            assert self.lead.opening._reader.join(10)
            while not self._soon.empty():
                self._soon.get()()

    def drops(self) -> dict[str, int]:
        return self.lead.report.drops()

    def state(self) -> str:
        return self.lead.report.state[0]

    def close(self) -> None:
        self.settle()
        self.lead.work.decisions.close()

    def crew(self, count: int, samples: int = 32, **data: Any) -> list[Peer]:
        """Learners that are attached and have said their data; rank 0 uploads."""
        crew = [Peer(self, rank) for rank in range(count)]
        for peer in crew:
            peer.hello()
            peer.say(ATTACH)
        crew[0].upload()
        for peer in crew:
            peer.ready()
            peer.say(d.Data(**({"samples": samples, "minibatch": 0} | data)))
        return crew


class Peer:
    """A learner (or evaluator) that says what the test wants; weights are taken from what it is sent."""

    def __init__(self, stage: Stage, rank: int, incarnation: int = 1, role: str = "learner", name: str = "") -> None:
        self.stage, self.rank, self.incarnation, self.role = stage, rank, incarnation, role
        self.peer = (name or f"{role}-{rank}-{incarnation}").encode()
        self.pulse = self.peer + b"-pulse"
        self.gradient = Vector(Layout.of(ATTACH))
        self.weights = b""
        self.seq = 0
        self.grant: d.Grant | None = None

    @property
    def box(self) -> list[Any]:
        return self.stage.boxes.setdefault(self.peer, [])

    def say(self, message: d.Message, payload: bytes | None = None) -> None:
        self.stage.say(self.peer, message, payload)

    def hello(self, *, pulse: bool = False, **other: Any) -> None:
        fields = {"job": JOB, "token": TOKEN, "host": "h", "pid": 100 * self.rank + self.incarnation} | other
        hello = {"rank": self.rank, "incarnation": self.incarnation, "space": life.space()} | fields
        self.say(d.Hello(role=self.role, **hello))  # type: ignore[arg-type]
        if pulse:
            self.stage.say(self.pulse, d.Hello(role="pulse", **hello))  # type: ignore[arg-type]

    def ping(self) -> None:
        self.say(d.Ping())

    def take(self, kind: type[M]) -> M:
        """The first message of a kind; chunks of weights on the way are put together."""
        while self.box:
            message = self.box.pop(0)
            if isinstance(message, tuple):
                chunk, payload = message
                self.weights = payload if chunk.offset == 0 else self.weights + payload
                self.say(d.Credit(chunks=1))
            elif isinstance(message, kind):
                return message
        raise AssertionError(f"{self.peer!r} got no {kind.__name__}")

    def none(self, kind: type) -> bool:
        return not any(isinstance(m, kind) for m in self.box)

    def vector(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The weights that came last."""
        while self.box and isinstance(self.box[0], tuple):
            self.weights = self.box.pop(0)[1]
            self.say(d.Credit(chunks=1))
        return np.frombuffer(self.weights, np.float32)

    def upload(self, value: float = 1.0) -> None:
        init = self.take(d.SendInit)
        payload = np.full(4, value, np.float32).tobytes()
        self.say(d.Chunk(key=init.key, offset=0), payload)
        self.say(d.InitDone(key=init.key, nbytes=len(payload)))

    def ready(self) -> d.Ready:
        ready = self.take(d.Ready)
        self.vector()
        return ready

    @property
    def answered(self) -> bool:
        """Whether its last push has a grant."""
        return (
            self.hear().ack == self.seq
            if not self.none(d.Grant)
            else self.grant is not None and self.grant.ack == self.seq
        )

    def hear(self) -> d.Grant:
        self.grant = self.take(d.Grant)
        return self.grant

    def push(self, value: float = 1.0, **other: Any) -> d.Push:
        """The gradient of the first lease: ``value`` in every element."""
        grant = self.hear() if self.grant is None or not self.none(d.Grant) else self.grant
        self.seq = max(self.seq, grant.ack) + 1
        payload = np.full(4, value, np.float32).tobytes()
        lease = grant.leases[0] if grant.leases else []
        samples = other.pop("samples", sum(stop - start for _, start, stop in lease))
        group = d.Group(other.pop("timestamp", grant.timestamp), 1, samples, other.pop("spans", lease))
        fields: dict[str, Any] = {
            "rank": self.rank, "incarnation": self.incarnation, "seq": self.seq, "generation": grant.generation,
            "key": grant.key, "groups": [group], "loss": 1.0, "nbytes": len(payload),
        }  # fmt: skip
        push = d.Push(**(fields | other))
        if push.nbytes and not grant.shared:
            self.say(d.Chunk(key=push.key, offset=0), payload)
        self.say(push)
        return push
