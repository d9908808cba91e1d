"""When a step becomes a push, and what becomes of batches without one."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rudra_zmq.core.events import Clock, Lease, Span
from rudra_zmq.errors import Rejected, RudraError, UsageError
from rudra_zmq.learner.exchange import Answer, Gradient
from rudra_zmq.learner.join import Learner
from rudra_zmq.learner.session import _chunks
from rudra_zmq.update.rules import GroupSpan, RuleSpec, new_state, reference_step
from tests.unit.learner.world import (
    Remembering,
    alone,
    batches_by_hand,
    data,
    job,
    loss_of,
    net,
    normed,
    train,
)


def sgd(learner: Learner, model: nn.Module, lr: float = 0.1) -> Any:
    return learner.optimizer(torch.optim.SGD(model.parameters(), lr=lr))


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def positions(spans: tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(span.epoch, at) for span in spans for at in range(span.start, span.stop)]


# ---- the plain loop


def test_a_lone_learner_is_the_reference_bit_for_bit() -> None:
    exchange = Remembering(job(epochs=2))
    with alone(exchange) as learner:
        model = learner.attach(net())
        learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
        train(learner, model, data())
    torch.manual_seed(1)
    other = net()
    w = flat(other)
    spec = RuleSpec.of("momentum", [GroupSpan(0, w.size, 1.0, 0.01)], momentum=0.9)
    state = new_state(spec, w.size)
    for _, batch in batches_by_hand(data(), 1, 2, 8):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(w), other.parameters())
        other.zero_grad()
        loss_of(other, batch).backward()
        g = torch.cat([p.grad.reshape(-1) for p in other.parameters()]).numpy()
        w = reference_step(spec, state, w, [(1.0, g)], None, 1.0, 1.0, 0.1)
    assert np.array_equal(flat(model), w)


def test_every_sample_counts_once_per_epoch_also_where_it_does_not_divide() -> None:
    exchange = Remembering(job(epochs=3, minibatch=16))
    with alone(exchange) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        assert train(learner, model, data(42)) == 9
    seen = [p for push in exchange.pushes for p in positions(push.spans)]
    assert sorted(seen) == [(e, i) for e in range(3) for i in range(42)]
    assert [push.count for push in exchange.pushes] == [16, 16, 10] * 3
    assert exchange.left == "done" and exchange.samples == 126


def test_two_runs_of_one_seed_are_equal_and_another_seed_is_not() -> None:
    def run(seed: int) -> np.ndarray:
        with alone(Remembering(job(seed=seed))) as learner:
            model = learner.attach(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
            sgd(learner, model)
            train(learner, model, data())
        return flat(model)

    assert np.array_equal(run(5), run(5))
    assert not np.array_equal(run(5), run(6))


def test_seq_names_the_gradient_of_the_batch_before_and_after_its_step() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        seen = []
        for batch in learner.batches(data()):
            before = learner.seq
            learner.step(loss_of(model, batch))
            seen.append((before, learner.seq))
    assert seen == [(i, i) for i in range(1, 6)]


def test_losses_are_reported() -> None:
    exchange = Remembering(job(minibatch=40))
    with alone(exchange) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        for batch in learner.batches(data()):
            loss = loss_of(model, batch)
            learner.step(loss)
    assert exchange.pushes[0].loss == float(loss.detach())


def test_buffers_go_with_the_gradient() -> None:
    exchange = Remembering(job(minibatch=20))
    with alone(exchange) as learner:
        model = learner.attach(normed())
        sgd(learner, model)
        means = []
        for batch in learner.batches(data()):
            loss = loss_of(model, batch)
            means.append(model[1].running_mean.numpy().copy())
            learner.step(loss)
    parameters = sum(p.numel() for p in model.parameters())
    for vector, mean in zip(exchange.vectors, means, strict=True):
        assert vector is not None and np.array_equal(vector[parameters : parameters + 6], mean)


def test_unused_and_frozen_parameters_train_the_rest_and_the_unused_are_named_once(caplog) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)
            self.spare.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    exchange = Remembering(job())
    with alone(exchange) as learner:
        model = learner.attach(Half())
        before = flat(model)
        sgd(learner, model)
        train(learner, model, data())
    moved = flat(model) != before
    assert moved[:15].all() and not moved[15:].any()
    lines = [r.getMessage() for r in caplog.records if "without a gradient" in r.getMessage()]
    assert len(lines) == 1 and "spare.bias" in lines[0] and "spare.weight" not in lines[0]


# ---- steps that cannot be


def test_a_step_without_a_batch_or_twice_for_one_is_refused() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        batches = learner.batches(data())
        batch = next(batches)
        loss_of(model, batch).backward()
        opt.step()
        with pytest.raises(UsageError, match="one step for each batch"):
            opt.step()
        batches.close()


def test_a_step_without_any_gradient_is_refused() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        batches = learner.batches(data())
        next(batches)
        with pytest.raises(UsageError, match=r"loss\.backward"):
            opt.step()
        batches.close()


def test_weights_loaded_after_attach_are_refused_at_the_step() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        model.load_state_dict(net().state_dict())
        batches = learner.batches(data())
        with pytest.raises(Rejected, match=r"before learner\.attach"):
            learner.step(loss_of(model, next(batches)))
        batches.close()


def test_a_step_inside_frozen_is_refused_and_weights_come_back() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        batches = learner.batches(data())
        batch = next(batches)
        before = flat(model)
        with learner.frozen():
            model.load_state_dict(net().state_dict())
            loss = loss_of(model, batch)
            with pytest.raises(UsageError, match="frozen"):
                learner.step(loss)
        model.zero_grad()
        assert np.array_equal(flat(model), before)
        learner.step(loss_of(model, batch))
        batches.close()


def test_data_without_a_rule_is_refused() -> None:
    with alone(Remembering(job())) as learner:
        learner.attach(net())
        with pytest.raises(UsageError, match=r"learner\.optimizer"):
            learner.batches(data())


def test_calls_before_attach_are_refused() -> None:
    with alone(Remembering(job())) as learner:
        for call in (lambda: learner.batches(data()), lambda: learner.save("x"), lambda: learner.step(torch.ones(1))):
            with pytest.raises(UsageError, match=r"learner\.attach"):
                call()


# ---- batches without a step


def test_a_skipped_batch_comes_back_once_and_is_then_counted_as_skipped() -> None:
    exchange = Remembering(job(minibatch=10))
    bad = 2  # position of the batch that the script never likes
    with alone(exchange) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        for batch in learner.batches(data()):
            loss = loss_of(model, batch)
            if learner.seq and exchange_position(learner) == bad:
                continue
            learner.step(loss)
    assert [push.count for push in exchange.pushes].count(0) == 2
    assert exchange.skipped == 2 and exchange.samples == 30 and exchange.left == "done"


def exchange_position(learner: Learner) -> int:
    """The number of the batch under way in its epoch."""
    session = learner._session
    assert session is not None
    return session._open[-1].spans[0].start // 10


@pytest.mark.parametrize("to_none", [True, False])
def test_a_batch_without_backward_is_skipped(to_none: bool) -> None:
    exchange = Remembering(job(minibatch=10))
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        for i, batch in enumerate(learner.batches(data())):
            if i == 1:
                continue
            loss_of(model, batch).backward()
            opt.step()
            opt.zero_grad(set_to_none=to_none)
    assert [push.count for push in exchange.pushes] == [10, 0, 10, 10, 10]


def test_old_gradients_that_nobody_zeroed_are_no_contribution() -> None:
    exchange = Remembering(job(minibatch=10))
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        for i, batch in enumerate(learner.batches(data())):
            if i == 1:
                continue
            model.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
    assert [push.count for push in exchange.pushes] == [10, 0, 10, 10, 10]


def test_a_step_that_grad_scaler_skips_counts_nothing() -> None:
    exchange = Remembering(job(minibatch=10))
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for i, batch in enumerate(learner.batches(data())):
            opt.zero_grad()
            loss = loss_of(model, batch)
            scaler.scale(loss * (float("inf") if i == 1 else 1.0)).backward()
            scaler.step(opt)
            scaler.update()
    assert [push.count for push in exchange.pushes] == [10, 0, 10, 10, 10]
    assert exchange.samples == 40 and np.isfinite(flat(model)).all()
    assert scaler.get_scale() == 2.0


def test_a_gradient_that_is_not_finite_is_refused_and_its_samples_come_back() -> None:
    exchange = Remembering(job(minibatch=10))
    with alone(exchange) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        for i, batch in enumerate(learner.batches(data())):
            learner.step(loss_of(model, batch) * (float("nan") if i == 1 else 1.0))
    assert [answer.verdict for answer in exchange.answers] == [
        "accepted",
        "nonfinite",
        "accepted",
        "accepted",
        "accepted",
    ]
    assert exchange.samples == 40 and np.isfinite(flat(model)).all()
    assert exchange.pushes[1].loss is None


# ---- accumulation


def test_accumulate_is_one_batch_of_k_times_the_size() -> None:
    exchange = Remembering(job(epochs=2))
    with alone(exchange) as learner:
        learner.accumulate(3)
        model = learner.attach(net())
        sgd(learner, model)
        assert train(learner, model, data(42)) == 12
    # 24 and 18 samples: the remainder has batches of 8, 8 and 2
    assert [push.count for push in exchange.pushes] == [24, 18] * 2
    torch.manual_seed(1)
    other = net()
    opt = torch.optim.SGD(other.parameters(), lr=0.1)
    for _, batch in batches_by_hand(data(42), 1, 2, 24):
        loss_of(other, batch).backward()
        opt.step()
        opt.zero_grad()
    assert np.allclose(flat(model), flat(other), rtol=1e-5, atol=1e-6)


def test_accumulate_works_with_a_step_per_group_and_divided_losses() -> None:
    def run(by_group: bool) -> tuple[np.ndarray, list[int]]:
        exchange = Remembering(job())
        with alone(exchange) as learner:
            learner.accumulate(2)
            model = learner.attach(net())
            opt = sgd(learner, model)
            for i, batch in enumerate(learner.batches(data(32))):
                (loss_of(model, batch) / (2 if by_group else 1)).backward()
                if not by_group or i % 2:
                    opt.step()
                    opt.zero_grad()
        return flat(model), [push.count for push in exchange.pushes]

    one, two = run(True), run(False)
    assert one[1] == two[1] == [16, 16]
    assert np.allclose(one[0], two[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("skipped", [1, 2])
def test_a_skipped_part_of_an_accumulation_leaves_the_mean_of_the_rest(skipped: int) -> None:
    exchange = Remembering(job())
    with alone(exchange) as learner:
        learner.accumulate(3)
        model = learner.attach(net())
        opt = sgd(learner, model)
        grads = []
        for i, batch in enumerate(learner.batches(data(24))):
            if i == skipped:
                continue
            loss_of(model, batch).backward()
            grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy())
            opt.step()
            opt.zero_grad()
    assert [push.count for push in exchange.pushes] == [24]
    assert exchange.vectors[0] is not None
    assert np.allclose(exchange.vectors[0], (grads[0] + grads[1]) / 2, rtol=1e-5, atol=1e-7)


def by_hand(exchange: Remembering, samples: int, every: int, zero_first: bool = False) -> tuple[Learner, nn.Module]:
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        for _ in learner.epochs():
            for i, batch in enumerate(learner.batches(data(samples))):
                if zero_first and i % every == 0:
                    opt.zero_grad()
                (loss_of(model, batch) / every).backward()
                if i % every == every - 1:
                    opt.step()
                    if not zero_first:
                        opt.zero_grad()
    return learner, model


@pytest.mark.parametrize("zero_first", [False, True])
def test_accumulation_by_hand_pushes_the_samples_of_all_its_batches(zero_first: bool) -> None:
    exchange = Remembering(job(epochs=2))
    by_hand(exchange, 48, 3, zero_first)
    assert [push.count for push in exchange.pushes] == [24] * 4
    assert exchange.samples == 96 and exchange.left == "done"


def test_what_is_left_at_the_end_of_an_epoch_is_pushed_with_its_true_count() -> None:
    exchange = Remembering(job(epochs=2))
    _, model = by_hand(exchange, 42, 4)
    assert [push.count for push in exchange.pushes] == [32, 10, 32, 10]
    seen = sorted(p for push in exchange.pushes for p in positions(push.spans))
    assert seen == [(e, i) for e in range(2) for i in range(42)]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_script_drops_take_their_batches_with_them(to_none: bool) -> None:
    exchange = Remembering(job(minibatch=10))
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        grads = []
        for i, batch in enumerate(learner.batches(data())):
            opt.zero_grad(set_to_none=to_none)
            loss_of(model, batch).backward()
            if i == 1:
                continue  # a finite gradient, and no step: zero_grad drops it
            grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy())
            opt.step()
    counts = [push.count for push in exchange.pushes]
    assert counts == [10, 10, 0, 10, 10]  # the third push names the samples that were dropped
    assert positions(exchange.pushes[2].spans) == [(0, i) for i in range(10, 20)]
    carried = [vector for vector in exchange.vectors if vector is not None]
    assert all(np.array_equal(a, b) for a, b in zip(carried, grads, strict=True))


def test_gradients_dropped_by_the_model_are_noticed_too() -> None:
    exchange = Remembering(job(minibatch=10))
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        for i, batch in enumerate(learner.batches(data())):
            model.zero_grad()
            loss_of(model, batch).backward()
            if i != 1:
                opt.step()
    assert [push.count for push in exchange.pushes] == [10, 10, 0, 10, 10]


def test_several_losses_before_one_step() -> None:
    exchange = Remembering(job(minibatch=20))
    with alone(exchange) as learner:
        model = learner.attach(net())
        opt = sgd(learner, model)
        for batch in learner.batches(data()):
            loss_of(model, batch).backward()
            sum(p.square().sum() for p in model.parameters()).backward()
            opt.step()
            opt.zero_grad()
    assert [push.count for push in exchange.pushes] == [20, 20]


def test_accumulate_after_the_first_batch_is_refused() -> None:
    with alone(Remembering(job())) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        batches = learner.batches(data())
        next(batches)
        with pytest.raises(UsageError, match=r"before learner\.batches"):
            learner.accumulate(2)
        batches.close()


# ---- epochs, loops, leaving


def test_a_loop_left_early_is_finished_by_the_next_one() -> None:
    exchange = Remembering(job(epochs=2))
    with alone(exchange) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        lengths = []
        for _ in learner.epochs():
            lengths.append(0)
            for batch in learner.batches(data()):
                learner.step(loss_of(model, batch))
                lengths[-1] += 1
                if len(lengths) == 1 and lengths[-1] == 2:
                    break
    assert lengths == [2, 8] and exchange.samples == 80 and exchange.left == "done"


def test_loops_without_epochs_serve_one_epoch_each_and_then_nothing() -> None:
    exchange = Remembering(job(epochs=2))
    with alone(exchange) as learner:
        model = learner.attach(net())
        sgd(learner, model)
        lengths = []
        for _ in range(4):
            lengths.append(0)
            for batch in learner.batches(data()):
                learner.step(loss_of(model, batch))
                lengths[-1] += 1
    assert lengths == [5, 5, 0, 0]


class Scripted:
    """An exchange that gives the leases of a list, one answer per call."""

    rank, incarnation, chief, lam = 3, 2, False, 4

    def __init__(self, answers: list[tuple[list[Lease], Any]]) -> None:
        self.job = job(minibatch=4, epochs=3, count=4)
        self.leaving = False
        self.left = ""
        self.pushed: list[Gradient] = []
        self.wants = 0
        self._answers = answers
        self._clock = Clock(1, 0)

    def attach(self, message: Any, layout: Any, weights: Any, gradient: Any) -> None:
        self.weights, self.gradient = weights, gradient

    def rule(self, rule: Any) -> Any:
        from rudra_zmq.learner.exchange import RuleVerdict

        return RuleVerdict(True, "sgd")

    def begin(self, *what: int) -> Answer:
        self.announced = what
        return self._next()

    def push(self, gradient: Gradient) -> Answer:
        self.pushed.append(gradient)
        return self._next()

    def want(self) -> Answer:
        self.wants += 1
        return self._next()

    def log(self, *what: Any) -> None: ...

    def keep(self) -> None: ...

    def leave(self, reason: str, text: str = "") -> None:
        self.left = self.left or reason

    def close(self) -> None: ...

    def _next(self) -> Answer:
        leases, more = self._answers.pop(0)
        options = {"done": False, "verdict": "accepted", "fresh": False, **(more or {})}
        self._clock = options.pop("clock", self._clock)
        return Answer(ack=len(self.pushed), clock=self._clock, leases=tuple(leases), lam=4, chief=False, **options)


def lease(epoch: int, start: int, stop: int) -> Lease:
    return Lease((Span(epoch, start, stop),))


def run_script(exchange: Scripted, step: Any = None) -> list[list[int]]:
    """The first positions of the batches of each loop."""
    loops: list[list[int]] = []
    learner = Learner(exchange, None)  # type: ignore[arg-type]
    model = learner.attach(net())
    learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    session = learner._session
    assert session is not None
    for _ in learner.epochs():
        loops.append([])
        for batch in learner.batches(data(12)):
            loops[-1].append(session._open[-1].spans[0].start)
            if step is None:
                learner.step(loss_of(model, batch))
            else:
                step(learner, model, batch, len(loops) - 1)
    learner.leave(None)
    learner.close()
    return loops


def test_a_learner_without_samples_in_an_epoch_has_an_empty_loop() -> None:
    exchange = Scripted([([lease(1, 0, 4)], None), ([lease(2, 4, 8)], None), ([], {"done": True})])
    assert run_script(exchange) == [[], [0], [4]]
    assert exchange.left == "done"


def test_samples_of_an_earlier_epoch_that_came_back_are_served_in_this_loop() -> None:
    answers = [([lease(1, 0, 4)], None), ([lease(0, 8, 12), lease(1, 4, 8)], None)]
    answers += [([lease(1, 4, 8)], None), ([], {"done": True})]
    exchange = Scripted(answers)
    assert run_script(exchange) == [[], [0, 8, 4]]


def test_revoked_leases_are_not_computed() -> None:
    answers = [([lease(0, 0, 4), lease(0, 4, 8)], None), ([lease(0, 8, 12)], None), ([], {"done": True})]
    exchange = Scripted(answers)
    assert run_script(exchange) == [[0, 8]]


def test_a_learner_asked_to_leave_finishes_its_step_pushes_and_goes() -> None:
    exchange = Scripted([([lease(0, 0, 4)], None), ([lease(0, 4, 8)], None)])

    def step(learner: Learner, model: nn.Module, batch: Any, loop: int) -> None:
        exchange.leaving = True
        learner.step(loss_of(model, batch))

    assert run_script(exchange, step) == [[0]]
    assert [g.count for g in exchange.pushed] == [4] and exchange.left == "drain"


def test_accumulation_by_hand_asks_for_more_and_pushes_when_there_is_none() -> None:
    # Hardsync: the round has one lease for this learner, and nothing follows until it has pushed.
    only = lease(0, 0, 4)
    exchange = Scripted([([only], None), ([only], {"verdict": ""}), ([lease(1, 0, 4)], None), ([], {"done": True})])

    def step(learner: Learner, model: nn.Module, batch: Any, loop: int) -> None:
        loss_of(model, batch).backward()
        if loop:
            learner._optimizer.step()  # type: ignore[union-attr]

    assert run_script(exchange, step) == [[0], [0]]
    assert exchange.wants == 1 and [g.count for g in exchange.pushed] == [4, 4]


def test_a_gradient_over_two_versions_is_as_old_as_the_older() -> None:
    first, second = lease(0, 0, 4), lease(0, 4, 8)
    newer = {"verdict": "", "clock": Clock(1, 7), "fresh": True}
    exchange = Scripted([([first], None), ([first, second], newer), ([], {"done": True})])

    def step(learner: Learner, model: nn.Module, batch: Any, loop: int) -> None:
        loss_of(model, batch).backward()
        if exchange.wants:
            learner._optimizer.step()  # type: ignore[union-attr]

    assert run_script(exchange, step) == [[0, 4]]
    assert exchange.pushed[0].clock == Clock(1, 0) and exchange.pushed[0].count == 8


def test_a_restored_job_voids_what_is_under_way() -> None:
    restored = {"clock": Clock(2, 5), "verdict": "void", "fresh": True}
    answers = [([lease(0, 0, 4)], None), ([lease(0, 4, 8)], {"verdict": "", **restored}), ([], {"done": True})]
    exchange = Scripted(answers)

    def step(learner: Learner, model: nn.Module, batch: Any, loop: int) -> None:
        loss_of(model, batch).backward()
        if len(exchange._answers) == 1:
            learner._optimizer.step()  # type: ignore[union-attr]

    assert run_script(exchange, step) == [[0, 4]]
    assert [g.spans for g in exchange.pushed] == [(Span(0, 4, 8),)]
    assert exchange.pushed[0].clock == Clock(2, 5)


def test_identity_is_that_of_the_exchange() -> None:
    learner = Learner(Scripted([]), None)  # type: ignore[arg-type]
    assert (learner.rank, learner.incarnation, learner.size, learner.is_chief, learner.seq) == (3, 2, 4, False, 0)


def test_only_the_chief_saves(tmp_path) -> None:
    from safetensors.torch import load_file

    exchange = Remembering(job())
    with alone(exchange, tmp_path) as learner:
        model = normed()
        model.register_parameter("again", model[0].weight)
        learner.attach(model)
        saved = learner.save("sub/weights.safetensors")
        assert saved == tmp_path / "sub" / "weights.safetensors"
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(RudraError, match=r"no regular file.*Fix: "):
            learner.save("pipe")  # it would be replaced, and /dev/null by root
        exchange.chief = False
        assert learner.save("other.safetensors") is None
        assert not (tmp_path / "other.safetensors").exists()
    state = load_file(saved)
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert [p.name for p in saved.parent.iterdir()] == ["weights.safetensors"]


def test_figures_are_reported_as_numbers() -> None:
    exchange = Remembering(job())
    with alone(exchange) as learner:
        learner.log(loss=torch.tensor(0.5), n=3)
        with pytest.raises(UsageError, match="at most 64"):
            learner.log(**{f"x{i}": 1.0 for i in range(65)})
    assert exchange.logs == [{"loss": 0.5, "n": 3.0}]


def test_spans_are_cut_into_batches_across_their_borders() -> None:
    spans = (Span(0, 0, 5), Span(0, 9, 10), Span(0, 20, 24))
    assert _chunks(spans, 4) == [
        [Span(0, 0, 4)],
        [Span(0, 4, 5), Span(0, 9, 10), Span(0, 20, 22)],
        [Span(0, 22, 24)],
    ]
