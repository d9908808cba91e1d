"""A dataset as leases need it: samples by index, each seeded by its own place.

Owns: what is done to a dataset and to collate_fn so that a batch of a lease comes out, here or in a worker. Must not
know: leases, loaders, jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from rudra_zmq.core.params import MAX_SAMPLES
from rudra_zmq.errors import Rejected
from rudra_zmq.learner.seeds import SAMPLE, mix, seed_everything
from rudra_zmq.learner.workers import Carried, end_with_learner

WHERE = "learner.batches()"


class Ask(NamedTuple):
    """One batch: indices into the dataset, of one epoch."""

    epoch: int
    indices: tuple[int, ...]


class _Ready(NamedTuple):
    """A batch that needs no collating."""

    batch: Any


def length(dataset: Any) -> int:
    """N. Rejected, with the fix, for data that cannot be leased by index, or of which there is none."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise Rejected(
            f"{type(dataset).__name__} cannot be leased: it has no samples by index",
            where=WHERE,
            fix="give a dataset with __len__ and __getitem__",
        )
    samples = len(dataset)
    if samples < 1:
        raise Rejected(f"{type(dataset).__name__} is empty", where=WHERE, fix="see where its samples come from")
    if samples > MAX_SAMPLES:
        text = f"{type(dataset).__name__} says that it has {samples} samples, more than {MAX_SAMPLES}"
        raise Rejected(text, where=WHERE, fix="look at its __len__")
    return samples


class LeasedDataset(Dataset[Any]):
    """`dataset` asked by whole batches. What it draws for a sample depends on (seed, epoch, sample) alone.

    A dataset with __getitems__ is asked once per batch, and seeded once, from the batch's first sample. A plain
    TensorDataset under the default collate_fn is indexed without a call per sample: it draws nothing.
    """

    def __init__(self, dataset: Any, seed: int, default_collating: bool) -> None:
        self._carried = Carried(dataset)
        self._seed = seed
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and default_collating else None

    def __getitems__(self, ask: Ask) -> list[Any]:
        if self._tensors is not None:
            at = torch.tensor(ask.indices, dtype=torch.int64)
            # Copies whole rows: 2.6 times as fast as tensor[at] for 32 images.
            return [_Ready([torch.index_select(tensor, 0, at) for tensor in self._tensors])]
        dataset = self._carried.value
        several: Callable[[Sequence[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        if several is not None:
            self._seed_for(ask.epoch, ask.indices[0])
            return several(list(ask.indices))
        return [self._one(ask.epoch, index) for index in ask.indices]

    def _one(self, epoch: int, index: int) -> Any:
        self._seed_for(epoch, index)
        return self._carried.value[index]

    def _seed_for(self, epoch: int, index: int) -> None:
        seed_everything(mix(SAMPLE, self._seed, epoch, index))


class Collate:
    """collate_fn, carried; the default one where there is none."""

    def __init__(self, function: Callable[[list[Any]], Any] | None) -> None:
        self._carried = Carried(function) if function is not None else None

    def __call__(self, samples: list[Any]) -> Any:
        if samples and isinstance(samples[0], _Ready):
            return samples[0].batch
        return default_collate(samples) if self._carried is None else self._carried.value(samples)


class WorkerInit:
    """What a worker begins with: its end, and worker_init_fn, carried, where there is one."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._carried = Carried(function) if function is not None else None

    def __call__(self, worker: int) -> None:
        end_with_learner()
        if self._carried is not None:
            self._carried.value(worker)
