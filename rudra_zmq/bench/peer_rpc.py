"""torch rpc as a parameter server. Its functions are looked up by module and name, so this is never ``__main__``.

Owns: the server's object and the way to it. Must not know: how a round is made (peer.py).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed import rpc

from rudra_zmq.bench.control import Order
from rudra_zmq.bench.peer_torch import TIMEOUT_S, Member, Weights, touched
from rudra_zmq.bench.place import Place
from rudra_zmq.errors import RudraError

SERVER = "server"


class Server(Member):
    """A parameter server that learners call; the last one of a round makes the update, and answers all."""

    def __init__(self, place: Place) -> None:
        self._weights = Weights(place)
        self._learners = place.learners
        self._threads = 1
        self._made = self._due = 0
        self._waiting: list[torch.Tensor] = []
        self._answer: Any = torch.futures.Future()
        self._turn = threading.Condition()

    def prepare(self, order: Order) -> None:
        with self._turn:
            self._threads = int(order["threads"])
            self._weights.consistent = bool(order["consistent"])

    def round(self) -> None:
        with self._turn:
            self._due += 1
            if not self._turn.wait_for(lambda: self._made >= self._due, TIMEOUT_S):
                raise RudraError("a round of torch rpc does not end", where="rudra bench")

    def push(self, gradient: torch.Tensor) -> Any:
        """A future of the weights."""
        with self._turn:
            answer = self._answer
            self._waiting.append(gradient)
            if len(self._waiting) < self._learners:
                return answer
            torch.set_num_threads(self._threads)  # of this thread: rpc has many
            total, *others = self._waiting
            for other in others:
                total.add_(other)
            self._waiting, self._answer = [], torch.futures.Future()
            answer.set_result(self._weights.update(total))
            self._made += 1
            self._turn.notify_all()
            return answer


_server: Server | None = None


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(gradient: torch.Tensor) -> Any:
    """In the server: a future of the weights."""
    assert _server is not None
    return _server.push(gradient)


class Learner(Member):
    """Calls the server."""

    def __init__(self, place: Place) -> None:
        self._gradient = touched(place.elements)

    def round(self) -> None:
        rpc.rpc_sync(SERVER, push, args=(self._gradient,), timeout=TIMEOUT_S)


def member(place: Place) -> Member:
    """The server is member 0."""
    global _server
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{place.folder}/rpc", rpc_timeout=TIMEOUT_S, num_worker_threads=place.learners + 2
    )
    made: Member
    if place.index == 0:
        made = _server = Server(place)
    else:
        made = Learner(place)
    name = SERVER if place.index == 0 else f"learner-{place.index}"
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=place.index, world_size=place.learners + 1, rpc_backend_options=options
    )
    return made
