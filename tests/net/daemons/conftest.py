"""Real daemons on folders of their own, with everything looked for that they could leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq import paths
from rudra_zmq.net.rpc import RpcClient
from rudra_zmq.wire.messages import control as c

ROOT = Path(__file__).resolve().parents[3]


def until(done: Callable[[], Any], what: str = "it", seconds: float = 15.0) -> Any:
    """The first true value of ``done``."""
    end = time.monotonic() + seconds
    while True:
        value = done()
        if value:
            return value
        assert time.monotonic() < end, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.02)


class Place:
    """A state and a runtime folder, and the daemons in them."""

    def __init__(self, folder: Path) -> None:
        self.state, self.runtime, self.home = folder / "s", folder / "r", folder / "h"
        for path in (self.state, self.runtime, self.home):
            path.mkdir(mode=0o700)
        self.children: list[subprocess.Popen[bytes]] = []
        self.clients: list[RpcClient] = []
        self.env = {
            "HOME": str(self.home),
            "PATH": os.defpath,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
            "XDG_CONFIG_HOME": str(self.home / "c"),
        }

    def spawn(self, daemon: str, *args: str, env: dict[str, str] | None = None, **kw: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"rudra_zmq.daemons.{daemon}"]
        command += ["--state", str(self.state), "--runtime", str(self.runtime), *args]
        with open(self.state / f"{daemon}.log", "ab") as log:
            child = subprocess.Popen(
                command, env=self.env | (env or {}), stdin=subprocess.DEVNULL, stdout=log, stderr=log, **kw
            )
        self.children.append(child)
        return child

    def psd(self, *args: str, **kw: Any) -> subprocess.Popen[bytes]:
        child = self.spawn("psd", *args, **kw)

        def ready() -> bool:
            assert child.poll() is None, self.log("psd")
            with contextlib.suppress(OSError, ValueError):
                return bool(json.loads((self.state / "endpoint.json").read_text())["pid"] == child.pid)
            return False

        until(ready, "psd")
        return child

    def learnerd(self, *args: str, **kw: Any) -> subprocess.Popen[bytes]:
        child = self.spawn("learnerd", *args, **kw)
        until(lambda: any(h.pid == child.pid for h in self.hosts()), "learnerd")
        return child

    def endpoint(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.state / "endpoint.json").read_text())
        return value

    def client(self, token: str = "") -> RpcClient:
        endpoint = self.endpoint()
        token = token or paths.read_token(Path(endpoint["token_file"]))
        made = RpcClient(endpoint["address"], whoami=c.Whoami(token=token))
        self.clients.append(made)
        return made

    def hosts(self) -> list[c.HostRow]:
        return self.client().call(c.ListHosts(), expect=c.Hosts).rows

    def log(self, daemon: str) -> str:
        return (self.state / f"{daemon}.log").read_text()

    def run(self, daemon: str, *args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """To its end: status and stderr."""
        command = [sys.executable, "-m", f"rudra_zmq.daemons.{daemon}", *args]
        done = subprocess.run(
            command, env=self.env | (env or {}), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
        return done.returncode, done.stderr

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for child in self.children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for child in self.children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                raise AssertionError(f"{child.args} did not stop") from None


@pytest.fixture
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="d"))
    made = Place(folder)
    try:
        yield made
        made.close()
        left = [p.name for p in made.runtime.iterdir()]
        assert not left, f"left in the runtime folder: {left}"
    finally:
        for child in made.children:
            if child.poll() is None:
                child.kill()
                child.wait()
        shutil.rmtree(folder)


def memory(pid: int) -> float:
    """Resident MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu(pid: int) -> float:
    """Seconds of a core so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
