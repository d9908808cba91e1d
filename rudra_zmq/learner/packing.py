"""A learner's vectors as they travel: gradients are encoded on their way up, weights decoded on their way down.

Owns: the memory for encoded vectors where none is shared. Must not know: torch, messages, what an encoding does.
"""

from __future__ import annotations

from rudra_zmq.learner.feedback import Feedback
from rudra_zmq.node.vectors import Packed, Vector, carrier
from rudra_zmq.update.codecs import Scratch
from rudra_zmq.wire.compress import Form


class Packing:
    """``up`` is the form of gradients, ``down`` that of weights; ``weights`` is where new ones belong."""

    def __init__(self, up: Form, down: Form, weights: Vector) -> None:
        self.up, self.down = up, down
        self._weights = weights
        self._scratch = Scratch(up.layout.P)
        self._outgoing = None if up.codec == "float32" else Packed(up)
        self._incoming = weights if down.codec == "float32" else carrier(down)
        self.feedback = Feedback(up.layout.P) if up.codec == "topk" else None

    @property
    def incoming(self) -> Vector | Packed:
        """Where weights are received into; ``take`` them then."""
        return self._incoming

    def take(self, version: Vector | Packed) -> None:
        """Make the weights what a version says."""
        if version is not self._weights:
            version.decode(self._weights)

    def pack(
        self, gradient: Vector, slot: Vector | Packed | None, seq: int, finite: bool | None
    ) -> tuple[Vector | Packed, bool]:
        """Gradient number ``seq`` as it is to be sent, in ``slot`` where there is one, and whether it is finite.

        ``finite``: what is known of it. Without a slot and an encoding it is sent as it is, and the node looks too.
        """
        target = slot or self._outgoing or gradient
        if isinstance(target, Packed):
            if self.feedback is not None:
                return target, self.feedback.pack(gradient, target, seq)
            return target, target.encode(gradient, self._scratch)
        if slot is None:
            return target, finite is not False
        if target is not gradient:  # there was another connection when it was computed
            target.copy_from(gradient)
        return target, target.finite() if finite is None else finite
