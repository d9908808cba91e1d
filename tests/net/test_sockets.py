"""Sockets: options, owner, full queues, vanished peers, binds that collide, and the end of a context."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from rudra_zmq.errors import AlreadyRunning, ConfigError
from rudra_zmq.net import sockets
from rudra_zmq.net.addresses import MAX_PATH
from rudra_zmq.net.sockets import MAX_FRAMES, OPTIONS, PeerGone, Plane, Router, make_context
from rudra_zmq.wire.codec import MAX_CONTROL, MAX_HEADER
from rudra_zmq.wire.seal import OVERHEAD
from tests.net.conftest import PATIENCE, Net, wait_for


def arrived(router: Router) -> tuple[bytes, list[bytes]]:
    assert router.wait(PATIENCE)
    received = router.recv()
    assert received is not None
    return received[0], [bytes(frame) for frame in received[1]]


@pytest.mark.parametrize("plane", ["control", "data"])
def test_the_table_is_in_force(net: Net, plane: Plane) -> None:
    router, address = net.bound("tcp", plane)
    dealer = net.dealer(address, plane)
    write_only = {zmq.ROUTER_MANDATORY, zmq.ROUTER_HANDOVER}
    for option, control, data, which, _ in OPTIONS:
        for sock, role in ((router, "router"), (dealer, "dealer")):
            if which in ("both", role) and option not in write_only:
                assert sock.raw.getsockopt(option) == (control if plane == "control" else data), option


def test_messages_both_ways(net: Net, kind: str) -> None:
    router, address = net.bound(kind)
    dealer = net.dealer(address)
    assert dealer.send([b"a", b"b"])
    peer, frames = arrived(router)
    assert (peer, frames) == (dealer.identity, [b"a", b"b"])
    assert router.send(peer, [b"c", b"d" * 100_000], copy=False)
    assert dealer.wait(PATIENCE)
    got = dealer.recv()
    assert got is not None and [bytes(frame) for frame in got] == [b"c", b"d" * 100_000]
    assert dealer.recv() is None
    assert router.recv() is None


def test_identities_are_unique(net: Net) -> None:
    _, address = net.bound()
    identities = {net.dealer(address).identity for _ in range(20)}
    assert len(identities) == 20
    assert all(len(identity) <= 255 and not identity.startswith(b"\0") for identity in identities)


def test_a_long_message_is_not_kept(net: Net) -> None:
    router, address = net.bound()
    net.dealer(address).send([b"x"] * 1000)
    _, frames = arrived(router)
    assert MAX_FRAMES < len(frames) <= MAX_FRAMES + 1
    assert router.recv() is None  # the rest of it is no message of its own


@pytest.mark.parametrize(("plane", "limit"), [("control", MAX_CONTROL), ("data", MAX_HEADER + OVERHEAD)])
def test_who_sends_too_much_is_disconnected(net: Net, kind: str, plane: Plane, limit: int) -> None:
    router, address = net.bound(kind, plane)
    dealer = net.dealer(address, plane)
    assert dealer.send([bytes(limit)])
    assert len(arrived(router)[1][0]) == limit
    assert dealer.send([bytes(limit + 1)])
    wait_for(lambda: not dealer.writable())
    assert router.recv() is None


def test_unknown_and_vanished_peers(net: Net, kind: str) -> None:
    router, address = net.bound(kind)
    with pytest.raises(PeerGone):
        router.send(b"nobody", [b"x"])
    dealer = net.dealer(address)
    dealer.send([b"x"])
    peer, _ = arrived(router)
    dealer.close()

    def gone() -> bool:
        try:
            router.send(peer, [b"x"])
        except PeerGone:
            return True
        return False

    wait_for(gone)


def test_a_lost_connection_is_seen_and_never_comes_back(net: Net, kind: str) -> None:
    router, address = net.bound(kind)
    dealer = net.dealer(address)
    router.close()
    wait_for(lambda: not dealer.writable())
    assert dealer.send([b"x"]) is False
    again = net.router()
    if kind == "ipc":
        again.bind_ipc(address.removeprefix("ipc://"))
    else:
        again.bind_tcp("127.0.0.1", int(address.rsplit(":", 1)[1]))
    fresh = net.dealer(address)
    assert fresh.writable()
    assert not dealer.writable()
    assert dealer.send([b"x"]) is False


def test_a_message_to_nobody_is_refused_not_queued(net: Net) -> None:
    dealer = net.dealer(f"ipc://{net.path()}", connected=False)
    assert dealer.wait_connected(0.05) is False
    assert dealer.send([b"x", b"y"]) is False


def test_the_last_words_of_a_dealer_arrive(net: Net, kind: str) -> None:
    router, address = net.bound(kind, "data")
    dealer = net.dealer(address, "data")
    for i in range(5):
        dealer.send([b"%d" % i])
    dealer.close(linger=2.0)
    assert [arrived(router)[1] for _ in range(5)] == [[b"%d" % i] for i in range(5)]


STOPPED_READER = """
import sys, time
from rudra_zmq.net.sockets import make_context
dealer = make_context("data").dealer(sys.argv[1], "reader")
dealer.wait_connected(10.0)
dealer.send([b"hello"])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_stopped_reader_costs_a_bounded_queue_and_no_time(net: Net, kind: str) -> None:
    router, address = net.bound(kind, "data")
    reader = subprocess.Popen(
        [sys.executable, "-c", STOPPED_READER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with reader:
        try:
            peer, _ = arrived(router)
            assert reader.stdout is not None and reader.stdout.readline() == b"ready\n"
            reader.send_signal(signal.SIGSTOP)
            slowest = 0.0
            sent = 0
            body = bytes(10_000)
            for _ in range(3000):
                begun = time.perf_counter()
                sent += router.send(peer, [body])
                slowest = max(slowest, time.perf_counter() - begun)
            # Our queue and the kernel's buffers (a few MB on loopback, which may grow meanwhile), and then no more.
            assert 256 <= sent < 3000
            assert slowest < 1.0
            healthy = net.dealer(address, "data")
            healthy.send([b"hello"])
            other, _ = arrived(router)
            assert router.send(other, [b"welcome"])
            assert healthy.wait(PATIENCE)
        finally:
            reader.kill()  # or the block would wait for it


def test_200_connects_leave_no_descriptor_open(net: Net, kind: str) -> None:
    router, address = net.bound(kind)

    def visit() -> None:
        dealer = net.context("control").dealer(address, "visitor")
        assert dealer.wait_connected(PATIENCE)
        assert dealer.send([b"hello"])
        arrived(router)
        dealer.close(0.0)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    for _ in range(5):
        visit()
    before = descriptors()
    for _ in range(200):
        visit()
    wait_for(lambda: descriptors() <= before)


MEASURE = """
import resource, sys
from rudra_zmq.net.sockets import make_context
context = make_context(sys.argv[1])
size = 40_000_000
sum(len(bytearray(size)) for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
sum(len(bytearray(size)) for _ in range(10))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
context.close()
"""


def test_big_buffers_stay_in_the_process_of_the_data_plane_alone() -> None:
    """A fresh buffer faults once per page (above 32 MiB always: below, glibc adapts by itself)."""

    def faults(plane: str) -> int:
        done = subprocess.run([sys.executable, "-c", MEASURE, plane], stdout=subprocess.PIPE, check=True, timeout=60)
        return int(done.stdout)

    pages = 10 * 40_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert faults("data") < pages / 100
    assert faults("control") > pages / 2


class TestBind:
    def test_the_longest_path(self, net: Net) -> None:
        path = str(net.folder / "x")
        path += "x" * (MAX_PATH - len(path))
        router = net.router()
        net.dealer(router.bind_ipc(path)).send([b"hello"])
        assert arrived(router)[1] == [b"hello"]

    def test_a_second_bind_of_a_path_is_refused_and_the_first_goes_on(self, net: Net) -> None:
        path = net.path()
        router = net.router()
        address = router.bind_ipc(path)
        assert os.stat(path).st_mode & 0o777 == 0o600
        with pytest.raises(AlreadyRunning, match=f"PID {os.getpid()}"):
            net.router().bind_ipc(path)
        net.dealer(address).send([b"hello"])
        assert arrived(router)[1] == [b"hello"]
        router.close()
        assert not Path(path).exists()
        net.router().bind_ipc(path)

    def test_a_folder_that_is_not_there(self, net: Net) -> None:
        with pytest.raises(ConfigError, match=r"No such file or directory .*make the folder"):
            net.router().bind_ipc(f"{net.path()}/deeper/s")

    def test_the_first_free_port_of_a_range(self, net: Net) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(AlreadyRunning, match=f"held by PID {os.getpid()} "):
                net.router().bind_tcp("127.0.0.1", port)
            bound = net.router().bind_tcp("127.0.0.1", port, min(65535, port + 50))
            assert port < int(bound.rsplit(":", 1)[1]) <= port + 50

    def test_an_address_of_another_machine(self, net: Net) -> None:
        with pytest.raises(ConfigError, match="address of this machine"):
            net.router().bind_tcp("192.0.2.1", 7740)


def test_another_thread_is_told_so_before_libzmq_sees_it(net: Net) -> None:
    router, address = net.bound()
    dealer = net.dealer(address)
    errors: list[BaseException] = []

    def work() -> None:
        for call in (router.recv, lambda: dealer.send([b"x"]), lambda: dealer.wait(0.0), dealer.close):
            try:
                call()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 4
    assert router.recv() is None
    assert dealer.send([b"mine"])
    assert arrived(router)[1] == [b"mine"]


def test_a_context_that_does_not_end_names_the_open_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, object]] = []
    monkeypatch.setattr(sockets.journal, "error", lambda sentence, **pairs: lines.append(pairs))
    context = make_context("control")
    forgotten = context.router("forgotten")
    assert context.close(0.05) is False
    assert lines[0]["open_sockets"] == "forgotten"
    forgotten.close()


def test_a_forced_end_has_status_70(tmp_path: Path) -> None:
    code = (
        "from rudra_zmq.net.sockets import make_context\n"
        "c = make_context('control'); r = c.router('forgotten'); c.close(0.05, exit_if_stuck=True)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 70
