"""How `rudra bench` leads processes: who is ready, what they answer, and every way in which they do not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rudra_zmq.bench.control import Control, Group, Order, Orders, usage_of
from rudra_zmq.bench.folder import PREFIX, Folder
from rudra_zmq.bench.product import node_below
from rudra_zmq.bench.tied import tied
from rudra_zmq.errors import RudraError


@pytest.fixture
def control() -> Iterator[Control]:
    folder = Folder()
    with Control(folder.path) as control:
        yield control
    folder.close()


def nothing() -> None:
    """All is well."""


def gathered(control: Control, *members: Callable[[Orders], None]) -> tuple[Group, list[threading.Thread]]:
    """A group whose members are threads; the last one is ready first."""
    threads = []
    orders = [Orders(str(control.path)) for _ in members]
    for index in reversed(range(len(members))):
        orders[index].ready(index, rank=10 * index)
        threads.append(threading.Thread(target=members[index], args=(orders[index],)))
        threads[-1].start()
    return control.gather("g", len(members), nothing, 10.0), threads


def end(group: Group, threads: list[threading.Thread]) -> None:
    group.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_orders_and_answers_in_the_order_of_members(control: Control) -> None:
    def member(value: float) -> Callable[[Orders], None]:
        return lambda orders: orders.work(lambda order: [value] * int(order["rounds"]))

    group, threads = gathered(control, member(0.5), member(1.5))
    assert [facts["rank"] for facts in group.facts] == [0, 10]
    for rounds in (1, 20_000):  # the second answer comes in many pieces
        answers = group.do({"rounds": rounds}, 10.0)
        assert [a["times"] for a in answers] == [[0.5] * rounds, [1.5] * rounds]
        assert all(a["end"] >= a["start"] and a["cpu"] >= 0 and a["faults"] >= 0 for a in answers)
    end(group, threads)


def test_an_error_of_a_member_is_one_line(control: Control) -> None:
    def rounds(order: Order) -> list[float]:
        raise ValueError("no\nmore")

    def member(orders: Orders) -> None:
        with pytest.raises(ValueError):
            orders.work(rounds)

    group, threads = gathered(control, member)
    with pytest.raises(RudraError, match=r"^g: ValueError: no more$"):
        group.do({"rounds": 1}, 10.0)
    end(group, threads)


def test_a_member_that_cannot_begin_says_why(control: Control) -> None:
    Orders(str(control.path)).fail("there is no room")
    with pytest.raises(RudraError, match="g: there is no room"):
        control.gather("g", 1, nothing, 10.0)


def test_a_member_that_is_gone_is_no_wait(control: Control) -> None:
    orders = Orders(str(control.path))
    orders.ready(0)
    group = control.gather("g", 1, nothing, 10.0)
    orders._lines.close()
    with pytest.raises(RudraError, match="a process ended"):
        group.do({"rounds": 1}, 60.0)
    group.close()


def test_every_wait_has_an_end(control: Control) -> None:
    with pytest.raises(RudraError, match="0 of 2 processes were ready"):
        control.gather("g", 2, nothing, 0.1)
    orders = Orders(str(control.path))
    orders.ready(0)
    group = control.gather("g", 1, nothing, 10.0)
    with pytest.raises(RudraError, match="no answer within 0 s"):
        group.do({"rounds": 1}, 0.1)
    group.close()
    orders._lines.close()


def test_a_check_that_fails_ends_every_wait(control: Control) -> None:
    def check() -> None:
        raise RudraError("the job ended")

    with pytest.raises(RudraError, match="the job ended"):
        control.gather("g", 1, check, 60.0)


def test_what_another_process_used() -> None:
    cpu, faults = usage_of(os.getpid())
    assert cpu == pytest.approx(time.process_time(), rel=0.2)
    bytearray(1 << 26)
    assert usage_of(os.getpid())[1] >= faults
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(20)
    with pytest.raises(RudraError, match=f"process {child.pid} has ended"):
        usage_of(child.pid)


def test_the_node_is_found_among_descendants() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', 'rudra_zmq.node'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        deadline = time.monotonic() + 20
        while True:
            try:
                found = node_below(parent.pid)
                break
            except RudraError:
                assert time.monotonic() < deadline
        assert found != parent.pid
        assert b"rudra_zmq.node" in Path(f"/proc/{found}/cmdline").read_bytes()
    with pytest.raises(RudraError, match="not to be found"):
        node_below(os.getpid())


def test_folders_of_benchmarks_that_were_killed_are_removed() -> None:
    code = "from rudra_zmq.bench.folder import Folder; print(Folder().path, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().decode().strip())
        os.utime(path, (0, 0))
        mine = Folder()
        assert path.exists()  # it is in use
        other.kill()
    young = Path(tempfile.mkdtemp(prefix=PREFIX))
    Folder().close()
    assert not path.exists()
    assert mine.path.exists()
    assert young.exists()  # it may not be locked yet
    young.rmdir()
    mine.close()
    assert not mine.path.exists()


def test_a_tied_program_ends_with_whoever_started_it() -> None:
    code = (
        "import subprocess, sys; from rudra_zmq.bench.tied import tied\n"
        "child = subprocess.Popen(tied([sys.executable, '-c', 'import signal; print(1, flush=True); signal.pause()']), stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        said = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        (pid,) = (int(word) for word in said if word != b"1")
        parent.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    late = subprocess.run(
        [*tied(["/bin/true"])[:3], "1", "15", "/bin/true"], capture_output=True, text=True, timeout=20
    )
    assert (late.returncode, late.stderr) == (1, "process 1, which wanted this one, has ended\n")
