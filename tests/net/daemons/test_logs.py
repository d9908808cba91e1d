"""Logs across real daemons: a reader whose connection is cut (S58), a learner that prints without end (R15), daemons' own."""

from __future__ import annotations

import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rudra_zmq.head.files import CUT, KEPT
from rudra_zmq.net.addresses import parse
from rudra_zmq.wire.messages import control as c
from tests.net.daemons.conftest import ROOT, Place, free_port, until
from tests.net.daemons.test_cluster import SLEEP, Cluster


class Relay:
    """A wire to a loopback port that can be cut (``closed``) or go silent (``stalled``), as lines do."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self.mode = "open"
        self.refused = 0  # connections that were closed at once
        self.taken = 0  # connections so far
        self._end = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end:
            if self.mode == "closed":
                self._drop()
            socks = [self._listener, *([] if self.mode == "stalled" else self._pairs)]
            for sock in select.select(socks, [], [], 0.02)[0]:
                if sock is self._listener:
                    self._accept()
                elif sock in self._pairs:
                    self._pass_on(sock)
        self._drop()
        self._listener.close()

    def _accept(self) -> None:
        near = self._listener.accept()[0]
        if self.mode == "closed":
            self.refused += 1
            near.close()
            return
        self.taken += 1
        far = socket.create_connection(("127.0.0.1", self._to))
        self._pairs |= {near: far, far: near}

    def _pass_on(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
            if data:
                self._pairs[sock].sendall(data)
                return
        except OSError:
            pass
        other = self._pairs.pop(sock)
        self._pairs.pop(other)
        sock.close()
        other.close()

    def _drop(self) -> None:
        for sock in self._pairs:
            sock.close()
        self._pairs.clear()

    def close(self) -> None:
        self._end = True
        self._thread.join()


class Shown:
    """What `rudra logs` prints, as it comes."""

    def __init__(self, place: Place, *args: str, port: int) -> None:
        env = place.env | {
            "RUDRA_HEAD_ADDRESS": f"tcp://127.0.0.1:{port}",
            "RUDRA_TOKEN_FILE": place.endpoint()["token_file"],
            "XDG_STATE_HOME": str(place.home / "cli"),
        }
        self.path = place.home / "shown"
        with open(self.path, "wb") as out:
            command = [
                sys.executable,
                "-c",
                "import sys; from rudra_zmq.cli.main import main; sys.exit(main())",
                "logs",
                *args,
            ]
            self.child = subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        place.children.append(self.child)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def numbers(self, rank: int) -> list[int]:
        found = [re.fullmatch(rf"{rank}[|] number ([0-9]+)", line) for line in self.lines()]
        return [int(m[1]) for m in found if m]


LINES = 3000
PHASES = f"""
for phase in range(4):
    while not os.path.exists(
        os.path.join(os.environ["HOME"], f"go-{{phase}}")
    ):
        time.sleep(0.02)
    for i in range(phase * {LINES}, (phase + 1) * {LINES}):
        print("number", i)
    sys.stdout.flush()
raise SystemExit(3)
"""


@pytest.fixture
def relayed(place: Place) -> Iterator[tuple[Cluster, Relay]]:
    port = free_port()
    cluster = Cluster(place, "--listen", f"tcp://127.0.0.1:{port}")
    assert parse(place.endpoint()["address"]).port == port
    relay = Relay(port)
    yield cluster, relay
    relay.close()


def test_a_reader_whose_connection_is_cut_loses_and_doubles_nothing(relayed: tuple[Cluster, Relay]) -> None:
    cluster, relay = relayed
    place = cluster.place
    job = cluster.submit(PHASES)
    cluster.up()
    shown = Shown(place, "-f", job, port=relay.port)

    def go(phase: int) -> None:
        (place.home / f"go-{phase}").touch()

    def written(phases: int) -> bool:
        last = f"number {phases * LINES - 1}\n".encode()
        outs = [place.state / "jobs" / job / "logs" / f"learner-{rank}.out" for rank in (0, 1)]
        return all(last in out.read_bytes() for out in outs)

    def seen(phases: int) -> bool:
        return all(shown.numbers(rank)[-1:] == [phases * LINES - 1] for rank in (0, 1))

    go(0)
    until(lambda: seen(1), "the first lines")
    relay.mode = "closed"
    go(1)
    until(lambda: written(2) and relay.refused > 5, "what is written meanwhile")
    assert not seen(2)
    relay.mode = "open"
    until(lambda: seen(2), "the lines of the cut")
    before, relay.mode = relay.taken, "stalled"
    go(2)
    until(lambda: written(3) and relay.taken > before, "a new connection instead of the silent one", 20.0)
    assert not seen(3)
    relay.mode = "open"
    until(lambda: seen(3), "the lines of the silence")
    go(3)
    assert shown.child.wait(30) == 8, shown.lines()[-5:]
    for rank in (0, 1):
        assert shown.numbers(rank) == list(range(4 * LINES))
    assert shown.lines()[-1] == f"job {job} is FAILED"


def test_a_learner_that_prints_without_end_keeps_head_and_tail(cluster: Cluster) -> None:
    """R15, 300 MB at once from two learners: a psd and a learnerd that answer meanwhile, 4 MiB on disk, the cut said."""
    count = 3_000_000
    body = (
        f"block = ''.join('%049d\\n' % i for i in range(1000))\nprint('first', flush=True)\n"
        f"for _ in range({count} // 1000): sys.stdout.write(block)\nprint('last', flush=True)\n"
    )
    job = cluster.submit(body + SLEEP)
    out = cluster.place.state / "jobs" / job / "logs" / "learner-1.out"
    largest = 0

    def done() -> bool:
        nonlocal largest
        largest = max(largest, out.stat().st_size if out.exists() else 0)
        assert [h.free for h in cluster.place.hosts()] == [2]
        return out.exists() and out.read_bytes().endswith(b"last\n")

    until(done, "the last line", 60.0)
    data = out.read_bytes()
    (mark,) = CUT.finditer(data)
    assert data.startswith(b"up 1 1\nfirst\n" + b"0" * 49) and mark.start() == KEPT and largest <= 4 << 20
    assert len(data) - len(mark[0]) + int(mark[1]) == len("up 1 1\nfirst\nlast\n") + 50 * count
    assert "silent" not in cluster.story()


@pytest.fixture
def cluster(place: Place) -> Cluster:
    return Cluster(place)


def test_a_daemons_own_log(place: Place) -> None:
    port = free_port()
    place.psd("--listen", f"tcp://127.0.0.1:{port}")
    first = place.learnerd("--name", "b")
    told = {}
    for args in (["--daemon"], ["--host", "b", "--daemon"], ["--host", "x", "--daemon"], ["--host", "b"]):
        shown = Shown(place, *args, port=port)
        told[tuple(args)] = (shown.child.wait(20), "\n".join(shown.lines()))
    assert told["--daemon",][0] == 0 and "psd: " in told["--daemon",][1] and "psd runs" in told["--daemon",][1]
    assert (
        "b: " in told["--host", "b", "--daemon"][1]
        and f"learnerd runs pid={first.pid}" in told["--host", "b", "--daemon"][1]
    )
    assert told["--host", "x", "--daemon"][0] == 3 and "Fix: name one that has: b" in told["--host", "x", "--daemon"][1]
    assert told["--host", "b"][0] == 2

    shown = Shown(place, "--host", "b", "--daemon", "-f", port=port)
    until(lambda: "learnerd runs" in "\n".join(shown.lines()), "the log")
    first.terminate()
    first.wait(20)
    second = place.learnerd("--name", "b")
    until(lambda: f"learnerd runs pid={second.pid}" in "\n".join(shown.lines()), "the next one's log")
    assert "was started anew" in "\n".join(shown.lines())
    shown.child.kill()
    shown.child.wait()
    assert place.client().call(c.ReadLog(host="b", offset=10**6, limit=10), expect=c.LogData).data == b""
