"""GPUs that were declared and are not there: waited for, without holding up the loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from rudra_zmq.daemons import devices as module
from rudra_zmq.daemons.devices import Devices
from rudra_zmq.net.loop import Loop


def test_a_look_that_hangs_holds_up_nothing_and_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, answered = Loop(), threading.Event()
    looks: list[threading.Thread] = []
    came: list[tuple[str, ...]] = []

    def absent(declared: Sequence[str]) -> tuple[str, ...]:
        looks.append(threading.current_thread())
        if len(looks) == 1:
            return ("1",)
        assert answered.wait(30.0)
        return ()

    monkeypatch.setattr(module.hardware, "absent", absent)
    try:
        devices = Devices(loop, ["0", "1"], lambda: came.append(devices.absent))
        devices.begin()
        assert devices.absent == ("1",)
        devices.look()
        devices.look()  # both return at once
        assert devices.absent == ("1",) and not came
        answered.set()
        while not came:
            loop.turn(1.0)
        assert came == [()] and len(looks) == 2
        devices.look()
        assert len(looks) == 2
    finally:
        answered.set()
        for thread in looks[1:]:
            thread.join()
        loop.close()


def test_a_device_that_stays_away_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, looks = Loop(), threading.Semaphore(0)

    def absent(declared: Sequence[str]) -> tuple[str, ...]:
        looks.release()
        return ("0",)

    monkeypatch.setattr(module.hardware, "absent", absent)
    try:
        devices = Devices(loop, ["0"], lambda: pytest.fail("none has come"))
        devices.begin()
        assert looks.acquire(timeout=30.0)
        for _ in range(3):
            devices.look()
            assert looks.acquire(timeout=30.0)
            while devices._looking:
                loop.turn(1.0)
    finally:
        loop.close()
