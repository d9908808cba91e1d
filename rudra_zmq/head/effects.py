"""What the head's rules ask for: messages to send and processes to start or end.

Owns the three kinds of effect. The rules append them to a list; psd carries them out in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from rudra_zmq.wire.messages.data import Message


@dataclass(frozen=True, slots=True)
class Send:
    """A message to a peer: the reply to its request ``id``, a request with our own ``id``, or a notice ("")."""

    peer: bytes
    message: Message
    id: str = ""
    reply: bool = False


@dataclass(frozen=True, slots=True)
class StartNode:
    """Spawn the job's node; psd adds to ``spec`` what only it knows (sockets, runtime folder)."""

    job: str
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StopNode:
    """TERM the job's node, KILL it after ``grace`` seconds (0: at once). Nothing to do where none runs."""

    job: str
    grace: float


Effect: TypeAlias = Send | StartNode | StopNode
