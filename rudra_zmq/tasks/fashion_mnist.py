"""Fashion-MNIST: 60,000 and 10,000 grey images of 28 x 28 pixels, ten classes, and two small networks.

Owns: the networks, the samples as tensors. Must not know: where the files lie (data.py), servers, learners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from rudra_zmq.tasks import data

MEAN, STD = 0.2860, 0.3530  # of the training images' pixels, scaled to 0..1

Batch = Sequence[torch.Tensor]
Sample = tuple[torch.Tensor, torch.Tensor]


class Tensors(NamedTuple):
    """images: float32 [n, 1, 28, 28], normalised; labels: int64 [n]."""

    images: torch.Tensor
    labels: torch.Tensor


class Images(Dataset[Sample]):
    """All samples of a split in memory, 3 KiB each. A batch may be indexed from `tensors` in one call."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.tensors.images[index], self.tensors.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples with one gather each; torch's DataLoader asks for a batch this way."""
        at = torch.as_tensor(indices, dtype=torch.int64)
        return list(zip(self.tensors.images[at].unbind(), self.tensors.labels[at].unbind(), strict=True))


class FashionMnist:
    """The task. A batch is (images, labels), shapes as in `Tensors`."""

    def __init__(self, network: Callable[[], nn.Module], limit: int | None, folder: str | None) -> None:
        self._network = network
        self._limit = limit
        self._folder = folder

    def model(self) -> nn.Module:
        return self._network()

    def dataset(self, split: str) -> Images:
        """Split "train" (its first `limit` images) or "test" (whole). ConfigError on missing or bad files."""
        folder = data.find(self._folder)
        pixels, labels = data.load(folder, split, self._limit if split == "train" else None)
        images = torch.from_numpy(pixels.astype(np.float32)).unsqueeze(1).div_(255).sub_(MEAN).div_(STD)
        return Images(Tensors(images, torch.from_numpy(labels.astype(np.int64))))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        images, labels = batch
        with torch.no_grad():
            scores = model(images)
            loss_sum = functional.cross_entropy(scores, labels, reduction="sum").item()
            correct = int((scores.argmax(dim=1) == labels).sum().item())
        return {"correct": correct, "count": len(labels), "loss_sum": loss_sum}


def cnn(limit: int | None = None, data: str | None = None) -> FashionMnist:
    """99,550 parameters. limit: the first so many training images alone. data: the folder of the files."""
    return FashionMnist(_cnn, limit, data)


def small(limit: int | None = None, data: str | None = None) -> FashionMnist:
    """26,826 parameters, for grids of many learners; arguments as for cnn."""
    return FashionMnist(_small, limit, data)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1568, 60), nn.ReLU(), nn.Linear(60, 10),
    )  # fmt: skip


def _small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
