"""One end of a sealed connection: two keys, and the memory that payloads are sealed into.

Owns when that memory may be used again. Must not know which socket carries it, nor who is at the other end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rudra_zmq.wire.codec import CHUNK, Buffer, Frame
from rudra_zmq.wire.messages.data import Bulk
from rudra_zmq.wire.seal import DOWN, TAG, UP, Opener, Sealer

SendFrames: TypeAlias = Callable[[Sequence[Buffer], bool], bool]


class Channel:
    """``bulk`` is of the Welcome that made it, ``window`` the chunks that may be under way."""

    def __init__(self, bulk: Bulk, window: int, *, node: bool) -> None:
        """``node``: it is the node's end."""
        up, down = (bulk.up, UP), (bulk.down, DOWN)
        (out, out_way), (into, in_way) = (down, up) if node else (up, down)
        self._sealer = Sealer(out, bulk.connection, out_way)
        self._opener = Opener(into, bulk.connection, in_way)
        self._window = window
        self._buffers: list[bytearray] = []
        self._at = 0

    @property
    def worn(self) -> bool:
        """So much went through it that a new one is due."""
        return self._sealer.worn or self._opener.worn

    def send(self, send: SendFrames, frames: Sequence[Buffer]) -> bool:
        """Seals a message and hands it to ``send(frames, copy)``; what that says.

        A payload lies in one of a window of buffers. It is sent under credit, so the one that was in this buffer
        before has been received, and nobody reads it any more: it need not be copied again.
        """
        if len(frames) == 1:
            return send(self._sealer.seal(frames), True)
        if self._at == len(self._buffers):
            self._buffers.append(bytearray(CHUNK + TAG))
        sent = send(self._sealer.seal(frames, self._buffers[self._at]), False)
        if sent:
            self._at = (self._at + 1) % self._window
        return sent

    def open(self, frames: Sequence[Buffer]) -> list[Frame]:
        """The frames of a message; a payload is still sealed. Raises SealError."""
        return self._opener.open(frames)
