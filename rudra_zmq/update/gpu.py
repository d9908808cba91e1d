"""The update on a GPU, bit for bit as rules.py has it: sum, rule, state, new weights and their cast in one pass.

Owns: the optimiser's state in device memory, the checks of arguments, the tables that step.cu reads. Must not know:
where gradients come from, protocols, clocks. Vectors are arrays of CuPy on the device; what lies on the host is a
matter of whoever calls. The seam is that of cpu.py, so that the tests of both are the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra_zmq.update.codecs import Quantised, Sparse, arrays
from rudra_zmq.update.cuda import THREADS, TILE, Device, Word, address
from rudra_zmq.update.engine import Setup
from rudra_zmq.update.gpu_codecs import GpuCodecs
from rudra_zmq.update.rules import (
    ENCODINGS,
    NORM_BLOCK,
    RULES,
    GroupSpan,
    RuleSpec,
    Scalars,
    State,
    block_square_sums,
    clip_factor,
    coefficients,
    constants,
    new_state,
    norm_of,
    scalars,
)

GpuTerm = tuple[float, Any]
"""(a_k*s_k, gradient): an array of CuPy in an encoding of rules.py, or codecs.Quantised or Sparse of such arrays."""

KERNELS = ("step", "sum", "squares")
_ROW = struct.Struct("=QQfi")
_FLAGS = struct.pack("=ii", 0, 0)
_INT8 = len(ENCODINGS)
_TAGS = {name: tag for tag, name in enumerate(ENCODINGS)}
_WORD = {"float32": 16, "float16": 8, "uint16": 8, "int8": 4}
"""Bytes that four elements are read as, by dtype."""


class GpuReport(NamedTuple):
    """finite, grad_norm: as cpu.StepReport. sent_finite: all of what ``step`` wrote to ``sent`` was."""

    finite: bool
    grad_norm: float | None
    sent_finite: bool = True


class GpuUpdate:
    """The optimiser of a vector of n float32 elements on a device. One caller at a time; methods share scratch.

    All of it runs on CuPy's current stream, which has to be the same one at every call. `step` waits for its kernels:
    what it says of the sum comes back from the device. ValueError (one line) for a spec that does not fit n; RudraError
    for what the device refuses.
    """

    def __init__(self, spec: RuleSpec, n: int, device: Device) -> None:
        spec.validate(n)
        self.spec = spec
        self.n = n
        self.device = device
        self._rule = RULES[spec.rule]
        self._kernels = device.module("step", spec.rule, KERNELS)
        self._codecs = GpuCodecs(device, n)
        self._steps = np.zeros(1, np.int64)  # Adam's "t"
        with device.errors():
            self._state = {name: device.xp.zeros(n, np.float32) for name in self._rule.state}
            self._squares = device.xp.zeros(n // NORM_BLOCK if spec.clip_norm is not None else 0, np.float64)
            self._table = device.xp.zeros(4096, np.uint8)
        self._decoded: Any = None
        self.regroup(spec.groups)

    @staticmethod
    def nbytes(rule: str, n: int) -> int:
        """What an object takes of the device, but for scratch that is small or needed for topk alone."""
        return 4 * n * len(RULES[rule].state)

    def regroup(self, groups: Sequence[GroupSpan]) -> None:
        """Other factors and decays from the next step on; state and memory stay. ValueError as for a spec."""
        spec = replace(self.spec, groups=tuple(groups))
        spec.validate(self.n)
        self.spec = spec
        setup = Setup(spec, self.n, {}, 1)
        self._kinds = setup.kinds
        rows = []
        for group in spec.groups:
            kind = setup.kinds.index((group.lr_scale, group.weight_decay))
            starts = np.arange(group.start // TILE * TILE, group.stop, TILE)  # all cuts but the groups' at whole tiles
            piece = np.full((starts.size, 3), kind, np.int64)
            piece[:, 0] = np.maximum(starts, group.start)
            piece[:, 1] = np.minimum(starts + TILE, group.stop)
            rows.append(piece)
        with self.device.errors():
            self._pieces = self.device.xp.asarray(np.concatenate(rows))

    def step(
        self,
        w_in: Any,
        direct: Sequence[GpuTerm],
        folded: GpuTerm | None,
        weight_sum: float,
        s_bar: float,
        lr: float,
        w_out: Any,
        sent: Any = None,
    ) -> GpuReport:
        """One update, as cpu.CpuUpdate.step; ``sent``, float16 or uint16 (bfloat16), becomes the new weights in that.

        What is void where the sum is not finite is the same as there.
        """
        terms = ([] if folded is None else [folded]) + list(direct)
        self._check(w_in, terms)
        if sent is not None:
            self._check_array(sent, ENCODINGS[1:])
        self._check_output(w_out, [w_in, *(g for _, g in terms)])
        b, gradients = self._plain(coefficients(self.spec, terms, weight_sum), [g for _, g in terms], w_out)
        norm = None
        if self.spec.clip_norm is not None:
            norm = self._norm(b, gradients, w_out)
            if not math.isfinite(norm):
                return GpuReport(False, norm)
            b, gradients = [clip_factor(self.spec.clip_norm, norm)], [w_out]
        with self.device.errors():
            bad, bad_sent = self._launch_step(b, gradients, w_in, w_out, self._next_scalars(s_bar, lr), sent)
        return GpuReport(not bad, norm, not bad_sent)

    def fold(self, acc: Any, coefficient: float, g: Any) -> None:
        """acc += coefficient*g, as `step` sums. It is queued, not waited for. acc starts as zeros."""
        self._check(acc, [(coefficient, g)])
        self._check_output(acc, [g])
        self._sum([np.float32(1.0), np.float32(coefficient)], [acc, self._dense(g)], acc)

    def state_dict(self, into: State | None = None) -> State:
        """As cpu.CpuUpdate.state_dict: arrays of the host."""
        into = new_state(self.spec, self.n) if into is None else into
        self._check_state(into)
        with self.device.errors():
            for name, array in self._state.items():
                array.get(out=into[name])
        if self._rule.counts_steps:
            into["t"][:] = self._steps
        return into

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """As cpu.CpuUpdate.load_state_dict: arrays of the host."""
        self._check_state(state)
        with self.device.errors():
            for name, array in self._state.items():
                array.set(np.ascontiguousarray(state[name]))
            self.device.synchronize()  # the caller may change what it gave
        if self._rule.counts_steps:
            self._steps[:] = state["t"]

    # ---- launches

    def _launch_step(
        self, b: list[np.float32], gradients: list[Any], w_in: Any, w_out: Any, kinds: list[Scalars], sent: Any
    ) -> tuple[int, int]:
        """Whether flags[0] and flags[1] of step.cu were set."""
        c, rule = len(b), constants(self.spec)
        numbers = [value for kind in (rule, *kinds) for value in kind]
        base, rows = self._upload(b, gradients, struct.pack(f"={len(numbers)}f", *numbers))
        a, second = [*(address(vector) for vector in self._state.values()), np.int64(0), np.int64(0)][:2]
        after = base + rows + _ROW.size * c
        wide = self._wide([w_in, w_out, sent, *self._state.values(), *gradients])
        args = (
            address(self._pieces), base + rows, np.int64(c), address(w_in), address(w_out), a, second, address(sent),
            np.int64(0 if sent is None else _TAGS[str(sent.dtype)]), after, after + 4 * len(rule), base, wide,
        )  # fmt: skip
        self._kernels["step"]((len(self._pieces),), (THREADS,), args)
        bad, bad_sent = self._table[: len(_FLAGS)].get().view(np.int32)
        return int(bad), int(bad_sent)

    def _sum(self, b: list[np.float32], gradients: list[Any], out: Any) -> None:
        with self.device.errors():
            base, rows = self._upload(b, gradients)
            wide = self._wide([out, *gradients])
            args = (address(self._pieces), base + rows, np.int64(len(b)), address(out), wide)
            self._kernels["sum"]((len(self._pieces),), (THREADS,), args)

    def _norm(self, b: list[np.float32], gradients: list[Any], out: Any) -> float:
        """The norm of the sum, which is left in out. The squares of a last block that is not whole are the host's."""
        self._sum(b, gradients, out)
        whole = self.n // NORM_BLOCK
        sums = np.zeros(-(-self.n // NORM_BLOCK))
        with self.device.errors():
            if whole:
                self._kernels["squares"]((whole,), (NORM_BLOCK // 16,), (address(out), address(self._squares)))
                sums[:whole] = self._squares.get()
            if whole < sums.size:
                tail = out[whole * NORM_BLOCK :].get()
                with np.errstate(all="ignore"):
                    block_square_sums(tail, sums[whole:], np.empty(NORM_BLOCK))
        return norm_of(sums)

    def _upload(self, b: list[np.float32], gradients: list[Any], *more: bytes) -> tuple[Word, Word]:
        """The table on the device: flags, a row for each gradient, and more. Its address, and the rows' offset.

        The host's copy is taken before `set` returns, as CUDA does with memory that is not pinned.
        """
        rows = [_row(b_k, g) for b_k, g in zip(b, gradients, strict=True)]
        table = np.frombuffer(bytearray().join([_FLAGS, *rows, *more]), np.uint8)
        if table.size > self._table.size:
            self._table = self.device.xp.zeros(2 * table.size, np.uint8)
        self._table[: table.size].set(table)
        return address(self._table), np.int64(len(_FLAGS))

    def _wide(self, vectors: Sequence[Any]) -> Word:
        """1 where every vector begins where words of four elements may."""
        parts: list[Any] = [v.q if isinstance(v, Quantised) else v for v in vectors if v is not None]
        wide: Word = np.int64(all(part.data.ptr % _WORD[str(part.dtype)] == 0 for part in parts))
        return wide

    def _next_scalars(self, s_bar: float, lr: float) -> list[Scalars]:
        if self._rule.counts_steps:
            self._steps += 1
        return [scalars(self.spec, scale, decay, lr, s_bar, int(self._steps[0])) for scale, decay in self._kinds]

    # ---- gradients that are decoded first

    def _dense(self, g: Any) -> Any:
        """A gradient as step.cu takes it; topk's lies in ``_decoded`` until the next."""
        if not isinstance(g, Sparse):
            return g
        if self._decoded is None:
            with self.device.errors():
                self._decoded = self.device.xp.zeros(self.n, np.float32)
        self._codecs.decode_topk(g, self._decoded)
        return self._decoded

    def _plain(self, b: list[np.float32], given: list[Any], w_out: Any) -> tuple[list[np.float32], list[Any]]:
        """The same sum without topk. Where several have to be decoded, all but the last are summed in w_out."""
        last = max((k for k, g in enumerate(given) if isinstance(g, Sparse)), default=0)
        if not last:
            return b, [self._dense(g) for g in given]
        self._sum(b[:1], [self._dense(given[0])], w_out)
        for k in range(1, last):
            self._sum([np.float32(1.0), b[k]], [w_out, self._dense(given[k])], w_out)
        return [np.float32(1.0), *b[last:]], [w_out, *(self._dense(g) for g in given[last:])]

    # ---- checks

    def _check(self, first: Any, terms: Sequence[GpuTerm]) -> None:
        if not terms:
            raise ValueError("an update needs at least one gradient")
        self._check_array(first, ENCODINGS[:1])
        for _, g in terms:
            if not isinstance(g, (Quantised, Sparse)):
                self._check_array(g, ENCODINGS)
            elif g.size != self.n:
                raise ValueError(f"expected a gradient of {self.n} elements, got one of {g.size}")

    def _check_array(self, array: Any, dtypes: Sequence[str]) -> None:
        if array.shape != (self.n,) or str(array.dtype) not in dtypes:
            raise ValueError(f"expected {' or '.join(dtypes)} of shape ({self.n},), got {_kind(array)}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{_kind(array)} is not contiguous")

    def _check_output(self, out: Any, inputs: Sequence[Any]) -> None:
        self._check_array(out, ENCODINGS[:1])
        start, stop = out.data.ptr, out.data.ptr + out.nbytes
        read: list[Any] = [x for given in inputs for x in arrays(given)]
        if any(x.data.ptr < stop and start < x.data.ptr + x.nbytes for x in read):
            raise ValueError("the output shares memory with the weights or a gradient that the update reads")

    def _check_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        expected: dict[str, tuple[npt.DTypeLike, tuple[int]]] = dict.fromkeys(self._rule.state, (np.float32, (self.n,)))
        if self._rule.counts_steps:
            expected["t"] = (np.int64, (1,))
        if set(state) != set(expected):
            raise ValueError(f"state of rule {self.spec.rule} is {sorted(expected)}, got {sorted(state)}")
        for name, (dtype, shape) in expected.items():
            if state[name].shape != shape or state[name].dtype != dtype:
                raise ValueError(f"state {name!r} is {np.dtype(dtype)} of shape {shape}, got {_kind(state[name])}")


def _row(b: np.float32, g: Any) -> bytes:
    if isinstance(g, Quantised):
        return _ROW.pack(address(g.q), address(g.scales), b, _INT8)
    return _ROW.pack(g.data.ptr, 0, b, _TAGS[str(g.dtype)])


def _kind(array: Any) -> str:
    return f"{array.dtype} of shape {array.shape}"
