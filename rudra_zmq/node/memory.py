"""Segments of shared memory as node and learner see them: numbers in whole pages, then vectors of one layout.

Owns: where in a segment a vector lies, and what the numbers before them are. Must not know: whose vectors they are,
how descriptors travel.
"""

from __future__ import annotations

from rudra_zmq import log
from rudra_zmq.net.shm import Segment, rounded
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout

OURS, THEIRS = 0, 1
"""Places of the nonces: what the node wrote, what the learner wrote."""
STAMPS = 2
"""Place of the first vector's stamp; those of the others follow. 0: it is being written."""

_log = log.get("node")


def size(layout: Layout, count: int) -> int:
    """Bytes of a segment of so many vectors."""
    return header(count) + count * rounded(layout.nbytes)


def header(count: int) -> int:
    """Bytes before the first of so many vectors."""
    return rounded(8 * (STAMPS + count))


def vectors(segment: Segment, layout: Layout, count: int) -> list[Vector]:
    """The vectors in a segment; their memory lives as long as one of them."""
    start, stride = header(count), rounded(layout.nbytes)
    return [Vector(layout, segment.memory[start + i * stride :][: layout.nbytes]) for i in range(count)]


def create(name: str, layout: Layout, count: int, *, sealed: bool) -> tuple[Segment, list[Vector]] | None:
    """A segment with its vectors, none of their pages touched; None, and a line in the log, where there is none."""
    try:
        segment = Segment.create(name, size(layout, count), sealed=sealed)
    except OSError as error:
        _log.warning("no memory can be shared, chunks are used", what=name, reason=error.strerror or str(error))
        return None
    return segment, vectors(segment, layout, count)
