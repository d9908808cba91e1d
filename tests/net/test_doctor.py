"""The way to the head, and ports: what is there instead of psd, in words and with the fix."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rudra_zmq import __version__
from rudra_zmq.config import load_rudra
from rudra_zmq.config.host import RudraToml
from rudra_zmq.doctor import cluster, here
from rudra_zmq.doctor.findings import Finding
from rudra_zmq.errors import RefusedBySecurity
from rudra_zmq.net.client import RpcClient
from rudra_zmq.net.sockets import make_context
from rudra_zmq.wire.messages.control import HostRow, Hosts, ListHosts
from tests.conftest import PrivateHome
from tests.net.test_keys import CASES, Guarded, guarded  # noqa: F401  the fixture

NOW = 1e9


class Way:
    """To a head that says what it is told to say."""

    def __init__(self, address: str, answer: Hosts | Exception | None = None) -> None:
        self._address, self._answer = address, answer

    def address(self) -> str:
        return self._address

    @contextmanager
    def dial(self) -> Iterator[Way]:
        yield self

    def listing(self) -> Hosts:
        assert self._answer is not None, "it was dialled"
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        yield sock


def at(sock: socket.socket) -> str:
    return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


@contextmanager
def answering(sock: socket.socket, data: bytes) -> Iterator[None]:
    def serve() -> None:
        peer, _ = sock.accept()  # closed with it: the probe that only connects
        peer.close()
        peer, _ = sock.accept()
        peer.sendall(data)
        peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join(10)


def only(found: Iterator[Finding]) -> Finding:
    (one,) = found
    return one


def test_nobody_listens(listener: socket.socket) -> None:
    address = at(listener)
    listener.close()
    found = only(cluster.look(Way(address)))
    assert (found.id, found.where, found.status) == ("head-unreachable", address, 4)
    assert "from 127.0.0.1 (lo): refused: nobody listens" in found.text and "start psd there" in found.fix


def test_a_name_that_nobody_knows() -> None:
    found = only(cluster.look(Way("tcp://nohost.invalid:7733")))
    assert found.status == 4 and "name not found: nohost.invalid" in found.text and "correct the name" in found.fix


def test_packets_are_dropped(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    monkeypatch.setattr(cluster, "PROBE_S", 0.2)
    listener.listen(0)
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):  # the queue is full: the kernel answers nobody
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        found = only(cluster.look(Way(at(listener))))
    assert "no answer in 0.2 s (host down, or filtered)" in found.text and "firewalls" in found.fix


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "it says 'SSH-2.0-OpenSSH_9.2p1'"),
        (b"", "without a word"),
        (b"\xff" + bytes(9), "it says"),
    ],
)
def test_another_program_is_there(listener: socket.socket, data: bytes, words: str) -> None:
    with answering(listener, data):
        found = only(cluster.look(Way(at(listener))))
    assert (found.id, found.status) == ("head-other", 4)
    assert words in found.text and f"(PID {os.getpid()})" in found.text and "correct the port" in found.fix


def test_who_is_there_says_nothing(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    monkeypatch.setattr(cluster, "PROBE_S", 0.2)
    listener.listen(8)
    found = only(cluster.look(Way(at(listener))))
    assert "it says nothing in 0.2 s" in found.text and found.id == "head-other"


@pytest.fixture
def head() -> Iterator[str]:
    """The address of a socket that speaks ZeroMQ's protocol."""
    context = make_context("control")
    router = context.router("psd")
    yield router.bind_tcp("127.0.0.1", 0)
    router.close()
    context.close()


def test_it_refuses(head: str) -> None:
    found = only(cluster.look(Way(head, RefusedBySecurity("the token is another one", where=head, fix="see it"))))
    assert (found.id, found.status, found.fix) == ("head-security", 5, "see it")


def row(name: str, **more: object) -> HostRow:
    versions = {"rudra": __version__, "torch": "2.9.0", "python": "3.11.2"}
    values: dict[str, object] = {"slots": 1, "free": 1, "pid": 1, "last_seen": NOW, "versions": versions} | more
    return HostRow(name=name, **values)  # type: ignore[arg-type]


def looked(head: str, hosts: Hosts, clock: Callable[[], float] = lambda: NOW) -> list[tuple[str, str, str, int]]:
    return [(one.id, one.where, one.text, one.status) for one in cluster.look(Way(head, hosts), clock)]


def test_a_cluster_that_is_well(head: str) -> None:
    assert looked(head, Hosts(rows=[row("a"), row("b")], now=NOW, version=__version__)) == []
    assert looked(head, Hosts(rows=[row("a")])) == []  # a head that tells neither time nor version


def test_hosts_that_fail(head: str) -> None:
    rows = [row("a", silent=True, last_seen=NOW - 600), row("b", devices=["0", "1"], absent=["1"])]
    assert looked(head, Hosts(rows=rows, now=NOW)) == [
        ("host-silent", "host a", "its learnerd was not heard for 10 m", 7),
        ("host-gpu", "host b", "GPU 1 of its [host] devices is not there", 7),
    ]
    assert [one[::3] for one in looked(head, Hosts(rows=[], now=NOW))] == [("no-hosts", 7)]


def test_versions_that_differ(head: str) -> None:
    other = {"rudra": __version__, "torch": "2.8.1", "python": "3.11.9"}
    rows = [row("a"), row("b", versions=other), row("c", versions={"torch": "1"}, silent=True)]
    found = [one for one in looked(head, Hosts(rows=rows, version="9.9")) if one[0] == "versions"]
    assert [one[2] for one in found] == [
        "versions differ: torch 2.9.0 on a, 2.8.1 on b",
        f"rudra is 9.9 there and {__version__} here",
    ]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [(NOW - 10.0, "10.0 s behind"), (NOW + 14.0, "10.0 s ahead of"), (NOW - 1.9, ""), (NOW + 5.9, ""), (NOW + 2, "")],
)
def test_clocks_that_differ_by_more_than_the_round_trip_explains(head: str, theirs: float, words: str) -> None:
    ticks = iter((NOW, NOW + 4.0))  # the answer took 4 s: anything between is certain of nothing
    found = looked(head, Hosts(rows=[row("a")], now=theirs), lambda: next(ticks))
    assert [one[0] for one in found] == (["clock-skew"] if words else [])
    assert all(words in one[2] for one in found)


def configured(address: str, key: str = "psd.listen") -> RudraToml:
    return load_rudra([f"{key}={address}"]).config


def test_another_process_on_our_port(private_home: PrivateHome, listener: socket.socket) -> None:
    found = only(here.ports(configured(at(listener)), []))
    assert found.id == "port-taken" and f"is taken by PID {os.getpid()}" in found.text
    assert list(here.ports(configured(at(listener)), [os.getpid()])) == []
    port = listener.getsockname()[1]
    found = only(here.ports(configured(f'"{port}"', "metrics.listen"), []))
    assert f"port {port} of metrics.listen is taken by PID" in found.text


def test_a_process_of_another_user_on_our_port(
    private_home: PrivateHome, monkeypatch: pytest.MonkeyPatch, listener: socket.socket, tmp_path: Path
) -> None:
    monkeypatch.setattr(here, "port_owner", lambda _: None)
    listener.listen(8)
    found = only(here.ports(configured(at(listener)), [], tmp_path))
    assert found.id == "port-taken" and "another user's process" in found.text
    (tmp_path / "7").mkdir()
    monkeypatch.setattr(here, "is_daemon", lambda pid, name: (pid, name) == (7, "psd"))
    assert list(here.ports(configured(at(listener)), [], tmp_path)) == []  # it may be that psd, the system's
    listener.close()
    assert list(here.ports(configured("tcp://127.0.0.1:1"), [], tmp_path)) == []


@pytest.mark.parametrize("case", CASES)
def test_keys_that_do_not_fit(guarded: Guarded, case: str) -> None:  # noqa: F811
    curve, words, fix = CASES[case]

    class Keyed(Way):
        def listing(self) -> Hosts:
            with RpcClient(guarded.tcp, curve=curve) as client:
                return client.call(ListHosts(), 9.0, expect=Hosts)

    found = only(cluster.look(Keyed(guarded.tcp)))
    assert (found.id, found.status) == ("head-security", 5) and words in found.text and fix in found.fix
