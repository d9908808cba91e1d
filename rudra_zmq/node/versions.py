"""The memory of the ring of versions: weights of timestamp k are read while k+1 is written.

Owns: the buffers, allocated (in shared memory: touched) when they are first needed. Must not know: who reads what
(core.versions has the rule, budget.py how many there are). With lambda + 2 there is one for each learner, the current
one, and the one being written, so nobody waits; with fewer a reader may have to wait until another one lets go.

In shared memory each buffer has a stamp: 0 while it is written, then a number of its own. A reader that found the same
stamp before and after has read one version.
"""

from __future__ import annotations

from rudra_zmq.core.versions import Ring
from rudra_zmq.net.shm import Segment
from rudra_zmq.node.memory import STAMPS, create
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout


class Versions:
    """``size`` buffers, as Ring has it.

    ``shared``: learners of this host may map ``segment``, and read; None where that is not so.
    """

    def __init__(self, layout: Layout, size: int, shared: bool = False) -> None:
        self._layout = layout
        self._ring = Ring(size)
        self.segment: Segment | None = None
        self._places: list[Vector] = []
        made = create("versions", layout, self._ring.size, sealed=True) if shared else None
        if made is not None:
            self.segment, self._places = made
        self._buffers: dict[int, Vector] = {}
        self._next = 0
        self._published = 0

    @property
    def current(self) -> Vector:
        """The newest version."""
        return self._buffer(self._ring.current)

    @property
    def allocated(self) -> int:
        """Buffers in use so far."""
        return len(self._buffers)

    @property
    def count(self) -> int:
        """Buffers of the ring."""
        return self._ring.size

    def _buffer(self, index: int) -> Vector:
        vector = self._buffers.get(index)
        if vector is None:
            if self._places:
                vector = self._places[index]
                vector.clear()
            else:
                vector = Vector(self._layout)
            self._buffers[index] = vector
        return vector

    def room(self, reader: str, brief: bool) -> bool:
        """Whether ``reader`` may hold the newest version; ``brief``: it lets go before the next update is due."""
        return self._ring.room(reader, brief)

    def hold(self, reader: str, brief: bool) -> Vector:
        """The newest version, kept until ``release``; what the reader held before is let go."""
        return self._buffer(self.place(reader, brief))

    def place(self, reader: str, brief: bool) -> int:
        """As ``hold``: which buffer of the ring it is."""
        index = self._ring.hold(reader, brief)
        if index is None:
            raise RuntimeError(f"{reader} is one reader more than the ring has room for")
        return index

    def release(self, reader: str) -> None:
        """The reader is through, or gone."""
        self._ring.release(reader)

    def begin(self) -> Vector:
        """The buffer to write the next version into."""
        self._next = self._ring.next()
        self._stamp(0)
        return self._buffer(self._next)

    def publish(self) -> None:
        """What ``begin`` gave is complete: it is the newest version."""
        self._published += 1
        self._stamp(self._published)
        self._ring.publish(self._next)

    def _stamp(self, number: int) -> None:
        if self.segment is not None:
            self.segment.note(STAMPS + self._next, number)
