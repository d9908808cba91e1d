"""Other systems as contenders: their processes, started, led and ended.

Owns: the processes of a peer and their environment. Must not know: torch; what a round is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace

from rudra_zmq.bench.contender import Contender
from rudra_zmq.bench.control import Control, Order
from rudra_zmq.bench.place import Place
from rudra_zmq.bench.product import undisturbed
from rudra_zmq.bench.timing import Block
from rudra_zmq.errors import RudraError, UsageError

LABELS = {
    "all-reduce": "gloo all_reduce + fused step",
    "send-recv": "gloo send/recv",
    "rpc": "torch rpc",
    "sockets": "raw sockets",
    "ray": "Ray",
    "plain": "plain PyTorch loop",
    "ddp": "torch DDP gloo",
}
WITH_SERVER = ("send-recv", "rpc", "sockets")
ALONE = ("ray", "plain")
CONSISTENT_ANYWAY = ("ray",)

START_S = 180.0
BLOCK_S = 300.0
END_S = 5.0
BEAT_S = 0.01

# glibc's malloc as this program has it: memory once touched is kept.
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}


def need(module: str, install: str) -> None:
    """UsageError, with the fix, where a module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{module} is not installed", where="rudra bench", fix=f"pip install {install}")


class Peer(Contender):
    """``with Peer("all-reduce", place) as peer: peer.block(10, 1, False)``. RudraError, one line, where it cannot be.

    ``place`` has what is to be done; where and who is added here.
    """

    def __init__(self, kind: str, place: Place) -> None:
        super().__init__()
        self.kind = kind
        self.label = LABELS[kind]
        self._place = place
        self._processes: list[subprocess.Popen[bytes]] = []

    def _start(self) -> None:
        learners = self._place.learners
        count = 1 if self.kind in ALONE else learners + (self.kind in WITH_SERVER)
        with Control(self._folder) as control, open(self._folder / "out", "wb") as out:
            for index in range(count):
                place = replace(
                    self._place,
                    control=str(control.path),
                    folder=str(self._folder),
                    index=index,
                    parent=os.getpid(),
                )
                command = [sys.executable, "-m", "rudra_zmq.bench.peer", self.kind, json.dumps(asdict(place))]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment(os.environ),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,  # Ctrl-C is the benchmark's to handle
                    )
                )
            self._group = control.gather(self.kind, count, self._check, START_S)

    def _check(self) -> None:
        if any(_ended(process) for process in self._processes):
            said = (self._folder / "out").read_text(errors="replace").strip().splitlines()
            raise RudraError(f"{self.label} ended: {said[-1] if said else 'it said nothing'}", where="rudra bench")

    def block(self, rounds: int, threads: int = 1, consistent: bool = False) -> Block:
        """So many rounds."""
        answers = self._do(rounds, threads, consistent)
        if self.kind in WITH_SERVER:
            answers = [*answers[1:], answers[0]]  # the first one's rounds are what counts: a learner's
        return Block.of(answers, updates=rounds, in_step=True)

    def steps(self, rounds: int) -> Block:
        """So many steps of each process. The seconds are those of a step of all of them, pauses and all."""
        return Block.of(self._do(rounds, 1, False), updates=rounds, in_step=False)

    def _do(self, rounds: int, threads: int, consistent: bool) -> list[Order]:
        assert self._group is not None
        return self._group.do({"rounds": rounds, "threads": threads, "consistent": consistent}, BLOCK_S)

    def close(self) -> None:
        """End its processes; nothing of it is left."""
        if self._group is not None:
            self._group.close()
        with undisturbed():
            end = time.monotonic() + (END_S if self._group is not None else 0.0)
            for process in self._processes:
                _end(process, end)
        self._temporary.close()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without reaping it."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait for a process until the deadline; then kill it, and whatever it has left in its process group."""
    while not _ended(process) and time.monotonic() < deadline:
        time.sleep(BEAT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # nobody else can have its number before it is reaped
    process.wait()


def environment(source: Mapping[str, str]) -> dict[str, str]:
    """Of a peer's process: loopback, and malloc tuned."""
    return {**source, **TUNED, **LOOPBACK}
