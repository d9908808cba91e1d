"""When to try again. Owns the back-off that every reconnect uses; must not know what is tried."""

from __future__ import annotations

import random

FAST = 0.1  # seconds between the first attempts
FAST_FOR = 5.0  # seconds that they go on for
LONGEST = 5.0  # seconds between attempts, later on


class Backoff:
    """Waits between attempts: 0.1 s for 5 s, then doubled up to 5 s; all with jitter, so that no crowd returns."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._delay = FAST

    def next(self, now: float) -> float:
        """Seconds to wait after an attempt that failed at ``now``."""
        if self._since is None:
            self._since = now
        self._delay = FAST if now - self._since < FAST_FOR else min(LONGEST, self._delay * 2)
        return self._delay * random.uniform(0.75, 1.25)

    def reset(self) -> None:
        """An attempt succeeded."""
        self._since = None
        self._delay = FAST
