"""Every kind of model, over weights that are copied and weights that can only be read: the plain loop, or a refusal."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from rudra_zmq.core.versions import HARDSYNC_RING
from rudra_zmq.errors import Rejected
from rudra_zmq.learner.attach import AttachedModel
from rudra_zmq.learner.exchange import Answer, Gradient
from rudra_zmq.learner.join import Learner
from rudra_zmq.net.shm import Segment
from rudra_zmq.node.memory import vectors
from rudra_zmq.node.vectors import Vector
from rudra_zmq.node.versions import Versions
from rudra_zmq.update.rules import GroupSpan, RuleSpec, new_state, reference_step
from rudra_zmq.wire.compress import Form
from tests.unit.learner.world import Remembering, alone, batches_by_hand, data, job, loss_of, net, normed

Make = Callable[[], nn.Module]


class Showing(Remembering):
    """A lone exchange whose weights lie in sealed memory, another place after each update."""

    def attach(self, message: Any, layout: Any, weights: Vector, gradient: Vector) -> None:
        super().attach(message, layout, weights, gradient)
        self._versions = Versions(layout, HARDSYNC_RING, shared=True)
        self._versions.begin().copy_from(weights)
        self._versions.publish()
        segment = self._versions.segment
        assert segment is not None
        mapped = Segment.map(os.dup(segment.fd), segment.nbytes, writable=False)
        self._places = vectors(mapped, Form.of(layout, "float32"), self._versions.count)
        self._at: int | None = None

    def close(self) -> None:
        super().close()
        assert self._versions.segment is not None
        self._versions.segment.close()

    @property
    def weights(self) -> Vector:
        return self._weights if self._at is None else self._places[self._at]

    def push(self, gradient: Gradient) -> Answer:
        answer = super().push(gradient)
        self._at = self._versions.place("learner", brief=False)
        assert self._at is not None
        for index, vector in enumerate(self._versions._places):
            if index not in (self._at, self._versions._ring.current):
                vector.reals[:] = np.nan  # whoever reads what he may not sees it
        self._weights.reals[:] = np.nan
        return answer

    def keep(self) -> None:
        if self._at is not None:
            self._weights.copy_from(self._places[self._at])
            self._at = None


EXCHANGES = {"copy": Remembering, "shared": Showing}


def by_hand(make: Make) -> tuple[nn.Module, np.ndarray]:
    """One process, float32 masters, the reference of the update: the model and the masters."""
    torch.manual_seed(1)
    model = make()
    params = list(model.parameters())
    w = np.concatenate([p.detach().float().reshape(-1).numpy() for p in params])
    spec = RuleSpec.of("momentum", spans_of(params), momentum=0.9)
    state = new_state(spec, w.size)
    for _, batch in batches_by_hand(data(), 1, 2, 8):
        at = 0
        for p in params:
            p.data.copy_(torch.from_numpy(w[at : at + p.numel()]).view(p.shape))
            p.grad = None
            at += p.numel()
        loss_of(model, batch).backward()
        grads = [torch.zeros(p.numel()) if p.grad is None else p.grad.float().reshape(-1) for p in params]
        w = reference_step(spec, state, w, [(1.0, torch.cat(grads).numpy())], None, 1.0, 1.0, 0.1)
    return model, w


def spans_of(params: list[nn.Parameter]) -> list[GroupSpan]:
    spans, at = [], 0
    for p in params:
        if p.numel():
            spans.append(
                GroupSpan(at, at + p.numel(), 1.0 if p.requires_grad else 0.0, 0.01 if p.requires_grad else 0.0)
            )
        at += p.numel()
    return spans


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).numpy()


def trained(make: Make, exchange: Remembering, each: Callable[[nn.Module, Learner], None] | None = None) -> nn.Module:
    with alone(exchange) as learner:
        model = learner.attach(make())
        learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
        for _ in learner.epochs():
            for batch in learner.batches(data()):
                learner.step(loss_of(model, batch))
                if each is not None:
                    each(model, learner)
    return model


# ---- the models: 4 numbers in, 3 out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.second(self.first(x).tanh()).tanh())
        return out


class Twice(nn.Module):
    """One layer used twice, perhaps under checkpointing: its gradient comes in two parts."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if self.reentrant is None:
                x = self.inner(x).tanh()
            else:
                x = checkpoint(lambda y: self.inner(y).tanh(), x.requires_grad_(), use_reentrant=self.reentrant)
        out: torch.Tensor = self.last(x)
        return out


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare, self.used = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table((x.abs() * 2).long().clamp(max=4)).mean(1)
        return out


class Odd(nn.Module):
    """Parameters of no dimension, without elements, and over transposed memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned * self.scale + self.nothing.sum() + self.none.sum()


class Mixed(nn.Module):
    """Some layers in half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.last = nn.Linear(4, 6).to(dtype), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x.to(self.dtype)).float().tanh())
        return out


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picture = torch.stack([x, -x], 1).view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        out: torch.Tensor = self.norm(self.conv(picture)).flatten(1)
        return out


def frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3))
    model(torch.zeros(1, 4))
    return model


def parametrized(how: Callable[[nn.Module], nn.Module]) -> Make:
    return lambda: nn.Sequential(how(nn.Linear(4, 6)), nn.Tanh(), how(nn.Linear(6, 3)))


MODELS: dict[str, Make] = {
    "plain": net,
    "batch norm": normed,
    "tied": Tied,
    "frozen": frozen,
    "unused": Unused,
    "channels_last": Pictures,
    "dense embedding": Words,
    "used twice": Twice,
    "checkpointed": lambda: Twice(reentrant=False),
    "checkpointed, re-entrant": lambda: Twice(reentrant=True),
    "odd shapes": Odd,
    "lazy, run once": lazy,
    "float16": lambda: Mixed(torch.float16),
    "bfloat16": lambda: Mixed(torch.bfloat16),
    "weight_norm": parametrized(parametrizations.weight_norm),
    "weight_norm by a hook": parametrized(weight_norm),
    "spectral_norm": parametrized(parametrizations.spectral_norm),
    "orthogonal": parametrized(parametrizations.orthogonal),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("weights", EXCHANGES)
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_the_plain_loop(name: str, weights: str) -> None:
    expected, masters = by_hand(MODELS[name])
    exchange = EXCHANGES[weights](job(epochs=2))
    model = trained(MODELS[name], exchange)
    np.testing.assert_array_equal(exchange.weights.params, masters)
    if all(p.dtype == torch.float32 for p in model.parameters()):
        np.testing.assert_array_equal(flat(model), masters)
    for (key, ours), theirs in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(ours, theirs), key
    assert all(
        p.is_contiguous() == q.is_contiguous() for p, q in zip(model.parameters(), expected.parameters(), strict=True)
    )


def expanded() -> nn.Module:
    model = nn.Linear(4, 3)
    model.bias = nn.Parameter(torch.zeros(1).expand(3))
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(4, 3).double(), ["weight is float64", "model.float()"]),
        (lambda: Words(sparse=True), ["table.weight would get sparse gradients", "sparse=False"]),
        (lambda: nn.LazyLinear(3), ["weight has no shape yet", "run one batch"]),
        (lambda: nn.Linear(4, 3, device="meta"), ["weight has no memory", "to_empty"]),
        (expanded, ["bias has elements that lie in one place", "clone()"]),
    ],
)
def test_or_is_refused_with_the_name_and_the_fix(make: Make, words: list[str]) -> None:
    with pytest.raises(Rejected) as error, alone(Remembering(job())) as learner:
        learner.attach(make())
    assert all(word in str(error.value) for word in words), error.value


# ---- compiled


@pytest.mark.parametrize("weights", EXCHANGES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_compiled_once(weights: str, backend: str) -> None:
    torch._dynamo.reset()
    found = torch._dynamo.lookup_backend(backend)
    compiled = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return found(graph, inputs)

    _, masters = by_hand(net)
    exchange = EXCHANGES[weights](job(epochs=2))
    model = trained(lambda: torch.compile(net(), backend=counting), exchange)  # type: ignore[arg-type,return-value]
    np.testing.assert_array_equal(flat(model), masters)
    assert compiled == 1


# ---- what scripts do with a model


def test_copies_and_files_of_a_model_whose_weights_are_shown() -> None:
    kept: list[tuple[np.ndarray, nn.Module, bytes, dict[str, torch.Tensor], np.ndarray]] = []

    def keep(model: nn.Module, learner: Learner) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        state = copy.deepcopy(model.state_dict())
        assert learner._session is not None
        kept.append(
            (flat(model).copy(), copy.deepcopy(model), file.getvalue(), state, learner._session.model.weights.params)
        )

    trained(normed, Showing(job()), keep)
    assert len({id(weights) for *_, weights in kept}) > 1
    for values, clone, file, state, _ in kept:
        assert np.array_equal(flat(clone), values)
        with torch.no_grad():
            for p in clone.parameters():
                p.zero_()  # memory of its own
        assert np.array_equal(flat(torch.load(io.BytesIO(file), weights_only=False)), values)
        assert np.array_equal(
            torch.cat([v.reshape(-1) for n, v in state.items() if "weight" in n or "bias" in n]).numpy(), values
        )


def test_inside_frozen_weights_can_be_written_and_come_back() -> None:
    def evaluate(model: nn.Module, learner: Learner) -> None:
        before, places = flat(model).copy(), [p.data_ptr() for p in model.parameters()]
        buffers = [b.clone() for b in model.buffers()]
        with learner.frozen():
            assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
            model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
            model(torch.ones(4, 4))
        assert np.array_equal(flat(model), before) and [p.data_ptr() for p in model.parameters()] == places
        assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))

    exchange = Showing(job(epochs=2))
    model = trained(normed, exchange, evaluate)
    np.testing.assert_array_equal(flat(model), by_hand(normed)[1])


def test_weights_assigned_or_moved_by_the_script_are_told_apart() -> None:
    def halve(model: nn.Module, learner: Learner) -> None:
        model[0].weight.data = model[0].weight.data * 0.5

    with pytest.raises(Rejected, match=r"parameter 0\.weight was changed outside"):
        trained(net, Showing(job()), halve)
    model = trained(net, Showing(job(epochs=2)), lambda model, learner: model.double().float() and None)
    np.testing.assert_array_equal(flat(model), by_hand(net)[1])


@pytest.mark.parametrize("weights", EXCHANGES)
def test_parameters_lie_in_the_weights_themselves(weights: str) -> None:
    exchange = EXCHANGES[weights](job(epochs=2))
    places = set()

    def look(model: nn.Module, learner: Learner) -> None:
        assert model[0].weight.data_ptr() == exchange.weights.params.ctypes.data
        places.add(model[0].weight.data_ptr())

    trained(net, exchange, look)
    assert (len(places) > 1) == (weights == "shared")


def test_what_is_shown_no_longer_is_let_go() -> None:
    attached = AttachedModel(net())
    shown = Vector(attached.layout)
    attached.load(shown)
    assert attached._shown
    attached.load(attached.own)
    assert not attached._shown
