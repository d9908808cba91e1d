"""psd: the head. Binds the control socket, keeps the registry, spawns one node per job.

Owns the processes of nodes and the endpoint file; every decision is the coordinator's. Must not know: torch, weights,
user code. It is no part of a job's hot path.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rudra_zmq import __version__, log, paths
from rudra_zmq.daemons.base import (
    Daemon,
    Options,
    already,
    boot_id,
    is_alive,
    launch,
    log_piece,
    machine_mark,
    parser,
    write_json,
)
from rudra_zmq.daemons.environment import node_environment
from rudra_zmq.daemons.output import OutputFile, last_words
from rudra_zmq.daemons.spawn import Child
from rudra_zmq.errors import AlreadyRunning
from rudra_zmq.head.coordinator import Coordinator
from rudra_zmq.head.effects import Effect, Send, StartNode, StopNode
from rudra_zmq.head.figures import Figure
from rudra_zmq.head.keyring import Origin
from rudra_zmq.head.registry import Registry
from rudra_zmq.net import keys
from rudra_zmq.net.addresses import Address, PathLock, interface_of, is_any, is_daemon, parse, port_owner
from rudra_zmq.net.auth import KEY_CHARACTERS, Doorman, KeyPair, Verdict, to_hex
from rudra_zmq.net.handshake import Failure
from rudra_zmq.net.rpc import RpcServer
from rudra_zmq.net.sockets import Router
from rudra_zmq.wire.messages.data import Message

if TYPE_CHECKING:
    from rudra_zmq.daemons.metrics import Metrics

logger = log.get()

TICK_S = 0.25
_LINE = re.compile(r"\d{4}-\d\d-\d\dT\S+Z ([DIWE]) \S+ (.*)")
_SAID: dict[Failure, str] = {
    "unknown-key": "a key that nobody authorised",
    "revoked-key": "a key that was revoked, or an invitation that is used up",
    "no-key": "a connection without a key",
    "wrong-server-key": "a connection that was meant for another key than psd's",
    "malformed": "a connection that spoke no ZeroMQ",
    "cut": "a connection that broke off",
}
GRACE_S = 0.2  # for peers to read the last replies


class Psd(Daemon):
    """The daemon."""

    name = "psd"
    live = (*Daemon.live, "psd.ports", "psd.data")  # for nodes that start from now on
    others = ("head.", *(f"host.{key}" for key in ("labels", "devices", "slots", "user", "python", "paths", "env")))

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._nodes: dict[str, Child] = {}
        self._router: Router | None = None
        self._server: RpcServer | None = None
        self._registry: Registry | None = None
        self._head: Coordinator | None = None
        self._metrics: Metrics | None = None
        self._ipc = ""
        self._interface = ""  # IP that psd listens at; "": ipc alone
        self._doorman: Doorman | None = None
        # A cluster of one run: nobody will start this psd again, and it takes no fixed port.
        self._passing = bool(options.parent) and not options.args.lasting

    def begin(self) -> None:
        """READY means: locked, token made, registry open, bound, unfinished jobs taken up."""
        state, runtime = self.options.state, self.options.runtime
        self.lock(state)
        token = paths.make_token(state / "token", paths.shared(state))
        paths.check_ipc_path(self._socket("000000"))
        for left in runtime.glob("n-??????.sock"):
            _clear(left)
        pair = keys.load("psd") if self._wanted_tcp() else None
        self._registry = Registry.open(paths.registry_file(state))
        self._router = self.context.router("psd")
        if pair is not None:
            self._doorman = self.context.doorman(self.loop, self._admit)
        self._router.count_failures(self.loop, self._refused)
        address = self._bind(self._router, pair)
        self._head = Coordinator(
            self._registry,
            state,
            token=token,
            address=address,
            boot=machine_mark(),
            lives=is_alive,
            log_piece=log_piece,
            public="" if pair is None else to_hex(pair.public),
            bound=self._bound,
            suspend_as="STOPPED" if self._passing else "PENDING",
        )
        self._server = RpcServer(self.loop, self._router, self._handle, on_reply=self._answered, on_gone=self._gone)
        logger.info("psd runs", pid=os.getpid(), address=address, state=state, version=__version__)
        self._do(self._head.begin(self.loop.now()))
        self.loop.every(TICK_S, self._tick)
        self._write_endpoint(address)
        self._serve_metrics()

    def _serve_metrics(self) -> None:
        """Where the settings say so; the cluster of one run leaves the port to those that stay."""
        address = self.options.settings.metrics.address
        if address is None or self._passing:
            return
        from rudra_zmq.daemons.metrics import Metrics  # its library is read only where it is used

        self._metrics = Metrics(self.loop, *address, self._figures)
        self._metrics.begin()

    def _figures(self) -> list[Figure]:
        assert self._head is not None and self._server is not None
        return self._head.figures(self._server.drops, self.loop.now())

    def _wanted_tcp(self) -> bool:
        return self.options.settings.psd.listen.startswith("tcp://")

    def _bound(self) -> list[str]:
        return [address for address in self._router.addresses if address.startswith("tcp:")] if self._router else []

    def _admit(self, key: str) -> Verdict:
        """The door's question, before a connection under CURVE is let in."""
        return 400 if self._head is None else self._head.keyring.verdict(to_hex(key), time.time())

    def _refused(self, failure: Failure) -> None:
        """A connection ended before it had begun."""
        if self._head is not None:
            self._head.refusal(failure, _SAID[failure])

    def _bind(self, router: Router, pair: KeyPair | None) -> str:
        """The address for the people and learnerds of this machine; nodes have an ipc socket in any case.

        With a key tcp takes none but keys, and this machine's own use ipc; without one only loopback is bound.
        """
        listen = self.options.settings.psd.listen
        wanted = parse(listen) if listen else None
        own = paths.psd_endpoint(self.options.runtime).removeprefix("ipc://")
        try:
            path = wanted.path if wanted is not None and wanted.kind == "ipc" else own
            self._ipc = router.bind_ipc(path, 0o660 if paths.shared(self.options.runtime) else 0o600)
        except AlreadyRunning as error:
            raise already(self.name, error) from None
        if wanted is None or wanted.kind == "ipc":
            return self._ipc
        if pair is not None:
            router.secure(pair)
        elif not keys.is_loopback(wanted):
            here = Address("tcp", host="127.0.0.1", port=wanted.port)
            fix = "make psd a key (rudra keys new psd) and start it again"
            logger.warning("there is no key, so only loopback is bound", wanted=listen, bound=str(here), fix=fix)
            wanted = here
        try:
            bound = router.bind_tcp(wanted.host, wanted.port)
            self._interface = parse(bound).host
            self._tell_interface(bound)
            return bound if pair is None else self._ipc
        except AlreadyRunning:
            pid = port_owner(wanted.port)
            if pid is None or not is_daemon(pid, self.name):
                raise
            known = AlreadyRunning(f"already running as PID {pid}", where=listen, fix=f"use it, or stop it: kill {pid}")
            raise already(self.name, known) from None

    def _tell_interface(self, bound: str) -> None:
        """Which interface the address stands for: a typing error shows here, and not on another host."""
        name = "all interfaces" if is_any(self._interface) else interface_of(self._interface) or "no interface"
        logger.info("psd is reached", listen=self.options.settings.psd.listen, bound=bound, interface=name)

    def _write_endpoint(self, address: str) -> None:
        state = self.options.state
        value = {
            "address": address,
            "pid": os.getpid(),
            "token_file": str(state / "token"),
            "boot": boot_id(),
        }
        write_json(state / "endpoint.json", value, mode=0o640 if paths.shared(state) else 0o600)

    # ---------------------------------------------------------------------------------------- messages

    def _handle(self, peer: bytes, request: str, message: Message) -> None:
        assert self._head is not None
        self._do(self._head.handle(peer, request, message, self.loop.now(), self._origin()))

    def _answered(self, peer: bytes, request: str, message: Message) -> None:
        assert self._head is not None
        self._do(self._head.answered(peer, request, message, self.loop.now(), self._origin()))

    def _origin(self) -> Origin:
        """Of the message at hand."""
        assert self._router is not None
        user = self._router.user
        return Origin(to_hex(user) if len(user) == KEY_CHARACTERS else user, self._router.uid)

    def _gone(self, peer: bytes) -> None:
        assert self._head is not None
        self._do(self._head.gone(peer, self.loop.now()))

    def _tick(self) -> None:
        assert self._head is not None
        self._do(self._head.tick(self.loop.now()))
        self._check_drained()

    def _do(self, effects: Sequence[Effect]) -> None:
        assert self._server is not None
        for effect in effects:
            if isinstance(effect, Send):
                self._server.send(effect.peer, effect.message, id=effect.id, reply=effect.reply)
            elif isinstance(effect, StartNode):
                self._start_node(effect)
            elif isinstance(effect, StopNode) and (child := self._nodes.get(effect.job)) is not None:
                if effect.grace > 0:
                    self.supervisor.stop(child, effect.grace)
                else:
                    self.supervisor.kill(child)

    # ---------------------------------------------------------------------------------------- nodes

    def _start_node(self, effect: StartNode) -> None:
        job = effect.job
        spec = dict(effect.spec)
        previous = spec.pop("previous")
        spec |= {
            "psd_address": self._ipc,
            "runtime": str(self.options.runtime),
            "ppid": os.getpid(),
            "host": self.options.settings.host.host_name,
            "bind": {**self._places(job), "previous": previous},
        }
        folder = paths.job_folder(self.options.state, job)
        output: OutputFile | None = None
        try:
            output = OutputFile(folder.log("node"))
            child = self.supervisor.spawn(
                [sys.executable, "-m", "rudra_zmq.node"],
                env=node_environment(),
                cwd=str(folder.root),
                stdin=json.dumps(spec).encode(),
                output=output,
                on_exit=lambda child: self._node_exited(job, child),
            )
        except OSError as error:
            if output is not None:
                output.close()
            text = f"it cannot be started: {error.strerror}"
            self.loop.after(0.0, lambda: self._tell_exit(job, 1, text))
            return
        self._nodes[job] = child
        logger.info("node started", job=job, pid=child.pid, generation=spec["generation"])

    def _places(self, job: str) -> dict[str, object]:
        """Where the node may listen: ipc (and its memory) for this host; ports where psd itself is reached over tcp, at
        the same interface, or psd.data asks for it. A private cluster takes any free ones."""
        psd = self.options.settings.psd
        local = psd.data != "tcp"
        first, last = (0, 0) if self._passing else psd.port_range
        return {
            "ipc": str(self._socket(job)) if local else None,
            "shm": str(_memory(self._socket(job))) if psd.data in ("auto", "shm") else None,
            "tcp": [first, last] if self._interface or not local else None,
            "host": self._interface or "127.0.0.1",
        }

    def _socket(self, job: str) -> Path:
        return self.options.runtime / f"n-{job}.sock"

    def _node_exited(self, job: str, child: Child) -> None:
        if self._nodes.get(job) is child:
            del self._nodes[job]
            _clear(self._socket(job))
        status = child.returncode if child.returncode is not None else 1
        words = "" if status <= 0 else _complaint(paths.job_folder(self.options.state, job).log("node"))
        logger.info("node ended", job=job, pid=child.pid, status=status)
        self._tell_exit(job, status, words)

    def _tell_exit(self, job: str, status: int, words: str) -> None:
        assert self._head is not None
        self._do(self._head.node_exited(job, status, words, self.loop.now()))
        self._check_drained()

    # ---------------------------------------------------------------------------------------- end

    def drain(self) -> None:
        """Jobs finish their step and are snapshotted; they go on when psd is started again."""
        assert self._head is not None
        if self._head.busy:
            logger.info("jobs are drained and snapshotted", jobs=self._head.live)
        self._do(self._head.suspend(self.loop.now()))
        self._check_drained()

    def status_line(self) -> str:
        """Jobs and hosts."""
        return "" if self._head is None else self._head.status_line

    def _check_drained(self) -> None:
        if self.stopping and self._head is not None and not self._head.busy:
            self.finish()

    def close(self) -> None:
        """The endpoint goes first: nobody is to dial a socket that is being closed."""
        if self._metrics is not None:
            self._metrics.close()
        if self._router is not None:
            if self._registry is not None:
                (self.options.state / "endpoint.json").unlink(missing_ok=True)
            if self._server is not None:
                self._server.close()
            self._router.close(GRACE_S if self._server is not None else 0.0)
        if self._doorman is not None:
            self._doorman.close()
        if self._registry is not None:
            self._registry.close()


def _clear(socket: Path) -> None:
    """Remove what a killed node left, and nothing of a living one."""
    with contextlib.suppress(AlreadyRunning, OSError):
        lock = PathLock(str(socket))
        _memory(socket).unlink(missing_ok=True)
        lock.release()


def _memory(socket: Path) -> Path:
    """The socket that hands out the memory of the node at ``socket``."""
    return socket.with_name(f"m{socket.name[1:]}")


def _complaint(path: Path, count: int = 65536) -> str:
    """What a node that ended badly said last: its traceback's end, or its last warning or error."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - count))
            words = last_words(file.read())
    except OSError:
        return ""
    line = _LINE.match(words)
    return words if line is None else line[2] if line[1] in "WE" else ""


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(
        "psd", "The head: jobs, their nodes, the command line's endpoint.", "psd --listen tcp://127.0.0.1:7733"
    )
    made.add_argument(
        "--listen", metavar="ADDRESS", default="", help="ipc:///PATH or tcp://127.0.0.1:PORT (psd.listen)"
    )
    made.add_argument(
        "--lasting", action="store_true", help="with --private: jobs go on when psd is started again (rudra up)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The daemon's exit status."""
    return launch(options(), argv, lambda args: [f"psd.listen={args.listen}"] if args.listen else [], Psd)


if __name__ == "__main__":
    sys.exit(main())
