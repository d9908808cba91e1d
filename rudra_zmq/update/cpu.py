"""The update on a CPU: one pass over memory in blocks that stay in the cache, bit for bit as rules.py has it.

Owns: the optimiser's state, the scratch, the blocks and the threads over them. Must not know: where
gradients and weights live, protocols, clocks. Every operation is a NumPy ufunc with `out=`, multiply and
add apart: nothing is fused, and no vector is allocated once the object exists.

The sum of the gradients is built in w_out itself, block by block, and becomes the new weights in place:
that spares an accumulator and its share of the cache. So nobody may read w_out before `step` has
returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra_zmq.update.cpu_kernels import KERNELS
from rudra_zmq.update.rules import (
    F32,
    NORM_BLOCK,
    RULES,
    GroupSpan,
    RuleSpec,
    Scalars,
    State,
    Term,
    block_square_sums,
    clip_factor,
    coefficients,
    constants,
    new_state,
    norm_of,
    scalars,
)

BLOCK, BLOCK_OF_THREADS = 65536, 131072
"""Elements per block for one thread and for several. One: the few vectors of a block (256 KiB each) stay near
the core. Several: each operation passes the interpreter's lock around, which larger blocks make rarer.
"""

MIN_PER_THREAD = 1 << 19
"""Below this many elements a thread costs more to wake than it saves."""


class StepReport(NamedTuple):
    """finite: all of the summed gradient was. grad_norm: its norm before clipping, None without clip_norm."""

    finite: bool
    grad_norm: float | None


class _Update(NamedTuple):
    """One update as every thread sees it; factor is that of clipping, None where there is no sum yet."""

    b: list[np.float32]
    gradients: list[F32]
    w_in: F32
    w_out: F32
    factor: np.float32 | None
    scalars: list[Scalars]


class _Block(NamedTuple):
    start: int
    stop: int
    spans: tuple[tuple[int, int, int], ...]  # (from, to, index of the group's kind), relative to start


class CpuUpdate:
    """The optimiser of a vector of n float32 elements. One caller at a time; `step` and `fold` share scratch.

    threads: at most this many; fewer when n is small. block: elements, a multiple of 8192, None to choose.
    Results depend on neither. Raises ValueError (one line) for a spec that does not fit n.
    """

    def __init__(self, spec: RuleSpec, n: int, threads: int = 1, block: int | None = None) -> None:
        spec.validate(n)
        if threads < 1 or (block is not None and (block < NORM_BLOCK or block % NORM_BLOCK)):
            raise ValueError(f"threads = {threads} below 1, or block = {block} no multiple of {NORM_BLOCK}")
        self.spec = spec
        self.n = n
        self._rule = RULES[spec.rule]
        self._kernel = KERNELS[spec.rule]
        self._constants = constants(spec)
        self._state = new_state(spec, n)
        self._square_sums = np.zeros(-(-n // NORM_BLOCK) if spec.clip_norm is not None else 0)
        parts = min(threads, max(1, n // MIN_PER_THREAD))
        self._size = block or (BLOCK if parts == 1 else BLOCK_OF_THREADS)
        parts = min(parts, -(-n // self._size))
        self._share(parts)
        self._scratch = [_Scratch(min(self._size, n), spec.clip_norm is not None) for _ in self._parts]
        self._pool = ThreadPoolExecutor(parts - 1, "rudra-update") if parts > 1 else None

    def _share(self, parts: int) -> None:
        self._kinds = list(dict.fromkeys((g.lr_scale, g.weight_decay) for g in self.spec.groups))
        blocks = _cut(self.spec, self.n, self._size, self._kinds)
        cuts = [len(blocks) * i // parts for i in range(parts + 1)]
        self._parts = [blocks[lo:hi] for lo, hi in pairwise(cuts)]

    def regroup(self, groups: Sequence[GroupSpan]) -> None:
        """Other factors and decays from the next step on; state, memory and threads stay. ValueError as for a spec."""
        spec = replace(self.spec, groups=tuple(groups))
        spec.validate(self.n)
        self.spec = spec
        self._share(len(self._parts))

    @property
    def threads(self) -> int:
        """Threads in use, the caller's included."""
        return len(self._parts)

    def close(self) -> None:
        """End the threads; `step` and `fold` must not be called any more."""
        if self._pool is not None:
            self._pool.shutdown()

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

        The sum is checked block by block, before the block's state is touched. With finite = False the
        pass was left where the hit was: w_out and, unless clip_norm is set (the sum is then complete
        first), state are void. Raises ValueError for a wrong shape or dtype, for w_out over w_in, for no
        gradient at all.
        """
        terms = ([] if folded is None else [folded]) + list(direct)
        self._check(w_in, w_out, terms)
        b = coefficients(self.spec, terms, weight_sum)
        update = _Update(b, [g for _, g in terms], w_in, w_out, None, [])
        norm = None
        if self.spec.clip_norm is not None:
            self._run(lambda blocks, scratch: self._sum_part(blocks, scratch, update))
            norm = norm_of(self._square_sums)
            if not math.isfinite(norm):
                return StepReport(False, norm)
            update = update._replace(factor=clip_factor(self.spec.clip_norm, norm))
        update = update._replace(scalars=self._next_scalars(s_bar, lr))
        finite = self._run(lambda blocks, scratch: self._apply_part(blocks, scratch, update))
        return StepReport(finite, norm)

    def fold(self, acc: F32, coefficient: float, g: F32) -> None:
        """acc += coefficient*g, as `step` sums: multiply, round, add, round. acc starts as zeros."""
        self._check(acc, None, [(coefficient, g)])
        b = np.float32(coefficient)
        self._run(lambda blocks, scratch: _fold_part(blocks, scratch, acc, b, g))

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

    def _check(self, first: F32, w_out: F32 | None, terms: Sequence[Term]) -> None:
        if not terms:
            raise ValueError("an update needs at least one gradient")
        for array in [first, *([] if w_out is None else [w_out]), *(g for _, g in terms)]:
            if array.shape != (self.n,) or array.dtype != np.float32:
                raise ValueError(f"expected float32 of shape ({self.n},), got {_kind(array)}")
        if w_out is not None and any(np.may_share_memory(w_out, x) for x in [first, *(g for _, g in terms)]):
            raise ValueError("w_out shares memory with the weights or a gradient that the update reads")

    def _next_scalars(self, s_bar: float, lr: float) -> list[Scalars]:
        t = 0
        if self._rule.counts_steps:
            self._state["t"] += 1
            t = int(self._state["t"][0])
        return [scalars(self.spec, scale, decay, lr, s_bar, t) for scale, decay in self._kinds]

    def _run(self, part: Callable[[Sequence[_Block], _Scratch], bool]) -> bool:
        """Run part over all blocks, one share a thread; True if every share says so."""
        if self._pool is None:
            return part(self._parts[0], self._scratch[0])
        shares = list(zip(self._parts, self._scratch, strict=True))
        others = [self._pool.submit(part, *share) for share in shares[1:]]
        mine = part(*shares[0])
        return all([mine, *(other.result() for other in others)])

    def _sum_part(self, blocks: Sequence[_Block], scratch: _Scratch, update: _Update) -> bool:
        with np.errstate(all="ignore"):
            for start, stop, _ in blocks:
                acc = update.w_out[start:stop]
                _sum(acc, start, stop, update, scratch.t)
                sums = self._square_sums[start // NORM_BLOCK : -(-stop // NORM_BLOCK)]
                block_square_sums(acc, sums, scratch.wide)
        return True

    def _apply_part(self, blocks: Sequence[_Block], scratch: _Scratch, update: _Update) -> bool:
        vectors = [self._state[name] for name in self._rule.state]
        with np.errstate(all="ignore"):
            for start, stop, spans in blocks:
                acc = update.w_out[start:stop]
                if update.factor is not None:
                    np.multiply(acc, update.factor, out=acc)
                else:
                    _sum(acc, start, stop, update, scratch.t)
                    if not np.isfinite(acc, out=scratch.mask[: acc.size]).all():
                        return False
                for lo, hi, kind in spans:
                    p = update.scalars[kind]
                    state = [vector[start + lo : start + hi] for vector in vectors]
                    w, g, t = update.w_in[start + lo : start + hi], acc[lo:hi], scratch.t[: hi - lo]
                    if p.decay and not self._rule.decoupled_decay:
                        np.multiply(w, p.decay, out=t)
                        np.add(g, t, out=g)
                    self._kernel(self._constants, p, state, w, g, t)
        return True


class _Scratch:
    """What one thread needs: a block of float32, a mask for the check, a norm's block of float64."""

    def __init__(self, size: int, norm: bool) -> None:
        self.t = np.zeros(size, np.float32)
        self.mask = np.zeros(size, np.bool_)
        self.wide = np.zeros(NORM_BLOCK if norm else 0)


def _kind(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _cut(spec: RuleSpec, n: int, size: int, kinds: list[tuple[float, float]]) -> list[_Block]:
    blocks = []
    first = 0
    for start in range(0, n, size):
        stop = min(start + size, n)
        while spec.groups[first].stop <= start:
            first += 1
        spans = []
        for group in spec.groups[first:]:
            if group.start >= stop:
                break
            kind = kinds.index((group.lr_scale, group.weight_decay))
            spans.append((max(group.start, start) - start, min(group.stop, stop) - start, kind))
        blocks.append(_Block(start, stop, tuple(spans)))
    return blocks


def _sum(acc: F32, start: int, stop: int, update: _Update, scratch: F32) -> None:
    t = scratch[: acc.size]
    np.multiply(update.gradients[0][start:stop], update.b[0], out=acc)
    for b_k, g_k in zip(update.b[1:], update.gradients[1:], strict=True):
        np.multiply(g_k[start:stop], b_k, out=t)
        np.add(acc, t, out=acc)


def _fold_part(blocks: Sequence[_Block], scratch: _Scratch, acc: F32, b: np.float32, g: F32) -> bool:
    with np.errstate(all="ignore"):
        for start, stop, _ in blocks:
            part, t = acc[start:stop], scratch.t[: stop - start]
            np.multiply(g[start:stop], b, out=t)
            np.add(part, t, out=part)
    return True
