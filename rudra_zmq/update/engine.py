"""What a back end of the update offers, and what is common to them.

Owns: the seam between cpu.py, which checks arguments and keeps the state, and the back ends, which compute. Arrays
that come to a back end are contiguous, of n elements, in the encodings of rules.py; an output is writable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rudra_zmq.update.rules import F32, Gradient, RuleSpec, Scalars

F64 = npt.NDArray[np.float64]


class Engine(Protocol):
    """One rule on vectors of n elements. One caller at a time."""

    @property
    def threads(self) -> int:
        """Threads in use, the caller's included."""

    def sum(self, b: Sequence[np.float32], gradients: Sequence[Gradient], out: F32) -> None:
        """out = the sum of b_k*g_k in order. out may be the first of the gradients."""

    def sum_squares(self, b: Sequence[np.float32], gradients: Sequence[Gradient], out: F32, squares: F64) -> None:
        """As ``sum``, and squares = what ``rules.block_square_sums`` makes of out."""

    def apply(
        self,
        b: Sequence[np.float32],
        gradients: Sequence[Gradient],
        w_in: F32,
        w_out: F32,
        scalars: Sequence[Scalars],
    ) -> bool:
        """Sum, rule, state, new weights. False, and all of it void, where the sum is not finite.

        w_out may be the first of the gradients; scalars: one for each of :func:`kinds_of`, in its order.
        """

    def regroup(self, setup: Setup) -> None:
        """The same rule, size, state and threads, other groups."""

    def close(self) -> None:
        """End the threads."""


class Setup:
    """What a back end is made for: a rule, n elements, its state, at most so many threads."""

    def __init__(self, spec: RuleSpec, n: int, state: Mapping[str, npt.NDArray[Any]], threads: int) -> None:
        self.spec = spec
        self.n = n
        self.state = [vector for vector in state.values() if vector.dtype == np.float32]
        self.threads = threads
        self.kinds = list(dict.fromkeys((g.lr_scale, g.weight_decay) for g in spec.groups))
        self.clips = spec.clip_norm is not None
