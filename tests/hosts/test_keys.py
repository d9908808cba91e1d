"""Two hosts with real addresses: keys, an invitation, a stranger; and a psd without a key."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUDRA = "import sys; from rudra_zmq.cli.main import main; sys.exit(main())"
HEAD, PORT = "10.91.7.1", 7733


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


def until(done: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


class Machine:
    """A network namespace with folders of its own."""

    def __init__(self, space: str, folder: Path) -> None:
        self.space, self.folder = space, folder
        self.children: list[subprocess.Popen[bytes]] = []
        for name in ("c", "s", "r"):
            (folder / name).mkdir(mode=0o700, parents=True)
        self.env = {
            "HOME": str(folder), "PATH": os.defpath, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder),
            "XDG_CONFIG_HOME": str(folder / "c"), "RUDRA_PATHS_STATE": str(folder / "s"),
            "RUDRA_PATHS_RUNTIME": str(folder / "r"),
        }  # fmt: skip

    def rudra(self, *args: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["ip", "netns", "exec", self.space, sys.executable, "-c", RUDRA, *args],
            env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == status, (args, done)
        return done

    def daemon(self, name: str, *args: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            command = ["ip", "netns", "exec", self.space, sys.executable, "-m", f"rudra_zmq.daemons.{name}", *args]
            self.children.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        for child in self.children:
            child.wait(15)


@pytest.fixture
def pair() -> Iterator[tuple[Machine, Machine]]:
    """A head at 10.91.7.1 and another host, with a cable between them."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"rk{os.getpid()}{letter}" for letter in "ab"]
    folder = Path(tempfile.mkdtemp(prefix="k"))
    made: list[Machine] = []
    try:
        if not all(ip("netns", "add", name) for name in names):
            pytest.skip("no network namespaces here")
        assert ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v0", "netns", names[1])
        for number, name in enumerate(names, 1):
            assert ip("-n", name, "addr", "add", f"10.91.7.{number}/24", "dev", "v0")
            assert ip("-n", name, "link", "set", "v0", "up") and ip("-n", name, "link", "set", "lo", "up")
        made = [Machine(name, folder / letter) for name, letter in zip(names, "ab", strict=True)]
        yield made[0], made[1]
    finally:
        for machine in made:
            machine.close()
        for name in names:
            ip("netns", "del", name)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_head_with_a_key_serves_those_that_it_knows(pair: tuple[Machine, Machine]) -> None:
    head, other = pair
    head.rudra("keys", "new", "psd")
    head.daemon("psd", "--listen", f"tcp://0.0.0.0:{PORT}")
    until((head.folder / "s" / "endpoint.json").exists)
    invitation = json.loads(head.rudra("invite", "far", "--address", f"tcp://{HEAD}:{PORT}", "--json").stdout)
    other.rudra("host-join", invitation["invitation"])
    other.daemon("learnerd")

    def hosts() -> list[dict[str, Any]]:
        return list(json.loads(head.rudra("hosts", "--json").stdout)["hosts"])

    until(lambda: [row["name"] for row in hosts()] == ["far"])
    assert "there is no key of user here" in other.rudra("hosts", status=5).stderr
    public = json.loads(other.rudra("keys", "new", "--json").stdout)["key"]
    refused = other.rudra("hosts", status=5).stderr
    assert "psd does not know the key" in refused and f"tcp://{HEAD}:{PORT}" in refused
    head.rudra("keys", "authorize", public, "ann", "--role", "read")
    assert "far" in other.rudra("hosts").stdout
    head.rudra("keys", "revoke", "far")
    until(lambda: "was revoked" in other.log("learnerd"), 10)
    counts = json.loads(head.rudra("keys", "list", "--json").stdout)["refused"]
    assert counts["unknown-key"] >= 1 and counts["revoked-key"] >= 1


def test_a_head_without_a_key_is_not_there_for_others(pair: tuple[Machine, Machine]) -> None:
    head, other = pair
    head.daemon("psd", "--listen", f"tcp://{HEAD}:{PORT}")
    until((head.folder / "s" / "endpoint.json").exists)
    assert head.log("psd").count("only loopback is bound") == 1
    other.rudra("keys", "new")
    (other.folder / "c" / "rudra" / "rudra.toml").write_text(
        f'[head]\naddress = "tcp://{HEAD}:{PORT}"\nkey = "{"0" * 64}"\n'
    )
    assert "refused: nobody listens" in other.rudra("hosts", status=4).stderr
