"""Sockets that are closed at the end of each test, a loop that runs until something is so, a server in a thread."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from rudra_zmq.net.loop import Loop
from rudra_zmq.net.sockets import Context, Dealer, Plane, Router, make_context

_T = TypeVar("_T")

PATIENCE = 10.0  # seconds that anything may take on a busy machine


class Net:
    """Contexts, routers and dealers of one test; ends with the assertion that everything ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._contexts: dict[str, Context] = {}
        self._names = 0

    def context(self, plane: Plane) -> Context:
        """The test's context for a plane."""
        if plane not in self._contexts:
            self._contexts[plane] = make_context(plane)
        return self._contexts[plane]

    def path(self) -> str:
        """A fresh path for a socket."""
        self._names += 1
        return str(self.folder / f"s{self._names}")

    def router(self, plane: Plane = "control") -> Router:
        """An unbound ROUTER."""
        router = self.context(plane).router("router")
        self._stack.callback(router.close)
        return router

    def bound(self, kind: str = "ipc", plane: Plane = "control") -> tuple[Router, str]:
        """A ROUTER and its address."""
        router = self.router(plane)
        return router, router.bind_ipc(self.path()) if kind == "ipc" else router.bind_tcp("127.0.0.1", 0)

    def dealer(self, address: str, plane: Plane = "control", *, connected: bool = True) -> Dealer:
        """A DEALER, connected."""
        dealer = self.context(plane).dealer(address, "dealer")
        self._stack.callback(dealer.close, 0.0)
        assert not connected or dealer.wait_connected(PATIENCE)
        return dealer

    def loop(self) -> Loop:
        """A loop of this thread."""
        loop = Loop()
        self._stack.callback(loop.close)
        return loop

    def close_at_end(self, close: Callable[[], object]) -> None:
        """Called before the sockets are closed."""
        self._stack.callback(close)

    def close(self) -> None:
        """Closes all; fails if a context does not end."""
        self._stack.close()
        assert all(context.close() for context in self._contexts.values())


@pytest.fixture
def net() -> Iterator[Net]:
    folder = Path(tempfile.mkdtemp(prefix="n"))
    net = Net(folder)
    yield net
    net.close()
    left = sorted(path.name for path in folder.iterdir())
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture(params=["ipc", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def until(loop: Loop, condition: Callable[[], object], timeout: float = PATIENCE) -> None:
    """Turns the loop until ``condition`` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        loop.turn(0.02)


def wait_for(condition: Callable[[], object], timeout: float = PATIENCE) -> None:
    """Waits for something that another thread or the kernel does."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.005)


@contextmanager
def in_thread(build: Callable[[Loop], tuple[_T, Callable[[], object]]]) -> Iterator[_T]:
    """Runs a loop in a thread of its own; ``build`` makes there what it serves, and how that is closed."""
    loop = Loop()
    ready = threading.Event()
    made: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            thing, close = build(loop)
            made.append(thing)
            ready.set()
            try:
                loop.run()
            finally:
                close()
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        if failed:
            raise failed[0]
        yield made[0]
    finally:
        loop.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if failed:
        raise failed[0]
