"""The memory that gradients are received into: two vectors for each incarnation of a learner.

Owns: the vectors and what the gradient in one is (its samples). Must not know: which slot is free, when one is
folded (core decides). A dead learner's accepted gradients stay until the core releases them; the memory is then
used again for the next incarnation, so a job that loses learners all day does not grow.
"""

from __future__ import annotations

from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout

PER_LEARNER = 2


class Slot:
    """One vector; ``count`` is the samples of the gradient that lies in it (0: none was accepted)."""

    __slots__ = ("count", "vector")

    def __init__(self, vector: Vector) -> None:
        self.vector = vector
        self.count = 0


class SlotTable:
    """Slots by (rank, incarnation)."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._of: dict[tuple[int, int], list[Slot]] = {}
        self._free: list[Slot] = []

    @staticmethod
    def nbytes(layout: Layout, learners: int) -> int:
        """What so many learners take."""
        return PER_LEARNER * learners * layout.nbytes

    def open(self, rank: int, incarnation: int) -> None:
        """Slots for a session, allocated at once; harmless if it has them."""
        key = (rank, incarnation)
        if key not in self._of:
            self._of[key] = [self._free.pop() if self._free else Slot(Vector(self._layout)) for _ in range(PER_LEARNER)]

    def slot(self, rank: int, incarnation: int, number: int) -> Slot:
        """A slot of a session that has not been released; else KeyError or IndexError."""
        return self._of[rank, incarnation][number]

    def release(self, rank: int, incarnation: int) -> None:
        """Nobody needs them any more."""
        for slot in self._of.pop((rank, incarnation), ()):
            slot.count = 0
            self._free.append(slot)

    @property
    def sessions(self) -> int:
        """Incarnations that hold slots."""
        return len(self._of)
