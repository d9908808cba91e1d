"""The GPUs that a host has declared: which of them are not there, and when they come.

Owns the looks and what is said of them. Must not know: the head, jobs. A look asks nvidia-smi, which a driver that is
ill keeps for seconds: all but the first are in a thread, for a loop that stands still is a host that is silent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rudra_zmq import log
from rudra_zmq.daemons import hardware
from rudra_zmq.net.loop import Loop

logger = log.get()

LOOK_S = 10.0
REMIND_S = 60.0


class Devices:
    """``absent``: those of ``declared`` not there at the last look; ``changed`` is called when that differs."""

    def __init__(self, loop: Loop, declared: Sequence[str], changed: Callable[[], None]) -> None:
        self.absent: tuple[str, ...] = ()
        self._loop, self._declared, self._changed = loop, tuple(declared), changed
        self._looking = False
        self._reminder = log.RateLimiter(REMIND_S)

    def begin(self) -> None:
        """Look, now and from time to time while one is missing: nothing takes its place."""
        self.absent = hardware.absent(self._declared)
        self._say()
        if self._declared:
            self._loop.every(LOOK_S, self.look)

    def look(self) -> None:
        """Look again where one was missing, unless a look is under way."""
        if self.absent and not self._looking:
            self._looking = True
            threading.Thread(target=self._look, name="devices", daemon=True).start()

    def _look(self) -> None:
        found = hardware.absent(self._declared)
        self._loop.call_soon_threadsafe(lambda: self._looked(found))

    def _looked(self, found: tuple[str, ...]) -> None:
        self._looking = False
        before, self.absent = self.absent, found
        self._say()
        if come := [name for name in before if name not in found]:
            logger.info("devices have come", devices=" ".join(come))
        if found != before:
            self._changed()

    def _say(self) -> None:
        if self.absent:
            fix = "see nvidia-smi, or correct host.devices"
            names = " ".join(self.absent)
            logger.limited(self._reminder, "warning", "waiting for devices that are not there", devices=names, fix=fix)
