"""What the tests of the learner share: small models and data, lone learners, an exchange that remembers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from rudra_zmq.core.permutation import permutation
from rudra_zmq.learner.exchange import Answer, Gradient, Job
from rudra_zmq.learner.join import Learner
from rudra_zmq.learner.local import LocalExchange
from rudra_zmq.learner.seeds import seed_everything


def job(seed: int = 1, epochs: int = 1, minibatch: int = 8, count: int = 1, protocol: str = "softsync") -> Job:
    return Job(seed=seed, epochs=epochs, minibatch=minibatch, global_batch=0, count=count, protocol=protocol)


class Remembering(LocalExchange):
    """A lone exchange that keeps every push, and the gradient vector that it carried."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.pushes: list[Gradient] = []
        self.vectors: list[np.ndarray | None] = []
        self.answers: list[Answer] = []
        self.logs: list[dict[str, float]] = []
        self.left = ""

    def push(self, gradient: Gradient) -> Answer:
        self.pushes.append(gradient)
        self.vectors.append(self._gradient.reals.copy() if gradient.count else None)
        answer = super().push(gradient)
        self.answers.append(answer)
        return answer

    def log(self, metrics: Any, epoch: int) -> None:
        self.logs.append(dict(metrics))

    def leave(self, reason: str, text: str = "") -> None:
        self.left = reason

    @property
    def samples(self) -> int:
        """Applied so far."""
        assert self._sync is not None
        return self._sync.samples_applied

    @property
    def skipped(self) -> int:
        """Gradients that were skips."""
        assert self._sync is not None
        return self._sync.counters.skipped


@contextmanager
def alone(exchange: LocalExchange, output: Path = Path(".")) -> Iterator[Learner]:
    """As rudra.join(), with an exchange of the test's."""
    seed_everything(exchange.job.seed)
    learner = Learner(exchange, output)
    try:
        yield learner
        learner.leave(None)
    finally:
        learner.close()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def data(samples: int = 40, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


class Numbered(Dataset[Any]):
    """Samples that are their own index."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


def batches_by_hand(
    dataset: TensorDataset, seed: int, epochs: int, size: int
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """(epoch, batch) as a lone learner gets them."""
    for epoch in range(epochs):
        order = permutation(seed, epoch, len(dataset))
        for start in range(0, len(dataset), size):
            at = torch.from_numpy(order[start : start + size].copy())
            yield epoch, [tensor[at] for tensor in dataset.tensors]


def train(learner: Learner, model: nn.Module, dataset: Any, **options: Any) -> int:
    """The plain loop; how many steps."""
    steps = 0
    for _ in learner.epochs():
        for batch in learner.batches(dataset, **options):
            learner.step(loss_of(model, batch))
            steps += 1
    return steps
