"""Arithmetic of leases: what is left of them once some spans are taken out.

Owns one function. Must not know who holds the leases.
"""

from __future__ import annotations

from collections.abc import Sequence

from rudra_zmq.core.events import Lease, Span


def without(leases: Sequence[Lease], spans: Sequence[Span]) -> list[tuple[Span, ...]] | None:
    """The spans left in each lease once ``spans`` are taken out; None if any of them is not held.

    Each span must lie within one span of one lease; one that is listed twice is not held the second time.
    """
    rest = [list(lease.spans) for lease in leases]
    for span in spans:
        for pieces in rest:
            if span in pieces:  # whole, as nearly all are
                pieces.remove(span)
                break
            at = next((i for i, piece in enumerate(pieces) if _within(span, piece)), None)
            if at is not None:
                piece = pieces[at]
                left = (Span(piece.epoch, piece.start, span.start), Span(piece.epoch, span.stop, piece.stop))
                pieces[at : at + 1] = [part for part in left if part.count]
                break
        else:
            return None
    return [tuple(pieces) for pieces in rest]


def _within(span: Span, piece: Span) -> bool:
    return span.epoch == piece.epoch and piece.start <= span.start < span.stop <= piece.stop
