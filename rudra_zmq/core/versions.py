"""The ring of weight versions: which buffer the next update may write.

Owns who reads which version in place. Must not know memory or weights. An update never waits for a reader:
``hold`` refuses ("copy") before the last buffer that can be overwritten would be gone.
"""

from __future__ import annotations

FEWEST = 3
"""Buffers of the smallest ring: the newest version, one that is read, and one to write."""


class Ring:
    """``size`` buffers (at least 3) numbered from 0; buffer ``current`` is the newest version."""

    def __init__(self, size: int) -> None:
        if size < FEWEST:
            raise ValueError(f"a ring needs {FEWEST} buffers, not {size}")
        self.size = size
        self.current = 0
        self._readers: dict[str, int] = {}

    def _free(self) -> list[int]:
        held = set(self._readers.values())
        return [index for index in range(self.size) if index != self.current and index not in held]

    @property
    def free(self) -> int:
        """How many buffers may be overwritten."""
        return len(self._free())

    @property
    def must_copy(self) -> bool:
        """Whether grants say "copy": fewer than two buffers are free."""
        return self.free < 2

    def hold(self, reader: str) -> int | None:
        """``reader`` reads the current version in place (and no other one any more).

        Returns its buffer, or None: too few are free, the reader must copy and then holds nothing.
        """
        self.release(reader)
        if self.must_copy:
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
