"""Training as PyTorch alone does it: a plain loop, and DistributedDataParallel over gloo.

Owns: the loops that a job is held against. Must not know: this program's learners. Model, batches, loading and rule are
those of `trainer`: Fashion-MNIST's small CNN, whole batches indexed at once, SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from rudra_zmq.bench.control import Order
from rudra_zmq.bench.peer_torch import Member, gloo
from rudra_zmq.bench.place import Place
from rudra_zmq.tasks import fashion_mnist

LR, MOMENTUM = 0.03, 0.9


class Plain(Member):
    """One process, one thread."""

    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self._task = fashion_mnist.cnn(place.samples)
        self._model = self._wrapped(self._task.model(), place)
        self._model.train()
        self._rule = torch.optim.SGD(self._model.parameters(), lr=LR, momentum=MOMENTUM)
        data = TensorDataset(*self._task.dataset("train").tensors)
        sampler = BatchSampler(self._sampler(data, place), place.minibatch, drop_last=True)
        self._loader = DataLoader(data, sampler=sampler, batch_size=None, num_workers=place.workers)
        self._batches = self._forever()

    def _wrapped(self, model: nn.Module, place: Place) -> nn.Module:
        return model

    def _sampler(self, data: TensorDataset, place: Place) -> Sampler[int]:
        return RandomSampler(data)

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def prepare(self, order: Order) -> None:
        """Nothing to do."""

    def round(self) -> None:
        """One mini-batch."""
        loss = self._task.loss(self._model, next(self._batches))
        loss.backward()  # type: ignore[no-untyped-call]
        self._rule.step()
        self._rule.zero_grad()


class Ddp(Plain):
    """One of several processes, each with a mini-batch of its own in every step."""

    def _wrapped(self, model: nn.Module, place: Place) -> nn.Module:
        gloo(place, place.learners)
        return nn.parallel.DistributedDataParallel(model)

    def _sampler(self, data: TensorDataset, place: Place) -> Sampler[int]:
        return DistributedSampler(data, dist.get_world_size(), dist.get_rank())
