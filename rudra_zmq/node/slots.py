"""The memory that gradients are received into: one or two vectors for each incarnation of a learner.

Owns: the vectors and what the gradient in one is (its samples). Must not know: which slot is free, when one is
folded (core decides). A dead learner's accepted gradients stay until the core releases them. Memory of the node's own
is then used again for the next incarnation; memory that a learner could write to is not: a process that wakes up late
writes where nobody reads. Either way a job that loses learners all day does not grow.
"""

from __future__ import annotations

from rudra_zmq.net.shm import Segment
from rudra_zmq.node.memory import create
from rudra_zmq.node.vectors import Packed, Vector, carrier
from rudra_zmq.wire.compress import Form
from rudra_zmq.wire.layout import Layout


class Slot:
    """One vector; ``count`` is the samples of the gradient that lies in it (0: none was accepted)."""

    __slots__ = ("count", "vector")

    def __init__(self, vector: Vector | Packed) -> None:
        self.vector = vector
        self.count = 0


class SlotTable:
    """Slots by (rank, incarnation), ``each`` of them, in ``form``; ``shared``: in memory that learners may map."""

    def __init__(self, layout: Layout, each: int, shared: bool = False, form: Form | None = None) -> None:
        self._form = form or Form.of(layout, "float32")
        self.each = each
        self._shared = shared
        self._of: dict[tuple[int, int], list[Slot]] = {}
        self._segments: dict[tuple[int, int], Segment] = {}
        self._free: list[Slot] = []

    def open(self, rank: int, incarnation: int) -> None:
        """Slots for a session, allocated at once; harmless if it has them."""
        key = (rank, incarnation)
        if key in self._of:
            return
        made = create(f"slots-{rank}.{incarnation}", self._form, self.each, sealed=False) if self._shared else None
        if made is None:
            self._of[key] = [self._free.pop() if self._free else Slot(carrier(self._form)) for _ in range(self.each)]
            return
        self._segments[key], vectors = made
        for vector in vectors:
            vector.clear()
        self._of[key] = [Slot(vector) for vector in vectors]

    def slot(self, rank: int, incarnation: int, number: int) -> Slot:
        """A slot of a session that has not been released; else KeyError or IndexError."""
        return self._of[rank, incarnation][number]

    def segment(self, rank: int, incarnation: int) -> Segment | None:
        """The memory of a session's slots, where a learner can map it."""
        return self._segments.get((rank, incarnation))

    def release(self, rank: int, incarnation: int) -> None:
        """Nobody needs them any more."""
        slots = self._of.pop((rank, incarnation), [])
        segment = self._segments.pop((rank, incarnation), None)
        if segment is not None:
            segment.close()
            return
        for slot in slots:
            slot.count = 0
            self._free.append(slot)

    @property
    def sessions(self) -> int:
        """Incarnations that hold slots."""
        return len(self._of)
