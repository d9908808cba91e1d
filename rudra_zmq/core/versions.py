"""The ring of weight versions: which buffer the next update may write.

Owns who reads which version in place. Must not know memory or weights. An update never waits for a reader:
``hold`` refuses ("copy") before the last buffer that can be overwritten would be gone.

Some readers are *brief*: they let go before the next update is due, so they may take the last buffer but one. Those
who take part in a round of hardsync without backup are, since the round is over when all of them have pushed; and so
is an only learner, for whom 2 buffers are enough.
"""

from __future__ import annotations

LONE_RING = 2
HARDSYNC_RING = 3


def ring_size(protocol: str, lam: int, affordable: int, backup: int = 0) -> int:
    """Buffers of the ring: 3 under hardsync, else lambda + 2, at most what memory affords, at least 3.

    2 for an only learner. With ``backup`` learners that a round of hardsync does not wait for, each of them may hold a
    version of its own, and the others hold that of the round before until they are answered.
    """
    if lam == 1:
        return LONE_RING
    wanted = lam + 2
    if protocol == "hardsync":
        wanted = min(wanted, backup + 4) if backup else HARDSYNC_RING
    return max(HARDSYNC_RING, min(wanted, affordable))


class Ring:
    """``size`` buffers (at least 2) numbered from 0; buffer ``current`` is the newest version."""

    def __init__(self, size: int) -> None:
        if size < LONE_RING:
            raise ValueError(f"a ring needs {LONE_RING} buffers, not {size}")
        self.size = size
        self.current = 0
        self._readers: dict[str, int] = {}

    def _free(self, but: str = "") -> list[int]:
        held = {index for reader, index in self._readers.items() if reader != but}
        return [index for index in range(self.size) if index != self.current and index not in held]

    @property
    def free(self) -> int:
        """How many buffers may be overwritten."""
        return len(self._free())

    @property
    def must_copy(self) -> bool:
        """Whether grants say "copy": fewer than two buffers are free."""
        return not self.room()

    def room(self, reader: str = "", brief: bool = False) -> bool:
        """Whether ``hold`` would not refuse."""
        return len(self._free(but=reader)) >= (1 if brief else 2)

    def hold(self, reader: str, brief: bool = False) -> int | None:
        """``reader`` reads the current version in place (and no other one any more).

        Returns its buffer, or None: too few are free, the reader must copy and then holds nothing.
        """
        self.release(reader)
        if not self.room(reader, brief):
            return None
        self._readers[reader] = self.current
        return self.current

    def release(self, reader: str) -> None:
        """``reader`` reads nothing in place any more (harmless if it did not)."""
        self._readers.pop(reader, None)

    def next(self) -> int:
        """The buffer to write the next version to. There always is one."""
        return self._free()[0]

    def publish(self, index: int) -> None:
        """Buffer ``index`` (from ``next``) is complete: it is the current version."""
        if index not in self._free():
            raise ValueError(f"buffer {index} is being read")
        self.current = index
