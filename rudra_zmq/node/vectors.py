"""The memory of one vector: a gradient, or a version of the weights, with its buffers behind it.

Owns: allocation (pages touched once, so that no update pays for it), the views of a vector's parts and
the check for NaN and infinity. Must not know: whose vector it is. The arithmetic of the layout is wire's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rudra_zmq.wire.layout import Layout

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

_CHECK = 1 << 18  # elements per step of a check: 1 MiB stays in the cache


class Vector:
    """``data``: the bytes as they travel; ``params``, ``floats``, ``ints``: parts; ``reals``: the float32."""

    __slots__ = ("data", "floats", "ints", "params", "reals")

    def __init__(self, layout: Layout, memory: memoryview | None = None, *, touch: bool = True) -> None:
        """Zeros in memory of its own; or over ``memory`` as it is, of which the vector is the beginning.

        ``touch`` False: its pages come when they are first written, for a vector that may never be.
        """
        if memory is None:
            whole = np.zeros(layout.nbytes, np.uint8)
            if touch:
                whole.fill(0)
        else:
            whole = np.frombuffer(memory, np.uint8, layout.nbytes)
        self.data: memoryview = whole.data
        self.reals: F32 = whole[: 4 * (layout.P + layout.BF)].view(np.float32)
        self.params: F32 = self.reals[: layout.P]
        self.floats: F32 = self.reals[layout.P :]
        ints = whole[layout.int_offset : layout.int_offset + 8 * layout.BI]
        self.ints: I64 = ints.view(np.int64)

    def clear(self) -> None:
        """Zeros; every page is there afterwards."""
        np.frombuffer(self.data, np.uint8).fill(0)

    def copy_from(self, other: Vector) -> None:
        """All of another vector of the same layout."""
        self.data[:] = other.data

    def finite(self) -> bool:
        """Whether no parameter and no floating buffer is NaN or infinite."""
        return all(finite(self.reals[at : at + _CHECK]) for at in range(0, self.reals.size, _CHECK))


def finite(values: F32) -> bool:
    """Whether every element is finite. The sum of finite ones may overflow; only then each is looked at."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.add.reduce(values)) or np.isfinite(values).all())
