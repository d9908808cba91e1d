"""What attach() sees of a model, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rudra_zmq.errors import Rejected
from rudra_zmq.learner.signature import Signature
from tests.unit.learner.world import normed


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.encoder.weight


class Inner(nn.Module):
    """A module of the user's own that happens to be called `module` inside."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def names(model: nn.Module) -> list[str]:
    return [spec.name for spec in Signature.of(model).message().params]


def test_order_and_names_are_those_of_the_state_dict() -> None:
    model = normed()
    message = Signature.of(model).message()
    assert [spec.name for spec in message.params] == [name for name, _ in model.named_parameters()]
    every = [spec.name for spec in (*message.params, *message.float_buffers, *message.int_buffers)]
    assert sorted(every) == sorted(model.state_dict())
    assert [spec.dtype for spec in message.int_buffers] == ["int64"]
    assert message.params[0].shape == [6, 4]


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda m: torch.compile(nn.DataParallel(m))])
def test_wrappers_leave_no_trace(wrap) -> None:
    model = normed()
    assert Signature.of(wrap(model)).message() == Signature.of(model).message()


def test_a_compiled_part_leaves_no_trace() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = nn.Sequential(plain[0], torch.compile(plain[1]))
    assert names(parts) == names(plain)


def test_a_module_of_that_name_keeps_it() -> None:
    assert names(Inner()) == ["module.weight", "module.bias"]


def test_tied_parameters_are_one_with_two_names() -> None:
    message = Signature.of(Tied()).message()
    assert [spec.name for spec in message.params] == ["encoder.weight"]
    assert message.tied == [("decoder.weight", "encoder.weight")]


def test_frozen_parameters_are_named() -> None:
    model = normed()
    model[0].weight.requires_grad_(False)
    assert Signature.of(model).message().frozen == ["0.weight"]


def test_a_buffer_that_is_not_persistent_stays_at_home() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    assert Signature.of(model).message().float_buffers == []


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.detach().view(2, 2))
    return model


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("table", tensor)
    return model


@pytest.mark.parametrize(
    ("make", "name", "fix"),
    [
        (lambda: nn.Linear(2, 2).double(), "weight", "model.float()"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "weight", "view_as_real"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight", "to_empty"),
        (lambda: nn.LazyLinear(2), "weight", "one batch"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "0.weight", "sparse=False"),
        (lambda: nn.Embedding(4, 3, max_norm=0.1), "weight", "max_norm=None"),
        (lambda: with_buffer(torch.zeros(1).expand(2)), "table", "clone()"),
        (shared, "1.weight", "one Parameter"),
        (lambda: with_buffer(torch.zeros(2, dtype=torch.float64)), "table", "model.float()"),
        (lambda: with_buffer(torch.zeros(2, dtype=torch.complex64)), "table", "real"),
        (nn.ReLU, "no parameters", "attach a model"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name_and_with_a_fix(make, name: str, fix: str) -> None:
    with pytest.raises(Rejected) as error:
        Signature.of(make())
    assert name in str(error.value) and fix in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", [None, [nn.Linear(1, 1)]])
def test_what_is_no_module_is_one_line(model: object) -> None:
    with pytest.raises(Rejected, match=f"the model is {type(model).__name__}, not a torch.nn.Module.*Fix: "):
        Signature.of(model)  # type: ignore[arg-type]
