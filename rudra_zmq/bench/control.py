"""How a benchmark leads processes that do rounds: orders and answers, a JSON object a line, over a Unix socket.

Owns: both ends of it, deadlines, and what a block of rounds cost the process that did them. Must not know: what a
round is.

An order is {"rounds": number, ...}; the answer {"start", "end", "times", "cpu", "faults"}: two times of the clock that
all processes share, the seconds of each round, the CPU seconds and page faults of all of them. An error is one line
under "error". The end of the connection is the end of the work.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rudra_zmq.errors import RudraError

HELLO_S = 10.0
SLICE_S = 0.2
IDLE_S = 3600.0
"""The longest that a member waits for its next order: others have their turn."""

Order = dict[str, Any]
Rounds = Callable[[Order], "list[float]"]


class _Lines:
    """Objects over a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, value: Mapping[str, Any]) -> None:
        self._sock.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, seconds: float) -> Order | None:
        """None past the deadline; EOFError where the other end is gone."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._sock], [], [], left)[0]:
                return None
            try:
                data = self._sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        value = json.loads(line)
        if not isinstance(value, dict):
            raise EOFError
        return value

    def close(self) -> None:
        self._sock.close()


class Control:
    """Where members come to; ``with`` closes it. ``path`` is what they are to be told."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "c"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(64)

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def gather(self, name: str, count: int, check: Callable[[], None], seconds: float) -> Group:
        """Wait for members 0 to count - 1 of a group. ``check`` raises where that is in vain."""
        coming: list[_Lines] = []
        found: dict[int, tuple[_Lines, Order]] = {}
        end = time.monotonic() + seconds
        try:
            while len(found) < count:
                ready = _readable([self._listener, *coming])
                if self._listener in ready:
                    coming.append(_Lines(self._listener.accept()[0]))
                for lines in [lines for lines in coming if lines in ready]:
                    hello = _hello(lines, name)
                    found[int(hello["index"])] = (lines, hello)
                    coming.remove(lines)
                check()
                if time.monotonic() > end:
                    what = f"{name}: {len(found)} of {count} processes were ready after {seconds:.0f} s"
                    raise RudraError(what, where="rudra bench", fix="try again on a machine that is less busy")
        except BaseException:
            for lines in [*coming, *(lines for lines, _ in found.values())]:
                lines.close()
            raise
        for lines in coming:
            lines.close()
        members = [found[i] for i in range(count)]
        return Group(name, [lines for lines, _ in members], check, [facts for _, facts in members])


def _readable(sources: Sequence[Any]) -> Sequence[Any]:
    """Those that have something to read, after a moment at most."""
    return select.select(sources, [], [], SLICE_S)[0]


def _hello(lines: _Lines, name: str) -> Order:
    """What a member says first. RudraError where that is why it cannot be one."""
    try:
        hello = lines.receive(HELLO_S)
    except EOFError:
        hello = None
    if hello is None:
        raise RudraError(f"{name}: a process ended before it was ready", where="rudra bench", fix="try again")
    if "error" in hello:
        raise RudraError(f"{name}: {hello['error']}")
    return hello


class Group:
    """The members that do rounds together. ``facts``: what each of them said of itself."""

    def __init__(self, name: str, members: Sequence[_Lines], check: Callable[[], None], facts: Sequence[Order]) -> None:
        self.facts = facts
        self._name = name
        self._members = members
        self._check = check

    def do(self, order: Mapping[str, Any], seconds: float) -> list[Order]:
        """Give all of them an order and wait for the answers, in the order of the members. RudraError otherwise."""
        for lines in self._members:
            try:
                lines.send(order)
            except OSError:
                raise self._lost() from None
        end = time.monotonic() + seconds
        return [self._answer(lines, end, seconds) for lines in self._members]

    def _answer(self, lines: _Lines, end: float, seconds: float) -> Order:
        while True:
            try:
                answer = lines.receive(SLICE_S)
            except EOFError:
                raise self._lost() from None
            if answer is not None and "error" in answer:
                raise RudraError(f"{self._name}: {answer['error']}")
            if answer is not None:
                return answer
            self._check()
            if time.monotonic() > end:
                what = f"{self._name}: no answer within {seconds:.0f} s"
                raise RudraError(what, where="rudra bench", fix="choose a smaller --size, or fewer --learners")

    def _lost(self) -> RudraError:
        self._check()
        return RudraError(f"{self._name}: a process ended", where="rudra bench", fix="see what it wrote above")

    def close(self) -> None:
        """End their work."""
        for lines in self._members:
            lines.close()


# ---- the other end


class Orders:
    """A member's end. Connects at once; `ready` says hello."""

    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(HELLO_S)
        self._sock.connect(path)
        self._sock.settimeout(None)
        self._lines = _Lines(self._sock)

    def ready(self, index: int, **facts: Any) -> None:
        """This member can begin."""
        self._lines.send({"index": index, "pid": os.getpid(), **facts})

    def fail(self, text: str) -> None:
        """One line, for the person who waits."""
        self._lines.send({"error": " ".join(text.split())})

    def work(self, rounds: Rounds) -> None:
        """Carry out orders until the other end is gone. ``rounds`` returns the seconds of each round."""
        while True:
            try:
                order = self._lines.receive(IDLE_S)
            except EOFError:
                return
            if order is None:
                return
            before, start = usage(), time.perf_counter()
            try:
                times = rounds(order)
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}" if not isinstance(error, RudraError) else str(error))
                raise
            end, after = time.perf_counter(), usage()
            self._lines.send(
                {
                    "start": start,
                    "end": end,
                    "times": times,
                    "cpu": after[0] - before[0],
                    "faults": after[1] - before[1],
                }
            )


def usage() -> tuple[float, int]:
    """CPU seconds and page faults of this process, all threads."""
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime, now.ru_minflt + now.ru_majflt


def usage_of(pid: int) -> tuple[float, int]:
    """The same of another process. RudraError where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        # The clock of a process's CPU time, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime(~pid << 3 | 2), int(fields[7]) + int(fields[9])
    except OSError:
        raise RudraError(f"process {pid} has ended", where="rudra bench") from None


def stamps(count: int, work: Callable[[], object]) -> list[float]:
    """Do something so many times; the seconds of each."""
    times = []
    before = time.perf_counter()
    for _ in range(count):
        work()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return times
