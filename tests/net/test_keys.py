"""Key files; and CURVE at a control port: each way of being refused has its own line, and its own count."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.errors import NotFound, RefusedBySecurity, RudraError, Unreachable
from rudra_zmq.net import keys
from rudra_zmq.net.auth import KeyPair, Verdict, to_hex, to_z85
from rudra_zmq.net.handshake import Curve
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.peer import RpcPeer
from rudra_zmq.net.rpc import RpcClient, RpcServer
from rudra_zmq.net.sockets import Router, make_context
from rudra_zmq.wire.codec import encode_control
from rudra_zmq.wire.messages.control import Envelope, ListJobs, Ok
from tests.net.conftest import PATIENCE, Net, in_thread, until, wait_for

ME, UNKNOWN, REVOKED, HEAD, OTHER = (KeyPair.new() for _ in range(5))


# ------------------------------------------------------------------------------------------------ key files


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "c"), "HOME": str(tmp_path)}


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path, env: dict[str, str]) -> None:
    assert keys.load("user", env, tmp_path) is None
    path, pair = keys.make("user", keys.person_folder(env))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert keys.load("user", env, tmp_path) == pair
    with pytest.raises(RudraError, match="already"):
        keys.make("user", keys.person_folder(env))
    assert keys.load("user", env, tmp_path) == pair and len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602])
def test_a_secret_that_others_may_read_is_refused(env: dict[str, str], tmp_path: Path, mode: int) -> None:
    path, _ = keys.make("psd", keys.person_folder(env))
    path.chmod(mode)
    with pytest.raises(RefusedBySecurity, match=rf"mode {mode:04o}.*Fix: .*chmod 600"):
        keys.load("psd", env, tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_secret_of_somebody_else_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    path, _ = keys.make("psd", keys.person_folder(env))
    os.chown(path, 12345, -1)
    with pytest.raises(RefusedBySecurity, match="belongs to uid 12345"):
        keys.load("psd", env, tmp_path)


@pytest.mark.parametrize("content", ["", "~" * 40, "0" * 39, "é" * 40])
def test_what_is_no_secret_is_refused(env: dict[str, str], tmp_path: Path, content: str) -> None:
    path, _ = keys.make("psd", keys.person_folder(env))
    path.write_text(content)
    with pytest.raises(RefusedBySecurity, match="no secret key") as caught:
        keys.load("psd", env, tmp_path)
    assert content == "" or content not in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        ("user", "rudra keys new; the head must then be told"),
        ("learnerd", "rudra keys new learnerd; the head must then be told"),
        ("psd", "rudra keys new psd; every host and person"),
    ],
)
def test_the_fix_of_a_damaged_key_makes_that_key(tmp_path: Path, owner: str, words: str) -> None:
    path, _ = keys.make(owner, tmp_path / "keys")
    path.write_text("damaged")
    with pytest.raises(RefusedBySecurity) as caught:
        keys.read(path)
    assert words in caught.value.fix
    path.unlink()
    with pytest.raises(NotFound) as missing:
        keys.read(path)
    assert words in missing.value.fix


def test_a_link_is_not_followed(env: dict[str, str], tmp_path: Path) -> None:
    path, _ = keys.make("psd", keys.person_folder(env))
    (path.parent / "learnerd.key").symlink_to(path)
    with pytest.raises(RefusedBySecurity):
        keys.load("learnerd", env, tmp_path)


def test_where_keys_are_looked_for(env: dict[str, str], tmp_path: Path) -> None:
    system, handed = tmp_path / "etc", tmp_path / "credentials"
    made = {}
    for folder in (system, keys.person_folder(env), handed):
        for owner in ("psd", "user"):
            made[folder, owner] = keys.make(owner, folder)[1]
    assert keys.load("psd", env, system) == made[keys.person_folder(env), "psd"]
    assert keys.load("psd", {"XDG_CONFIG_HOME": "/nowhere"}, system) == made[system, "psd"]
    assert keys.load("user", {"XDG_CONFIG_HOME": "/nowhere"}, system) is None
    (handed / "psd.key").chmod(0o440)  # as systemd leaves it, for a user who has it by an ACL
    assert keys.load("psd", env | {"CREDENTIALS_DIRECTORY": str(handed)}, system) == made[handed, "psd"]
    (handed / "psd.key").chmod(0o600)
    (handed / "psd.key").write_text("none")  # SetCredential: there is no such file at home
    assert keys.load("psd", env | {"CREDENTIALS_DIRECTORY": str(handed)}, system) is None
    with pytest.raises(NotFound):
        keys.read(tmp_path / "none.key")


def test_keys_are_written_as_hex() -> None:
    assert to_z85(to_hex(ME.public)) == ME.public and re.fullmatch("[0-9a-f]{64}", to_hex(ME.public))
    with pytest.raises(ValueError, match="32 bytes"):
        to_z85("abcd")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("tcp://127.0.0.1:1", True), ("tcp://127.9.9.9:1", True), ("tcp://[::1]:1", True), ("tcp://localhost:1", True),
     ("ipc:///x", True), ("tcp://0.0.0.0:1", False), ("tcp://10.0.0.1:1", False), ("tcp://127.evil.com:1", False),
     ("tcp://[::]:1", False)],
)  # fmt: skip
def test_beyond_this_machine_there_is_no_connection_without_keys(
    address: str, loopback: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if loopback:
        assert keys.curve_to(address, "", "user") is None
    else:
        with pytest.raises(RefusedBySecurity, match=r"head\.key is not set"):
            keys.curve_to(address, "", "user")
    if not address.startswith("ipc"):
        with pytest.raises(RefusedBySecurity, match=r"there is no key of user here.*rudra keys new"):
            keys.curve_to(address, to_hex(HEAD.public), "user")
        _, mine = keys.make("user", tmp_path / "rudra" / "keys")
        assert keys.curve_to(address, to_hex(HEAD.public), "user") == (mine, HEAD.public)


# ------------------------------------------------------------------------------------------------ the port


def verdict(key: str) -> Verdict:
    return 200 if key == ME.public else 500 if key == REVOKED.public else 400


class Guarded:
    """A server with ipc for this machine and tcp under CURVE; counts what does not come in."""

    def __init__(self, loop: Loop, folder: str, pair: KeyPair = HEAD) -> None:
        self.failures: list[str] = []
        self.heard: list[tuple[str, int]] = []
        self.context = make_context("control")
        self.doorman = self.context.doorman(loop, verdict)
        self.router: Router = self.context.router("psd")
        self.router.count_failures(loop, self.failures.append)
        self.ipc = self.router.bind_ipc(folder)
        self.router.secure(pair)
        self.tcp = self.router.bind_tcp("127.0.0.1", 0)
        self.server = RpcServer(loop, self.router, self.handle)

    def handle(self, peer: bytes, id: str, message: Any) -> Ok:
        self.heard.append((self.router.user, self.router.uid))
        return Ok(text=type(message).__name__)

    def close(self) -> None:
        self.server.close()
        self.router.close()
        self.doorman.close()
        assert self.context.close()


@pytest.fixture
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("g")

    def build(loop: Loop) -> tuple[Guarded, Callable[[], object]]:
        made = Guarded(loop, str(folder / "s"))
        return made, made.close

    with in_thread(build) as server:
        yield server


CASES: dict[str, tuple[Curve, str, str]] = {
    "no-key": (None, "psd takes nobody without a key there", "set head.key"),
    "unknown-key": (
        (UNKNOWN, HEAD.public),
        "psd does not know the key",
        f"rudra keys authorize {to_hex(UNKNOWN.public)}",
    ),
    "revoked-key": ((REVOKED, HEAD.public), "of this side was revoked", "ask who runs the head"),
    "wrong-server-key": ((ME, OTHER.public), f"does not have the key {to_hex(OTHER.public)[:8]}", "compare"),
}


@pytest.mark.parametrize("case", CASES)
def test_who_is_refused_is_told_why_and_counted(guarded: Guarded, case: str) -> None:
    curve, line, fix = CASES[case]
    with RpcClient(guarded.tcp, curve=curve) as client, pytest.raises(RefusedBySecurity) as caught:
        client.call(ListJobs(), 9.0)
    assert line in str(caught.value) and guarded.tcp in str(caught.value) and fix in caught.value.fix
    wait_for(lambda: case in guarded.failures)
    assert guarded.heard == []


@pytest.mark.parametrize("case", CASES)
def test_a_daemon_that_is_refused_says_so_and_tries_again(guarded: Guarded, net: Net, case: str) -> None:
    curve, line, _ = CASES[case]
    loop, lost = net.loop(), []
    peer = RpcPeer(
        loop, net.context("control"), guarded.tcp, "learnerd",
        on_connect=lambda: pytest.fail("it came in"), on_message=lambda id, m: None, on_lost=lost.append,
        curve=lambda: curve,
    )  # fmt: skip
    net.close_at_end(lambda: peer.close(0.0))
    until(loop, lambda: guarded.failures.count(case) >= 2)
    assert len(lost) == 1 and line in lost[0]
    assert isinstance(peer.problem, RefusedBySecurity)
    assert guarded.heard == []


def test_who_has_the_keys_comes_in_and_is_known_by_them(guarded: Guarded) -> None:
    with RpcClient(guarded.tcp, curve=(ME, HEAD.public)) as client:
        assert client.call(ListJobs(), expect=Ok).text == "ListJobs"
    with RpcClient(guarded.ipc) as client:
        client.call(ListJobs(), expect=Ok)
    assert guarded.heard == [(ME.public, -1), ("", os.getuid())]
    assert guarded.failures == []


def test_a_client_with_keys_does_not_fall_back_to_a_server_without(net: Net) -> None:
    _, address = net.bound("tcp")
    with RpcClient(address, curve=(ME, HEAD.public)) as client, pytest.raises(RefusedBySecurity) as caught:
        client.call(ListJobs(), 9.0)
    assert "speaks without keys, and head.key is set" in str(caught.value)


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 64])
def test_another_program_on_the_port(greeting: bytes) -> None:
    script = (
        "import socket\ns = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1], flush=True)\n"
        f"kept = []\nwhile True:\n    c = s.accept()[0]; c.sendall({greeting!r}); kept.append(c)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            address = f"tcp://127.0.0.1:{int(other.stdout.readline())}"
            with RpcClient(address, curve=(ME, HEAD.public)) as client, pytest.raises(Unreachable) as caught:
                client.call(ListJobs(), 2.0)
            assert "does not answer as psd does" in str(caught.value) and address in str(caught.value)
        finally:
            other.kill()


def test_a_peer_without_a_key_cannot_name_one_of_its_own(guarded: Guarded) -> None:
    """NULL peers may send properties: User-Id, and an address that looks like root's."""
    greeting = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    forged = ((b"Socket-Type", b"DEALER"), (b"User-Id", ME.public.encode()), (b"Peer-Address", b"x:0:0:1"))
    ready = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in forged
    )
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(PATIENCE)
        plain.connect(guarded.ipc.removeprefix("ipc://"))
        plain.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        said = b""
        while b"READY" not in said:
            said += plain.recv(4096)
        head, body = (bytes(frame) for frame in encode_control(Envelope("1", False), ListJobs()))
        plain.sendall(bytes([1, len(head)]) + head + bytes([0, len(body)]) + body)
        wait_for(lambda: guarded.heard)
    assert guarded.heard == [("?", -1)]  # it has both, so one of them is made up


def test_noise_at_the_port_is_counted_and_costs_nothing(guarded: Guarded) -> None:
    port = int(guarded.tcp.rsplit(":", 1)[1])
    for noise in (os.urandom(200), b"GET / HTTP/1.0\r\n\r\n", b"\x80\x04\x95" + bytes(80), b""):
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(noise)
    with RpcClient(guarded.tcp, curve=(ME, HEAD.public)) as client:
        client.call(ListJobs(), expect=Ok)
    assert guarded.heard == [(ME.public, -1)]
