"""A task whose one test takes 45 s, longer than an evaluator may be silent."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset


class Task:
    """A line through a few points."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 2)

    def dataset(self, split: str) -> TensorDataset:
        return TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 2)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, float]:
        x, y = batch
        time.sleep(45)
        return {"correct": float((model(x).argmax(1) == y).sum()), "count": len(y), "loss_sum": 0.0}
