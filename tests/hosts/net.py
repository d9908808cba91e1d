"""Hosts of one machine: network namespaces at a switch, each with folders and settings of its own.

Names carry the PID of the test session, so that two sessions never meet. Everything is removed by ``close``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RATE = "1gbit"


def ip(*words: str | int) -> None:
    """An ``ip`` command."""
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {words}: {done.stderr}"


def why_not() -> str:
    """Why hosts cannot be made here; "" where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "nft"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2, nftables)"
    done = subprocess.run(["ip", "netns", "add", f"rz{os.getpid()}t"], capture_output=True, text=True)
    if done.returncode != 0:
        return f"network namespaces cannot be made: {done.stderr.strip()}"
    ip("netns", "del", f"rz{os.getpid()}t")
    return ""


class Host:
    """One namespace. ``address`` is its own on the network, as it is written in an URL."""

    def __init__(self, net: Network, number: int) -> None:
        self.net, self.number = net, number
        self.name = f"h{number}"
        self.space = f"rz{os.getpid()}{self.name}"
        self.folder = net.folder / self.name
        self.folder.mkdir()
        for name in ("home", "r"):
            (self.folder / name).mkdir(mode=0o700)
        self.address = f"[fd77::{number}]" if net.v6 else f"10.77.0.{number}"
        self.env = {
            "HOME": str(self.folder / "home"),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": os.pathsep.join(path for path in (os.environ.get("PYTHONPATH"),) if path),
            "LANG": "C.UTF-8",
            "TMPDIR": os.environ["TMPDIR"],
            "XDG_RUNTIME_DIR": str(self.folder / "r"),
            "XDG_STATE_HOME": str(self.folder / "home" / "state"),
            "XDG_CONFIG_HOME": str(self.folder / "home" / "config"),
            **{name: os.environ[name] for name in ("RUDRA_DATA",) if name in os.environ},
        }
        self.state = self.folder / "state"

    @property
    def bare(self) -> str:
        """The address without brackets."""
        return self.address.strip("[]")

    def configure(self, text: str) -> None:
        """Its rudra.toml."""
        file = self.folder / "home" / "config" / "rudra" / "rudra.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'[paths]\nstate = "{self.state}"\nruntime = "{self.folder / "r"}"\n{text}')

    def command(self, *words: str | Path) -> list[str]:
        return ["ip", "netns", "exec", self.space, *map(str, words)]

    def run(
        self, *words: str | Path, status: int | None = 0, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """A command on this host, to its end."""
        done = subprocess.run(
            self.command(*words), env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout,
        )  # fmt: skip
        if status is not None:
            assert done.returncode == status, f"{self.name}$ {words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def rudra(self, *words: str | Path, **kw: Any) -> subprocess.CompletedProcess[str]:
        return self.run(Path(sys.executable).parent / "rudra", *words, **kw)

    def start(self, daemon: str, *words: str) -> subprocess.Popen[bytes]:
        """A daemon on this host; its log is DAEMON.log."""
        with open(self.folder / f"{daemon}.log", "ab") as log:
            child = subprocess.Popen(
                self.command(sys.executable, "-m", f"rudra_zmq.daemons.{daemon}", *words),
                env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.net.children.append(child)
        return child

    def log(self, daemon: str) -> str:
        return (self.folder / f"{daemon}.log").read_text()

    def says(self, daemon: str, text: str, seconds: float = 20.0) -> None:
        """Wait for a line of a daemon."""
        self.net.until(lambda: text in self.log(daemon), f"{text!r} in {self.name}'s {daemon}.log", seconds, self)

    def names(self, table: dict[str, str]) -> None:
        """What names mean on this host, from now on: /etc/hosts of its namespace, changed in place."""
        file = Path("/etc/netns", self.space, "hosts")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = {"localhost": "127.0.0.1"} | table
        with open(file, "r+" if file.exists() else "w") as out:
            out.write("".join(f"{address} {name}\n" for name, address in lines.items()))
            out.truncate()

    def nft(self, rules: str) -> None:
        """Firewall rules of this host."""
        done = subprocess.run(self.command("nft", "-f", "-"), input=rules, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class Network:
    """``count`` hosts at a switch; with ``v6`` there is nothing but IPv6."""

    def __init__(self, count: int = 3, *, v6: bool = False) -> None:
        self.v6 = v6
        self.folder = Path(tempfile.mkdtemp(prefix="n"))
        self.children: list[subprocess.Popen[bytes]] = []
        self.switch = f"rz{os.getpid()}sw"
        self._spaces = [self.switch]
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        self.hosts = [self._host(number) for number in range(1, count + 1)]

    def _host(self, number: int) -> Host:
        host = Host(self, number)
        ip("netns", "add", host.space)
        self._spaces.append(host.space)
        ip("-n", host.space, "link", "set", "lo", "up")
        self.plug(host, "eth0", host.bare + ("/64" if self.v6 else "/24"))
        return host

    def plug(self, host: Host, device: str, address: str) -> None:
        """One more cable from a host to the switch, at 1 Gbit/s."""
        port = f"{device}{host.name}"
        ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", host.space)
        ip("-n", self.switch, "link", "set", port, "master", "br0")
        ip("-n", self.switch, "link", "set", port, "up")
        ip("-n", host.space, "link", "set", device, "up")
        nodad = ("nodad",) if ":" in address else ()
        ip("-n", host.space, "addr", "add", address, "dev", device, *nodad)
        for space, end in ((host.space, device), (self.switch, port)):
            command = ["tc", "qdisc", "replace", "dev", end, "root", "tbf", "rate", RATE, "burst", "256kb"]
            subprocess.run(["ip", "netns", "exec", space, *command, "latency", "20ms"], check=True, capture_output=True)

    def until(self, done: Callable[[], Any], what: str, seconds: float = 20.0, host: Host | None = None) -> Any:
        """The first true value of ``done``."""
        end = time.monotonic() + seconds
        while not (value := done()):
            logs = "\n".join(self.logs()) if time.monotonic() > end else ""
            assert time.monotonic() < end, f"no {what} within {seconds:g} s\n{logs}"
            time.sleep(0.05)
        return value

    def end(self, host: Host, daemon: str) -> None:
        """Stop a daemon."""
        for child in self.children:
            if child.poll() is None and host.space in child.args and f"rudra_zmq.daemons.{daemon}" in child.args:
                child.send_signal(signal.SIGTERM)
                child.wait(20)

    def logs(self) -> Sequence[str]:
        return [f"--- {file}\n{file.read_text()[-4000:]}" for file in sorted(self.folder.glob("h*/*.log"))]

    def close(self) -> None:
        """Daemons end in their order, namespaces and folders go."""
        try:
            for child in self.children:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
            stuck = []
            for child in self.children:
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    stuck.append(child.args)
                    child.kill()
                    child.wait()
            assert not stuck, f"did not stop: {stuck}"
        finally:
            for space in self._spaces:
                with contextlib.suppress(AssertionError):
                    ip("netns", "del", space)
                shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir("/etc/netns")
            shutil.rmtree(self.folder, ignore_errors=True)
