"""Child processes: started by exec, watched, stopped by escalation, reaped; their output pumped into a file.

Owns processes and their process groups. Must not know: jobs, ranks, messages.

Everything runs on the daemon's loop, in its main thread: a child that asked to die with its parent
(PR_SET_PDEATHSIG) dies with the *thread* that spawned it. SIGCHLD wakes the loop, which then calls ``reap``.
A child leads a process group of its own; the group is ended before the leader is reaped, while its id cannot yet
be anybody else's, so that workers of a training script go with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rudra_zmq.daemons.account import UMASK, Account
from rudra_zmq.daemons.output import OutputFile
from rudra_zmq.net.loop import Loop, Timer

PIPE = 1 << 20
READ = 1 << 18
READS_A_TURN = 4
LEFT_IN_PIPE = 4 * PIPE
TAIL = 1 << 18
SWEEP_S = 1.0
SWEEP_BEAT_S = 0.02
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


class Child:
    """A running process. ``returncode`` as subprocess has it (negative: the signal), None while it runs."""

    def __init__(self, process: subprocess.Popen[bytes], on_exit: Callable[[Child], None]) -> None:
        self.pid = process.pid
        self.returncode: int | None = None
        self.killed = False  # by us
        self.tail = b""
        self.on_exit = on_exit
        self.process = process
        self.output: OutputFile | None = None
        self.pipe = -1
        self.deadline: Timer | None = None
        self.sweep: Timer | None = None  # while its group ends


class Supervisor:
    """All children of a daemon."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._children: dict[int, Child] = {}

    def __len__(self) -> int:
        return len(self._children)

    @property
    def pids(self) -> list[int]:
        """Of children that run."""
        return list(self._children)

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        on_exit: Callable[[Child], None],
        stdin: bytes = b"",
        output: OutputFile | None = None,
        log: Path | None = None,
        pass_fds: Sequence[int] = (),
        account: Account | None = None,
    ) -> Child:
        """Start ``argv``. Its stdout and stderr go through a pipe into ``output``, or straight into ``log``.
        ``pass_fds``: descriptors that it has too, under the same numbers. ``account``: whom it runs as; a child asks
        to die with us (PR_SET_PDEATHSIG) by itself, for the change of user takes that back.

        ``on_exit(child)`` is called on the loop once it has ended, its group is killed and its output is in the
        file; ``child.tail`` is then the end of the output. Raises OSError (no such program, no such folder).
        """
        source = memory_file("stdin", stdin) if stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        sink, pipe = self._sink(output, log)
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=source,
                stdout=sink,
                stderr=sink,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                pass_fds=pass_fds,
                user=None if account is None else account.uid,
                group=None if account is None else account.gid,
                extra_groups=None if account is None else account.groups,
                umask=-1 if account is None else UMASK,
            )
        except BaseException:
            if pipe >= 0:
                os.close(pipe)
            raise
        finally:
            os.close(source)
            os.close(sink)
        child = Child(process, on_exit)
        self._children[child.pid] = child
        if output is not None:
            child.output, child.pipe = output, pipe
            self._loop.on_readable(pipe, lambda: self._pump(child))
        return child

    @staticmethod
    def _sink(output: OutputFile | None, log: Path | None) -> tuple[int, int]:
        if output is None:
            path = os.devnull if log is None else log
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), -1
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        with contextlib.suppress(OSError):  # a user's pipes are limited in sum; the default size works too
            fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE)
        return writing, reading

    # ---------------------------------------------------------------------------------------- output

    def _pump(self, child: Child) -> None:
        """Some of what is in the pipe; a flood gets a bounded share of each turn of the loop."""
        for _ in range(READS_A_TURN):
            if not self._read(child):
                return

    def _read(self, child: Child) -> int:
        if child.pipe < 0 or child.output is None:
            return 0
        try:
            data = os.read(child.pipe, READ)
        except BlockingIOError:
            return 0
        if not data:
            self._close_pipe(child)
            return 0
        child.output.write(data)
        return len(data)

    def _close_pipe(self, child: Child) -> None:
        if child.pipe >= 0:
            self._loop.forget(child.pipe)
            os.close(child.pipe)
            child.pipe = -1

    def _finish_output(self, child: Child) -> None:
        """What is left in the pipe. A process that left the group may hold it open: then no end is waited for."""
        left = LEFT_IN_PIPE
        while left > 0 and (done := self._read(child)):
            left -= done
        self._close_pipe(child)
        if child.output is not None:
            child.tail = child.output.tail(TAIL)
            child.output.close()

    # ---------------------------------------------------------------------------------------- ending

    def reap(self) -> None:
        """Look which children have ended; call after each SIGCHLD."""
        for child in list(self._children.values()):
            if child.sweep is None and os.waitid(os.P_PID, child.pid, _ENDED) is not None:
                self._sweep(child, time.monotonic() + SWEEP_S)

    def _sweep(self, child: Child, deadline: float) -> None:
        """TERM to what is left of the group: Python's resource tracker ignores it, outlives the others and removes
        their semaphores from /dev/shm. After ``deadline`` the group is killed."""
        if child.pid not in self._children:
            return
        if time.monotonic() >= deadline or not _others(child.pid):
            self._end(child)
            return
        if child.sweep is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGTERM)
        child.sweep = self._loop.after(SWEEP_BEAT_S, lambda: self._sweep(child, deadline))

    def _end(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.returncode = child.process.wait()
        del self._children[child.pid]
        if child.deadline is not None:
            child.deadline.cancel()
        self._finish_output(child)
        child.on_exit(child)

    def stop(self, child: Child, grace: float) -> None:
        """TERM to the process alone (its workers are its own to end), KILL to the group after ``grace`` seconds.

        Called again it can only shorten the time.
        """
        if child.returncode is not None:
            return
        when = time.monotonic() + grace
        if child.deadline is None:
            os.kill(child.pid, signal.SIGTERM)
        elif child.deadline.when <= when:
            return
        else:
            child.deadline.cancel()
        child.deadline = self._loop.at(when, lambda: self.kill(child))

    def kill(self, child: Child) -> None:
        """SIGKILL, now; the rest of its group follows (``reap``)."""
        if child.returncode is None:
            child.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL to all of them, now."""
        for child in self._children.values():
            self.kill(child)


def _others(group: int) -> bool:
    """Whether processes besides the leader, which has ended, live in this group."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != group:
            with contextlib.suppress(OSError, IndexError, ValueError):
                state, _, its_group = (
                    Path("/proc", name, "stat").read_text("ascii", "replace").rpartition(")")[2].split()[:3]
                )
                if int(its_group) == group and state != "Z":
                    return True
    return False


def memory_file(name: str, data: bytes) -> int:
    """A file to read ``data`` from that no folder has: a pipe would block us once it is full."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
