"""The process of a node: spec in, sockets, loop, signals, end.

Owns: everything that makes a process of a `Lead`. Must not know: what a job is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rudra_zmq import log, paths
from rudra_zmq.config import job_from_toml
from rudra_zmq.errors import EXIT_FAILED, ConfigError, RudraError
from rudra_zmq.net.entrance import Entrance
from rudra_zmq.net.loop import Loop, Timer
from rudra_zmq.net.shm import FdServer
from rudra_zmq.net.sockets import PeerGone, make_context
from rudra_zmq.node import spec as specs
from rudra_zmq.node.decisions import DecisionLog
from rudra_zmq.node.lead import Lead
from rudra_zmq.node.metrics import MetricsCsv
from rudra_zmq.node.post import Post
from rudra_zmq.node.psd import Psd
from rudra_zmq.node.sessions import Sessions
from rudra_zmq.node.spec import NodeSpec
from rudra_zmq.node.work import Head, Work
from rudra_zmq.wire.codec import Buffer, Frame, WireError, decode_to_node
from rudra_zmq.wire.messages.control import NodeDone, NodeEvent, NodeStop
from rudra_zmq.wire.messages.data import Hello, Message

_log = log.get("node")

TICK_S = 0.5
BATCH = 64  # messages that one turn of the loop takes, so that timers have theirs
RETRY_S = 0.005
GRACE_S = 0.2  # for peers to read what was said last
_PR_SET_PDEATHSIG = 1


class Node:
    """One node as a process. ``run`` returns its exit status."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.loop = Loop()
        self.status = EXIT_FAILED
        self._control = make_context("control")
        self._data = make_context("data")
        self._entrance = Entrance(self._data, self.loop, f"node-{spec.job}", self._drop)
        self._fds: FdServer | None = None
        self._psd: Psd | None = None
        self._retry: Timer | None = None
        self._busy = 0.0
        self._looked = time.monotonic()
        self._early: list[Message] = []
        self.lead = Lead(self._work())

    def _work(self) -> Work:
        spec = self.spec
        job = job_from_toml(spec.toml, name=spec.name).job
        folder = Path(spec.folder)
        return Work(
            spec=spec,
            job=job,
            post=Post(self._send, self._entrance.forget),
            head=_Late(self),
            sessions=Sessions(spec.job, spec.token, job.learners.most),
            decisions=DecisionLog(folder / "decisions.jsonl", self._warn),
            metrics=MetricsCsv(folder / "metrics.csv", self._warn),
            clock=time.monotonic,
            off_loop=self.loop.call_soon_threadsafe,
            channel=self._entrance.channel,
        )

    def _drop(self, reason: str) -> None:
        self.lead.work.sessions.drop(reason)

    def _warn(self, text: str) -> None:
        self.loop.call_soon_threadsafe(lambda: self.lead.work.warn(text))

    # ------------------------------------------------------------------------------------------ life

    def run(self) -> int:
        """Until psd has heard the end; 0 then."""
        try:
            self._begin()
            self.loop.run()
        except RudraError as error:
            self._last_words(str(error))
        except Exception as error:  # a mistake of ours: psd starts the node anew from the last snapshot
            traceback.print_exc()
            self._last_words(f"internal error: {error!r}")
        finally:
            self._end()
        return self.status

    def _begin(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        self.loop.on_signal(signal.SIGTERM, self._terminate)
        self.loop.on_signal(signal.SIGINT, self._terminate)
        try:
            self.lead.restore()
        except RudraError as error:
            self.lead.fail(str(error))
        self._bind()
        self._psd = Psd(
            self.loop,
            self._control,
            self.spec,
            self._entrance.addresses,
            self._entrance.key,
            progress=self.lead.report.progress,
            command=self.lead.command,
            ended=self._finish,
        )
        for message in self._early:
            self._pass_on(message)
        self._entrance.listen(self._readable)
        self.loop.every(TICK_S, self._tick)

    def _bind(self) -> None:
        """Where the learners look first: the addresses of the node before; else what psd allows."""
        bind = self.spec.bind
        if bind.ipc:
            # Learners may be another user's; then the job's token decides, as it does for the memory.
            self._entrance.bind_ipc(bind.ipc, 0o666 if paths.shared(Path(bind.ipc).parent) else 0o600)
        if bind.ipc and bind.shm:  # the right to the one is the right to the other
            self._bind_shm(bind.shm)
        if bind.tcp:
            encrypted = self.lead.work.job.wire.encrypt
            if not encrypted:
                self.lead.work.warn("wire.encrypt = false: weights and gradients can be read and changed on their way")
            self._entrance.bind_tcp(bind.host, *bind.tcp, encrypted=encrypted, previous=bind.previous)
        if not self._entrance.addresses:
            raise ConfigError("the node was given no place to listen at", fix="start it by psd")

    def _bind_shm(self, path: str) -> None:
        work = self.lead.work
        try:
            self._fds = FdServer(self.loop, path, self.lead.sharing.offer, work.sessions.drop)
        except OSError as error:
            work.warn(f"no memory is shared, learners use chunks: {error.strerror or error}")

    def _terminate(self) -> None:
        stop = NodeStop(now=self.lead.ending.draining, state="STOPPED", reason="the node was told to terminate")
        self.lead.command(stop)

    def _finish(self, status: int) -> None:
        self.status = status
        self.loop.stop()

    def _last_words(self, text: str) -> None:
        _log.error(text)
        if self._psd is not None:
            self._psd.notify(NodeEvent(job=self.spec.job, level="E", text=text[:4000]))

    def _end(self) -> None:
        work = self.lead.work
        self.lead.saving.wait(30.0)
        work.decisions.close()
        if work.model is not None:
            work.model.close()
        if self._psd is not None:
            self._psd.close()
        if self._fds is not None:
            self._fds.close()
        self._entrance.close(GRACE_S)
        self.loop.close()
        self._control.close(exit_if_stuck=True)
        self._data.close(exit_if_stuck=True)

    # ---------------------------------------------------------------------------------------- the loop

    def _tick(self) -> None:
        if self.spec.ppid and os.getppid() != self.spec.ppid:
            _log.error("psd is gone", pid=self.spec.ppid)
            self._finish(EXIT_FAILED)
            return
        now = time.monotonic()
        share = self._busy / max(1e-6, now - self._looked)
        self.lead.report.busy += 0.2 * (min(1.0, share) - self.lead.report.busy)
        self._busy, self._looked = 0.0, now
        self.lead.tick()

    def _readable(self) -> None:
        began = time.monotonic()
        self._entrance.receive(self._deliver, BATCH)
        if self._retry is None and self.lead.work.post.blocked:
            self._retry = self.loop.after(RETRY_S, self._again)
        self._busy += time.monotonic() - began

    def _deliver(self, peer: bytes, frames: list[Frame], key: str) -> None:
        try:
            message, payload = decode_to_node(frames)
        except WireError as error:
            self._drop(error.reason)
            return
        if isinstance(message, Hello) and message.key != key:
            self._drop("wrong-key")
            return
        self.lead.receive(peer, message, payload)

    def _again(self) -> None:
        self._retry = None
        self.lead.work.post.pump()
        if self.lead.work.post.blocked:
            self._retry = self.loop.after(RETRY_S, self._again)

    def _send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        try:
            return self._entrance.send(peer, frames)
        except PeerGone:
            self.loop.call_soon_threadsafe(lambda: self.lead.gone(peer))
            return False

    def _pass_on(self, message: Message) -> None:
        if self._psd is None:
            self._early.append(message)
        elif isinstance(message, NodeDone):
            self._psd.done(message)
        else:
            self._psd.notify(message)


class _Late(Head):
    """The way to psd before there is one: what a restore says is kept until then."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def notify(self, message: Message) -> None:
        self._node._pass_on(message)

    def report(self) -> None:
        if self._node._psd is not None:
            self._node._psd.report()

    def done(self, message: NodeDone) -> None:
        self._node._pass_on(message)


def _die_with_parent(ppid: int) -> None:
    """SIGKILL when psd dies: its successor starts a node of its own on the same folder."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if ppid and os.getppid() != ppid:
        raise RudraError(f"psd (PID {ppid}) is gone already", fix="start it again")


def main() -> int:
    """Read the spec, be a node, end. One line on stderr for what a person can mend."""
    log.setup("node")
    try:
        spec = specs.decode(sys.stdin.buffer.read())
        _die_with_parent(spec.ppid)
        node = Node(spec)
    except (RudraError, OSError) as error:
        _log.error(str(error))
        return error.daemon_exit_status if isinstance(error, RudraError) else EXIT_FAILED
    return node.run()
