"""Addresses, reasons of silence, and the lock of a path."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rudra_zmq.errors import AlreadyRunning, ConfigError, RudraError, Unreachable
from rudra_zmq.net.addresses import (
    MAX_PATH,
    Address,
    PathLock,
    is_here,
    parse,
    port_owner,
    probe,
    resolve,
    stopped,
    unreachable,
)
from tests.net.conftest import Net


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:7733", Address("tcp", host="127.0.0.1", port=7733)),
        ("tcp://head.example:1", Address("tcp", host="head.example", port=1)),
        ("tcp://[::1]:7733", Address("tcp", host="::1", port=7733)),
        ("ipc:///run/rudra/psd", Address("ipc", path="/run/rudra/psd")),
    ],
)
def test_forms(text: str, address: Address) -> None:
    assert parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:7733", "tcp://", "tcp://host", "tcp://host:", "tcp://host:x", "tcp://host:70000", "tcp://::1:80",
     "tcp://ho st:1", "ipc://", "ipc://relative", "ipc:///a\0b", "inproc://x", "udp://h:1", "tcp://h:1\n"],
)  # fmt: skip
def test_no_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="Fix: "):
        parse(text)


def test_a_path_must_fit_the_kernels_structure() -> None:
    parse("ipc:///" + "x" * (MAX_PATH - 1))
    with pytest.raises(ConfigError, match="shorter runtime folder"):
        parse("ipc:///" + "x" * MAX_PATH)


def test_names_are_resolved_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(parse("tcp://localhost:7733")).host in ("127.0.0.1", "::1")

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(Unreachable, match=r"name not found: head\.example .*looked up on .*Fix: "):
        resolve(parse("tcp://head.example:7733"))
    assert probe(parse("tcp://head.example:7733")) == "name not found: head.example"


class TestProbe:
    def test_somebody_listens(self, net: Net) -> None:
        for kind in ("ipc", "tcp"):
            _, address = net.bound(kind)
            assert probe(parse(address)) == ""

    def test_refused(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, and not listening
            assert probe(Address("tcp", host="127.0.0.1", port=taken.getsockname()[1])) == "refused: nobody listens"

    def test_no_such_socket(self, tmp_path: Path) -> None:
        assert probe(Address("ipc", path=str(tmp_path / "x"))) == "no such socket"

    def test_a_dead_owners_socket(self, tmp_path: Path) -> None:
        path = str(tmp_path / "x")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
            dead.listen()
        assert probe(Address("ipc", path=path)) == "refused: its owner is gone"

    def test_an_owner_that_accepts_nothing(self, tmp_path: Path) -> None:
        path = str(tmp_path / "x")
        with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as waiting:
            full.bind(path)
            full.listen(0)
            waiting.connect(path)
            reason = probe(Address("ipc", path=path), 0.05)
            assert reason.startswith(("no answer in 0.05 s", "its owner accepts no connections"))

    def test_the_error_has_reason_address_and_fix(self, tmp_path: Path) -> None:
        path = tmp_path / "psd"
        error = unreachable(Address("ipc", path=str(path)), "psd cannot be reached", fix="rudra up")
        assert str(error) == f"psd cannot be reached: no such socket (ipc://{path}). Fix: rudra up"


HOLDER = """
import socket, sys
kind, where = sys.argv[1:]
if kind == "tcp":
    sock = socket.create_server(("127.0.0.1", 0))
else:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(where)
    sock.listen(0 if kind == "full" else 16)
print(sock.getsockname()[1] if kind == "tcp" else "", flush=True)
sys.stdin.read()
"""


class TestStopped:
    @pytest.mark.parametrize("kind", ["ipc", "full", "tcp"])
    def test_who_is_stopped_is_named(self, tmp_path: Path, kind: str) -> None:
        path = str(tmp_path / "x")
        with (
            subprocess.Popen(
                [sys.executable, "-c", HOLDER, kind, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as holder,
            contextlib.ExitStack() as held,
        ):
            assert holder.stdout is not None
            port = holder.stdout.readline().strip()
            address = parse(f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"ipc://{path}")
            try:
                assert stopped(address) == 0
                os.kill(holder.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
                if kind == "full":
                    Path(f"{path}.lock").write_text(f"{holder.pid}\n")
                    with contextlib.suppress(BlockingIOError):
                        for _ in range(100):
                            sock = held.enter_context(socket.socket(socket.AF_UNIX))
                            sock.setblocking(False)
                            sock.connect(path)
                assert stopped(address) == holder.pid
                error = unreachable(address, "psd cannot be reached", fix="rudra up")
                text = f"psd cannot be reached: PID {holder.pid} is stopped ({address}). Fix: kill -CONT {holder.pid}"
                assert str(error) == text
            finally:
                holder.kill()

    def test_nobody_is_stopped_where_nobody_is(self, tmp_path: Path) -> None:
        assert stopped(Address("ipc", path=str(tmp_path / "x"))) == 0
        assert stopped(Address("tcp", host="nohost.invalid", port=7733)) == 0


def test_which_addresses_are_of_this_machine() -> None:
    assert all(map(is_here, map(parse, ("ipc:///x", "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://0.0.0.0:1"))))
    assert not any(map(is_here, map(parse, ("tcp://192.0.2.1:1", "tcp://nohost.invalid:1"))))


class TestPathLock:
    def test_the_second_is_refused_and_the_first_undisturbed(self, tmp_path: Path) -> None:
        path = tmp_path / "psd"
        lock = PathLock(str(path))
        path.touch()
        with pytest.raises(AlreadyRunning, match=f"already running as PID {os.getpid()} .*kill {os.getpid()}"):
            PathLock(str(path))
        assert path.exists()
        lock.release()
        lock.release()
        assert list(tmp_path.iterdir()) == []
        PathLock(str(path)).release()

    def test_a_killed_owner_leaves_nothing_in_the_way(self, tmp_path: Path) -> None:
        path = str(tmp_path / "psd")
        code = (
            "import sys; from rudra_zmq.net.sockets import make_context\n"
            "r = make_context('control').router('r'); r.bind_ipc(sys.argv[1]); print('bound', flush=True)\n"
            "sys.stdin.read()"
        )
        child = subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with child:
            assert child.stdout is not None and child.stdout.readline() == b"bound\n"
            with pytest.raises(AlreadyRunning, match=f"PID {child.pid}"):
                PathLock(path)
            child.send_signal(signal.SIGKILL)
        assert os.path.exists(path)
        lock = PathLock(path)
        assert not os.path.exists(path)
        lock.release()

    def test_each_reason_has_its_own_fix(self, tmp_path: Path) -> None:
        def fix(path: Path) -> str:
            with pytest.raises(ConfigError) as caught:
                PathLock(str(path))
            assert str(caught.value).startswith("cannot ")
            return caught.value.fix

        assert fix(tmp_path / "no" / "psd") == f"make the folder {tmp_path}/no"
        (tmp_path / "file").touch()
        assert fix(tmp_path / "file" / "psd") == f"make {tmp_path}/file a folder, or choose another one"
        (tmp_path / "a.lock").symlink_to("elsewhere")
        assert fix(tmp_path / "a") == f"remove {tmp_path}/a.lock, a link that is not ours"
        (tmp_path / "b.lock").mkdir()
        assert fix(tmp_path / "b") == f"remove {tmp_path}/b.lock, a folder that is not ours"
        (tmp_path / "c").mkdir()
        assert fix(tmp_path / "c") == f"remove {tmp_path}/c, a folder that is not ours"
        assert not (tmp_path / "c.lock").exists()
        assert fix(tmp_path / ("d" * 300)) == "choose a shorter folder"

    def test_a_full_disk_is_no_mistake_in_the_settings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(RudraError, match="No space left") as caught:
            PathLock(str(tmp_path / "psd"))
        assert not isinstance(caught.value, ConfigError)  # a supervisor may try again
        assert caught.value.fix == f"make room on the disk of {tmp_path}"
        assert list(tmp_path.iterdir()) == []

    def test_never_two_owners(self, tmp_path: Path) -> None:
        path = str(tmp_path / "psd")
        inside = 0
        most = 0
        taken = 0
        mutex = threading.Lock()

        def work() -> None:
            nonlocal inside, most, taken
            for _ in range(200):
                try:
                    lock = PathLock(path)
                except AlreadyRunning:
                    continue
                with mutex:
                    inside += 1
                    taken += 1
                    most = max(most, inside)
                with mutex:
                    inside -= 1
                lock.release()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert taken > 0
        assert most == 1


def test_port_owner() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert port_owner(port) is None
        listening.listen()
        assert port_owner(port) == os.getpid()
