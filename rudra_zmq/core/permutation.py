"""The order of an epoch's samples.

Owns the one function from (seed, epoch, N) to a permutation. Must not know who asks: the ledger deals in
positions of this permutation, learners turn positions into sample indices, both with equal results on every
host. The only module of core that needs numpy, so that the daemons stay small.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """The permutation of epoch ``epoch``: int64 of shape (samples,), position -> sample index.

    The stable order of N raw 64-bit draws of Philox with the key (seed, epoch). Raw streams of a bit generator
    are kept between NumPy versions, methods of Generator are not. ``seed`` and ``epoch`` are taken modulo
    2**64; raises ValueError if ``samples`` is negative.
    """
    if samples < 0:
        raise ValueError(f"a permutation of {samples} samples does not exist")
    key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(samples)
    order: NDArray[np.int64] = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
    return order
