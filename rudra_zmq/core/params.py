"""The core's own parameters: what the job file says, in the form that the rules need.

Owns plain frozen dataclasses with validation. Knows neither the job file nor msgspec: ``config`` converts.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOLS = ("hardsync", "softsync", "async")
MODULATIONS = ("auto", "none", "n", "average", "staleness", "inverse-sqrt")
ON_STALE = ("drop", "hold")
ON_LOST = ("shrink", "wait", "fail")

MAX_SAMPLES = 1 << 37
"""Of an epoch: with 65,536 learners, who may each take all of them at once, every number of samples is below 2**53."""

MAX_COUNT = 1 << 53
"""Of samples in all epochs: up to here a double is exact."""


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

    def validate(self, count: int) -> None:
        """Raise ValueError, one line, if the rules cannot hold for lambda = ``count``."""
        _one_of("sync.protocol", self.protocol, PROTOCOLS)
        _one_of("sync.modulation", self.modulation, MODULATIONS)
        _one_of("sync.on_stale", self.on_stale, ON_STALE)
        if not 1 <= self.n <= count:
            raise ValueError(f"sync.n = {self.n} is outside [1, {count}], the number of learners")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"sync.max_staleness = {self.max_staleness} is negative")
        if not 0 <= self.backup < count:
            raise ValueError(f"sync.backup = {self.backup} is outside [0, {count - 1}], one learner must be waited for")
        if self.warmup_epochs < 0:
            raise ValueError(f"sync.warmup_epochs = {self.warmup_epochs} is negative")
        if self.backup and self.protocol != "hardsync" and not self.warmup_epochs:
            raise ValueError(f"sync.backup = {self.backup} needs hardsync, {self.protocol} waits for nobody")


@dataclass(frozen=True, slots=True)
class LearnerParams:
    """Section [learners]: lambda is ``count``; ``minibatch`` 0 means ``global_batch`` is divided.

    Times in seconds; ``step_timeout`` bounds one mini-batch (the first of an incarnation: six, an hour at least).
    """

    count: int = 4
    min: int = 1
    max: int = 0
    minibatch: int = 32
    global_batch: int = 0
    on_lost: str = "shrink"
    deadline: float = 60.0
    step_timeout: float = 600.0

    @property
    def most(self) -> int:
        """The largest lambda: ``max``, or ``count`` where that is 0."""
        return self.max or self.count

    def validate(self) -> None:
        """Raise ValueError, one line, if no job can have such learners."""
        _one_of("learners.on_lost", self.on_lost, ON_LOST)
        if self.count < 1:
            raise ValueError(f"learners.count = {self.count} is less than 1")
        if not 1 <= self.min <= self.count <= self.most:
            raise ValueError(f"learners.min = {self.min}, count = {self.count}, max = {self.most} must ascend from 1")
        if self.minibatch < 0 or self.global_batch < 0:
            raise ValueError("learners.minibatch and learners.global_batch cannot be negative")
        if self.minibatch == 0 and self.global_batch < self.most:
            text = f"learners.global_batch = {self.global_batch} is less than a sample for each of {self.most} learners"
            raise ValueError(text)
        if not (self.deadline >= 0 and self.step_timeout > 0):
            raise ValueError("learners.deadline cannot be negative and learners.step_timeout must be positive")


@dataclass(frozen=True, slots=True)
class DataParams:
    """N samples per epoch, epochs to make, and a stop after so many updates (0: none)."""

    samples: int
    epochs: int
    max_updates: int = 0

    def validate(self) -> None:
        """Raise ValueError, one line, if there is nothing to train on, or more than can be counted."""
        if self.samples < 1:
            raise ValueError(f"{self.samples} samples are too few to train on")
        if self.samples > MAX_SAMPLES:
            raise ValueError(f"{self.samples} samples are more than {MAX_SAMPLES}")
        if self.epochs < 1:
            raise ValueError(f"job.epochs = {self.epochs} is less than 1")
        if self.samples * self.epochs > MAX_COUNT:
            raise ValueError(f"{self.samples} samples in each of {self.epochs} epochs are more than {MAX_COUNT}")
        if self.max_updates < 0:
            raise ValueError(f"a stop after {self.max_updates} updates is impossible")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} = {value!r} is none of {', '.join(allowed)}")
