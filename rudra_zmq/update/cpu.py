"""The update on a CPU, bit for bit as rules.py has it, by the fastest back end that the host has.

Owns: the optimiser's state, the checks of arguments, the choice of the back end. Must not know: where gradients and
weights live, protocols, clocks.

The sum of the gradients may be built in w_out itself before it becomes the new weights, so nobody may read w_out
before `step` has returned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra_zmq.update.blocks import NumpyEngine
from rudra_zmq.update.codecs import arrays
from rudra_zmq.update.compiled import CompiledEngine
from rudra_zmq.update.engine import Engine, Setup
from rudra_zmq.update.jit import Unavailable
from rudra_zmq.update.rules import (
    ENCODINGS,
    F32,
    NORM_BLOCK,
    RULES,
    Given,
    Gradient,
    GroupSpan,
    RuleSpec,
    Scalars,
    State,
    Term,
    aligned,
    clip_factor,
    coefficients,
    new_state,
    norm_of,
    scalars,
)

BACKENDS = ("auto", "compiled", "numpy")

_GRADIENTS = tuple(np.dtype(name) for name in ENCODINGS)
_FLOAT32 = _GRADIENTS[:1]
_ONE = np.float32(1.0)


class StepReport(NamedTuple):
    """finite: all of the summed gradient was. grad_norm: its norm before clipping, None without clip_norm."""

    finite: bool
    grad_norm: float | None


class CpuUpdate:
    """The optimiser of a vector of n float32 elements. One caller at a time; `step` and `fold` share scratch.

    threads: at most this many; fewer when n is small. block: elements of NumPy's blocks, a multiple of 8192, None to
    choose. backend: "compiled" (needs llvmlite), "numpy", or "auto" for the first where it works. Results depend on
    none of the three. Raises ValueError (one line) for a spec that does not fit n, and where "compiled" is asked for
    and cannot be had.
    """

    def __init__(
        self, spec: RuleSpec, n: int, threads: int = 1, block: int | None = None, backend: str = "auto"
    ) -> None:
        spec.validate(n)
        if threads < 1 or (block is not None and (block < NORM_BLOCK or block % NORM_BLOCK)):
            raise ValueError(f"threads = {threads} below 1, or block = {block} no multiple of {NORM_BLOCK}")
        self.spec = spec
        self.n = n
        self._rule = RULES[spec.rule]
        self._state = new_state(spec, n)
        self._setup = Setup(spec, n, self._state, threads)
        self._square_sums = np.zeros(-(-n // NORM_BLOCK) if self._setup.clips else 0)
        self._decoded: F32 | None = None
        self.backend, self._engine = _engine(self._setup, block, backend)

    def regroup(self, groups: Sequence[GroupSpan]) -> None:
        """Other factors and decays from the next step on; state, memory and threads stay. ValueError as for a spec."""
        spec = replace(self.spec, groups=tuple(groups))
        spec.validate(self.n)
        self.spec = spec
        self._setup = Setup(spec, self.n, self._state, self._setup.threads)
        self._engine.regroup(self._setup)

    @property
    def threads(self) -> int:
        """Threads in use, the caller's included."""
        return self._engine.threads

    def close(self) -> None:
        """End the threads; `step` and `fold` must not be called any more."""
        self._engine.close()

    def step(
        self,
        w_in: F32,
        direct: Sequence[Term],
        folded: Term | None,
        weight_sum: float,
        s_bar: float,
        lr: float,
        w_out: F32,
    ) -> StepReport:
        """One update: read w_in, write w_out, change the state. Arguments as in `rules.reference_step`.

        With finite = False w_out is void, and so is the state unless clip_norm is set (the sum is then complete
        first). Raises ValueError for a wrong shape or dtype, for memory that is not contiguous or cannot be
        written, for w_out over w_in or a gradient, for no gradient at all.
        """
        terms = ([] if folded is None else [folded]) + list(direct)
        self._check(w_in, terms)
        self._check_output(w_out, [w_in, *(g for _, g in terms)])
        b, gradients = self._plain(coefficients(self.spec, terms, weight_sum), [g for _, g in terms], w_out)
        norm = None
        if self.spec.clip_norm is not None:
            self._engine.sum_squares(b, gradients, w_out, self._square_sums)
            norm = norm_of(self._square_sums)
            if not math.isfinite(norm):
                return StepReport(False, norm)
            b, gradients = [clip_factor(self.spec.clip_norm, norm)], [w_out]
        finite = self._engine.apply(b, gradients, w_in, w_out, self._next_scalars(s_bar, lr))
        return StepReport(finite, norm)

    def fold(self, acc: F32, coefficient: float, g: Given) -> None:
        """acc += coefficient*g, as `step` sums: multiply, round, add, round. acc starts as zeros."""
        self._check(acc, [(coefficient, g)])
        self._check_output(acc, [g])
        self._engine.sum([_ONE, np.float32(coefficient)], [acc, self._array(g)], acc)

    def _array(self, g: Given) -> Gradient:
        """A gradient as the engines take it; what they do not decode themselves lies in ``_decoded`` until the next."""
        if isinstance(g, np.ndarray):
            return g
        if self._decoded is None:
            self._decoded = aligned(self.n)
        g.decode(self._decoded)
        return self._decoded

    def _plain(self, b: list[np.float32], given: list[Given], w_out: F32) -> tuple[list[np.float32], list[Gradient]]:
        """The same sum of arrays alone. Where several have to be decoded, all but the last are summed in w_out."""
        last = max((k for k, g in enumerate(given) if not isinstance(g, np.ndarray)), default=0)
        if not last:
            return b, [self._array(g) for g in given]
        self._engine.sum(b[:1], [self._array(given[0])], w_out)
        for k in range(1, last):
            self._engine.sum([_ONE, b[k]], [w_out, self._array(given[k])], w_out)
        return [_ONE, *b[last:]], [w_out, *(self._array(g) for g in given[last:])]

    def state_dict(self, into: State | None = None) -> State:
        """A copy of the state: the rule's vectors, and "t" for Adam; in the arrays of `into`, if given.

        `into` is a dict that this method returned before: copying into memory in use is ten times faster.
        """
        if into is None:
            return {name: array.copy() for name, array in self._state.items()}
        self._check_state(into)
        for name, array in self._state.items():
            np.copyto(into[name], array)
        return into

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over a state of this rule and size; ValueError (one line), and no change, for another."""
        self._check_state(state)
        for name, array in self._state.items():
            np.copyto(array, state[name])

    def _check_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        if set(state) != set(self._state):
            raise ValueError(f"state of rule {self.spec.rule} is {sorted(self._state)}, got {sorted(state)}")
        for name, array in self._state.items():
            given = state[name]
            if given.shape != array.shape or given.dtype != array.dtype:
                raise ValueError(f"state {name!r} is {_kind(array)}, got {_kind(given)}")

    def _check(self, first: F32, terms: Sequence[Term]) -> None:
        if not terms:
            raise ValueError("an update needs at least one gradient")
        self._check_input(first, _FLOAT32)
        for _, gradient in terms:
            if isinstance(gradient, np.ndarray):
                self._check_input(gradient, _GRADIENTS)
            elif gradient.size != self.n:
                raise ValueError(f"expected a gradient of {self.n} elements, got one of {gradient.size}")

    def _check_input(self, array: Gradient, dtypes: Sequence[np.dtype[Any]]) -> None:
        if array.shape != (self.n,) or array.dtype not in dtypes:
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(f"expected {expected} of shape ({self.n},), got {_kind(array)}")
        if not (array.flags.c_contiguous and array.flags.aligned):
            raise ValueError(f"{_kind(array)} is not contiguous, or not aligned")

    def _check_output(self, out: F32, inputs: Sequence[Given]) -> None:
        self._check_input(out, _FLOAT32)
        if not out.flags.writeable:
            raise ValueError("the output cannot be written")
        if any(np.may_share_memory(out, x) for given in inputs for x in arrays(given)):
            raise ValueError("the output shares memory with the weights or a gradient that the update reads")

    def _next_scalars(self, s_bar: float, lr: float) -> list[Scalars]:
        t = 0
        if self._rule.counts_steps:
            self._state["t"] += 1
            t = int(self._state["t"][0])
        return [scalars(self.spec, scale, decay, lr, s_bar, t) for scale, decay in self._setup.kinds]


def _engine(setup: Setup, block: int | None, backend: str) -> tuple[str, Engine]:
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; known ones: {', '.join(BACKENDS)}")
    if backend != "numpy":
        try:
            return "compiled", CompiledEngine(setup)
        except Unavailable as why:
            if backend == "compiled":
                raise ValueError(f"no compiled update here: {why}. Fix: pip install 'rudra-zmq[fast]'") from None
    return "numpy", NumpyEngine(setup, block)


def _kind(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"
