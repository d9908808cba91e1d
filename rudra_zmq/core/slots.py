"""The slots of one incarnation: where its next gradient may be written.

Owns which of the (two) slots hold an accepted gradient that no update has taken yet. Must not know memory:
the node owns that, and frees it as a whole when the session ends.
"""

from __future__ import annotations

from collections import deque


def unanswered_most(protocol: str, most: int, n: int) -> int:
    """Gradients that may be pending while one who pushed some of them is answered, and one more: the largest c.

    1 under hardsync, whose answer is the round's, and under async. ``most`` is the largest lambda.
    """
    return max(1, most // n) if protocol == "softsync" else 1


def slots_needed(protocol: str, most: int, n: int) -> int:
    """Slots of one incarnation: 2, or 1 where every push is applied before it is answered."""
    return 1 if unanswered_most(protocol, most, n) == 1 else 2


def may_fold(protocol: str, most: int, n: int) -> bool:
    """Whether a learner can need a third slot before an update is due, so that one is folded."""
    return unanswered_most(protocol, most, n) > 2


class Slots:
    """``count`` slots numbered from 0; ``writing`` is the one that the last grant named."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.writing = 0
        self._held: deque[int] = deque()

    @property
    def free(self) -> int | None:
        """The lowest free slot; None means that the oldest held one must be folded first."""
        return next((slot for slot in range(self.count) if slot not in self._held), None)

    def hold(self) -> int:
        """The gradient in the slot being written was accepted: the slot is taken. Returns it."""
        if self.writing in self._held:
            raise ValueError(f"slot {self.writing} already holds a gradient")
        self._held.append(self.writing)
        return self.writing

    def release(self, slot: int) -> None:
        """The gradient in ``slot`` was applied or folded. Raises ValueError if it holds none."""
        self._held.remove(slot)
