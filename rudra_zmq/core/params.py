"""The core's own parameters: what the job file says, in the form that the rules need.

Owns plain frozen dataclasses with validation. Knows neither the job file nor msgspec: ``config`` converts.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOLS = ("hardsync", "softsync", "async")
MODULATIONS = ("auto", "none", "n", "average", "staleness", "inverse-sqrt")


@dataclass(frozen=True, slots=True)
class SyncParams:
    """Section [sync]. ``max_staleness`` None is no bound; ``on_stale`` is drop or hold."""

    protocol: str = "softsync"
    n: int = 1
    modulation: str = "auto"
    max_staleness: int | None = None
    on_stale: str = "drop"
    backup: int = 0
    warmup_epochs: int = 0


@dataclass(frozen=True, slots=True)
class LearnerParams:
    """Section [learners]: lambda is ``count``; ``minibatch`` 0 means ``global_batch`` is divided.

    Times in seconds; ``step_timeout`` bounds one mini-batch (the first of an incarnation is exempt).
    """

    count: int = 4
    min: int = 1
    max: int = 0
    minibatch: int = 32
    global_batch: int = 0
    on_lost: str = "shrink"
    deadline: float = 60.0
    step_timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class DataParams:
    """N samples per epoch, epochs to make, and a stop after so many updates (0: none)."""

    samples: int
    epochs: int
    max_updates: int = 0
