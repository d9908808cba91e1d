"""Credit in chunks: how much may be under way to a peer.

Owns both ends of the rule. Must not know sockets or bytes. The sender starts with ``window`` chunks and spends
one per chunk; the receiver hands credit back once half a window was consumed, so that credit messages are
few and the sender does not run dry meanwhile.
"""

from __future__ import annotations


class SendWindow:
    """The sender's end: may the next chunk go out?"""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} chunks lets nothing pass")
        self.window = window
        self.available = window

    def spend(self) -> bool:
        """Take one chunk of credit; False means wait."""
        if self.available == 0:
            return False
        self.available -= 1
        return True

    def earn(self, chunks: int) -> None:
        """The receiver has room again. More than was spent is a lie: ValueError."""
        if chunks < 1 or self.available + chunks > self.window:
            raise ValueError(f"credit of {chunks} chunks, {self.window - self.available} are under way")
        self.available += chunks


class ReceiveWindow:
    """The receiver's end: is the sender within its credit, and when is credit to be handed back?"""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} chunks lets nothing pass")
        self.window = window
        self._room = window
        self._consumed = 0

    def receive(self) -> None:
        """A chunk came. Raises ValueError if the sender had no credit for it."""
        if self._room == 0:
            raise ValueError(f"more than {self.window} chunks without credit")
        self._room -= 1
        self._consumed += 1

    def due(self, flush: bool = False) -> int:
        """Credit to send now (0: none yet); ``flush`` at the end of a vector hands back all of it."""
        if self._consumed == 0 or (self._consumed < (self.window + 1) // 2 and not flush):
            return 0
        chunks, self._consumed = self._consumed, 0
        self._room += chunks
        return chunks
