"""Supervision of real, tiny processes: how they end, what they print, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rudra_zmq.daemons.output import OutputFile, last_words
from rudra_zmq.daemons.spawn import Child, Supervisor
from rudra_zmq.net.loop import Loop

ENV = {"PATH": os.defpath, "PYTHONUNBUFFERED": "1"}


class Bench:
    """A loop with a supervisor; ``until`` turns it."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.supervisor = Supervisor(self.loop)
        self.loop.on_signal(signal.SIGCHLD, self.supervisor.reap)
        self.ended: list[Child] = []

    def spawn(self, code: str, **kw: object) -> Child:
        return self.supervisor.spawn(
            [sys.executable, "-c", code],
            env=ENV,
            cwd="/",
            on_exit=self.ended.append,
            **kw,  # type: ignore[arg-type]
        )

    def until(self, done: Callable[[], object], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "it did not happen in time"
            self.loop.turn(0.2)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.supervisor.kill_all()
    made.until(lambda: not len(made.supervisor))
    made.loop.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_traceback_and_its_status(bench: Bench, tmp_path: Path) -> None:
    child = bench.spawn("print('hello'); raise ValueError('boom')", output=OutputFile(tmp_path / "o"))
    bench.until(lambda: bench.ended)
    assert bench.ended == [child] and child.returncode == 1
    assert last_words(child.tail) == "ValueError: boom"
    assert (tmp_path / "o").read_text().startswith("hello\nTraceback")
    assert not len(bench.supervisor)


def test_a_signal_is_told_as_such(bench: Bench, tmp_path: Path) -> None:
    child = bench.spawn("import os; os.kill(os.getpid(), 11)", output=OutputFile(tmp_path / "o"))
    bench.until(lambda: bench.ended)
    assert child.returncode == -signal.SIGSEGV and not child.killed


def test_stdin_is_given_whole_and_ends(bench: Bench, tmp_path: Path) -> None:
    data = b"x" * 300_000
    child = bench.spawn("import sys; print(len(sys.stdin.read()))", stdin=data, output=OutputFile(tmp_path / "o"))
    bench.until(lambda: bench.ended)
    assert child.tail == b"300000\n"


def test_without_input_stdin_is_empty(bench: Bench, tmp_path: Path) -> None:
    child = bench.spawn("import sys; print(repr(sys.stdin.read()))", output=OutputFile(tmp_path / "o"))
    bench.until(lambda: bench.ended)
    assert child.tail == b"''\n"


def test_a_log_file_takes_stderr_straight(bench: Bench, tmp_path: Path) -> None:
    bench.spawn("import sys; sys.stderr.write('words\\n')", log=tmp_path / "node.log")
    bench.until(lambda: bench.ended)
    assert (tmp_path / "node.log").read_text() == "words\n"


def test_a_flood_neither_blocks_the_loop_nor_fills_the_disk(bench: Bench, tmp_path: Path) -> None:
    code = "import os\nb = b'y' * 65535 + b'\\n'\nfor _ in range(1600): os.write(1, b)\nos.write(1, b'the end\\n')"
    late: list[float] = []
    last = [time.monotonic()]

    def beat() -> None:
        now = time.monotonic()
        late.append(now - last[0])
        last[0] = now

    bench.loop.every(0.02, beat)
    child = bench.spawn(code, output=OutputFile(tmp_path / "o"))
    bench.until(lambda: bench.ended, 60.0)
    assert child.returncode == 0
    assert (tmp_path / "o").stat().st_size <= 4 << 20
    text = (tmp_path / "o").read_bytes()
    assert b"bytes of output cut here" in text and text.endswith(b"the end\n")
    assert max(late) < 1.0


def test_term_first_and_kill_for_what_does_not_listen(bench: Bench, tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    child = bench.spawn(deaf, output=OutputFile(tmp_path / "o"))
    bench.until(lambda: (tmp_path / "o").read_bytes() == b"up\n")
    began = time.monotonic()
    bench.supervisor.stop(child, 0.3)
    bench.supervisor.stop(child, 60.0)  # a later deadline does not move an earlier one
    bench.until(lambda: bench.ended)
    assert child.returncode == -signal.SIGKILL and child.killed
    assert 0.25 < time.monotonic() - began < 5.0


def test_term_is_enough_for_what_listens(bench: Bench, tmp_path: Path) -> None:
    kind = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('up', flush=True)\ntime.sleep(60)"
    )
    child = bench.spawn(kind, output=OutputFile(tmp_path / "o"))
    bench.until(lambda: (tmp_path / "o").read_bytes() == b"up\n")
    bench.supervisor.stop(child, 30.0)
    bench.until(lambda: bench.ended)
    assert child.returncode == 0 and not child.killed


def test_workers_go_with_their_leader(bench: Bench, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "w = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(w.pid, flush=True)\n"
        "raise SystemExit(3)"
    )
    child = bench.spawn(code, output=OutputFile(tmp_path / "o"))
    bench.until(lambda: bench.ended)
    assert child.returncode == 3
    worker = int(child.tail)
    bench.until(lambda: not alive(worker), 5.0)


def test_a_worker_that_left_the_group_does_not_hold_us_up(bench: Bench, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "w = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'], start_new_session=True)\n"
        "print(w.pid, flush=True)"
    )
    child = bench.spawn(code, output=OutputFile(tmp_path / "o"))
    bench.until(lambda: bench.ended, 10.0)
    os.kill(int(child.tail), signal.SIGKILL)


def test_what_cannot_be_started_raises_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for argv, cwd in (["/no/such/python"], "/"), ([sys.executable], "/no/such/folder"):
        with pytest.raises(OSError):
            out = OutputFile(tmp_path / "o")
            try:
                bench.supervisor.spawn(argv, env=ENV, cwd=cwd, on_exit=bench.ended.append, output=out)
            finally:
                out.close()
    assert not len(bench.supervisor)
    assert len(os.listdir("/proc/self/fd")) == before


def test_kill_all_ends_many_at_once(bench: Bench, tmp_path: Path) -> None:
    children = [bench.spawn("import time; time.sleep(60)") for _ in range(5)]
    bench.supervisor.kill_all()
    bench.until(lambda: len(bench.ended) == 5)
    assert {child.returncode for child in children} == {-signal.SIGKILL}


def test_descriptors_are_given_back(bench: Bench, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for n in range(5):
        bench.spawn("print(1)", output=OutputFile(tmp_path / f"o{n}"))
    bench.until(lambda: len(bench.ended) == 5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_semaphores_of_a_killed_child_do_not_stay(bench: Bench, tmp_path: Path) -> None:
    """A DataLoader's workers share named semaphores; Python's resource tracker removes them if it may live on."""
    before = set(os.listdir("/dev/shm"))
    code = (
        "import multiprocessing as mp, signal\n"
        "locks = [mp.get_context('forkserver').Lock() for _ in range(3)]\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "signal.pause()"
    )
    child = bench.spawn(code)
    bench.until((tmp_path / "ready").exists)
    assert len(set(os.listdir("/dev/shm")) - before) >= 3
    bench.supervisor.kill(child)
    bench.until(lambda: bench.ended)
    assert not set(os.listdir("/dev/shm")) - before
