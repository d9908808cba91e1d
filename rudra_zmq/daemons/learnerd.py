"""learnerd: offers this host's slots to a head and runs the learners that it asks for.

Owns the connection to the head: registration, liveness, exits that were not yet heard. Learners go on while the head
is away. Must not know: user code and torch (they live in the children), what a job computes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rudra_zmq import __version__, log, paths
from rudra_zmq.config import job_from_toml
from rudra_zmq.daemons import hardware
from rudra_zmq.daemons.account import account
from rudra_zmq.daemons.base import Daemon, Options, launch, log_piece, machine_mark, parser
from rudra_zmq.daemons.code import Code
from rudra_zmq.daemons.devices import Devices
from rudra_zmq.daemons.learners import Learners
from rudra_zmq.daemons.readiness import problems
from rudra_zmq.errors import EXIT_UNREACHABLE, RudraError, Unreachable
from rudra_zmq.head import files
from rudra_zmq.net import keys
from rudra_zmq.net.addresses import way_to
from rudra_zmq.net.handshake import Curve, KeyRevoked
from rudra_zmq.net.rpc import RpcPeer
from rudra_zmq.wire.codec import error_message
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

logger = log.get()

DRAIN_S = 25.0
LAST_WORDS_S = 2.0
SHUT_OUT_S = 2.0  # for learners of a host whose key was revoked
FIRST_CONTACT_S = 60.0  # then a daemon that was never heard gives up, and its supervisor starts it again
REMIND_S = 60.0
RETRY_S = 5.0
QUIET_S = 2.0  # at the start, when psd may be just being started too
MOST_UNHEARD = 1000


class Learnerd(Daemon):
    """The daemon."""

    name = "learnerd"
    others = ("psd.", "metrics.")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._settings = options.settings.host
        self._host = self._settings.host_name
        self._slots = self._settings.slot_count
        self._devices = Devices(self.loop, self._settings.device_names, self._devices_differ)
        self._versions = hardware.versions()
        self._peer: RpcPeer | None = None
        self._registered = False
        self._ever = False
        self._began = self.loop.now()
        self._wanted = False  # the connection ends because we want a new one
        self._unheard: list[c.LearnerExit] = []
        self._problem = RudraError("psd was not reached")
        self._reminder = log.RateLimiter(REMIND_S)
        self._code = Code(self.loop, options.state, self._ask)
        self._learners = Learners(
            self.loop,
            self.supervisor,
            state=options.state,
            runtime=options.runtime,
            host=self._settings,
            tell=self._tell,
            code=self._code,
            account=account(self._settings.user),
        )

    def begin(self) -> None:
        """Connect; being registered is not awaited, so that a head may come later, and our key too if there is none."""
        if keys.wanted(self._address(), self.options.settings.head.key):
            keys.load("learnerd")
        self.lock(self.options.runtime)
        self._learners.sweep()
        devices = " ".join(self._settings.device_names) or "cpu"
        logger.info(
            "learnerd runs", pid=os.getpid(), host=self._host, slots=self._slots, devices=devices, version=__version__
        )
        self._devices.begin()
        self._peer = RpcPeer(
            self.loop,
            self.context,
            self._address(),
            "learnerd",
            on_connect=self._register,
            on_message=self._message,
            on_lost=self._lost,
            curve=self._curve,
        )
        self.loop.every(1.0, self._beat)
        self.loop.after(FIRST_CONTACT_S, self._give_up)

    def _devices_differ(self) -> None:
        """The head hears of them with our next registration."""
        if not self.stopping:
            self._reconnect(self._address())

    # ---------------------------------------------------------------------------------------- the head

    def _endpoint(self) -> dict[str, str]:
        """What a psd of the same state folder wrote about itself, or the system's psd where we are its learnerd."""
        folders = [self.options.state]
        if self.options.state.parent == paths.SYSTEM_PSD.parent:
            folders.append(paths.SYSTEM_PSD)
        for folder in folders:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                value = json.loads(paths.endpoint_file(folder).read_text("utf-8"))
                return {key: str(value[key]) for key in ("address", "token_file")}
        return {}

    def _address(self) -> str:
        return (
            self.options.settings.head.address
            or self._endpoint().get("address", "")
            or paths.psd_endpoint(self.options.runtime)
        )

    def _curve(self) -> Curve:
        """Read each time, as the address is."""
        return keys.curve_to(self._address(), self.options.settings.head.key, "learnerd")

    def _token(self) -> str:
        """Read each time: psd may be started after us, and make it then."""
        given = self.options.args.token_file or os.environ.get("RUDRA_TOKEN_FILE", "")
        path = given or self._endpoint().get("token_file", "") or str(self.options.state / "token")
        return paths.read_token(Path(path))

    def _register(self) -> None:
        assert self._peer is not None
        try:
            token = "" if self._curve() is not None else self._token()
        except RudraError as error:
            self._not_registered(error)
            return
        message = c.Register(
            token=token,
            name=self._host,
            slots=self._slots,
            pid=os.getpid(),
            boot=machine_mark(),
            versions=self._versions,
            labels=list(self._settings.labels),
            devices=list(self._settings.device_names),
            absent=list(self._devices.absent),
            reached=self._peer.reached,
            running=self._running(),
        )
        self._peer.request(message, self._registration)

    def _running(self) -> list[tuple[str, int, int, int]]:
        """What runs, and what ended unheard: the head learns of that end next, not from its absence here."""
        found = self._learners.running()
        known = {(job, rank) for job, rank, _, _ in found}
        for message in self._unheard:
            if (message.job, message.rank) not in known:
                known.add((message.job, message.rank))
                found.append((message.job, message.rank, message.incarnation, 0))
        return found

    def _registration(self, answer: Message) -> None:
        if isinstance(answer, c.Registered):
            self._registered = self._ever = True
            way = way_to(self._peer.reached) if self._peer is not None and self._peer.reached else ""
            logger.info("registered", head=self._address(), by=way or "a socket", slots=self._slots)
            for message in list(self._unheard):
                self._send_exit(message)
            return
        if isinstance(answer, c.Error) and answer.code not in ("unreachable", "timed-out"):
            if answer.code == "security" and self._curve() is not None:  # its key is in, and is no host's
                self._shut_out()
            error = RudraError(answer.message, where=answer.where or self._address(), fix=answer.fix)
            self._not_registered(error)

    def _not_registered(self, error: RudraError) -> None:
        """Said once a minute; tried again after a while, on a new connection."""
        self._problem = error
        logger.limited(self._reminder, "warning", str(error))
        self.loop.after(RETRY_S, self._again)

    def _again(self) -> None:
        if not self._registered and not self.stopping:
            self._reconnect(self._address())

    def _reconnect(self, address: str) -> None:
        self._wanted = True
        if self._peer is not None:
            self._peer.reconnect(address)
        self._wanted = False

    def _lost(self, reason: str) -> None:
        self._registered = False
        if self._wanted:
            return
        fix = "start it: rudra up (or systemctl start rudra-psd), or name another with --head"
        unreachable = Unreachable(f"psd cannot be reached: {reason}", where=self._address(), fix=fix)
        self._problem = (self._peer.problem if self._peer is not None else None) or unreachable
        if isinstance(self._problem, KeyRevoked):
            self._shut_out()
        if not self.stopping:
            self._complain()

    def _shut_out(self) -> None:
        """The head does not want this host: nothing may run here for its jobs, nor start again."""
        if count := len(self._learners.running()):
            logger.warning("learners stop: this host may not run them any more", learners=count)
            self._learners.leave(SHUT_OUT_S)

    def _complain(self) -> None:
        if self.loop.now() - self._began > QUIET_S:
            logger.limited(self._reminder, "warning", str(self._problem))

    def _give_up(self) -> None:
        if not self._ever and not self.stopping:
            logger.error("giving up", reason=str(self._problem))
            self.finish(EXIT_UNREACHABLE if isinstance(self._problem, Unreachable) else self._problem.exit_status)

    def _beat(self) -> None:
        """A sign of life; without a head, a reminder now and then, and a look whether it is elsewhere."""
        if self._peer is None:
            return
        if self._registered:
            self._peer.request(c.HostPing(), self._pinged, timeout=10.0)
        elif not self._peer.connected and not self.stopping:
            self._complain()
            if (address := self._address()) != self._peer.address:
                self._reconnect(address)

    def _pinged(self, answer: Message) -> None:
        if isinstance(answer, c.Error) and answer.code in ("not-found", "security") and self._peer is not None:
            # The head gave us up while we were silent.
            self._reconnect(self._address())

    # ---------------------------------------------------------------------------------------- messages

    def _message(self, request: str, message: Message) -> Message | None:
        try:
            return self._obey(message)
        except RudraError as error:
            return error_message(error)
        except OSError as error:
            return error_message(RudraError(f"{error.strerror}", where=self._host))

    def _obey(self, message: Message) -> Message | None:
        if isinstance(message, c.StartLearners):
            return c.Ok(text=self._learners.start(message))
        if isinstance(message, c.CheckJob):
            file = job_from_toml(message.toml, name=message.name).job
            return c.Checked(problems=problems(file, message.cwd, self._settings), memory=hardware.memory())
        if isinstance(message, c.StopLearners):
            self._learners.stop(message)
        elif isinstance(message, c.KillLearner):
            self._learners.kill(message)
        elif isinstance(message, c.NodeMoved):
            self._learners.moved(message)
        elif isinstance(message, c.RemoveJob):
            self._learners.remove(message.job)
        elif isinstance(message, c.ReadLog):
            return log_piece(message)
        elif isinstance(message, c.ReadFile):
            folder = paths.job_folder(self.options.state, message.job).root
            return files.read_file(folder, message.path, message.offset, message.limit)
        elif isinstance(message, c.ListFiles):
            return c.Files(rows=files.list_files(paths.job_folder(self.options.state, message.job).root))
        else:
            logger.limited(self._reminder, "warning", "a message that is not for learnerd", kind=type(message).__name__)
        return None

    def _ask(self, message: c.GetBundle, then: Callable[[Message], None]) -> None:
        if self._peer is not None and self._registered:
            self._peer.request(message, then, timeout=30.0)
        else:
            away = error_message(Unreachable("psd cannot be reached"))
            self.loop.after(0.0, lambda: then(away))

    def _tell(self, message: c.LearnerStarted | c.LearnerExit) -> None:
        if isinstance(message, c.LearnerStarted):
            if self._peer is not None and self._registered:
                self._peer.notify(message)
            return
        self._unheard.append(message)
        del self._unheard[:-MOST_UNHEARD]
        if self._registered:
            self._send_exit(message)
        self._check_drained()

    def _send_exit(self, message: c.LearnerExit) -> None:
        assert self._peer is not None

        def heard(answer: Message) -> None:
            if isinstance(answer, c.Ok) and message in self._unheard:
                self._unheard.remove(message)
                self._check_drained()

        self._peer.request(message, heard, timeout=30.0)

    # ---------------------------------------------------------------------------------------- end

    def drain(self) -> None:
        """Learners finish their step, push and leave; the head hears of it."""
        if self._learners.count:
            logger.info("learners finish their step", learners=self._learners.count, seconds=DRAIN_S)
        self._learners.drain(DRAIN_S)
        self._check_drained()

    def status_line(self) -> str:
        """The head, and what runs here."""
        address = "" if self._peer is None else self._peer.address
        where = f"registered with {address}" if self._registered else f"waiting for psd at {address}"
        return f"{where}; {self._learners.count} of {self._slots} slots in use"

    def _check_drained(self) -> None:
        if not self.stopping or self._learners.running():
            return
        if not self._unheard or not self._registered:
            self.finish()
        else:
            self.loop.after(LAST_WORDS_S, self.finish)

    def close(self) -> None:
        """Nothing that is told any more."""
        self._code.close()
        if self._peer is not None:
            self._peer.close(linger=0.5)


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser("learnerd", "Runs learners on this host for a psd.", "learnerd --slots 4")
    made.add_argument("--head", metavar="ADDRESS", default="", help="of psd (head.address)")
    made.add_argument("--name", default="", help="of this host (host.name)")
    made.add_argument("--slots", type=int, default=0, help="learners at once (host.slots)")
    made.add_argument("--user", default="", help="whom learners run as (host.user)")
    made.add_argument("--token-file", metavar="FILE", default="", help="psd's token (default: where psd says)")
    return made


def _sets(args: argparse.Namespace) -> list[str]:
    given = {
        "head.address": args.head,
        "host.name": args.name,
        "host.slots": args.slots,
        "host.user": args.user,
    }
    return [f"{key}={value}" for key, value in given.items() if value]


def main(argv: Sequence[str] | None = None) -> int:
    """The daemon's exit status."""
    return launch(options(), argv, _sets, Learnerd)


if __name__ == "__main__":
    sys.exit(main())
