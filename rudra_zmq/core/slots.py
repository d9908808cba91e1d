"""The slots of one incarnation: where its next gradient may be written.

Owns which of the (two) slots hold an accepted gradient that no update has taken yet. Must not know memory:
the node owns that, and frees it as a whole when the session ends.
"""

from __future__ import annotations

from collections import deque


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
