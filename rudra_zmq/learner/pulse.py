"""The pulse: a thread that tells the node that this learner lives, and this learner what becomes of the node.

Owns: a connection of its own, pinging while user code computes; whether the node answers, moved, or asks to stop. Must
not know: training, the data connection.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from rudra_zmq import log
from rudra_zmq.errors import RudraError
from rudra_zmq.learner.keys import Keys
from rudra_zmq.learner.link import Link, LinkLost
from rudra_zmq.learner.spec import NodeFile, read_node_file
from rudra_zmq.net.retry import Backoff
from rudra_zmq.net.sockets import Context
from rudra_zmq.wire.messages.data import Hello, Ping, Pong, Refused, Welcome

CONNECT_S = 2.0

_log = log.get()


class _Closing(Exception):
    """The learner ends."""


class Pulse:
    """Started by `start` once the node has welcomed the learner. What it knows is read from any thread."""

    def __init__(
        self, context: Context, keys: Keys, hello: Hello, node_file: Path, ping_s: float, liveness_s: float
    ) -> None:
        self.stop_asked = False
        self._context = context
        self._keys = keys
        self._hello = hello
        self._node_file = node_file
        self._ping_s = ping_s
        self._liveness_s = liveness_s
        self._heard = time.monotonic()
        self._closing = threading.Event()
        self._known: NodeFile | None = read_node_file(node_file)
        self._thread = threading.Thread(target=self._run, name="rudra-pulse", daemon=True)

    def start(self) -> None:
        """Begin to ping."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; harmless twice."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CONNECT_S + 1.0)

    @property
    def silent(self) -> float:
        """Seconds since the node was heard."""
        return time.monotonic() - self._heard

    def look(self, link_heard: float, address: str, generation: int) -> None:
        """For a thread that waits on a connection to `address`: raises LinkLost if it waits in vain."""
        known = self._known
        if known is not None and (known.generation > generation or address not in known.addresses):
            raise LinkLost("the node moved")
        silent = min(self.silent, time.monotonic() - link_heard)
        if silent > self._liveness_s:
            raise LinkLost(f"the node is silent for {silent:.0f} s")

    def alive(self) -> None:
        """The data connection was made anew: the node lives, as far as it knows."""
        self._heard = time.monotonic()

    # ---- in the thread

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closing.is_set():
            link = None
            try:
                link = self._connect()
                backoff.reset()
                self._ping(link)
            except (LinkLost, RudraError) as error:
                _log.debug("pulse lost", reason=str(error))
            except _Closing:
                pass
            finally:
                if link is not None:
                    link.close()
            self._closing.wait(backoff.next(time.monotonic()))

    def _connect(self) -> Link:
        self._read_file()
        known = self._known
        if known is None or not known.addresses:
            raise LinkLost("no address of the node")
        curve = self._keys.curve(known, known.addresses[0])
        link = Link(self._context, known.addresses[0], f"pulse.{self._hello.rank}", self._look, curve)
        try:
            link.wait_connected(CONNECT_S)
            link.send(self._keys.sign(self._hello, curve))
            answer = link.receive(Welcome, Refused, seconds=CONNECT_S)
            if isinstance(answer, Refused):
                raise LinkLost(answer.message)
        except BaseException:
            link.close()
            raise
        self._heard = time.monotonic()
        return link

    def _ping(self, link: Link) -> None:
        while True:
            link.send(Ping())
            due = time.monotonic() + self._ping_s
            try:
                pong = link.receive(Pong, seconds=self._liveness_s)
            except LinkLost:
                self._read_file()
                raise
            self._heard = time.monotonic()
            self.stop_asked = self.stop_asked or pong.stop
            while time.monotonic() < due:
                self._closing.wait(min(self._ping_s, max(0.0, due - time.monotonic())))
                self._look()
            self._read_file()

    def _read_file(self) -> None:
        """Another generation or other addresses: the node moved."""
        self._known = read_node_file(self._node_file) or self._known

    def _look(self) -> None:
        if self._closing.is_set():
            raise _Closing
