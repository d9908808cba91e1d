"""A node of the rig and pusher processes, over shared memory or tcp, for the soak tests; what /proc says of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rudra_zmq.net.auth import KeyPair
from rudra_zmq.wire.messages import control as c
from tests.long.pusher import Board
from tests.net.node.rig import JOB, TOKEN, Rig, wait_for

ROOT = Path(__file__).parents[2]


class Sample(NamedTuple):
    """Of the node: bytes, open descriptors, minor page faults so far."""

    rss: int
    vm: int
    descriptors: int
    faults: int


class Crew:
    """``data``: shm or tcp. Learners start with the block and are gone at its end."""

    def __init__(
        self, rig: Rig, ranks: int, data: str, *, tensors: list[int], samples: int, seconds: float = 0.0,
        minibatches: list[int] | None = None, fill: bool = False,
    ) -> None:  # fmt: skip
        self.rig, self.ranks = rig, ranks
        folder = rig.folder.parent
        if data == "tcp":
            rig.start(bind={"tcp": [20000, 60000]})
        else:
            rig.start()
        hello = [m for m in rig.psd.all(c.NodeHello) if m.generation == rig.generation][-1]
        (folder / "node.json").write_text(
            json.dumps({"addresses": hello.addresses, "generation": rig.generation, "key": hello.key})
        )
        self.board = Board(folder / "board", ranks)
        self._say = {
            "folder": str(folder), "board": str(folder / "board"), "ranks": ranks, "tensors": tensors, "fill": fill,
            "samples": samples, "spec": {"job": JOB, "token": TOKEN, "toml": rig.toml, "node_file": str(folder / "node.json")},
        }  # fmt: skip
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(ranks):
            self.board.takes(rank, seconds)
            self.start(rank, 1, minibatches[rank] if minibatches else 0)

    def start(self, rank: int, incarnation: int, minibatch: int = 0) -> None:
        key = os.memfd_create("key")  # a pair of its own; of no use where nothing is encrypted
        os.write(key, KeyPair.new().secret.encode("ascii"))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.long.pusher"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[key],
        )  # fmt: skip
        assert process.stdin is not None
        spec = {**self._say["spec"], "incarnation": incarnation, "key_fd": key}  # type: ignore[dict-item]
        process.stdin.write(json.dumps({**self._say, "rank": rank, "minibatch": minibatch, "spec": spec}))
        process.stdin.close()
        os.close(key)
        self.processes.append(process)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(10)
            with contextlib.suppress(OSError):
                if process.stdout is not None:
                    process.stdout.close()

    def results(self, seconds: float) -> list[dict[str, Any]]:
        """What each said at its end."""
        end = time.monotonic() + seconds
        found = []
        for process in self.processes:
            process.wait(max(0.1, end - time.monotonic()))
            assert process.stdout is not None and process.returncode == 0, self.rig.log()[-2000:]
            found.append(json.loads(process.stdout.read()))
        return found

    @property
    def gradients(self) -> list[int]:
        return [self.board.row(rank)[0] for rank in range(self.ranks)]

    @property
    def samples(self) -> list[int]:
        return [self.board.row(rank)[1] for rank in range(self.ranks)]

    def running(self) -> None:
        """All have made some gradients."""
        wait_for("first gradients", lambda: min(self.gradients) > 3, 120)

    def rates(self, seconds: float) -> list[float]:
        """Samples per second of each, over so long."""
        before, began = self.samples, time.monotonic()
        time.sleep(seconds)  # this is the measurement
        after, took = self.samples, time.monotonic() - began
        return [(b - a) / took for a, b in zip(before, after, strict=True)]

    def sample(self) -> Sample:
        assert self.rig.process is not None
        return sample(self.rig.process.pid)

    def until(self, reached: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, self.gradients
            assert all(p.poll() in (None, 0) for p in self.processes)
            time.sleep(0.05)


def sample(pid: int) -> Sample:
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    page = os.sysconf("SC_PAGE_SIZE")
    return Sample(int(pages[1]) * page, int(pages[0]) * page, len(os.listdir(f"/proc/{pid}/fd")), int(stat[7]))
