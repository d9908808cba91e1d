"""The loop over an epoch: leases become batches of data, loaded ahead by torch's DataLoader.

Owns: the options of DataLoader that make sense here, what is loaded ahead, and the order in which it comes back.
Must not know: gradients, sockets. When a lease ends and what a missing step means is the session's.

DataLoader asks its sampler for as many batches as its workers may hold, and each time it hands one out. The sampler
here never waits: what is not leased yet is not there yet. What was loaded for a lease that was revoked is dropped.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Sampler, default_collate

from rudra_zmq import log
from rudra_zmq.core.events import Span
from rudra_zmq.core.permutation import permutation
from rudra_zmq.errors import Rejected, UsageError
from rudra_zmq.learner import workers
from rudra_zmq.learner.data import WHERE, Ask, Collate, LeasedDataset, WorkerInit, length
from rudra_zmq.learner.seeds import BATCH, mix, seed_everything
from rudra_zmq.learner.session import Batch, Session

_log = log.get()

Spans = tuple[Span, ...]
PASSED = {"pin_memory", "timeout", "prefetch_factor", "multiprocessing_context", "pin_memory_device"}
KNOWN = PASSED | {"batch_size", "num_workers", "collate_fn", "worker_init_fn", "persistent_workers", "shuffle"}
REFUSED = {
    "sampler": "leave it out: leases are the sampler",
    "batch_sampler": "leave it out: leases are the sampler",
    "generator": "leave it out: job.seed decides",
    "drop_last": "leave it out: each sample counts once per epoch",
    "in_order": "leave it out: batches come in the order of their leases",
}
KEPT_ORDERS = 4


class LeaseSampler(Sampler[Any]):
    """What learner.sampler(dataset) returns: for DataLoader(dataset, sampler=..., ...) or batch_sampler=...

    Such a loader is iterated through learner.batches(loader): the leases are dealt there.
    """

    def __init__(self, dataset: Any) -> None:
        self.samples = length(dataset)

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[Any]:
        fix = "for batch in learner.batches(loader): ..."
        raise UsageError("this loader has no samples of its own: they are leased", where="learner.sampler()", fix=fix)


@dataclass(frozen=True)
class Options:
    """What batches() was called with. ``batch_size`` 0: the job's."""

    dataset: Any
    samples: int
    batch_size: int = 0
    num_workers: int = 0
    collate_fn: Any = None
    worker_init_fn: Any = None
    persistent: bool = True
    passed: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Any, given: dict[str, Any]) -> Options:
        """From a dataset and DataLoader's arguments, or from a DataLoader. Rejected, with the fix, for the rest."""
        if isinstance(source, DataLoader):
            if given:
                fix = "give them to the DataLoader"
                raise Rejected(f"{', '.join(given)} beside a DataLoader", where=WHERE, fix=fix)
            source, given = source.dataset, _of_loader(source)
        for name, value in given.items():
            if name in REFUSED and value is not None and value is not (name == "in_order"):
                raise Rejected(f"{name} cannot be honoured", where=WHERE, fix=REFUSED[name])
            if name not in KNOWN and name not in REFUSED:
                fix = f"use {', '.join(sorted(KNOWN))}"
                raise UsageError(f"{name} is no argument of DataLoader", where=WHERE, fix=fix)
        if given.get("shuffle") is False:
            raise Rejected("shuffle=False cannot be honoured", where=WHERE, fix="leave it out: leases are shuffled")
        batch_size = given.get("batch_size", 0)
        if not isinstance(batch_size, int) or batch_size < 0 or (batch_size == 0 and "batch_size" in given):
            raise Rejected(f"batch_size = {batch_size}", where=WHERE, fix="give a whole number of at least 1")
        return cls(
            dataset=source,
            samples=length(source),
            batch_size=batch_size,
            num_workers=given.get("num_workers", 0),
            collate_fn=given.get("collate_fn"),
            worker_init_fn=given.get("worker_init_fn"),
            persistent=given.get("persistent_workers", True),
            passed={name: value for name, value in given.items() if name in PASSED and value is not None},
        )

    def same_as(self, other: Options) -> bool:
        """Whether a loader made for one serves the other."""
        names = ("batch_size", "num_workers", "collate_fn", "worker_init_fn", "persistent", "passed")
        return self.dataset is other.dataset and all(getattr(self, n) == getattr(other, n) for n in names)

    @property
    def ahead(self) -> int:
        """Batches to be loaded beyond the one that is computed."""
        return int(self.num_workers * self.passed.get("prefetch_factor", 2))


def _of_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments that made a DataLoader which has our sampler."""
    by_batch = isinstance(loader.batch_sampler, LeaseSampler)
    if not by_batch and not isinstance(loader.sampler, LeaseSampler):
        fix = "DataLoader(dataset, sampler=learner.sampler(dataset), ...), or learner.batches(dataset, ...)"
        raise Rejected("the DataLoader has a sampler of its own", where=WHERE, fix=fix)
    names = ["num_workers", "worker_init_fn", "pin_memory", "timeout", "multiprocessing_context", "drop_last"]
    given = {name: getattr(loader, name) for name in names}
    if loader.batch_size is None and not by_batch:
        raise Rejected("the DataLoader makes no batches", where=WHERE, fix="give it batch_size")
    if loader.batch_size is not None:
        given["batch_size"] = loader.batch_size
    if loader.num_workers:
        given |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    if loader.collate_fn is not default_collate:
        given["collate_fn"] = loader.collate_fn
    return given


class _Feed(Sampler[Any]):
    """The sampler inside the DataLoader: gives what is planned, and never waits."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading

    def __iter__(self) -> Iterator[Ask]:
        return self

    def __next__(self) -> Ask:
        return self._loading.ask_next()


class Loading:
    """A DataLoader that is fed batch by batch. ``planned``: not asked for yet; ``asked``: on the way, in order."""

    def __init__(self, options: Options, seed: int) -> None:
        self.options = options
        self._seed = seed
        self._planned: deque[Spans] = deque()
        self._asked: deque[Spans] = deque()
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._iterator: Iterator[Any] | None = None
        self._loader = self._make()

    def _make(self) -> DataLoader[Any]:
        options = self.options
        passed = dict(options.passed)
        if options.num_workers:
            passed.setdefault("multiprocessing_context", workers.context())
            passed["persistent_workers"] = True
            passed["worker_init_fn"] = WorkerInit(options.worker_init_fn)
        return DataLoader(
            LeasedDataset(options.dataset, self._seed, options.collate_fn is None),
            batch_sampler=_Feed(self),
            num_workers=options.num_workers,
            collate_fn=Collate(options.collate_fn),
            **passed,
        )

    def get(self, spans: Spans, ahead: list[Spans]) -> Any:
        """The data of `spans`; `ahead` is what will probably be asked for next, in order."""
        wanted = [spans, *ahead]
        coming = 0
        for asked in self._asked:
            if coming < len(wanted) and asked == wanted[coming]:
                coming += 1
        self._planned = deque(wanted[coming:])
        self._top_up()
        while True:
            got, data = self._pull()
            if got == spans:
                return data

    def ask_next(self) -> Ask:
        """For the sampler: the next planned batch, StopIteration if there is none now."""
        if not self._planned:
            raise StopIteration
        spans = self._planned.popleft()
        self._asked.append(spans)
        parts = [self._order(span.epoch)[span.start : span.stop] for span in spans]
        return Ask(spans[0].epoch, tuple(np.concatenate(parts).tolist()))

    def close(self) -> None:
        """End the workers."""
        self._iterator = None
        self._asked.clear()

    def _top_up(self) -> None:
        """Give workers that have room what is planned: by itself a DataLoader asks only when it hands a batch out."""
        put = getattr(self._iterator, "_try_put_index", None)
        while put is not None and self._asked and self._planned and len(self._asked) < self.options.ahead:
            put()

    def _pull(self) -> tuple[Spans, Any]:
        # A persistent iterator that ran dry is wound up again: it asks for as much as its workers may hold.
        if self._iterator is None or (self.options.num_workers and not self._asked):
            self._iterator = self._start()
        data = next(self._iterator)
        return self._asked.popleft(), data

    def _start(self) -> Iterator[Any]:
        """Workers are started at the first call."""
        try:
            with workers.without_main(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")
                return iter(self._loader)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise Rejected(
                f"the data cannot be sent to workers: {error}",
                where=WHERE,
                fix="define datasets and functions at the top level of the script, above join(), or num_workers=0",
            ) from error

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._orders:
            while len(self._orders) >= KEPT_ORDERS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = permutation(self._seed, epoch, self.options.samples)
        return self._orders[epoch]


class Batches:
    """The data of one learner over all epochs: announced once, the same for every loop."""

    def __init__(self, session: Session, accumulate: int) -> None:
        self._session = session
        self._accumulate = accumulate
        self._loading: Loading | None = None

    @property
    def announced(self) -> bool:
        """Whether the servers know the data: accumulate() comes too late then."""
        return self._loading is not None

    def loop(self, options: Options, epoch: int) -> Iterator[Any]:
        """The batches of one epoch."""
        loading = self._ready(options)
        session = self._session
        session.model.check_structure()
        try:
            while (batch := session.next(epoch)) is not None:
                data = loading.get(batch.spans, session.ahead)
                self._seed_for(batch)
                yield data
        finally:
            if not options.persistent or session.done:
                loading.close()

    def close(self) -> None:
        """End the workers."""
        if self._loading is not None:
            self._loading.close()

    def _seed_for(self, batch: Batch) -> None:
        seed_everything(mix(BATCH, self._session.exchange.job.seed, batch.epoch, batch.spans[0].start))

    def _ready(self, options: Options) -> Loading:
        if self._loading is None:
            self._announce(options)
            self._loading = Loading(options, self._session.exchange.job.seed)
        elif not self._loading.options.same_as(options):
            old = self._loading.options
            if (old.samples, old.batch_size) != (options.samples, options.batch_size):
                raise UsageError(
                    f"the data was {old.samples} samples in batches of {old.batch_size or 'the job'}, "
                    f"now it is {options.samples} in {options.batch_size or 'the job'}",
                    where=WHERE,
                    fix="keep the number of samples and batch_size for all epochs",
                )
            self._loading.close()
            self._loading = Loading(options, self._session.exchange.job.seed)
        return self._loading

    def _announce(self, options: Options) -> None:
        job = self._session.exchange.job
        mu = options.batch_size or job.minibatch or -(-job.global_batch // job.count)
        if mu * self._accumulate > options.samples:
            times = f"{self._accumulate} x " if self._accumulate > 1 else ""
            raise Rejected(
                f"a mini-batch of {times}{mu} samples is larger than the data, {options.samples} samples",
                where=WHERE,
                fix="lower learners.minibatch (or batch_size), or train on more data",
            )
        if options.batch_size and options.batch_size != job.minibatch:
            was = f"learners.minibatch = {job.minibatch}" if job.minibatch else f"global_batch = {job.global_batch}"
            _log.info("the script's batch_size is used", batch_size=options.batch_size, instead_of=was)
        self._session.begin(options.samples, options.batch_size, self._accumulate, options.ahead)
