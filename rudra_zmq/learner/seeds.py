"""Where randomness comes from: every generator that user code draws from, seeded by place and not by history.

Owns: the mixing of numbers into a seed, and the seeding of Python, NumPy and torch. Must not know: jobs, leases.

A mini-batch's draws (dropout) depend on (seed, epoch, first position) alone, a sample's (augmentation) on
(seed, epoch, sample): so they are equal under every protocol, in every process, and after a restart.
"""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch

RANK = 1
BATCH = 2
SAMPLE = 3


def mix(*numbers: int) -> int:
    """64 bits that depend on every number (each taken modulo 2**64) and on their order."""
    packed = struct.pack(f"<{len(numbers)}Q", *(n % 2**64 for n in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU): about 10 microseconds.

    torch.manual_seed would walk over every accelerator and keep a stack trace for those that are not up yet.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**64)
