"""What topk holds back at this learner, and what is said about it.

Owns: the residual, which gradient it belongs to, its way to the node and back. Must not know: how entries are chosen.

What is not sent of a gradient is added to the next one. A gradient that is refused (stale, late, void, not finite)
changes nothing: its samples are computed anew by somebody, and what was held back before it still is. So there are two
vectors: the residual as it is after the last gradient that counts, and as it will be if the one under way counts too.
"""

from __future__ import annotations

import secrets
import time

import numpy as np

from rudra_zmq.learner.link import Link
from rudra_zmq.node.vectors import F32, Packed, Vector
from rudra_zmq.wire.messages.data import Ready, Residual

STAY_S = 15.0
KEYS = 1 << 52


class Feedback:
    """``residual``: float32 of all parameters. ``seq``: of the last gradient that counts, 0 before the first."""

    def __init__(self, elements: int) -> None:
        self.seq = 0
        self.residual: F32 = np.zeros(elements, np.float32)
        self._rest: F32 = np.zeros(elements, np.float32)
        self._under_way = 0
        self._stays_until: float | None = None

    def pack(self, gradient: Vector, into: Packed, seq: int) -> bool:
        """Encode gradient number ``seq``; the same once more, if it is repeated. Whether it is finite."""
        finite = into.encode_largest(gradient, self.residual, self._rest)
        self._under_way = seq if finite else 0
        return finite

    def answered(self, seq: int, accepted: bool) -> None:
        """Whether that gradient counts."""
        if seq == self._under_way:
            if accepted:
                self.residual, self._rest = self._rest, self.residual
                self.seq = seq
            self._under_way = 0

    # ---- what is said

    def say(self, link: Link, seq: int | None = None) -> None:
        """The residual as it is after gradient ``seq`` (None: the last that counts), if there is any. LinkLost."""
        known = seq is not None and seq == self._under_way
        values, after = (self._rest, self._under_way) if known else (self.residual, self.seq)
        if after:
            key = 1 + secrets.randbelow(KEYS)
            link.send(Residual(key=key, seq=after))
            link.send_vector(key, values.copy())  # the next gradient is not to wait for the last byte of it

    def hear(self, link: Link, ready: Ready, generation: int) -> None:
        """What to go on from, where the node says so or is of another generation than this learner was. LinkLost."""
        if ready.generation == generation and not ready.residual:
            return
        self.seq = self._under_way = 0
        self.residual.fill(0.0)
        if ready.residual:
            link.finish(link.expect(ready.residual, self.residual))

    def stays(self) -> bool:
        """Asked to leave: the answer to the gradient under way says what is held back, and is waited for a little."""
        if not self._under_way:
            return False
        now = time.monotonic()
        if self._stays_until is None:
            self._stays_until = now + STAY_S
        return now < self._stays_until
