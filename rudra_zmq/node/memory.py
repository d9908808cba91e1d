"""Segments of shared memory as node and learner see them: numbers in whole pages, then vectors of one form.

Owns: where in a segment a vector lies, and what the numbers before them are. Must not know: whose vectors they are,
how descriptors travel.
"""

from __future__ import annotations

from rudra_zmq import log
from rudra_zmq.net.shm import Segment, rounded
from rudra_zmq.node.vectors import Packed, Vector, carrier
from rudra_zmq.wire.compress import Form

OURS, THEIRS = 0, 1
"""Places of the nonces: what the node wrote, what the learner wrote."""
STAMPS = 2
"""Place of the first vector's stamp; those of the others follow. 0: it is being written."""

_log = log.get("node")


def size(form: Form, count: int) -> int:
    """Bytes of a segment of so many vectors."""
    return header(count) + count * rounded(form.nbytes)


def header(count: int) -> int:
    """Bytes before the first of so many vectors."""
    return rounded(8 * (STAMPS + count))


def vectors(segment: Segment, form: Form, count: int) -> list[Vector | Packed]:
    """The vectors in a segment; their memory lives as long as one of them."""
    start, stride = header(count), rounded(form.nbytes)
    return [carrier(form, segment.memory[start + i * stride :][: form.nbytes]) for i in range(count)]


def create(name: str, form: Form, count: int, *, sealed: bool) -> tuple[Segment, list[Vector | Packed]] | None:
    """A segment with its vectors, none of their pages touched; None, and a line in the log, where there is none."""
    try:
        segment = Segment.create(name, size(form, count), sealed=sealed)
    except OSError as error:
        _log.warning("no memory can be shared, chunks are used", what=name, reason=error.strerror or str(error))
        return None
    return segment, vectors(segment, form, count)
