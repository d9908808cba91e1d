"""Hardsync: rounds dealt in rank order, an update when a round is complete.

Owns the round under way and the forecast of the next ones. Must not know weights, verdicts or membership:
``sync`` tells it who waits and who is counted. The leases of a round are a function of (pool, members): the
forecast is thrown away and dealt anew whenever a round opens, so that samples that came back and members that
came or went need no care of their own, and a job that goes on from a snapshot deals the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rudra_zmq.core.events import Lease, Span
from rudra_zmq.core.leases import without
from rudra_zmq.core.ledger import Ledger
from rudra_zmq.core.membership import Session

Deal = dict[int, Lease]


class Rounds:
    """Leasing and timing of hardsync in the epochs below ``limit``; the slowest ``backup`` are not waited for."""

    by_rank = True

    def __init__(self, ledger: Ledger, limit: int, backup: int) -> None:
        self._ledger = ledger
        self._limit = limit
        self._backup = backup
        self._current: Deal = {}  # of the round under way, by rank: who has not answered
        self._size = 0  # leases of the round under way
        self._ahead: list[Deal] = []

    @property
    def idle(self) -> bool:
        """Whether no round is under way."""
        return not self._current

    def held(self, session: Session) -> tuple[Lease, ...]:
        """What a grant to ``session`` lists; empty if it has no part in the round under way (any more)."""
        if session.rank not in self._current:
            return ()
        ahead = [deal[session.rank] for deal in self._ahead if session.rank in deal]
        return (self._current[session.rank], *ahead[: session.depth])

    def surrender(self, rank: int, spans: Sequence[Span]) -> bool:
        """Take ``spans`` out of what ``rank`` holds; False (and nothing is changed) if it does not hold them.

        It is the rank's answer to the round: what is left of its lease returns to the pool.
        """
        if rank not in self._current:
            return False
        deals = [self._current, *(deal for deal in self._ahead if rank in deal)]
        rest = without([deal[rank] for deal in deals], spans)
        if rest is None:
            return False
        self._ledger.give_back(rest[0])
        del self._current[rank]
        for deal, pieces in zip(deals[1:], rest[1:], strict=True):
            if pieces:
                deal[rank] = Lease(pieces)
            else:
                del deal[rank]
        return True

    def answerable(self, queue: Mapping[int, Session]) -> list[Session]:
        """Those in the queue (rank -> session) who have a part in the round under way, in rank order."""
        return [queue[rank] for rank in self._current if rank in queue]

    def supply(self, queue: Mapping[int, Session], minibatches: Mapping[int, int]) -> None:
        """Open the next round if none is under way and somebody waits, and forecast as far as they look ahead."""
        if queue and not self._current:
            self._forget_ahead()
            self._current = self._deal(minibatches)
            self._size = len(self._current)
        depth = max((session.depth for session in self.answerable(queue)), default=0)
        while len(self._ahead) < depth:
            deal = self._deal(minibatches)
            if not deal:
                break
            self._ahead.append(deal)

    def due(self, pending: int, c: int) -> bool:
        """Whether the round is complete: all but ``backup`` of its leases (at least one) became gradients."""
        return pending > 0 and (not self._current or pending >= max(1, self._size - self._backup))

    def close(self) -> None:
        """The round was applied: what the others still hold of it returns to the pool, they are late."""
        self._return(self._current.values())
        self._current = {}

    def lose(self, rank: int) -> None:
        """``rank`` is lost: its lease stays reserved, so that it gets the same samples if it comes back."""

    def withdraw(self, rank: int) -> None:
        """All that ``rank`` holds returns to the pool, and it has no part in the round."""
        lease = self._current.pop(rank, None)
        if lease is not None:
            self._size -= 1
            self._ledger.give_back(lease.spans)
        for deal in self._ahead:
            if rank in deal:
                self._ledger.give_back(deal.pop(rank).spans)

    def revoke(self, begun: Mapping[int, int]) -> None:
        """Return every lease that was not begun; ``begun`` tells how many of each rank were."""
        for rank in [rank for rank in self._current if not begun.get(rank, 0)]:
            self.withdraw(rank)
        left = {rank: begun[rank] - 1 for rank in self._current}  # of its leases ahead
        for deal in self._ahead:
            for rank in list(deal):
                left[rank] = left.get(rank, 0) - 1
                if left[rank] < 0:
                    self._ledger.give_back(deal.pop(rank).spans)

    def _deal(self, minibatches: Mapping[int, int]) -> Deal:
        epoch = self._ledger.leasable(self._limit)
        deal: Deal = {}
        if epoch is None:
            return deal
        for rank in sorted(minibatches):
            lease = self._ledger.take(minibatches[rank], epoch)
            if lease is not None:
                deal[rank] = lease
        return deal

    def _forget_ahead(self) -> None:
        for deal in self._ahead:
            self._return(deal.values())
        self._ahead = []

    def _return(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._ledger.give_back(lease.spans)
