"""Softsync and async: leases first come, no barrier, an update as soon as c gradients are pending.

Owns who holds which lease. Must not know weights, verdicts or membership: ``sync`` tells it who waits. It has
the same interface as ``rounds``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rudra_zmq.core.events import Lease, Span
from rudra_zmq.core.leases import without
from rudra_zmq.core.ledger import Ledger
from rudra_zmq.core.membership import Session


class Flow:
    """Leasing and timing of n-softsync (async is n = lambda)."""

    by_rank = False

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._leases: dict[int, list[Lease]] = {}

    @property
    def idle(self) -> bool:
        """Whether nobody holds a lease."""
        return not self._leases

    def held(self, session: Session) -> tuple[Lease, ...]:
        """What a grant to ``session`` lists; empty if it has nothing to begin."""
        return tuple(self._leases.get(session.rank, ()))

    def surrender(self, rank: int, spans: Sequence[Span]) -> bool:
        """Take ``spans`` out of what ``rank`` holds; False (and nothing is changed) if it does not hold them."""
        rest = without(self._leases.get(rank, ()), spans)
        if rest is None:
            return False
        self._set(rank, [Lease(pieces) for pieces in rest if pieces])
        return True

    def answerable(self, queue: Mapping[int, Session]) -> list[Session]:
        """Those in the queue (rank -> session, in order of arrival) who hold something to begin."""
        return [session for rank, session in queue.items() if rank in self._leases]

    def supply(self, queue: Mapping[int, Session], minibatches: Mapping[int, int]) -> None:
        """Lease to those who wait: first one to each who has none, then each up to its depth."""
        for session in queue.values():
            if session.rank not in self._leases:
                self._top_up(session, 1, minibatches)
        for session in queue.values():
            self._top_up(session, 1 + session.depth, minibatches)

    def due(self, pending: int, c: int) -> bool:
        """Whether enough gradients are pending for an update."""
        return pending >= c

    def close(self) -> None:
        """An update was made: nothing to do, there are no rounds."""

    def lose(self, rank: int) -> None:
        """``rank`` is lost: its samples return at once."""
        self.withdraw(rank)

    def withdraw(self, rank: int) -> None:
        """All that ``rank`` holds returns to the pool."""
        for lease in self._leases.pop(rank, ()):
            self._ledger.give_back(lease.spans)

    def revoke(self, begun: Mapping[int, int]) -> None:
        """Return every lease that was not begun; ``begun`` tells how many of each rank were."""
        for rank in list(self._leases):
            leases, keep = self._leases[rank], begun.get(rank, 0)
            for lease in leases[keep:]:
                self._ledger.give_back(lease.spans)
            self._set(rank, leases[:keep])

    def _top_up(self, session: Session, target: int, minibatches: Mapping[int, int]) -> None:
        leases = list(self._leases.get(session.rank, ()))
        while len(leases) < target:
            epoch = self._ledger.leasable(self._ledger.epochs)
            lease = None if epoch is None else self._ledger.take(minibatches[session.rank], epoch)
            if lease is None:
                break
            leases.append(lease)
        self._set(session.rank, leases)

    def _set(self, rank: int, leases: list[Lease]) -> None:
        if leases:
            self._leases[rank] = leases
        else:
            self._leases.pop(rank, None)
