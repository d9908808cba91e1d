"""What became of bad input. Owns the counts by reason; must not know what was wrong with it."""

from __future__ import annotations

from rudra_zmq import log

journal = log.get()


class Drops(dict[str, int]):
    """How many messages were dropped, by reason; the first of each reason is logged."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def count(self, reason: str, detail: str = "") -> None:
        """One more. ``reason`` is one of few words of ours, never a peer's text."""
        self[reason] = self.get(reason, 0) + 1
        if self[reason] == 1:
            journal.warning("message dropped", at=self._what, reason=reason, detail=detail[:200])
