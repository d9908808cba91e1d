"""The loop: timers in order, wake-ups, signals, sources that come and go."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from rudra_zmq.net.loop import Loop
from tests.net.conftest import Net, until


def test_timers_run_in_order_and_once(net: Net) -> None:
    loop = net.loop()
    seen: list[str] = []
    now = loop.now()
    loop.at(now + 0.02, lambda: seen.append("second"))
    loop.at(now + 0.01, lambda: seen.append("first"))
    loop.at(now + 0.02, lambda: seen.append("third"))  # same time: in the order in which they were asked for
    loop.after(0.03, loop.stop)
    loop.run()
    assert seen == ["first", "second", "third"]
    assert loop.now() - now >= 0.03


def test_a_cancelled_timer_does_not_run(net: Net) -> None:
    loop = net.loop()
    seen: list[int] = []
    timer = loop.after(0.0, lambda: seen.append(1))
    periodic = loop.every(0.001, lambda: seen.append(2))
    timer.cancel()
    timer.cancel()
    periodic.cancel()
    loop.after(0.01, loop.stop)
    loop.run()
    assert seen == []


def test_a_timer_may_cancel_itself_and_make_others(net: Net) -> None:
    loop = net.loop()
    seen: list[str] = []

    def tick() -> None:
        seen.append("tick")
        if len(seen) == 3:
            timer.cancel()
            loop.after(0.0, loop.stop)

    timer = loop.every(0.001, tick)
    loop.run()
    assert seen == ["tick"] * 3


def test_missed_turns_are_not_made_up_for(net: Net) -> None:
    loop = net.loop()
    seen: list[float] = []
    loop.every(0.005, lambda: seen.append(loop.now()))
    loop.after(0.0, lambda: time.sleep(0.1))
    loop.after(0.1, loop.stop)
    loop.run()
    assert len(seen) <= 2


def test_other_threads_wake_it_up(net: Net) -> None:
    loop = net.loop()
    seen: list[int] = []

    def work() -> None:
        for i in range(1000):
            loop.call_soon_threadsafe(lambda i=i: seen.append(i))
        loop.call_soon_threadsafe(loop.stop)

    thread = threading.Thread(target=work)
    thread.start()
    loop.run()
    thread.join()
    assert seen == list(range(1000))


def test_stop_before_run(net: Net) -> None:
    loop = net.loop()
    loop.stop()
    loop.run()  # returns
    loop.after(0.0, loop.stop)
    loop.run()  # and may be run again


def test_a_signal_is_handled_in_the_loop(net: Net) -> None:
    loop = Loop()
    before = signal.getsignal(signal.SIGUSR1)
    seen: list[str] = []
    loop.on_signal(signal.SIGUSR1, lambda: (seen.append(threading.current_thread().name), loop.stop()))
    loop.after(0.0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    loop.run()
    loop.close()
    assert seen == [threading.main_thread().name]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_just_before_the_poll_ends_it(net: Net) -> None:
    """The handler's C part writes to the pipe that the poll looks at, whatever Python does meanwhile."""
    loop = Loop()
    loop.on_signal(signal.SIGUSR1, lambda: None)
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    os.write(fd, bytes([signal.SIGUSR1]))
    begun = loop.now()
    loop.turn(5.0)
    assert loop.now() - begun < 4.0
    loop.close()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_descriptor_and_its_end(net: Net) -> None:
    loop = net.loop()
    r, w = os.pipe()
    seen: list[bytes] = []

    def read() -> None:
        got = os.read(r, 100)
        seen.append(got)
        if not got:
            loop.forget(r)
            os.close(r)

    loop.on_readable(r, read)
    os.write(w, b"abc")
    until(loop, lambda: seen)
    os.close(w)
    until(loop, lambda: len(seen) == 2)
    loop.turn(0.0)
    assert seen == [b"abc", b""]


def test_a_source_forgotten_by_a_callback_of_the_same_turn(net: Net) -> None:
    loop = net.loop()
    router, address = net.bound()
    dealers = [net.dealer(address), net.dealer(address)]
    seen: list[int] = []
    for dealer in dealers:
        dealer.send([b"hello"])
    for _ in dealers:
        assert router.wait(5.0)
        received = router.recv()
        assert received is not None and router.send(received[0], [b"welcome"])

    def readable(i: int) -> None:
        seen.append(i)
        for dealer in dealers:
            loop.forget(dealer)

    assert all(dealer.wait(5.0) for dealer in dealers)
    for i, dealer in enumerate(dealers):
        loop.on_readable(dealer, lambda i=i: readable(i))
    loop.turn(0.0)
    loop.turn(0.0)
    assert len(seen) == 1


def test_writable_is_told_once(net: Net) -> None:
    loop = net.loop()
    _, address = net.bound()
    dealer = net.dealer(address, connected=False)
    seen: list[bool] = []
    loop.on_readable(dealer, lambda: None)
    loop.on_writable(dealer, lambda: seen.append(dealer.writable()))
    until(loop, lambda: seen)
    loop.turn(0.0)
    assert seen == [True]


def test_an_exception_ends_the_run(net: Net) -> None:
    loop = net.loop()

    def fail() -> None:
        raise ZeroDivisionError

    loop.after(0.0, fail)
    with pytest.raises(ZeroDivisionError):
        loop.run()


def test_a_closed_loop_takes_no_callback() -> None:
    loop = Loop()
    loop.close()
    loop.call_soon_threadsafe(lambda: None)
    loop.close()
