"""Segments and the socket that hands them out: what can be written by whom, and that nobody can hold the loop up."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.errors import Rejected
from rudra_zmq.net.shm import MOST_ASKING, PAGE, FdAsker, FdServer, Offer, Segment
from rudra_zmq.wire.codec import encode_data
from rudra_zmq.wire.messages.data import Hello, Mapped, Ping, Segments
from tests.net.conftest import Net, until

HELLO = Hello(role="learner", job="ab12cd", token="t", rank=3, incarnation=1)
MESSAGE = Segments(slot_nbytes=4, slots=1, version_nbytes=4, versions=1, slots_nonce=1, versions_nonce=2)


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except (PermissionError, OSError):
        return True
    return False


def test_sealed_memory_is_written_by_its_owner_alone() -> None:
    owner = Segment.create("t", 2 * PAGE, sealed=True)
    fd = os.dup(owner.fd)
    reader = Segment.map(os.dup(fd), 2 * PAGE, writable=False)
    owner.memory[PAGE] = 9
    assert reader.memory[PAGE] == 9
    assert refuses(lambda: mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
    assert refuses(lambda: os.pwrite(fd, b"x", 0))
    assert refuses(lambda: os.ftruncate(fd, 0)) and refuses(lambda: os.ftruncate(fd, 3 * PAGE))
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert refuses(lambda: os.pwrite(again, b"x", 0))
    os.close(again)
    os.close(fd)
    owner.memory[PAGE] = 10
    assert reader.memory[PAGE] == 10
    owner.close()
    reader.close()


def test_slots_are_written_by_both_and_cannot_shrink() -> None:
    owner = Segment.create("t", 2 * PAGE, sealed=False)
    other = Segment.map(os.dup(owner.fd), 2 * PAGE, writable=True)
    other.memory[5] = 1
    assert owner.memory[5] == 1
    assert refuses(lambda: os.ftruncate(owner.fd, 0))
    with pytest.raises(OSError, match="not what was announced"):
        Segment.map(os.dup(owner.fd), 3 * PAGE, writable=True)
    owner.close()
    other.close()


def test_memory_that_its_owner_could_take_away_is_not_mapped() -> None:
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    with pytest.raises(OSError, match="not what was announced"):
        Segment.map(fd, PAGE, writable=False)


class Serving:
    """A server in a loop, a segment of each kind, what was asked and dropped."""

    def __init__(self, net: Net) -> None:
        self.loop = net.loop()
        self.path = net.path()
        self.asked: list[tuple[Hello, int]] = []
        self.drops: Counter[str] = Counter()
        self.mapped: list[int] = []
        self.slots = Segment.create("slots", 2 * PAGE, sealed=False)
        self.versions = Segment.create("versions", 2 * PAGE, sealed=True)
        self.server = FdServer(self.loop, self.path, self.ask, lambda reason: self.drops.update([reason]))

    def ask(self, hello: Hello, pid: int) -> Offer:
        self.asked.append((hello, pid))
        if hello.token != "t":
            raise Rejected("wrong token", fix="none")

        def confirm(mapped: Mapped) -> Mapped:
            self.mapped.append(mapped.nonce)
            return mapped

        return Offer(MESSAGE, (self.slots.fd, self.versions.fd), confirm)

    def plain(self, *packets: bytes) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(10)
        made.connect(self.path)
        for packet in packets:
            made.send(packet)
        return made

    def close(self) -> None:
        self.server.close()
        self.slots.close()
        self.versions.close()


@pytest.fixture
def serving(net: Net) -> Iterator[Serving]:
    made = Serving(net)
    yield made
    made.close()


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def conversation(path: str, hello: Hello = HELLO) -> list[bytes]:
    """What is in both segments after the nonces, as an asker sees it."""
    with FdAsker(path, 10) as asker:
        answer, fds = asker.ask(hello, descriptors=2)
        assert answer == MESSAGE and len(fds) == 2 and not any(map(os.get_inheritable, fds))
        found = [Segment.map(fd, 2 * PAGE, writable=i == 0) for i, fd in enumerate(fds)]
        echo, none = asker.ask(Mapped(nonce=77))
        assert echo == Mapped(nonce=77) and none == []
        return [bytes(s.memory[PAGE : PAGE + 3]) for s in found]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_both_descriptors_and_the_credentials(serving: Serving) -> None:
    serving.slots.memory[PAGE : PAGE + 3] = b"abc"
    serving.versions.memory[PAGE : PAGE + 3] = b"xyz"
    before = descriptors()
    thread, results = in_background(lambda: conversation(serving.path))
    until(serving.loop, lambda: not thread.is_alive())
    assert results == [[b"abc", b"xyz"]]
    assert serving.asked == [(HELLO, os.getpid())] and serving.mapped == [77]
    assert serving.server.asking == 0 and not serving.drops
    assert descriptors() == before


def test_a_refusal_is_told(serving: Serving) -> None:
    other = Hello(role="learner", job="ab12cd", token="guess", rank=3, incarnation=1)
    thread, results = in_background(lambda: conversation(serving.path, other))
    until(serving.loop, lambda: not thread.is_alive())
    (error,) = results
    assert isinstance(error, PermissionError) and error.strerror == "wrong token"
    assert serving.server.asking == 0


HELLO_BYTES = bytes(encode_data(HELLO)[0])


@pytest.mark.parametrize(
    ("packets", "reason"),
    [
        ([b"GET / HTTP/1.1"], "shm-garbage"),
        ([os.urandom(8000)], "shm-garbage"),
        ([HELLO_BYTES + b"x" * 20000], "shm-garbage"),  # cut by the reader
        ([bytes(encode_data(Ping())[0])], "shm-garbage"),
        ([bytes(encode_data(Mapped(nonce=1))[0])], "shm-garbage"),  # without a hello
        ([HELLO_BYTES, HELLO_BYTES], "shm-garbage"),
    ],
)
def test_nonsense_is_dropped_and_counted(serving: Serving, packets: list[bytes], reason: str) -> None:
    before = descriptors()
    with serving.plain(*packets):
        until(serving.loop, lambda: serving.drops)
    assert serving.drops == {reason: 1} and serving.server.asking == 0 and not serving.mapped
    assert descriptors() == before


def test_who_leaves_in_the_middle(serving: Serving) -> None:
    serving.plain(HELLO_BYTES).close()
    until(serving.loop, lambda: serving.drops)
    assert serving.drops == {"shm-left": 1} and not serving.mapped


def test_silent_ones_are_bounded_and_ended_and_an_honest_one_gets_through(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty that say nothing: sixteen are let in at a time, each for its deadline; the loop goes on meanwhile."""
    monkeypatch.setattr("rudra_zmq.net.shm.DEADLINE_S", 0.2)
    most, ticks = 0, 0

    def look() -> None:
        nonlocal most, ticks
        most = max(most, serving.server.asking)
        ticks += 1

    serving.loop.every(0.01, look)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(serving.plain())
        thread, results = in_background(lambda: conversation(serving.path))
        until(serving.loop, lambda: not thread.is_alive())
    assert results == [[b"\0\0\0"] * 2]
    assert most == MOST_ASKING and ticks > 20
    assert serving.drops["shm-slow"] >= 32


def test_an_asker_gives_up_in_time(net: Net, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FdAsker(str(tmp_path / "nobody"), 1)
    path = net.path()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(path)
        deaf.listen(1)
        began = time.monotonic()
        with pytest.raises(TimeoutError), FdAsker(path, 0.3) as asker:
            asker.ask(HELLO, descriptors=2)
        assert 0.2 < time.monotonic() - began < 5
    os.unlink(path)


@pytest.mark.skipif(os.getuid() != 0, reason="another uid can only be taken by root")
def test_another_user_reads_versions_and_writes_its_own_slots(serving: Serving) -> None:
    os.chmod(Path(serving.path).parent, 0o711)
    serving.versions.memory[PAGE : PAGE + 3] = b"xyz"
    child = os.fork()
    if not child:
        status = 1
        try:
            os.chdir(Path(serving.path).parent)  # what is above it is this user's own
            os.setgid(65534)
            os.setuid(65534)
            with FdAsker(Path(serving.path).name, 10) as asker:
                _, fds = asker.ask(HELLO, descriptors=2)
                slots = Segment.map(os.dup(fds[0]), 2 * PAGE, writable=True)
                slots.memory[PAGE] = 42
                versions = Segment.map(os.dup(fds[1]), 2 * PAGE, writable=False)
                asker.ask(Mapped(nonce=5))
            sealed = refuses(lambda: Segment.map(os.dup(fds[1]), 2 * PAGE, writable=True))
            sealed = sealed and refuses(lambda: os.pwrite(fds[1], b"x", PAGE))
            status = 0 if sealed and bytes(versions.memory[PAGE : PAGE + 3]) == b"xyz" else 2
        finally:
            os._exit(status)
    ended: list[int] = []

    def gone() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([status] if pid else [])
        return bool(pid)

    until(serving.loop, gone)
    assert ended == [0] and serving.slots.memory[PAGE] == 42
    assert serving.asked[0][1] == child
