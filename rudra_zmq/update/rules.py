"""The update rules as formulas: one table, and a NumPy reference that reads like it.

Owns: what a rule is (state, constants, order of operations) and the scalars that an update is made with.
Every back end derives its scalars from :func:`constants`, :func:`scalars` and :func:`coefficients` and
follows the order of operations written here, so that all of them produce the same bits. Must not know:
where gradients come from, protocols, clocks, threads.

Notation. An update applies c gradients g_k, each with a weight a_k (its share of the samples) and a
modulation s_k (its scale for staleness); s_bar is the mean of the s_k; lr is the scheduled rate; wd the
weight decay of the group.

Order of operations. Vectors are float32, each operation is rounded once, multiply and add are never fused:

0. A gradient in another encoding is decoded to float32 (:func:`decode`; codecs.py has the encodings).
1. ``acc = fl(b_0*g_0)``, then ``acc = fl(acc + fl(b_k*g_k))`` in the order given; a folded accumulator
   comes first. b_k is float32 of a_k*s_k, for the normalised rules of a_k*s_k / sum(a_j*s_j), formed in
   float64.
2. clip_norm: ``acc = fl(acc*min(1, clip/(norm + 1e-6)))`` (torch's clip_grad_norm_), with
   :func:`norm_of`.
3. Weight decay of every rule but adamw: ``acc = fl(acc + fl(decay*w))``. decay is s_bar*wd for sgd,
   momentum and nesterov, whose modulation sits inside the sum (an unscaled decay would be 1/s_bar too
   strong), else wd.
4. The rule's own lines below. The step is lr for sgd, momentum and nesterov, lr*s_bar for the normalised
   rules: those divide a gradient by its own size, so a scaled gradient would cancel and only a scaled
   step modulates.

Source: Gupta, Zhang, Wang, arXiv 1509.04210 (modulation, AdaGrad as Rudra has it); torch.optim for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rudra_zmq.update.codecs import Coded, Quantised, Sparse

F32 = npt.NDArray[np.float32]
State = dict[str, npt.NDArray[Any]]
Gradient = npt.NDArray[Any]
Given = Gradient | Coded
Term = tuple[float, Given]

ENCODINGS = ("float32", "float16", "uint16")
"""How a gradient may be stored, by the name of its dtype; uint16 are the bits of bfloat16, which NumPy lacks.

Those that are more than one array (``codecs.Coded``) are decoded before the pass.
"""

CACHE_LINE = 64

NORM_BLOCK = 8192
"""Elements per partial sum of squares. Fixed, so that a norm does not depend on a back end's blocks or
threads.
"""


@dataclass(frozen=True)
class GroupSpan:
    """Elements [start, stop) of the flat vector, with the factor on the rate and the weight decay that hold
    there.
    """

    start: int
    stop: int
    lr_scale: float
    weight_decay: float


@dataclass(frozen=True)
class RuleSpec:
    """A rule and its constants. :meth:`of` fills in a rule's defaults and refuses what it does not read."""

    rule: str
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    rho: float = 0.99
    clip_norm: float | None = None
    groups: tuple[GroupSpan, ...] = ()

    @classmethod
    def of(
        cls, rule: str, groups: Sequence[GroupSpan], clip_norm: float | None = None, **parameters: float
    ) -> RuleSpec:
        """A spec with the rule's defaults; ValueError (one line) for a parameter that the rule does not
        read.
        """
        row = _row(rule)
        for name in parameters:
            if name not in row.parameters:
                reads = ", ".join(row.parameters) or "none"
                raise ValueError(f"rule {rule!r} has no parameter {name!r}; its parameters: {reads}")
        return cls(rule, clip_norm=clip_norm, groups=tuple(groups), **{**row.parameters, **parameters})

    def validate(self, n: int) -> None:
        """Raise ValueError (one line) unless constants are in range and the groups cover [0, n) exactly."""
        _row(self.rule)
        for name in ("momentum", "beta1", "beta2", "rho"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} = {value} is outside [0, 1)")
        if not (math.isfinite(self.eps) and self.eps >= 0.0):
            raise ValueError(f"eps = {self.eps} is not a finite number of at least 0")
        if self.clip_norm is not None and not (math.isfinite(self.clip_norm) and self.clip_norm > 0.0):
            raise ValueError(f"clip_norm = {self.clip_norm} is not a finite number above 0")
        end = 0
        for group in self.groups:
            _check_group(group, end)
            end = group.stop
        if n < 1 or end != n:
            raise ValueError(f"groups cover [0, {end}) of a vector of {n} elements")


def _row(rule: str) -> Rule:
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown; known rules: {', '.join(RULES)}")
    return RULES[rule]


def _check_group(group: GroupSpan, expected_start: int) -> None:
    where = f"group [{group.start}, {group.stop})"
    if group.start != expected_start:
        raise ValueError(f"{where} should start at {expected_start}: groups are contiguous and in order")
    if group.stop <= group.start:
        raise ValueError(f"{where} is empty")
    for name in ("lr_scale", "weight_decay"):
        value = getattr(group, name)
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{where}: {name} = {value} is not a finite number of at least 0")


class Constants(NamedTuple):
    """float32 constants of a spec; differences are formed in float64 and rounded once."""

    momentum: np.float32
    beta1: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    rho: np.float32
    one_minus_rho: np.float32


class Scalars(NamedTuple):
    """float32 scalars of one group in one update. A decay of 0 means that the term is left out altogether."""

    step: np.float32
    decay: np.float32
    eps: np.float32


def constants(spec: RuleSpec) -> Constants:
    """The spec's constants as float32."""
    return Constants(
        momentum=np.float32(spec.momentum),
        beta1=np.float32(spec.beta1),
        one_minus_beta1=np.float32(1.0 - spec.beta1),
        beta2=np.float32(spec.beta2),
        one_minus_beta2=np.float32(1.0 - spec.beta2),
        rho=np.float32(spec.rho),
        one_minus_rho=np.float32(1.0 - spec.rho),
    )


def scalars(spec: RuleSpec, lr_scale: float, weight_decay: float, lr: float, s_bar: float, t: int) -> Scalars:
    """Step, decay and eps of a group; t is Adam's count, this update included (unused by the other rules).

    Adam's bias corrections bc1 = 1 - beta1^t and bc2 = 1 - beta2^t are in the scalars: step/bc1 * m /
    (sqrt(v/bc2) + eps) is (step*sqrt(bc2)/bc1) * m / (sqrt(v) + eps*sqrt(bc2)), one vector operation
    fewer.
    """
    rule = RULES[spec.rule]
    rate = lr * lr_scale
    eps = spec.eps
    if not rule.normalised:
        return Scalars(np.float32(rate), np.float32(s_bar * weight_decay), np.float32(eps))
    step = rate * s_bar
    decay = step * weight_decay if rule.decoupled_decay else weight_decay
    if rule.counts_steps:
        root = math.sqrt(1.0 - spec.beta2**t)
        step *= root / (1.0 - spec.beta1**t)
        eps *= root
    return Scalars(np.float32(step), np.float32(decay), np.float32(eps))


def coefficients(spec: RuleSpec, terms: Sequence[Term], weight_sum: float) -> list[np.float32]:
    """b_k of each term: a_k*s_k, for the normalised rules over weight_sum = sum a_j*s_j.

    Raises ValueError where that sum is needed and is not a finite number above 0.
    """
    if not RULES[spec.rule].normalised:
        return [np.float32(a) for a, _ in terms]
    if not (math.isfinite(weight_sum) and weight_sum > 0.0):
        raise ValueError(f"weight_sum = {weight_sum} is not a finite number above 0")
    return [np.float32(a / weight_sum) for a, _ in terms]


def decode(gradient: Given) -> F32:
    """A gradient in any encoding as float32; float32 is returned as it is."""
    if isinstance(gradient, (Quantised, Sparse)):
        decoded: F32 = np.empty(gradient.size, np.float32)
        gradient.decode(decoded)
    elif gradient.dtype == np.uint16:
        bits = np.left_shift(gradient, np.uint32(16), dtype=np.uint32)
        decoded = bits.view(np.float32)
    else:
        decoded = gradient.astype(np.float32, copy=False)
    return decoded


def block_square_sums(acc: F32, out: npt.NDArray[np.float64], scratch: npt.NDArray[np.float64]) -> None:
    """Write the sum of squares of every NORM_BLOCK elements of acc to out; scratch has room for one block.

    The squares are exact in float64, and NumPy adds a block pairwise in a fixed order.
    """
    for i, start in enumerate(range(0, acc.size, NORM_BLOCK)):
        part = acc[start : start + NORM_BLOCK]
        wide = scratch[: part.size]
        np.copyto(wide, part)
        np.multiply(wide, wide, out=wide)
        out[i] = np.add.reduce(wide)


def norm_of(square_sums: npt.NDArray[np.float64]) -> float:
    """Euclidean norm from the partial sums; NaN or infinite exactly if an element of the vector was."""
    if not np.isfinite(square_sums).all():
        return math.nan
    return math.sqrt(math.fsum(square_sums))


def clip_factor(clip_norm: float, norm: float) -> np.float32:
    """torch's clip_grad_norm_: clip_norm / (norm + 1e-6), at most 1."""
    factor: np.float32 = np.float32(min(1.0, clip_norm / (norm + 1e-6)))
    return factor


def aligned(n: int, dtype: npt.DTypeLike = np.float32) -> Gradient:
    """n zeros that begin at a cache line, which spares an update up to a fifth of its time."""
    dtype = np.dtype(dtype)
    raw = np.empty(n * dtype.itemsize + CACHE_LINE, np.uint8)
    raw.fill(0)  # np.zeros would leave the page faults to the first update
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + n * dtype.itemsize].view(dtype)


def new_state(spec: RuleSpec, n: int) -> State:
    """Zeroed state: the rule's float32 vectors of n elements, and for Adam "t", int64 of shape (1,)."""
    rule = RULES[spec.rule]
    state: State = {}
    for name in rule.state:
        state[name] = aligned(n)
    if rule.counts_steps:
        state["t"] = np.zeros(1, np.int64)
    return state


def reference_step(
    spec: RuleSpec,
    state: State,
    w: F32,
    direct: Sequence[Term],
    folded: Term | None,
    weight_sum: float,
    s_bar: float,
    lr: float,
) -> F32:
    """One update by the formulas above; state is changed in place, the new weights are returned.

    direct: (a_k*s_k, g_k) in order; folded: (coefficient, accumulator) or None. All vectors are of w's size,
    the g_k in any encoding, the others float32.
    """
    terms = ([] if folded is None else [folded]) + list(direct)
    if not terms:
        raise ValueError("an update needs at least one gradient")
    b = coefficients(spec, terms, weight_sum)
    w_new = np.empty_like(w)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        acc: F32 = b[0] * decode(terms[0][1])
        for b_k, (_, g_k) in zip(b[1:], terms[1:], strict=True):
            acc = acc + b_k * decode(g_k)
        if spec.clip_norm is not None:
            square_sums = np.empty(-(-w.size // NORM_BLOCK))
            block_square_sums(acc, square_sums, np.empty(NORM_BLOCK))
            acc = acc * clip_factor(spec.clip_norm, norm_of(square_sums))
        rule = RULES[spec.rule]
        if rule.counts_steps:
            state["t"] += 1
        t = int(state["t"][0]) if rule.counts_steps else 0
        for group in spec.groups:
            span = slice(group.start, group.stop)
            p = scalars(spec, group.lr_scale, group.weight_decay, lr, s_bar, t)
            vectors = [state[name][span] for name in rule.state]
            g = acc[span]
            if p.decay and not rule.decoupled_decay:
                g = g + p.decay * w[span]
            w_new[span] = w[span] - rule.reference(constants(spec), p, vectors, w[span], g)
    return w_new


# One function per rule: what is taken off the weights. v, s, m are slices of the state; `v[:] =` stores them.


def _sqrt(x: F32) -> F32:
    root: F32 = np.sqrt(x)
    return root


def _sgd(c: Constants, p: Scalars, state: list[F32], w: F32, g: F32) -> F32:
    return g * p.step


def _momentum(c: Constants, p: Scalars, state: list[F32], w: F32, g: F32) -> F32:
    (v,) = state
    v[:] = c.momentum * v + g
    return v * p.step


def _nesterov(c: Constants, p: Scalars, state: list[F32], w: F32, g: F32) -> F32:
    (v,) = state
    v[:] = c.momentum * v + g
    ahead: F32 = c.momentum * v + g
    return ahead * p.step


def _adagrad(c: Constants, p: Scalars, state: list[F32], w: F32, g: F32) -> F32:
    (s,) = state
    s[:] = s + g * g
    return g / (_sqrt(s) + p.eps) * p.step


def _rudra_adagrad(c: Constants, p: Scalars, state: list[F32], w: F32, g: F32) -> F32:
    s, v = state
    s[:] = s + g * g
    v[:] = c.momentum * v + g / _sqrt(s + np.float32(1.0))
    return v * p.step


def _rmsprop(c: Constants, p: Scalars, state: list[F32], w: F32, g: F32) -> F32:
    (s,) = state
    s[:] = c.rho * s + c.one_minus_rho * (g * g)
    return g / (_sqrt(s) + p.eps) * p.step


def _adam(c: Constants, p: Scalars, state: list[F32], w: F32, g: F32) -> F32:
    m, v = state
    m[:] = c.beta1 * m + c.one_minus_beta1 * g
    v[:] = c.beta2 * v + c.one_minus_beta2 * (g * g)
    return m / (_sqrt(v) + p.eps) * p.step


def _adamw(c: Constants, p: Scalars, state: list[F32], w: F32, g: F32) -> F32:
    d = _adam(c, p, state, w, g)
    # Not as w*(1 - decay): float32 of 1 - decay is coarse (6e-8), and the decay of a stale update is near it.
    return d + p.decay * w if p.decay else d


@dataclass(frozen=True)
class Rule:
    """A row of the table. parameters: the constants that the rule reads, with torch's defaults."""

    state: tuple[str, ...]
    normalised: bool
    parameters: Mapping[str, float]
    reference: Callable[[Constants, Scalars, list[F32], F32, F32], F32]
    counts_steps: bool = False
    decoupled_decay: bool = False


_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

RULES: Mapping[str, Rule] = {
    "sgd": Rule((), False, {}, _sgd),
    "momentum": Rule(("velocity",), False, {"momentum": 0.9}, _momentum),
    "nesterov": Rule(("velocity",), False, {"momentum": 0.9}, _nesterov),
    "adagrad": Rule(("square_sum",), True, {"eps": 1e-10}, _adagrad),
    "rudra-adagrad": Rule(("square_sum", "velocity"), True, {"momentum": 0.9}, _rudra_adagrad),
    "rmsprop": Rule(("square_mean",), True, {"rho": 0.99, "eps": 1e-8}, _rmsprop),
    "adam": Rule(("mean", "square_mean"), True, _ADAM, _adam, counts_steps=True),
    "adamw": Rule(("mean", "square_mean"), True, _ADAM, _adamw, counts_steps=True, decoupled_decay=True),
}
"""The rules by name, in the order in which they are listed to people."""
