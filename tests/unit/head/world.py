"""A head without sockets or processes: tests say what peers send, and read what the head wants done."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, TypeVar

from rudra_zmq.head.coordinator import Coordinator
from rudra_zmq.head.effects import Effect, Send, StartNode, StopNode
from rudra_zmq.head.keyring import Origin
from rudra_zmq.head.registry import Registry
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

TOKEN = "t" * 64
BOOT = "boot-1"
TOML = '[job]\ntask = "rudra_zmq.tasks.fashion_mnist:cnn"\n[learners]\ncount = {count}\n'
SCRIPT = '[run]\nscript = "/x/train.py"\n[learners]\ncount = {count}\n'

M = TypeVar("M", bound=Message)


class World:
    """``now`` is monotonic and wall time at once. ``effects`` is everything since the last ``take``."""

    def __init__(self, state: Path, *, now: float = 1000.0, suspend_as: c.JobState = "PENDING") -> None:
        self.state = state
        self.now = now
        self.dead: set[int] = set()
        self.keys: dict[bytes, str] = {}  # that peers have proved
        self.effects: list[Effect] = []
        self.ids = itertools.count(1)
        self.suspend_as = suspend_as
        self.inspects = True
        self.lacks: dict[bytes, list[str]] = {}  # what a host says that a job needs and it has not
        self.registry = Registry.open(state / "registry.sqlite")
        self.head = self._make()

    def _make(self) -> Coordinator:
        head = Coordinator(
            self.registry,
            self.state,
            token=TOKEN,
            address="ipc:///x",
            boot=BOOT,
            lives=lambda pid: pid not in self.dead,
            log_piece=lambda ask: c.LogData(data=b"of psd"[ask.offset :], offset=ask.offset, run=1),
            wall=lambda: self.now,
            suspend_as=self.suspend_as,
        )
        self.head = head
        self.do(head.begin(self.now))
        return head

    def do(self, effects: list[Effect]) -> None:
        """Keep what the head wants done; hosts that are asked whether they can run a job say what they lack."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, c.CheckJob) and self.inspects:
                answer = c.Checked(problems=self.lacks.get(effect.peer, []), memory=1 << 30)
                origin = Origin(self.keys.get(effect.peer, ""))
                self.do(self.head.answered(effect.peer, effect.id, answer, self.now, origin))
            else:
                self.effects.append(effect)

    def restart_head(self) -> None:
        """As if psd had been killed and started again: peers are strangers, nodes are gone."""
        self.registry.close()
        self.registry = Registry.open(self.state / "registry.sqlite")
        self.effects.clear()
        self.head = self._make()

    def close(self) -> None:
        self.registry.close()

    # ------------------------------------------------------------------------------------ sending

    def send(self, peer: bytes, message: Message) -> Message | None:
        """A request; its reply if one came at once."""
        request = f"q{next(self.ids)}"
        self.do(self.head.handle(peer, request, message, self.now))
        return self.reply(peer, request)

    def reply(self, peer: bytes, request: str) -> Message | None:
        for effect in self.effects:
            if isinstance(effect, Send) and effect.reply and (effect.peer, effect.id) == (peer, request):
                self.effects.remove(effect)
                return effect.message
        return None

    def cli(self, message: Message) -> Message | None:
        assert isinstance(self.send(b"cli", c.Whoami(token=TOKEN)), c.Ok)
        return self.send(b"cli", message)

    def submit(self, count: int = 2, name: str = "demo", request: str = "", toml: str = TOML) -> str:
        reply = self.cli(
            c.Submit(request=request or f"r{next(self.ids)}", name=name, toml=toml.format(count=count), cwd="/tmp")
        )
        assert isinstance(reply, c.Submitted), reply
        return reply.job

    def register(
        self, name: str = "a", slots: int = 4, pid: int = 500, running: list[Any] | None = None
    ) -> Message | None:
        return self.send(
            name.encode(),
            c.Register(token=TOKEN, name=name, slots=slots, pid=pid, boot=BOOT, running=running or []),
        )

    def hello(self, job: str, generation: int = 1, peer: bytes = b"node") -> None:
        reply = self.send(
            peer,
            c.NodeHello(
                job=job,
                token=self.registry.stored(job).token,
                generation=generation,
                pid=600,
                addresses=[f"ipc:///n{generation}"],
            ),
        )
        assert isinstance(reply, c.Ok), reply

    def report(self, job: str, state: c.JobState = "RUNNING", peer: bytes = b"node", **values: Any) -> None:
        message = c.NodeReport(job=job, progress=c.Progress(state=state, **values))
        assert isinstance(self.send(peer, message), c.Ok)

    def started(self, job: str, rank: int, incarnation: int = 1, host: bytes = b"a") -> None:
        self.send(
            host,
            c.LearnerStarted(job=job, rank=rank, incarnation=incarnation, pid=700 + rank, evaluator=rank == 65535),
        )

    def exit(
        self,
        job: str,
        rank: int,
        kind: Any,
        incarnation: int = 1,
        *,
        host: bytes = b"a",
        respawn: bool = False,
        text: str = "",
        tail: str = "",
    ) -> None:
        reply = self.send(
            host,
            c.LearnerExit(
                job=job, rank=rank, incarnation=incarnation, evaluator=rank == 65535, kind=kind,
                status={"ok": 0, "signal": -9}.get(kind, 1), respawn=respawn, text=text, tail=tail,
            ),
        )  # fmt: skip
        assert isinstance(reply, c.Ok), reply

    def node_done(self, job: str, state: c.JobState = "DONE", reason: str = "", peer: bytes = b"node") -> None:
        message = c.NodeDone(job=job, state=state, reason=reason, progress=c.Progress(state=state, updates=9))
        assert isinstance(self.send(peer, message), c.Ok)

    def node_exit(self, job: str, status: int = 0, words: str = "") -> None:
        self.do(self.head.node_exited(job, status, words, self.now))

    def wait(self, seconds: float, step: float = 0.25, alive: tuple[bytes, ...] = (b"a",)) -> None:
        """Time passes; the learnerds in ``alive`` ping."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            for peer in alive:
                self.do(self.head.handle(peer, "", c.HostPing(), self.now))
            self.do(self.head.tick(self.now))

    # ------------------------------------------------------------------------------------ reading

    def take(self) -> list[Effect]:
        taken, self.effects = self.effects, []
        return taken

    def sent(self, kind: type[M], peer: bytes | None = None) -> list[M]:
        """Messages of a kind that were sent, in order; they are taken."""
        found = [
            e for e in self.effects if isinstance(e, Send) and isinstance(e.message, kind) and peer in (None, e.peer)
        ]
        self.effects = [e for e in self.effects if e not in found]
        return [e.message for e in found]  # type: ignore[misc]

    def nodes_started(self) -> list[StartNode]:
        found = [e for e in self.effects if isinstance(e, StartNode)]
        self.effects = [e for e in self.effects if not isinstance(e, StartNode)]
        return found

    def nodes_stopped(self) -> list[StopNode]:
        found = [e for e in self.effects if isinstance(e, StopNode)]
        self.effects = [e for e in self.effects if not isinstance(e, StopNode)]
        return found

    def job(self, job: str) -> c.JobRow:
        reply = self.cli(c.GetJob(job=job))
        assert isinstance(reply, c.JobReply), reply
        return reply.row

    def state_of(self, job: str) -> str:
        return self.job(job).state

    def story(self, job: str) -> str:
        return "\n".join(f"{e.level} {e.text}" for e in self.registry.events(job, 0))

    # ------------------------------------------------------------------------------------ whole courses

    def running(self, count: int = 2, **kw: Any) -> str:
        """A job whose node serves and whose learners run on host a."""
        if b"a" not in [e.peer for e in self.effects if isinstance(e, Send)]:
            assert isinstance(self.register(), c.Registered)
        job = self.submit(count, **kw)
        self.hello(job)
        for rank in range(count):
            self.started(job, rank)
        if kw.get("toml", TOML) == TOML:
            self.started(job, 65535)
        self.report(job)
        assert self.state_of(job) == "RUNNING"
        self.take()
        return job
