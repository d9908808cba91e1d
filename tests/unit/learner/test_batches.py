"""Leases as batches of data: order, seeds, options, and what is loaded ahead."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from rudra_zmq.core.events import Span
from rudra_zmq.core.permutation import permutation
from rudra_zmq.errors import RudraError, UsageError
from rudra_zmq.learner.batches import Loading, Options
from rudra_zmq.learner.seeds import mix, seed_everything
from tests.unit.learner.world import Numbered, Remembering, alone, data, job, loss_of, net


def serve(source: Any, epochs: int = 1, seed: int = 1, size: int = 8, **options: Any) -> list[Any]:
    """All batches of a lone learner that steps on each, whatever it is."""
    got = []
    with alone(Remembering(job(seed=seed, epochs=epochs, minibatch=size))) as learner:
        model = learner.attach(net())
        learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in learner.epochs():
            for batch in learner.batches(source(learner) if callable(source) else source, **options):
                got.append(batch)
                learner.step(loss_of(model, data(4)[:]))
    return got


def test_samples_come_in_the_order_of_the_job_s_permutation() -> None:
    batches = serve(Numbered(20), epochs=2, seed=7)
    expected = [permutation(7, epoch, 20)[at : at + 8].tolist() for epoch in range(2) for at in range(0, 20, 8)]
    assert [batch.tolist() for batch in batches] == expected


class Plain(Dataset[Any]):
    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors_ = tensors

    def __len__(self) -> int:
        return len(self.tensors_)

    def __getitem__(self, index: int) -> Any:
        return self.tensors_[index]


def test_a_tensor_dataset_gives_what_a_dataset_of_samples_gives() -> None:
    for a, b in zip(serve(data()), serve(Plain(data())), strict=True):
        assert isinstance(a, list) and len(a) == len(b) == 2
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


class Drawing(Dataset[Any]):
    """Samples with draws from each of the three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class DrawingSeveral(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def draws(source: Any, **options: Any) -> dict[tuple[int, int], tuple[float, ...]]:
    """(epoch, index) -> what was drawn for it."""
    seen = {}
    for i, (index, *drawn) in enumerate(serve(source, epochs=2, **options)):
        for row in zip(index.tolist(), *(d.tolist() for d in drawn), strict=True):
            seen[i * len(index) // 12, row[0]] = tuple(row[1:])
    return seen


def test_augmentation_depends_on_seed_epoch_and_sample_alone() -> None:
    small, large = draws(Drawing(), size=2), draws(Drawing(), size=4)
    assert small == large and len(small) == 24
    assert len(set(small.values())) == 24


def test_datasets_that_give_several_at_once_are_seeded_by_batch() -> None:
    assert draws(DrawingSeveral(), size=4) == draws(DrawingSeveral(), size=4)
    assert draws(DrawingSeveral(), size=4) != draws(DrawingSeveral(), size=2)


def test_each_batch_s_own_draws_depend_on_its_place_alone() -> None:
    def run(noise: bool) -> list[float]:
        drawn = []
        with alone(Remembering(job())) as learner:
            model = learner.attach(net())
            learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in learner.batches(data()):
                drawn += [random.random(), float(np.random.rand()), float(torch.rand(()))]
                learner.step(loss_of(model, batch))
                if noise:
                    torch.rand(7)
        return drawn

    assert run(False) == run(True) and len(set(run(False))) == 15


def test_seeds_depend_on_every_number_and_their_order() -> None:
    seeds = {mix(1, 2, 3), mix(1, 3, 2), mix(1, 2), mix(0, 1, 2, 3), mix(-1), mix(2**64 - 2)}
    assert len(seeds) == 6
    seed_everything(mix(5))
    first = (random.random(), np.random.rand(), torch.rand(()).item())
    seed_everything(mix(5))
    assert first == (random.random(), np.random.rand(), torch.rand(()).item())


def test_join_seeds_like_torch_does() -> None:
    torch.manual_seed(11)
    expected = nn.Linear(3, 3).weight
    with alone(Remembering(job(seed=11))):
        assert torch.equal(nn.Linear(3, 3).weight, expected)


def test_after_attach_each_rank_draws_something_else() -> None:
    def draw(rank: int) -> float:
        exchange = Remembering(job())
        exchange.rank = rank
        with alone(exchange) as learner:
            learner.attach(net())
            return float(torch.rand(()))

    assert draw(0) == draw(0) != draw(1)


def test_a_collate_function_of_one_s_own() -> None:
    batches = serve(Numbered(16), collate_fn=lambda samples: ("mine", samples))
    assert [batch[0] for batch in batches] == ["mine"] * 2 and len(batches[0][1]) == 8
    batches = serve(data(16), collate_fn=len)
    assert batches == [8, 8]


def test_the_script_s_batch_size_wins() -> None:
    exchange = Remembering(job(minibatch=8))
    with alone(exchange) as learner:
        model = learner.attach(net())
        learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in learner.batches(data(), batch_size=20):
            learner.step(loss_of(model, batch))
    assert [push.count for push in exchange.pushes] == [20, 20]


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_data_loader_of_one_s_own(kind: str) -> None:
    def loader(learner: Any) -> DataLoader[Any]:
        if kind == "sampler":
            return DataLoader(Numbered(20), sampler=learner.sampler(Numbered(20)), batch_size=5, collate_fn=tuple)
        return DataLoader(Numbered(20), batch_sampler=learner.sampler(Numbered(20)), collate_fn=tuple)

    batches = serve(loader, size=5)
    assert batches == [tuple(permutation(1, 0, 20)[at : at + 5].tolist()) for at in range(0, 20, 5)]


def test_a_loader_of_ours_is_not_iterated_by_itself() -> None:
    with alone(Remembering(job())) as learner:
        loader = DataLoader(Numbered(4), sampler=learner.sampler(Numbered(4)))
        with pytest.raises(UsageError, match=r"learner\.batches"):
            next(iter(loader))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (Stream(), {}, "__getitem__"),
        (iter([1, 2]), {}, "__getitem__"),
        (TensorDataset(torch.zeros(0)), {}, "empty"),
        (Numbered(2**40), {}, "1099511627776 samples, more than 137438953472"),
        (Numbered(5), {}, "larger than the data, 5 samples"),
        (Numbered(20), {"batch_size": 21}, "larger than the data"),
        (Numbered(20), {"batch_size": 0}, "at least 1"),
        (Numbered(20), {"batch_size": None}, "at least 1"),
        (Numbered(20), {"shuffle": False}, "leases are shuffled"),
        (Numbered(20), {"drop_last": True}, "counts once"),
        (Numbered(20), {"sampler": [1, 2]}, "leases are the sampler"),
        (Numbered(20), {"in_order": False}, "in the order"),
        (Numbered(20), {"generator": torch.Generator()}, "job.seed"),
        (Numbered(20), {"batchsize": 4}, "batchsize is no argument"),
        (DataLoader(Numbered(20), batch_size=4), {}, "a sampler of its own"),
    ],
)
def test_what_cannot_be_leased_is_refused_with_the_fix(source: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RudraError) as error:
        serve(source, **options)
    assert says in str(error.value) and "Fix: " in str(error.value) and "\n" not in str(error.value)


def test_options_that_change_nothing_are_taken() -> None:
    assert len(serve(Numbered(16), shuffle=True, drop_last=False, num_workers=0, in_order=True)) == 2


def test_another_amount_of_data_in_a_later_epoch_is_refused() -> None:
    sizes = iter([20, 24])
    with pytest.raises(UsageError, match="was 20 samples"):
        serve(lambda learner: Numbered(next(sizes)), epochs=2)


def test_the_same_amount_of_other_data_in_a_later_epoch_is_taken() -> None:
    parts = iter([TensorDataset(torch.zeros(8)), TensorDataset(torch.ones(8))])
    batches = serve(lambda learner: next(parts), epochs=2)
    assert [float(batch[0].sum()) for batch in batches] == [0.0, 8.0]


class Recorded:
    """A DataLoader with workers, as far as `Loading` sees one: takes what the sampler has, gives it in order."""

    def __init__(self, loading: Loading, room: int) -> None:
        self.loading = loading
        self.room = room
        self.on_the_way: deque[Any] = deque()
        self.asked: list[Any] = []
        self.rewound = 0

    def __iter__(self) -> Recorded:
        assert not self.on_the_way
        self.rewound += 1
        while len(self.on_the_way) < self.room and self.loading._planned:
            self._try_put_index()
        return self

    def _try_put_index(self) -> None:
        try:
            ask = self.loading.ask_next()
        except StopIteration:
            return
        self.on_the_way.append(ask)
        self.asked.append(ask)

    def __next__(self) -> Any:
        ask = self.on_the_way.popleft()
        self._try_put_index()
        return ask.indices


def loading(room: int = 4) -> tuple[Loading, Recorded]:
    mine = Loading(Options(dataset=Numbered(100), samples=100, num_workers=2), seed=1)
    fake = Recorded(mine, room)
    mine._loader = fake  # type: ignore[assignment]
    return mine, fake


def span(start: int) -> tuple[Span, ...]:
    return (Span(0, start, start + 2),)


def indices(start: int) -> tuple[int, ...]:
    return tuple(permutation(1, 0, 100)[start : start + 2].tolist())


def test_what_is_planned_is_asked_for_ahead_and_once() -> None:
    mine, fake = loading()
    assert mine.get(span(0), [span(2), span(4)]) == indices(0)
    assert mine.get(span(2), [span(4), span(6)]) == indices(2)
    assert mine.get(span(4), [span(6)]) == indices(4)
    assert mine.get(span(6), []) == indices(6)
    assert [ask.indices for ask in fake.asked] == [indices(at) for at in (0, 2, 4, 6)]


def test_workers_with_room_are_filled_again_after_a_lean_time() -> None:
    mine, fake = loading()
    mine.get(span(0), [span(2)])
    mine.get(span(2), [span(4), span(6), span(8), span(10), span(12)])
    assert len(fake.on_the_way) == 4


def test_data_of_revoked_leases_is_dropped() -> None:
    mine, _fake = loading()
    mine.get(span(0), [span(2), span(4), span(6)])
    assert mine.get(span(50), [span(6), span(60)]) == indices(50)
    assert mine.get(span(6), [span(60)]) == indices(6)
    assert mine.get(span(60), []) == indices(60)


def test_a_share_of_a_global_batch_larger_than_the_data_is_refused() -> None:
    exchange = Remembering(dataclasses.replace(job(minibatch=0), global_batch=41))
    with alone(exchange) as learner:
        model = learner.attach(net())
        learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(RudraError, match="41 samples is larger than the data, 40"):
            next(learner.batches(data()))


def test_data_that_cannot_be_pickled_for_workers_is_refused_with_the_fix() -> None:
    with pytest.raises(RudraError, match=r"cannot be sent to workers.*num_workers=0"):
        serve(Numbered(16), num_workers=1, collate_fn=lambda samples: samples)


def test_default_collating_is_that_of_torch() -> None:
    mine = Loading(Options(dataset=data(), samples=40), seed=1)
    expected = default_collate([data()[int(i)] for i in permutation(1, 0, 40)[0:2]])
    got = mine.get(span(0), [])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
