"""What the evaluator makes of a task's metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from rudra_zmq.errors import RudraError
from rudra_zmq.learner.evaluate import Examiner


class Says:
    """A task whose metrics are given."""

    def __init__(self, **metrics: float) -> None:
        self._metrics = metrics

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def dataset(self, split: str) -> TensorDataset:
        return TensorDataset(torch.zeros(3, 2))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.zeros(())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, float]:
        return self._metrics


def test_sums_become_shares() -> None:
    assert Examiner(Says(correct=1.0, count=4.0, loss_sum=2.0), 1).test() == {
        "accuracy": 0.25,
        "test_error": 0.75,
        "loss": 0.5,
    }


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"correct": 1.0}, "counted no samples"),
        ({"correct": 1.0, "count": float("nan")}, "counted no samples"),
        ({"correct": float("nan"), "count": 3.0}, "nan of 3 samples are correct"),
        ({"correct": 4.0, "count": 3.0}, "4 of 3 samples are correct"),
    ],
)
def test_figures_that_are_no_accuracy_are_an_error_and_no_missing_result(metrics: dict[str, float], words: str) -> None:
    with pytest.raises(RudraError, match=f"{words}.*Fix: "):
        Examiner(Says(**metrics), 1).test()
