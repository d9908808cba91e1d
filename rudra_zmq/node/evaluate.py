"""The mailbox of the evaluator: the newest epoch's weights win, the last epoch's are always tested.

Owns: two buffers (one being tested, one waiting), which epoch is where and since when. Must not know: sockets, what a
test computes, how long one is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from rudra_zmq.core.events import Clock
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout


@dataclass
class Parcel:
    """The weights of one epoch, copied: nothing of the ring is held."""

    epoch: int
    clock: Clock
    vector: Vector


class Mailbox:
    """At most one parcel is with the evaluator and at most one waits."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._free: list[Vector] = []
        self.testing: Parcel | None = None
        self.waiting: Parcel | None = None
        self.longest = 0.0
        self.tests = 0
        self._put = 0.0
        self._taken = 0.0

    def put(self, epoch: int, clock: Clock, weights: Vector, now: float) -> None:
        """An epoch is done: copy its weights; what was waiting is superseded."""
        vector = self.waiting.vector if self.waiting else self._free.pop() if self._free else Vector(self._layout)
        vector.copy_from(weights)
        self.waiting = Parcel(epoch, clock, vector)
        self._put = now

    def take(self, now: float) -> Parcel | None:
        """The evaluator is here and free: what it gets, if anything."""
        if self.testing is not None or self.waiting is None:
            return None
        self.testing, self.waiting = self.waiting, None
        self._taken = now
        return self.testing

    def gone(self, now: float) -> None:
        """The evaluator died or came back: what it had is due again, unless something newer waits."""
        if self.testing is None:
            return
        self._put = now
        if self.waiting is None:
            self.waiting = self.testing
        else:
            self._free.append(self.testing.vector)
        self.testing = None

    def result(self, epoch: int, clock: Clock, seconds: float) -> bool:
        """A verdict; False if it is of nothing that was sent."""
        testing = self.testing
        if testing is None or testing.epoch != epoch or testing.clock != clock:
            return False
        self._free.append(testing.vector)
        self.testing = None
        self.longest = max(self.longest, seconds)
        self.tests += 1
        return True

    @property
    def due(self) -> Parcel | None:
        """The newest parcel without a result."""
        return self.waiting or self.testing

    @property
    def since(self) -> float:
        """When the test that is under way began; else when what waits was put here."""
        return self._taken if self.testing is not None else self._put
