"""What both daemons are: options, settings, one loop, signals, settings read again, a clean end.

Owns the life of a daemon's process. Must not know: jobs, messages about them, what the daemon serves.

    begin --READY--> loop --TERM--> drain --finish--> end (0)
                              '--second TERM, or the deadline--> kill children, end (70)

Signals only wake the loop; everything happens there, in the main thread.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from rudra_zmq import __version__, log, paths
from rudra_zmq.config import RudraToml, load_rudra, merge
from rudra_zmq.daemons.account import Account
from rudra_zmq.daemons.service import Manager
from rudra_zmq.daemons.spawn import Supervisor
from rudra_zmq.errors import EXIT_CONFIG_DAEMON, EXIT_FORCED, AlreadyRunning, ConfigError, RudraError
from rudra_zmq.net.addresses import PathLock
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.sockets import Context, make_context
from rudra_zmq.wire.messages.control import LogData, ReadLog

logger = log.get()
memory = log.Memory()
"""This daemon's newest lines, see `log_piece`."""

DRAIN_S = 40.0  # a clean end, at most; what it waits for has shorter deadlines of its own
REAP_S = 3.0  # for killed children to be gone
PARENT_S = 1.0
ECHO_S = 0.5
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Options:
    """What the command line and the files say.

    ``parent``: the process that the daemon lives and dies with; ``sets``: the settings that options stand for.
    """

    args: argparse.Namespace
    settings: RudraToml
    state: Path
    runtime: Path
    parent: int
    sets: tuple[str, ...] = ()


class Daemon:
    """A daemon named ``name``. Subclasses fill in ``begin``, ``drain``, ``close``, ``status_line``.

    ``live``: settings that it can take while it runs; ``others``: beginnings of settings that are not its own.
    """

    name = "daemon"
    live: tuple[str, ...] = ("log.level", "log.format")
    others: tuple[str, ...] = ()

    def __init__(self, options: Options) -> None:
        self.options = options
        self.manager = Manager(os.environ)
        self.loop = Loop()
        self.supervisor = Supervisor(self.loop)
        self.context: Context = make_context("control")
        self.stopping = False
        self._stopping_since = 0.0
        self.status = 0
        self._ready = False
        self._locks: list[PathLock] = []
        self._answer: Path | None = None  # beside the lock: what the last reload came to
        self._reloads = 0

    # ---------------------------------------------------------------------------------------- to fill in

    def begin(self) -> None:
        """Bind, connect, take up work. A RudraError ends the daemon before it is READY."""

    def drain(self) -> None:
        """Begin a clean end; ``finish`` says that it is reached."""
        self.finish()

    def close(self) -> None:
        """Close sockets and files; children are gone already."""

    def status_line(self) -> str:
        """What it does at the moment, for `systemctl status`."""
        return ""

    # ---------------------------------------------------------------------------------------- life

    def run(self) -> int:
        """Until the end; the exit status."""
        self.loop.on_signal(signal.SIGCHLD, self.supervisor.reap)
        self.loop.on_signal(signal.SIGTERM, self.terminate)
        self.loop.on_signal(signal.SIGINT, self.terminate)
        self.loop.on_signal(signal.SIGHUP, self.reload)
        try:
            self._watch_parent()
            self.begin()
            self._ready = True
            self.manager.ready()
            self.manager.attend(self.loop, self._status_line)
            self.loop.run()
        finally:
            self._end()
        return self.status

    def terminate(self) -> None:
        """A TERM or an INT: the first begins a clean end, the second is at once."""
        if self.stopping:
            if not self._echo():
                self.force("a second signal")
            return
        self.stopping = True
        self._stopping_since = self.loop.now()
        logger.info("stopping", children=len(self.supervisor))
        self.manager.stopping(self._status_line())
        self.loop.after(DRAIN_S, lambda: self.force("it takes too long"))
        self.drain()

    def _echo(self) -> bool:
        """Whether this TERM may be the parent's death once more: the kernel sends one for each of the parent's
        threads that was our parent for a moment while they died one by one."""
        return self.options.parent != 0 and self.loop.now() - self._stopping_since < ECHO_S

    def force(self, why: str) -> None:
        """End now: children are killed."""
        logger.warning("forced to stop", why=why, children=len(self.supervisor))
        self.finish(EXIT_FORCED)

    def finish(self, status: int = 0) -> None:
        """Leave the loop."""
        self.status = self.status or status
        self.loop.stop()

    def reload(self) -> None:
        """HUP: the log is opened again, and the settings are read again. What can be taken is; the rest is named, and a
        file that is wrong changes nothing."""
        if self.stopping:
            return
        self.manager.reloading()
        self._reloads += 1
        applied: list[str] = []
        later: list[str] = []
        problem: tuple[str, ...] = ()
        try:
            if self.options.args.log:
                redirect(self.options.args.log)
            fresh = load_rudra(self.options.sets).config
            settings, applied, later = merge(self.options.settings, fresh, live=self.live, others=self.others)
            self.options = replace(self.options, settings=settings)
            log.setup(self.name, level=settings.log.level, fmt=settings.log.format, memory=memory)
            logger.info("settings read again", applied=applied, needs_restart=later)
        except RudraError as error:
            problem = error.to_wire()
            logger.error("settings not taken, nothing changes", error=str(error))
        if self._answer is not None:
            row = {"pid": os.getpid(), "count": self._reloads, "applied": applied, "later": later, "problem": problem}
            with contextlib.suppress(RudraError):  # a full disk: the log has it
                write_json(self._answer, row)
        self.manager.ready()

    def _end(self) -> None:
        self.supervisor.kill_all()
        end = time.monotonic() + REAP_S
        while len(self.supervisor) and time.monotonic() < end:
            self.loop.turn(0.1)
            self.supervisor.reap()
        if len(self.supervisor):
            logger.error("children that a kill did not end", pids=self.supervisor.pids)
            self.status = EXIT_FORCED
        self.close()
        self.context.close(exit_if_stuck=True)
        if self._answer is not None:
            self._answer.unlink(missing_ok=True)
        for lock in self._locks:
            lock.release()
        if self.options.parent and os.getppid() != self.options.parent:
            with contextlib.suppress(OSError):  # the last of a private cluster: its parent cannot any more
                self.options.runtime.rmdir()
        if self._ready:
            logger.info("stopped", status=self.status)
        self.loop.close()  # last: it gives the signals back, and a TERM that comes late would end us in mid-way

    # ---------------------------------------------------------------------------------------- parts

    def lock(self, folder: Path) -> None:
        """Be the only one of this name in ``folder``. AlreadyRunning names the other's PID."""
        try:
            self._locks.append(PathLock(str(folder / self.name)))
        except AlreadyRunning as error:
            raise already(self.name, error) from None
        self._answer = paths.reload_file(folder, self.name)
        self._answer.unlink(missing_ok=True)

    def _watch_parent(self) -> None:
        parent = self.options.parent
        if not parent:
            return
        # The signal comes at once; the look each second is for a parent that was gone before.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

        def look() -> None:
            if os.getppid() != parent and not self.stopping:
                logger.info("the process that started this one is gone", pid=parent)
                self.terminate()

        self.loop.every(PARENT_S, look)

    def _status_line(self) -> str:
        return f"stopping: {self.status_line()}" if self.stopping else self.status_line()


def already(name: str, error: AlreadyRunning) -> AlreadyRunning:
    """The same error about a lock, with the name of who holds it."""
    return AlreadyRunning(f"{name} is {error.message}", where=error.where, fix=error.fix)


def write_json(path: Path, value: object, reader: Account | None = None, mode: int = 0o600) -> None:
    """Replace a file of mode 0600 in one step: readers see the old one or the new one. ``reader`` may read it too."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(value, file)
        if reader is not None:
            reader.lend(temporary, 0o640)
        elif mode != 0o600:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RudraError(f"cannot write: {error.strerror}", where=str(path), fix="make room on the disk") from None


def log_piece(ask: ReadLog) -> LogData:
    """What of this daemon's own log is asked for."""
    offset, data = memory.read(ask.offset, ask.limit)
    return LogData(data=data, offset=offset, run=memory.run)


def boot_id() -> str:
    """Of this machine's run; the same for all processes that can share a path of it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return paths.machine_id()


def machine_mark() -> str:
    """The same for two processes that share a boot, and the namespaces of PIDs and of the network.

    Containers of one machine have its boot id, and neither its processes nor its interfaces: they are hosts.
    """
    spaces = []
    for name in ("pid", "net"):
        with contextlib.suppress(OSError):
            spaces.append(str(os.stat(f"/proc/self/ns/{name}").st_ino))
    return "/".join([boot_id(), *spaces])


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


# ------------------------------------------------------------------------------------------ command line


def redirect(path: str) -> None:
    """Send stdout and stderr, tracebacks included, to the end of a file. Raises ConfigError, and changes nothing."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open the log: {error.strerror}", where=path, fix="correct --log") from None
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}. Fix: {self.prog} --help\n")
        sys.exit(EXIT_CONFIG_DAEMON)


def parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """The options that both daemons have."""
    made = _Parser(
        prog=name,
        description=f"example: {example}\n\n{description}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--state", metavar="DIR", default="", help="what outlives a reboot (paths.state)")
    made.add_argument("--runtime", metavar="DIR", default="", help="sockets (paths.runtime)")
    made.add_argument("--log", metavar="FILE", default="", help="for lines, instead of stderr; opened again at a HUP")
    made.add_argument("--private", metavar="PID", type=int, default=0, help="live and die with this parent process")
    made.add_argument("--version", action="version", version=f"{name} {__version__}")
    return made


def launch(
    options: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    sets: Callable[[argparse.Namespace], list[str]],
    make: Callable[[Options], Daemon],
) -> int:
    """Read the settings (``sets``: those that options stand for), run the daemon, return its exit status."""
    args = options.parse_args(argv)
    given = tuple(sets(args))
    try:
        if args.log:
            args.log = os.path.abspath(args.log)
            redirect(args.log)
        faulthandler.enable()  # a watchdog's SIGABRT then says where the loop was stuck
        settings = load_rudra(given).config
        log.setup(options.prog, level=settings.log.level, fmt=settings.log.format, memory=memory)
        state = paths.state_folder(os.path.abspath(args.state) if args.state else settings.paths.state)
        runtime = paths.runtime_folder(os.path.abspath(args.runtime) if args.runtime else settings.paths.runtime)
        return make(Options(args, settings, state, runtime, args.private, given)).run()
    except RudraError as error:
        sys.stderr.write(f"{log.priority('error')}{options.prog}: {error}\n")
        return error.daemon_exit_status
