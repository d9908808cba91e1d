"""A parameter server as Ray's documentation has it: actors, gradients and weights as objects of its store.

Owns: the driver, which is the one member of its group. Must not know: the other peers. Ray's weights are a copy in its
store, and so consistent as they are.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from rudra_zmq.bench.control import Order
from rudra_zmq.bench.peer_torch import Member, Weights
from rudra_zmq.bench.place import Place

ray: Any = import_module("ray")  # whoever asks for it has it

ROUND_S = 120.0


class Server:
    """The weights. An actor."""

    def __init__(self, place: Place) -> None:
        self._weights = Weights(place)

    def prepare(self, threads: int) -> None:
        """Threads of the update."""
        torch.set_num_threads(threads)

    def weights(self) -> Any:
        """As they are."""
        return self._weights.parameter.detach().numpy()

    def update(self, *gradients: Any) -> Any:
        """The new weights."""
        total = torch.from_numpy(np.array(gradients[0]))  # objects of the store cannot be written
        for gradient in gradients[1:]:
            total.add_(torch.from_numpy(gradient))
        return self._weights.update(total).numpy()


class Learner:
    """An actor that computes nothing."""

    def __init__(self, place: Place) -> None:
        self._gradient = np.full(place.elements, 1e-3, np.float32)

    def gradient(self, weights: Any) -> Any:
        """Of these weights."""
        return self._gradient


class Driver(Member):
    """The loop."""

    def __init__(self, place: Place) -> None:
        ray.init(
            num_cpus=place.learners + 1, include_dashboard=False, log_to_driver=False, _temp_dir=f"{place.folder}/y"
        )
        self._server = ray.remote(Server).remote(place)
        self._learners = [ray.remote(Learner).remote(place) for _ in range(place.learners)]
        self._weights = self._server.weights.remote()

    def prepare(self, order: Order) -> None:
        ray.get(self._server.prepare.remote(int(order["threads"])), timeout=ROUND_S)

    def round(self) -> None:
        gradients = [learner.gradient.remote(self._weights) for learner in self._learners]
        self._weights = self._server.update.remote(*gradients)
        ready, _ = ray.wait([self._weights], timeout=ROUND_S, fetch_local=False)
        if not ready:
            raise TimeoutError("a round of Ray does not end")

    def close(self) -> None:
        """Its daemons and actors."""
        ray.shutdown()
