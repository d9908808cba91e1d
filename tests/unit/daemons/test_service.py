"""What the service manager is told, and when it is told nothing."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from rudra_zmq.daemons.service import MOST_STATUS, Manager
from rudra_zmq.net.loop import Loop


def heard(sock: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(sock.recv(4096).decode())
        except BlockingIOError:
            return found


@pytest.fixture
def sock(tmp_path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind(str(tmp_path / "n"))
    made.setblocking(False)
    return made


def test_a_loop_that_is_stuck_feeds_no_watchdog(tmp_path: Path, sock: socket.socket) -> None:
    environ = {
        "NOTIFY_SOCKET": str(tmp_path / "n"),
        "WATCHDOG_USEC": "40000",
        "WATCHDOG_PID": str(os.getpid()),
        "A": "",
    }
    manager = Manager(environ)
    assert environ == {"A": ""} and manager.watchdog == 0.04
    loop = Loop()
    manager.attend(loop, lambda: "busy")
    fed: list[int] = []

    def stuck() -> None:
        fed.append(heard(sock).count("WATCHDOG=1"))
        time.sleep(0.1)
        fed.append(heard(sock).count("WATCHDOG=1"))
        loop.stop()

    loop.after(0.2, stuck)
    loop.run()
    loop.close()
    sock.close()
    assert fed[0] >= 2 and fed[1] == 0


def test_a_status_is_one_line_said_once(tmp_path: Path, sock: socket.socket) -> None:
    manager = Manager({"NOTIFY_SOCKET": str(tmp_path / "n")})
    manager.status("a\nREADY=1")
    manager.status("a READY=1")
    manager.status("x" * 1000)
    assert heard(sock) == ["STATUS=a READY=1", "STATUS=" + "x" * MOST_STATUS]
    manager.reloading()
    (text,) = heard(sock)
    lines = text.splitlines()
    assert (
        lines[0] == "RELOADING=1"
        and 0 <= time.monotonic_ns() // 1000 - int(lines[1].removeprefix("MONOTONIC_USEC=")) < 10e6
    )
    sock.close()


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "relative"}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_without_a_manager_nothing_is_said(environ: dict[str, str]) -> None:
    Manager(environ).ready()


def test_the_watchdog_of_another_process_is_not_ours(tmp_path: Path) -> None:
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "40000", "WATCHDOG_PID": "1"}
    assert Manager(environ).watchdog == 0.0
    assert Manager({"WATCHDOG_USEC": "40000"}).watchdog == 0.0
