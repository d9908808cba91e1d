"""The round trip as one would write it with torch.distributed's gloo, or with sockets.

Owns: push, sum, momentum update and pull in other systems. Must not know: this program's own data plane, who times it.

Where there is a server it is member 0. Rates are divided by the learners instead of gradients, which costs nothing.
An order's "threads" are those of torch's arithmetic, "consistent" asks for a copy out of the weights: what a learner
reads then does not change while it reads.
"""

from __future__ import annotations

import abc
import datetime
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rudra_zmq.bench.control import Order
from rudra_zmq.bench.place import Place
from rudra_zmq.errors import RudraError

TIMEOUT_S = 120.0
RULES = {"sgd": (0.0, False), "momentum": (0.9, False), "nesterov": (0.9, True)}
"""Momentum, and whether it is Nesterov's."""

BEAT_S = 0.01
RATE = 1e-6


class Member(abc.ABC):
    """One process's part of the rounds."""

    def prepare(self, order: Order) -> None:
        """Before the rounds of an order."""
        torch.set_num_threads(int(order["threads"]))

    @abc.abstractmethod
    def round(self) -> None:
        """One round trip."""

    def close(self) -> None:  # noqa: B027  most have nothing to end
        """End what does not end with this process."""


def touched(elements: int) -> torch.Tensor:
    """A vector whose pages are all there."""
    return torch.empty(elements).fill_(1e-3)


class Weights:
    """Weights with torch's fused step, in place, and the copy out of them."""

    def __init__(self, place: Place) -> None:
        self.parameter = torch.nn.Parameter(touched(place.elements))
        self._copy = touched(place.elements)
        momentum, nesterov = RULES[place.rule]
        rate = RATE / place.learners
        self._step = torch.optim.SGD([self.parameter], lr=rate, momentum=momentum, nesterov=nesterov, fused=True)
        self.consistent = False

    def prepare(self, order: Order) -> None:
        torch.set_num_threads(int(order["threads"]))
        self.consistent = bool(order["consistent"])

    def update(self, gradient: torch.Tensor) -> torch.Tensor:
        """What a learner may read."""
        self.parameter.grad = gradient
        self._step.step()
        if not self.consistent:
            return self.parameter.detach()
        return self._copy.copy_(self.parameter.detach())


class AllReduce(Member):
    """Every process holds the weights, and makes the update itself."""

    def __init__(self, place: Place) -> None:
        gloo(place, place.learners)
        self._weights = Weights(place)
        self._gradient = torch.zeros(place.elements).fill_(0.0)

    def prepare(self, order: Order) -> None:
        self._weights.prepare(order)

    def round(self) -> None:
        dist.all_reduce(self._gradient)
        self._weights.update(self._gradient)


def gloo(place: Place, processes: int) -> None:
    """Join the group of the processes of a place."""
    store = f"file://{place.folder}/gloo"
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=store, rank=place.index, world_size=processes, timeout=timeout)


class Summed:
    """A server's gradients, one vector for each learner."""

    def __init__(self, place: Place) -> None:
        self.vectors = [touched(place.elements) for _ in range(place.learners)]

    def sum(self) -> torch.Tensor:
        """In the first one."""
        total = self.vectors[0]
        for vector in self.vectors[1:]:
            total.add_(vector)
        return total


class SendRecvServer(Member):
    """A parameter server over gloo's point-to-point messages."""

    def __init__(self, place: Place) -> None:
        gloo(place, place.learners + 1)
        self._weights = Weights(place)
        self._gradients = Summed(place)

    def prepare(self, order: Order) -> None:
        self._weights.prepare(order)

    def round(self) -> None:
        for work in [dist.irecv(g, i + 1) for i, g in enumerate(self._gradients.vectors)]:
            _wait(work)
        weights = self._weights.update(self._gradients.sum())
        for work in [dist.isend(weights, i + 1) for i in range(len(self._gradients.vectors))]:
            _wait(work)


def _wait(work: Any) -> None:
    assert work is not None  # this process belongs to the group
    work.wait()


class SendRecvLearner(Member):
    """Its other side."""

    def __init__(self, place: Place) -> None:
        gloo(place, place.learners + 1)
        self._gradient, self._weights = touched(place.elements), touched(place.elements)

    def round(self) -> None:
        dist.send(self._gradient, 0)
        dist.recv(self._weights, 0)


class SocketServer(Member):
    """A parameter server over plain TCP sockets; with two threads, connections are served at the same time."""

    def __init__(self, place: Place) -> None:
        self._weights = Weights(place)
        self._gradients = Summed(place)
        self._pool = ThreadPoolExecutor(place.learners)
        self._at_once = False
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(TIMEOUT_S)
            port = Path(place.folder, "port.new")
            port.write_text(str(listener.getsockname()[1]))
            port.rename(Path(place.folder, "port"))
            self._sockets = [_ready(listener.accept()[0]) for _ in range(place.learners)]

    def prepare(self, order: Order) -> None:
        self._weights.prepare(order)
        self._at_once = int(order["threads"]) > 1

    def round(self) -> None:
        self._each(lambda i: _receive(self._sockets[i], _bytes(self._gradients.vectors[i])))
        weights = _bytes(self._weights.update(self._gradients.sum()))
        self._each(lambda i: self._sockets[i].sendall(weights))

    def _each(self, work: Callable[[int], None]) -> None:
        places = range(len(self._sockets))
        for _ in self._pool.map(work, places) if self._at_once else map(work, places):
            pass


class SocketLearner(Member):
    """Its other side."""

    def __init__(self, place: Place) -> None:
        self._gradient, self._weights = touched(place.elements), touched(place.elements)
        path = Path(place.folder, "port")
        end = time.monotonic() + TIMEOUT_S
        while not path.exists():
            if time.monotonic() > end:
                raise RudraError("the server of the sockets does not come", where="rudra bench")
            time.sleep(BEAT_S)
        self._socket = _ready(socket.create_connection(("127.0.0.1", int(path.read_text())), TIMEOUT_S))

    def round(self) -> None:
        self._socket.sendall(_bytes(self._gradient))
        _receive(self._socket, _bytes(self._weights))


def _ready(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(TIMEOUT_S)
    return sock


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")


def _receive(sock: socket.socket, into: memoryview) -> None:
    while into:
        count = sock.recv_into(into)
        if not count:
            raise RudraError("a socket was closed", where="rudra bench")
        into = into[count:]
