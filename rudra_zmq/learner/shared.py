"""The node's memory as a learner of its host has it: slots to write gradients into, versions to read.

Owns: asking for it, and the proof that both sides look at the same bytes. Must not know: when a slot or a version may
be touched (grants say so), torch.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from rudra_zmq.net.shm import FdAsker, Segment
from rudra_zmq.node.memory import OURS, STAMPS, THEIRS, size, vectors
from rudra_zmq.node.vectors import Packed, Vector
from rudra_zmq.wire.compress import Form
from rudra_zmq.wire.messages.data import Hello, Mapped, Segments

ASK_S = 10.0


class NotShared(Exception):
    """Memory cannot be shared; the text says why."""


class SharedMemory:
    """``slots`` are this incarnation's own; ``versions`` cannot be written. Mapped as long as a vector is used."""

    def __init__(self, slots: list[Vector | Packed], versions: list[Vector | Packed], stamps: Segment) -> None:
        self.slots = slots
        self.versions = versions
        self._stamps = stamps

    def show(self, place: int) -> Shown:
        """A version to be used where it lies."""
        return Shown(self, place, self.stamp(place))

    def stamp(self, place: int) -> int:
        """Which version lies in a place now; 0 while one is written."""
        return self._stamps.noted(STAMPS + place)


class Shown(NamedTuple):
    """A version in its place, held for this learner until the next grant."""

    memory: SharedMemory
    place: int
    stamp: int

    @property
    def vector(self) -> Vector:
        """The weights, which nothing encodes where they are used so."""
        version = self.memory.versions[self.place]
        assert isinstance(version, Vector)
        return version

    @property
    def intact(self) -> bool:
        """Whether nothing was written over it until now."""
        return self.stamp == self.memory.stamp(self.place) != 0


def share(path: str, hello: Hello, up: Form, down: Form, seconds: float = ASK_S) -> SharedMemory:
    """Ask at the socket ``path`` for the memory of the session of ``hello``: slots ``up``, versions ``down``.

    Raises NotShared.
    """
    try:
        with FdAsker(path, seconds) as asker:
            answer, fds = asker.ask(hello, descriptors=2)
            segments = _map(answer, fds, up, down)
            nonce = secrets.randbelow(1 << 52)
            segments[0].note(THEIRS, nonce)
            echo, _ = asker.ask(Mapped(nonce=nonce))
            if not isinstance(echo, Mapped) or echo.nonce != nonce:
                raise NotShared("the node did not read what was written here")
    except OSError as error:
        raise NotShared(error.strerror or str(error)) from None
    assert isinstance(answer, Segments)
    slots, versions = segments
    return SharedMemory(vectors(slots, up, answer.slots), vectors(versions, down, answer.versions), stamps=versions)


def _map(answer: object, fds: Sequence[int], up: Form, down: Form) -> list[Segment]:
    """Both segments; the descriptors are used up, whatever comes of it."""
    left = list(fds)
    try:
        if not isinstance(answer, Segments) or len(left) != 2:
            raise NotShared("the node offers no memory")
        if (answer.slot_nbytes, answer.version_nbytes) != (up.nbytes, down.nbytes):
            raise NotShared("the node offers the memory of another model")
        slots = Segment.map(left.pop(0), size(up, answer.slots), writable=True)
        versions = Segment.map(left.pop(0), size(down, answer.versions), writable=False)
        if (slots.noted(OURS), versions.noted(OURS)) != (answer.slots_nonce, answer.versions_nonce):
            raise NotShared("what the node wrote cannot be read here")
        return [slots, versions]
    finally:
        for fd in left:
            os.close(fd)
