"""How long a mini-batch takes and how long a vector is under way: distributions, stragglers, a link.

Owns their texts on the command line and the random draws. Must not know the protocol. Times in seconds.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from rudra_zmq.config import parse_duration
from rudra_zmq.errors import ConfigError, UsageError

EXAMPLES = "constant:20ms, gaussian:20ms,0.2, lognormal:20ms,0.5 or exponential:20ms"
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Compute:
    """Time of one mini-batch: ``kind`` constant, gaussian, lognormal or exponential.

    ``mean`` in seconds; ``relative`` is the standard deviation over the mean (gaussian and lognormal).
    """

    kind: str
    mean: float
    relative: float = 0.0

    def draw(self, rng: random.Random) -> float:
        """One time in seconds, never negative (a gaussian is cut off at 0)."""
        if self.kind == "gaussian":
            return max(0.0, rng.gauss(self.mean, self.relative * self.mean))
        if self.kind == "lognormal":
            # exp(N(m, s^2)) has mean exp(m + s^2/2) and relative deviation sqrt(exp(s^2) - 1).
            variance = math.log1p(self.relative**2)
            return rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        if self.kind == "exponential":
            return rng.expovariate(1.0 / self.mean)
        return self.mean


@dataclass(frozen=True)
class Link:
    """The server's line: ``rate`` in bytes per second each way, shared by all; ``latency`` in seconds."""

    rate: float
    latency: float


def parse_compute(text: str) -> Compute:
    """ "constant:20ms", "gaussian:MEAN,REL", "lognormal:MEAN,REL", "exponential:MEAN". UsageError on anything else."""
    kind, _, rest = text.partition(":")
    fields = rest.split(",")
    wanted = {"constant": 1, "exponential": 1, "gaussian": 2, "lognormal": 2}.get(kind)
    try:
        if wanted != len(fields):
            raise ValueError
        mean = parse_duration(fields[0])
        relative = float(fields[1]) if wanted == 2 else 0.0
        if not (mean > 0 and 0 <= relative < math.inf):
            raise ValueError
    except (ValueError, ConfigError):
        raise UsageError(f'"{text}" is no distribution of times', where="--compute", fix=f"write {EXAMPLES}") from None
    return Compute(kind, mean, relative)


def parse_straggler(text: str) -> tuple[int, float]:
    """ "1x3": so many learners, so many times slower. UsageError on anything else."""
    match = re.fullmatch(r"(\d{1,6})x(\d+(?:\.\d+)?)", text)
    if match is None or float(match[2]) <= 0:
        raise UsageError(
            f'"{text}" names no stragglers', where="--straggler", fix='write "1x3": one learner, 3x slower'
        )
    return int(match[1]), float(match[2])


def parse_link(text: str) -> Link:
    """ "1gbit,0.1ms": rate and latency. UsageError on anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit),(.+)", text)
    try:
        if match is None or float(match[1]) <= 0:
            raise ValueError
        return Link(float(match[1]) * _BITS[match[2]] / 8, parse_duration(match[3]))
    except (ValueError, ConfigError):
        raise UsageError(f'"{text}" is no link', where="--link", fix='write "1gbit,0.1ms"') from None


def slowness(learners: int, stragglers: list[tuple[int, float]]) -> list[float]:
    """The factor on the compute time of each rank: the last ranks are the slow ones. UsageError if too many."""
    factors = [factor for count, factor in stragglers for _ in range(count)]
    if len(factors) > learners:
        raise UsageError(
            f"{len(factors)} stragglers among {learners} learners", where="--straggler", fix=f"name at most {learners}"
        )
    return [1.0] * (learners - len(factors)) + factors
