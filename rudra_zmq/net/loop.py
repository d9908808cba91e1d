"""One thread's loop: sockets, timers, wake-ups from other threads and from signals.

Owns the poll, the order of timers, how late they ran, and what became ready. Must not know messages. A callback
that raises ends ``run`` with its exception: bad input must be dealt with before (net.rpc does).

    >>> loop = Loop()
    >>> seen = []
    >>> timer = loop.every(0.001, lambda: seen.append("tick"))
    >>> _ = loop.after(0.02, loop.stop)
    >>> loop.call_soon_threadsafe(lambda: seen.insert(0, "from another thread"))
    >>> loop.run(); loop.close()
    >>> seen[0], "tick" in seen
    ('from another thread', True)
"""

from __future__ import annotations

import heapq
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol, TypeAlias

import zmq

Callback: TypeAlias = Callable[[], object]

_LONGEST = 60.0  # seconds in one poll, where nothing is due


class HasRaw(Protocol):
    """A socket of net.sockets."""

    @property
    def raw(self) -> Any: ...


Source: TypeAlias = HasRaw | int  # a socket or a file descriptor


class Timer:
    """A call that is due at ``when`` (seconds of the loop's clock), once or every ``period``."""

    __slots__ = ("callback", "period", "when")

    def __init__(self, when: float, callback: Callback, period: float = 0.0) -> None:
        self.when = when
        self.period = period
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """It will not run (again); harmless twice."""
        self.callback = None


class Loop:
    """Runs in the thread that calls ``run``; all but ``call_soon_threadsafe``, ``stop`` are of that thread."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._readers: dict[Any, Callback] = {}
        self._writers: dict[Any, Callback] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._soon: deque[Callback] = deque()
        self._stopping = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.register(self._wake_r, zmq.POLLIN)
        self._signals: dict[int, Any] = {}

    @staticmethod
    def now() -> float:
        """Seconds of the clock that timers go by."""
        return time.monotonic()

    # ------------------------------------------------------------------------------------------ sources

    def on_readable(self, source: Source, callback: Callback) -> None:
        """Calls back in each turn in which ``source`` has something to receive."""
        self._watch(source, self._readers, callback)

    def on_writable(self, source: Source, callback: Callback) -> None:
        """Calls back once, when a DEALER is connected (or a descriptor takes bytes)."""
        self._watch(source, self._writers, callback)

    def forget(self, source: Source) -> None:
        """Forgets a source; to be called before it is closed."""
        key = _key(source)
        if self._readers.pop(key, None) or self._writers.pop(key, None):
            self._writers.pop(key, None)
            self._poller.unregister(key)

    def _watch(self, source: Source, table: dict[Any, Callback], callback: Callback) -> None:
        table[_key(source)] = callback
        self._register(_key(source))

    def _register(self, key: Any) -> None:
        flags = (zmq.POLLIN if key in self._readers else 0) | (zmq.POLLOUT if key in self._writers else 0)
        if flags:
            self._poller.register(key, flags)
        elif key in self._poller:
            self._poller.unregister(key)

    # ------------------------------------------------------------------------------------------- timers

    def at(self, when: float, callback: Callback) -> Timer:
        """Calls back at ``when`` seconds of ``now``'s clock."""
        return self._add(Timer(when, callback))

    def after(self, seconds: float, callback: Callback) -> Timer:
        """Calls back in so many seconds."""
        return self._add(Timer(self.now() + seconds, callback))

    def every(self, seconds: float, callback: Callback) -> Timer:
        """Calls back every so many seconds; turns that were missed are not made up for."""
        return self._add(Timer(self.now() + seconds, callback, seconds))

    def _add(self, timer: Timer) -> Timer:
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    # -------------------------------------------------------------------------------------- other threads

    def call_soon_threadsafe(self, callback: Callback) -> None:
        """Calls back in the loop's thread, in its next turn. For other threads (and signal handlers)."""
        self._soon.append(callback)
        try:
            os.write(self._wake_w, b"\0")
        except BlockingIOError:
            pass  # the pipe is full: it will wake up anyway
        except OSError:
            self._soon.clear()  # the loop was closed: nobody will call back

    def on_signal(self, number: int, callback: Callback) -> None:
        """Calls back in the loop after signal ``number``. To be called in the main thread."""
        # Python runs a handler between two of its steps: one that comes just before the poll would wait for its
        # end. The C part of the handler writes to the pipe at once.
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        previous = signal.signal(number, lambda *_: self.call_soon_threadsafe(callback))
        self._signals.setdefault(number, previous)

    # ---------------------------------------------------------------------------------------------- run

    def stop(self) -> None:
        """``run`` returns after this turn. May be called from any thread."""
        self._stopping = True
        self.call_soon_threadsafe(lambda: None)

    def run(self) -> None:
        """Until ``stop`` (at once, where it was called before); raises what a callback raises."""
        try:
            while not self._stopping:
                self.turn(_LONGEST)
        finally:
            self._stopping = False

    def turn(self, longest: float) -> None:
        """One poll of at most ``longest`` seconds, and what became due."""
        for key, flags in self._poller.poll(self._patience(longest)):
            if key == self._wake_r:
                self._drain()
                continue
            if flags & zmq.POLLOUT:
                callback = self._writers.pop(key, None)
                if callback is not None:
                    self._register(key)
                    callback()
            # A descriptor whose other end is gone reports an error; its reader finds out by reading.
            if flags & (zmq.POLLIN | zmq.POLLERR):
                callback = self._readers.get(key)
                if callback is not None:
                    callback()
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        self._run_timers()

    def _patience(self, longest: float) -> int:
        """Milliseconds that the poll may last."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if self._soon or self._stopping:
            return 0
        if self._timers:
            longest = min(longest, max(0.0, self._timers[0][0] - self.now()))
        return int(longest * 1000 + 0.999)

    def _drain(self) -> None:
        try:
            while len(os.read(self._wake_r, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def _run_timers(self) -> None:
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.callback is None:
                continue
            callback = timer.callback
            if timer.period:
                timer.when += timer.period
                if timer.when <= now:
                    timer.when = now + timer.period
                self._add(timer)
            else:
                timer.callback = None
            callback()

    def close(self) -> None:
        """Gives descriptors and signals back; sockets are their owners' to close."""
        if self._signals and threading.current_thread() is threading.main_thread():
            for number, previous in self._signals.items():
                signal.signal(number, previous)
            other = signal.set_wakeup_fd(-1)
            if other not in (-1, self._wake_w):
                signal.set_wakeup_fd(other)
        self._signals.clear()
        self._timers.clear()
        self._readers.clear()
        self._writers.clear()
        if self._wake_r >= 0:
            os.close(self._wake_r)
            os.close(self._wake_w)
            self._wake_r = self._wake_w = -1


def _key(source: Source) -> Any:
    return source if isinstance(source, int) else source.raw
