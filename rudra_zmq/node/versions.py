"""The memory of the ring of versions: weights of timestamp k are read while k+1 is written.

Owns: the buffers, allocated when they are first needed. Must not know: who reads what (core.versions has the rule).
lambda + 2 buffers are enough for any protocol, since each learner is sent at most one version at a time: one for
each of them, the current one, and the one being written.
"""

from __future__ import annotations

from rudra_zmq.core.versions import Ring, ring_size
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout


class Versions:
    """``readers`` is the largest number of learners that may be sent weights at one time."""

    def __init__(self, layout: Layout, readers: int) -> None:
        self._layout = layout
        self._ring = Ring(self.size(readers))
        self._buffers: dict[int, Vector] = {}
        self._next = 0

    @staticmethod
    def size(readers: int) -> int:
        """Buffers of the ring, at most."""
        return ring_size("softsync", readers, readers + 2)

    @property
    def current(self) -> Vector:
        """The newest version."""
        return self._buffer(self._ring.current)

    @property
    def allocated(self) -> int:
        """Buffers in use so far."""
        return len(self._buffers)

    def _buffer(self, index: int) -> Vector:
        vector = self._buffers.get(index)
        if vector is None:
            vector = self._buffers[index] = Vector(self._layout)
        return vector

    def hold(self, reader: str) -> Vector:
        """The newest version, kept until ``release``; what the reader held before is let go."""
        index = self._ring.hold(reader)
        if index is None:
            raise RuntimeError(f"{reader} is one reader more than the ring was made for")
        return self._buffer(index)

    def release(self, reader: str) -> None:
        """The reader is through, or gone."""
        self._ring.release(reader)

    def begin(self) -> Vector:
        """The buffer to write the next version into."""
        self._next = self._ring.next()
        return self._buffer(self._next)

    def publish(self) -> None:
        """What ``begin`` gave is complete: it is the newest version."""
        self._ring.publish(self._next)
