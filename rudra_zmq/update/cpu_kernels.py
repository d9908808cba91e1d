"""The rules of rules.py on one block in the cache: NumPy ufuncs with `out=`, in the reference's order of
operations.

Owns: the kernels. Must not know: blocks, threads, where the sum comes from.

A kernel gets the constants, the group's scalars, slices of the state, the weights w, the summed gradient
g (decay added) and scratch t, all of one size. It changes the state and leaves the new weights in g.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rudra_zmq.update.rules import F32, Constants, Scalars

Kernel = Callable[[Constants, Scalars, Sequence[F32], F32, F32, F32], None]


def _sgd(c: Constants, p: Scalars, state: Sequence[F32], w: F32, g: F32, t: F32) -> None:
    np.multiply(g, p.step, out=t)
    np.subtract(w, t, out=g)


def _accelerate(c: Constants, v: F32, g: F32) -> None:
    np.multiply(v, c.momentum, out=v)
    np.add(v, g, out=v)


def _momentum(c: Constants, p: Scalars, state: Sequence[F32], w: F32, g: F32, t: F32) -> None:
    (v,) = state
    _accelerate(c, v, g)
    np.multiply(v, p.step, out=t)
    np.subtract(w, t, out=g)


def _nesterov(c: Constants, p: Scalars, state: Sequence[F32], w: F32, g: F32, t: F32) -> None:
    (v,) = state
    _accelerate(c, v, g)
    np.multiply(v, c.momentum, out=t)
    np.add(t, g, out=t)
    np.multiply(t, p.step, out=t)
    np.subtract(w, t, out=g)


def _adagrad(c: Constants, p: Scalars, state: Sequence[F32], w: F32, g: F32, t: F32) -> None:
    (s,) = state
    np.multiply(g, g, out=t)
    np.add(s, t, out=s)
    _normalised_step(p, s, w, g, g, t)


def _rudra_adagrad(c: Constants, p: Scalars, state: Sequence[F32], w: F32, g: F32, t: F32) -> None:
    s, v = state
    np.multiply(g, g, out=t)
    np.add(s, t, out=s)
    np.add(s, np.float32(1.0), out=t)
    np.sqrt(t, out=t)
    np.divide(g, t, out=g)
    _accelerate(c, v, g)
    np.multiply(v, p.step, out=t)
    np.subtract(w, t, out=g)


def _rmsprop(c: Constants, p: Scalars, state: Sequence[F32], w: F32, g: F32, t: F32) -> None:
    (s,) = state
    _square_mean(c.rho, c.one_minus_rho, s, g, t)
    _normalised_step(p, s, w, g, g, t)


def _adam(c: Constants, p: Scalars, state: Sequence[F32], w: F32, g: F32, t: F32) -> None:
    m, v = state
    _mean(c, m, g, t)
    _square_mean(c.beta2, c.one_minus_beta2, v, g, t)
    _normalised_step(p, v, w, m, g, t)


def _adamw(c: Constants, p: Scalars, state: Sequence[F32], w: F32, g: F32, t: F32) -> None:
    if not p.decay:
        _adam(c, p, state, w, g, t)
        return
    m, v = state
    _mean(c, m, g, t)
    _square_mean(c.beta2, c.one_minus_beta2, v, g, t)
    _direction(p, v, m, g, t)
    np.multiply(w, p.decay, out=t)
    np.add(g, t, out=g)
    np.subtract(w, g, out=g)


def _mean(c: Constants, m: F32, g: F32, t: F32) -> None:
    np.multiply(m, c.beta1, out=m)
    np.multiply(g, c.one_minus_beta1, out=t)
    np.add(m, t, out=m)


def _square_mean(keep: np.float32, take: np.float32, s: F32, g: F32, t: F32) -> None:
    np.multiply(g, g, out=t)
    np.multiply(t, take, out=t)
    np.multiply(s, keep, out=s)
    np.add(s, t, out=s)


def _direction(p: Scalars, s: F32, numerator: F32, g: F32, t: F32) -> None:
    np.sqrt(s, out=t)
    np.add(t, p.eps, out=t)
    np.divide(numerator, t, out=g)
    np.multiply(g, p.step, out=g)


def _normalised_step(p: Scalars, s: F32, w: F32, numerator: F32, g: F32, t: F32) -> None:
    _direction(p, s, numerator, g, t)
    np.subtract(w, g, out=g)


KERNELS: Mapping[str, Kernel] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adagrad": _adagrad,
    "rudra-adagrad": _rudra_adagrad,
    "rmsprop": _rmsprop,
    "adam": _adam,
    "adamw": _adamw,
}
"""One kernel for each name of RULES."""
