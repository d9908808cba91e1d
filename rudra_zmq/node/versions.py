"""The memory of the ring of versions: weights of timestamp k are read while k+1 is written.

Owns: the buffers, allocated (in shared memory: touched) when they are first needed. Must not know: who reads what
(core.versions has the rule, budget.py how many there are). With lambda + 2 there is one for each learner, the current
one, and the one being written, so nobody waits; with fewer a reader may have to wait until another one lets go.

In shared memory each buffer has a stamp: 0 while it is written, then a number of its own. A reader that found the same
stamp before and after has read one version.
Where weights are encoded on their way down, the ring holds the encoded versions, each encoded once, and the float32
weights are in two buffers beside it: nobody reads those but the node.
"""

from __future__ import annotations

from rudra_zmq.core.versions import Ring
from rudra_zmq.net.shm import Segment
from rudra_zmq.node.memory import STAMPS, create
from rudra_zmq.node.vectors import Packed, Vector, carrier
from rudra_zmq.update.codecs import Scratch
from rudra_zmq.wire.compress import Form
from rudra_zmq.wire.layout import Layout


class Unsendable(Exception):
    """A weight is finite, and infinite as it would be sent."""


class Versions:
    """``size`` buffers, as Ring has it; learners have versions in ``form``.

    ``shared``: learners of this host may map ``segment``, and read; None where that is not so.
    """

    def __init__(self, layout: Layout, size: int, shared: bool = False, form: Form | None = None) -> None:
        self._layout = layout
        self.form = form or Form.of(layout, "float32")
        self._masters: list[Vector] = []  # where versions are encoded: the current one, and the next
        self._scratch: Scratch | None = None
        if self.form.codec != "float32":
            self._masters = [Vector(layout), Vector(layout)]
            self._scratch = Scratch(layout.P)
        self._ring = Ring(size)
        self.segment: Segment | None = None
        self._places: list[Vector | Packed] = []
        made = create("versions", self.form, self._ring.size, sealed=True) if shared else None
        if made is not None:
            self.segment, self._places = made
        self._buffers: dict[int, Vector | Packed] = {}
        self._next = 0
        self._published = 0

    @property
    def current(self) -> Vector:
        """The newest version, as float32."""
        if self._masters:
            return self._masters[0]
        return self._plain(self._ring.current)

    @property
    def allocated(self) -> int:
        """Buffers in use so far."""
        return len(self._buffers)

    @property
    def count(self) -> int:
        """Buffers of the ring."""
        return self._ring.size

    def _plain(self, index: int) -> Vector:
        vector = self._buffer(index)
        assert isinstance(vector, Vector)
        return vector

    def _buffer(self, index: int) -> Vector | Packed:
        vector = self._buffers.get(index)
        if vector is None:
            if self._places:
                vector = self._places[index]
                vector.clear()
            else:
                vector = carrier(self.form)
            self._buffers[index] = vector
        return vector

    def room(self, reader: str, brief: bool) -> bool:
        """Whether ``reader`` may hold the newest version; ``brief``: it lets go before the next update is due."""
        return self._ring.room(reader, brief)

    def hold(self, reader: str, brief: bool) -> Vector | Packed:
        """The newest version as it is sent, kept until ``release``; what the reader held before is let go."""
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
        return self._masters[1] if self._masters else self._plain(self._next)

    def publish(self) -> None:
        """What ``begin`` gave is complete: it is the newest version.

        Raises Unsendable, and it is not, where it is finite and would not be as it is sent.
        """
        if self._scratch is not None:
            encoded, (_, new) = self._buffer(self._next), self._masters
            assert isinstance(encoded, Packed)
            if not encoded.encode(new, self._scratch) and new.finite():
                raise Unsendable(f"too large for {self.form.codec}")
            self._masters.reverse()
        self._published += 1
        self._stamp(self._published)
        self._ring.publish(self._next)

    def _stamp(self, number: int) -> None:
        if self.segment is not None:
            self.segment.note(STAMPS + self._next, number)
