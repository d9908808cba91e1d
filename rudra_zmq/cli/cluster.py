"""A private cluster: one psd and one learnerd on this machine, for one ``rudra run``, gone when it is over.

Owns their folders and processes. Knows nothing of the job that they run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rudra_zmq import paths
from rudra_zmq.cli.places import Head, live_endpoint
from rudra_zmq.config import RudraToml
from rudra_zmq.errors import RudraError, of_daemon

START_S = 20.0
STOP_S = 40.0  # psd and learnerd have deadlines of 30 s of their own


class PrivateCluster:
    """``with PrivateCluster(settings) as cluster: cluster.head.submit(...)``. A folder given is gone on with."""

    def __init__(self, settings: RudraToml, folder: Path | None = None, *, slots: int = 0) -> None:
        self._settings = settings
        self._slots = slots
        state = paths.state_folder(settings.paths.state)
        run = folder.name if folder else secrets.token_hex(3)
        self.folder = paths.run_folder(state, run)
        for path in (self.folder.parent, self.folder):
            paths.own_folder(path)
        self.runtime = paths.own_folder(paths.runtime_folder(settings.paths.runtime) / f"r-{run}")
        self._children: list[subprocess.Popen[bytes]] = []
        self._fresh = folder is None
        self.submitted = not self._fresh
        self._head: Head | None = None

    @property
    def head(self) -> Head:
        """The cluster's psd."""
        assert self._head is not None
        return self._head

    def __enter__(self) -> PrivateCluster:
        _sweep(self.runtime, self.folder.parent)
        try:
            address = paths.psd_endpoint(self.runtime)
            self._start("psd", "--listen", address)
            endpoint = self._await_endpoint()
            slots = ["--slots", str(self._slots)] if self._slots else []
            self._start("learnerd", "--head", address, *slots)
            self._head = Head(endpoint["address"], Path(endpoint["token_file"]), run=self.folder)
            self._await_host()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop both, wait for them, remove what is of the moment."""
        if self._head is not None:
            self._head.close()
        if any(child.poll() is not None for child in self._children):
            self.kill()  # what the other one would wait for does not come
        try:
            for child in self._children:  # psd first: a job that still runs is drained while its learners are there
                _end(child)
        except KeyboardInterrupt:
            self.kill()
            for child in self._children:
                child.wait(STOP_S)
            raise
        finally:
            self._clear()

    def _clear(self) -> None:
        if live_endpoint(self.folder) is None:  # nobody else has come to go on with this run
            shutil.rmtree(self.runtime, ignore_errors=True)
        with contextlib.suppress(OSError):  # others are in it, or systemd's session owns it
            self.runtime.parent.rmdir()
        if self._fresh and not self.submitted:
            shutil.rmtree(self.folder, ignore_errors=True)  # a run that never came to be leaves nothing

    def kill(self) -> None:
        """At once: the daemons' children die with them."""
        for child in self._children:
            child.kill()

    def check(self) -> None:
        """Raise if a daemon ended by itself."""
        for child, name in zip(self._children, ("psd", "learnerd"), strict=False):
            if child.poll() is not None:
                raise RudraError(
                    f"{name} of the private cluster ended with status {child.returncode}",
                    where=str(self.folder),
                    fix=f"see {name}.log there; `rudra resume` goes on from the newest snapshot",
                )

    def _start(self, daemon: str, *args: str) -> None:
        command = [sys.executable, "-m", f"rudra_zmq.daemons.{daemon}", *args]
        command += [
            "--state",
            str(self.folder),
            "--runtime",
            str(self.runtime),
            "--private",
            str(os.getpid()),
        ]
        with open(self.folder / f"{daemon}.log", "ab") as log:
            # A session of its own: Ctrl-C in the terminal is the CLI's to handle.
            self._children.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            )

    def _await_endpoint(self) -> dict[str, str]:
        path = self.folder / "endpoint.json"
        pid = self._children[0].pid
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                value: dict[str, str] = json.loads(path.read_text())
                if int(value["pid"]) == pid:
                    return value
            except (OSError, ValueError, KeyError):
                pass
            self._check_started()
            time.sleep(0.01)
        raise RudraError("psd did not start in time", where=str(self.folder / "psd.log"), fix="see its log")

    def _await_host(self) -> None:
        end = time.monotonic() + START_S
        pid = self._children[1].pid
        while time.monotonic() < end:
            if any(host.pid == pid for host in self.head.hosts()):  # psd remembers those of before
                return
            self._check_started()
            time.sleep(0.02)
        raise RudraError("learnerd did not start in time", where=str(self.folder / "learnerd.log"), fix="see its log")

    def _check_started(self) -> None:
        for child, name in zip(self._children, ("psd", "learnerd"), strict=False):
            if child.poll() is not None:
                lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
                said = lines[-1] if lines else without_words(self.folder, child.returncode)
                fix = "" if "Fix: " in said else f"see {name}.log in {self.folder}"
                raise of_daemon(child.returncode, f"{name} did not start: {said}", fix=fix)


def without_words(folder: Path, status: int) -> str:
    """Why a daemon ended that wrote nothing into its log in ``folder``."""
    room = os.statvfs(folder)
    if not room.f_bavail or (room.f_files and not room.f_favail):
        return f"the disk is full ({folder}). Fix: make room on it"
    return f"it ended with status {status} and no word"


def _sweep(runtime: Path, runs: Path) -> None:
    """Remove the sockets of private clusters that were killed: nobody else is left to do it."""
    for folder in runtime.parent.glob("r-*"):
        run = runs / folder.name.removeprefix("r-")
        if folder != runtime and paths.registry_file(run).exists() and live_endpoint(run) is None:
            shutil.rmtree(folder, ignore_errors=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    """TERM, wait, KILL."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
