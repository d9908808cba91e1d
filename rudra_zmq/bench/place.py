"""What a process of another system is told at its start.

Owns: the fields. Must not know: torch; both sides import it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """``control``: path to connect to; ``folder``: where the members of a group find each other; ``parent``: a PID.

    ``elements`` of the model's one vector; ``samples``, ``minibatch`` and ``workers`` are of real training.
    """

    control: str
    folder: str
    index: int
    parent: int
    learners: int
    elements: int = 0
    rule: str = "momentum"
    samples: int = 0
    minibatch: int = 32
    workers: int = 0
