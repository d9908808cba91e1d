"""Which samples count: every position of every epoch is applied once, or counted as skipped once.

Owns the four states of a position (in the pool, out, applied, skipped) and the marks of those that were given
back once. Must not know who holds a lease, nor why one comes back: the policies (flow, rounds) decide that.

At most two epochs are open, the lowest unfinished one and the next; epochs end in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rudra_zmq.core.events import Lease, Span
from rudra_zmq.core.intervals import Intervals

OPEN_EPOCHS = 2


class Closed(NamedTuple):
    """An epoch that is done: every one of its positions was applied or, refused twice, skipped."""

    epoch: int
    applied: int
    skipped: int


class _Page:
    """One open epoch: the four sets are disjoint and make [0, N) together."""

    __slots__ = ("applied", "out", "pool", "returned", "skipped")

    def __init__(self, samples: int) -> None:
        self.pool = Intervals([(0, samples)])
        self.out = Intervals()
        self.applied = Intervals()
        self.skipped = Intervals()
        self.returned = Intervals()  # skipped or refused once: the second time they count as done

    @property
    def done(self) -> int:
        return self.applied.count + self.skipped.count


class Ledger:
    """The samples of a job: ``samples`` positions per epoch, ``epochs`` epochs numbered from 0.

    A span that is not out where it must be (leased, and neither applied nor given back since) raises
    ValueError: that is a fault of the caller, never of a learner.
    """

    def __init__(self, samples: int, epochs: int, state: Mapping[str, Any] | None = None) -> None:
        if samples < 1 or epochs < 0:
            raise ValueError(f"a ledger needs at least one sample, not {samples}, and {epochs} epochs >= 0")
        self.samples = samples
        self.epochs = epochs
        self.epoch = 0
        self._pages: dict[int, _Page] = {}
        if state is not None:
            self._restore(state)
        self._open()

    @property
    def finished(self) -> bool:
        """Whether every position of every epoch is done."""
        return self.epoch >= self.epochs

    def leasable(self, limit: int) -> int | None:
        """The lowest open epoch below ``limit`` with samples in its pool, None if there is none."""
        for epoch, page in self._pages.items():
            if epoch < limit and page.pool.count:
                return epoch
        return None

    def take(self, want: int, epoch: int) -> Lease | None:
        """Lease the lowest ``want`` positions in the pool of ``epoch`` (fewer at its end, None if empty)."""
        page = self._pages.get(epoch)
        if page is None:
            return None
        pieces = page.pool.take(want)
        for start, stop in pieces:
            page.out.add(start, stop)
        return Lease(tuple(Span(epoch, start, stop) for start, stop in pieces)) if pieces else None

    def give_back(self, spans: Iterable[Span]) -> None:
        """Return leased spans to the pool: they are leased again before anything else of their epoch."""
        for epoch, start, stop in spans:
            page = self._page(epoch)
            page.out.remove(start, stop)
            page.pool.add(start, stop)

    def apply(self, spans: Iterable[Span]) -> None:
        """Count leased spans as applied."""
        for epoch, start, stop in spans:
            page = self._page(epoch)
            page.out.remove(start, stop)
            page.applied.add(start, stop)

    def skip(self, spans: Iterable[Span]) -> int:
        """Give leased spans back; positions that came back before are skipped for good. Returns how many."""
        skipped = 0
        for epoch, start, stop in spans:
            page = self._page(epoch)
            page.out.remove(start, stop)
            again, once = page.returned.split(start, stop)
            for low, high in again:
                page.skipped.add(low, high)
                skipped += high - low
            for low, high in once:
                page.returned.add(low, high)
                page.pool.add(low, high)
        return skipped

    def advance(self) -> list[Closed]:
        """Close the finished epochs in order and return them; the next ones open."""
        closed: list[Closed] = []
        while self.epoch in self._pages and self._pages[self.epoch].done == self.samples:
            page = self._pages.pop(self.epoch)
            closed.append(Closed(self.epoch, page.applied.count, page.skipped.count))
            self.epoch += 1
            self._open()
        return closed

    def counts(self, epoch: int) -> dict[str, int]:
        """Positions of an epoch by state: pool, out, applied, skipped (a closed epoch is not kept: ValueError)."""
        page = self._page(epoch)
        return {name: getattr(page, name).count for name in ("pool", "out", "applied", "skipped")}

    def state(self) -> dict[str, Any]:
        """JSON-able; what is out counts as not applied."""
        return {
            "samples": self.samples,
            "epoch": self.epoch,
            "open": {
                str(epoch): {
                    name: [list(piece) for piece in getattr(page, name)] for name in ("applied", "skipped", "returned")
                }
                for epoch, page in self._pages.items()
            },
        }

    def _page(self, epoch: int) -> _Page:
        page = self._pages.get(epoch)
        if page is None:
            raise ValueError(f"epoch {epoch} is not open")
        return page

    def _open(self) -> None:
        for epoch in range(self.epoch, min(self.epoch + OPEN_EPOCHS, self.epochs)):
            if epoch not in self._pages:
                self._pages[epoch] = _Page(self.samples)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["samples"] != self.samples:
            raise ValueError(f"the saved ledger counts {state['samples']} samples, the data has {self.samples}")
        self.epoch = int(state["epoch"])
        for epoch in sorted(int(key) for key in state["open"]):
            saved = state["open"][str(epoch)]
            page = self._pages[epoch] = _Page(self.samples)
            for name in ("applied", "skipped"):
                for start, stop in saved[name]:
                    page.pool.remove(start, stop)
                    getattr(page, name).add(start, stop)
            page.returned = Intervals((start, stop) for start, stop in saved["returned"])
