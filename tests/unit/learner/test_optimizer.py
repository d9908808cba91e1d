"""Optimizers of torch as rules of the servers: equal steps, or a refusal with the fix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rudra_zmq.errors import Rejected, UsageError
from tests.unit.learner.world import Remembering, alone, batches_by_hand, data, job, loss_of, net, train

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def plain(make: Make, epochs: int = 2, schedule: Callable[[Any], Any] | None = None, seed: int = 1) -> nn.Module:
    """torch alone, on the batches that a lone learner gets."""
    torch.manual_seed(seed)
    model = net()
    opt = make(model.parameters())
    scheduler = schedule(opt) if schedule else None
    last = 0
    for epoch, batch in batches_by_hand(data(), seed, epochs, 8):
        if scheduler is not None and epoch != last:
            scheduler.step()
        last = epoch
        loss_of(model, batch).backward()
        opt.step()
        opt.zero_grad()
    return model


def ours(make: Make, epochs: int = 2, schedule: Callable[[Any], Any] | None = None) -> nn.Module:
    with alone(Remembering(job(epochs=epochs))) as learner:
        model = learner.attach(net())
        opt = learner.optimizer(make(model.parameters()))
        scheduler = schedule(opt) if schedule else None
        for epoch in learner.epochs():
            if scheduler is not None and epoch:
                scheduler.step()
            for batch in learner.batches(data()):
                learner.step(loss_of(model, batch))
    return model


def same(a: nn.Module, b: nn.Module, tolerance: float = 2e-6) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_lone_learner_does_what_torch_does(name: str) -> None:
    same(ours(OPTIMIZERS[name]), plain(OPTIMIZERS[name]))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1.0 / (1 + e)),
    ],
)
def test_schedulers_change_the_rate_on_the_server(schedule) -> None:
    same(ours(OPTIMIZERS["momentum"], 4, schedule), plain(OPTIMIZERS["momentum"], 4, schedule))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [{"params": decayed}, {"params": rest, "lr": 0.3, "weight_decay": 0.0}]


def test_groups_with_schedules_of_their_own() -> None:
    def schedule(opt: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(opt, [lambda e: 0.5**e, lambda e: 1.0 + e])

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups(model), lr=0.1, momentum=0.9, weight_decay=0.02)

    with alone(Remembering(job(epochs=3))) as learner:
        mine = learner.attach(net())
        opt = learner.optimizer(make(mine))
        scheduler = schedule(opt)
        for _ in learner.epochs():
            for batch in learner.batches(data()):
                learner.step(loss_of(mine, batch))
            scheduler.step()
        assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.0125, 1.2])
    torch.manual_seed(1)
    theirs = net()
    other = make(theirs)
    steps = schedule(other)
    for i, (_, batch) in enumerate(batches_by_hand(data(), 1, 3, 8)):
        loss_of(theirs, batch).backward()
        other.step()
        other.zero_grad()
        if i % 5 == 4:
            steps.step()
    same(mine, theirs)


def test_the_rates_of_each_push_are_those_of_the_moment() -> None:
    exchange = Remembering(job(minibatch=20))
    with alone(exchange) as learner:
        model = learner.attach(net())
        inner = torch.optim.SGD(groups(model), lr=0.1)
        opt = learner.optimizer(inner)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.1)  # built on the inner one
        for batch in learner.batches(data()):
            loss_of(model, batch).backward()
            opt.step()
            opt.zero_grad()
            scheduler.step()
    assert [push.rates for push in exchange.pushes] == [
        (0.1, 0.3, 0.1, 0.3),
        pytest.approx((0.01, 0.03, 0.01, 0.03)),
    ]


def test_only_the_chief_sends_rates() -> None:
    exchange = Remembering(job())
    exchange.chief = False
    with alone(exchange) as learner:
        model = learner.attach(net())
        learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = learner.batches(data())
        learner.step(loss_of(model, next(batches)))
        batches.close()
    assert exchange.pushes[0].rates is None


def test_frozen_and_left_out_parameters_do_not_move() -> None:
    with alone(Remembering(job(epochs=2))) as learner:
        model = net()
        model[0].bias.requires_grad_(False)
        learner.attach(model)
        before = copy.deepcopy(model)
        chosen = [p for name, p in model.named_parameters() if name != "2.weight"]
        learner.optimizer(torch.optim.SGD(chosen, lr=0.1, momentum=0.9, weight_decay=0.1))
        train(learner, model, data())
    assert torch.equal(model[0].bias, before[0].bias)
    assert torch.equal(model[2].weight, before[2].weight)
    assert not torch.equal(model[0].weight, before[0].weight)


class Mine(torch.optim.SGD):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.NAdam, "NAdam has no rule"),
        (lambda p: Mine(p, lr=0.1), "Mine has no rule"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1), "leave dampening at 0"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "leave maximize at False"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "leave amsgrad at False"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "leave centered at False"),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5), "leave momentum at 0"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "leave lr_decay at 0"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1), "not the attached model's"),
        (
            lambda p: torch.optim.SGD([{"params": [q], "momentum": i / 9} for i, q in enumerate(p)], lr=0.1),
            "may differ in lr and weight_decay alone",
        ),
    ],
)
def test_what_has_no_rule_is_refused_with_the_fix(make: Make, says: str) -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        with pytest.raises(Rejected) as error:
            learner.optimizer(make(model.parameters()))
    assert says in str(error.value) and "Fix: " in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_class_is_refused_with_the_list() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        with pytest.raises(Rejected, match=r"torch\.optim\.SGD.*Adagrad.*RMSprop.*Adam.*AdamW"):
            learner.optimizer(torch.optim.Rprop(model.parameters()))


def test_a_second_optimizer_is_refused_with_the_fix() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        learner.optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
        with pytest.raises(UsageError, match="one optimizer with a group"):
            learner.optimizer(torch.optim.SGD(model[2].parameters(), lr=0.1))


def test_a_second_model_is_refused_with_the_fix() -> None:
    with alone(Remembering(job())) as learner:
        learner.attach(net())
        with pytest.raises(UsageError, match="holds all networks"):
            learner.attach(net())


def test_a_scheduler_that_cycles_momentum_is_refused_by_name() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10)
        batches = learner.batches(data())
        with pytest.raises(Rejected, match="momentum changed"):
            learner.step(loss_of(model, next(batches)))
        batches.close()


def test_state_dict_is_the_groups_and_comes_back() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        opt = learner.optimizer(inner)
        state = opt.state_dict()
        assert state["state"] == {}
        inner.param_groups[0]["lr"] = 0.7
        opt.load_state_dict(state)
        assert opt.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.1
        with pytest.raises(UsageError, match="rudra resume"):
            opt.load_state_dict(
                {"state": {0: {"momentum_buffer": torch.ones(1)}}, "param_groups": state["param_groups"]}
            )
        with pytest.raises(UsageError, match=r"before learner\.optimizer"):
            opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(UsageError):
            copy.deepcopy(opt)


def test_a_closure_is_called_once_and_its_loss_reported() -> None:
    exchange = Remembering(job(minibatch=40))
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in learner.batches(data()):

            def closure(batch: Any = batch) -> torch.Tensor:
                opt.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            loss = opt.step(closure)
    assert exchange.pushes[0].loss == pytest.approx(float(loss.detach()))
    assert exchange.samples == 40


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_both_ways(to_none: bool) -> None:
    exchange = Remembering(job(epochs=2))
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = learner.optimizer(OPTIMIZERS["momentum"](model.parameters()))
        for _ in learner.epochs():
            for batch in learner.batches(data()):
                opt.zero_grad(set_to_none=to_none)
                loss_of(model, batch).backward()
                opt.step()
    same(model, plain(OPTIMIZERS["momentum"]))
    assert exchange.skipped == 0


def test_clip_grad_norm_acts_before_the_push() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in learner.batches(data()):
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
            opt.zero_grad()
    torch.manual_seed(1)
    other = net()
    mine = torch.optim.SGD(other.parameters(), lr=0.1)
    for _, batch in batches_by_hand(data(), 1, 1, 8):
        loss_of(other, batch).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        mine.step()
        mine.zero_grad()
    same(model, other)
