"""The model's weights in one flat vector, and its gradients gathered into another.

Owns: the two vectors; parameters as views of the first, so that new weights arrive in all of them with one copy, or
with none where the first is another one each time; the check that nothing but an update changed them. Must not know:
servers, optimizers, leases.

A view is an optimisation, not a contract: a parameter that cannot be one (half precision, channels_last), or that
.to() moved off its view, is copied instead.

Weights that are not those of the servers would give gradients of another model under the servers' timestamp. So each
step looks at every parameter's version (load_state_dict, clamp_ under no_grad) and compares a window of the vector
with what arrived, another one each time: what .data hides is found too, at a cost that does not grow with the model.
A vector of the servers cannot be written (learner.guard says who tried).

Buffers are written by forward(): they stay the module's own, and are copied.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from rudra_zmq.errors import Rejected
from rudra_zmq.learner.signature import FLOATS, Buffer, Signature
from rudra_zmq.node.vectors import F32, Vector, finite
from rudra_zmq.wire.layout import Layout, Slice

KNOWN = 4
"""Gradient vectors whose views are kept: one of the model's own, and a learner's slots."""

PIECE = 1 << 18
"""Elements of a gradient that are copied at one go: 1 MiB is in the cache still when they are looked at."""

WINDOW = 1 << 16
"""Elements compared per step: 256 KiB, some 30 microseconds."""


_Places: TypeAlias = list[tuple[tuple[Buffer, ...], list[torch.Tensor]]]


class Mark:
    """The gradients as they were at one moment: `same_as` tells whether they are those still."""

    def __init__(self, grads: list[torch.Tensor]) -> None:
        self._first = weakref.ref(grads[0]) if grads else None
        self._count = len(grads)
        self._versions = sum(g._version for g in grads)

    def same_as(self, grads: list[torch.Tensor]) -> bool:
        """No gradient was replaced, dropped or written to since."""
        if self._first is None or not grads:
            return self._first is None and not grads
        return (
            self._first() is grads[0] and self._count == len(grads) and self._versions == sum(g._version for g in grads)
        )

    def replaced(self, grads: list[torch.Tensor]) -> bool:
        """The gradients were dropped in between (zero_grad with set_to_none), whatever is there now."""
        return self._first is not None and (not grads or self._first() is not grads[0])


class _Look:
    """Copies gradients to their places in ``values``, in order, and looks whether they are finite as it goes."""

    def __init__(self, values: F32) -> None:
        self._values = values
        self._seen = 0
        self._good = True

    def copy(self, slot: torch.Tensor, grad: torch.Tensor, place: Slice) -> None:
        """One parameter's; a large one in pieces, each of which is in the cache still when it is looked at."""
        if slot.numel() <= PIECE or not grad.is_contiguous():
            slot.copy_(grad)
            self._upto(place.stop)
            return
        to, given = slot.view(-1), grad.view(-1)
        for at in range(0, given.numel(), PIECE):
            piece = given[at : at + PIECE]
            to[at : at + PIECE].copy_(piece)
            self._upto(place.start + at + piece.numel())

    def _upto(self, stop: int) -> None:
        if stop - self._seen >= PIECE:
            self._good = self._good and finite(self._values[self._seen : stop])
            self._seen = stop

    def finite(self) -> bool:
        """Of all that was copied."""
        return self._good and finite(self._values[self._seen :])


class AttachedModel:
    """A model whose weights are `weights` and whose gradients go to `gradient`, both vectors of `layout`.

    `load` makes `weights` another one, `write_into` makes `gradient` another one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.signature = Signature.of(model)
        self.message = self.signature.message()
        self.layout = Layout.of(self.message)
        self.own = self.weights = Vector(self.layout)
        self.gradient = Vector(self.layout, touch=False)  # where memory is shared, it is a slot
        self.unused: tuple[str, ...] = ()  # parameters that the last gather found without a gradient
        self._finite: bool | None = None  # what the last gather saw of the parameters' gradients
        self._params = [p for _, p in self.signature.params]
        self._views = self._own_views = _views(self.weights, self.layout)
        self._shown: dict[int, tuple[Vector, list[torch.Tensor]]] = {}  # vectors but the own, with their views
        self._slots = _views(self.gradient, self.layout)
        self._places: dict[int, tuple[Vector, _Places]] = {}
        self._known = {id(self.gradient): (self.gradient, self._slots)}
        self._bound = [_bind(p, view) for p, view in zip(self._params, self._views, strict=True)]
        self._versions = [p._version for p in self._params]
        self._window = (0, np.empty(0, np.float32))
        self._watch()
        self.read_buffers(self.weights)

    # ---- weights

    def load(self, weights: Vector | None = None) -> None:
        """Make the model what `weights` says, from here on a vector that was given.

        Of what is not `own` nothing is kept once `own` is loaded again.
        """
        if weights is not None:
            self._look_at(weights)
            if weights is self.own:
                self._shown.clear()
        self._bind()
        for tensors, source in self._buffers(self.weights):
            for tensor, view in zip(tensors, source, strict=True):
                with torch.no_grad():
                    tensor.tensor.copy_(view)
        self._versions = [p._version for p in self._params]
        self._watch()

    def _look_at(self, weights: Vector) -> None:
        if weights is self.weights:
            return
        if weights is self.own:
            views = self._own_views
        elif id(weights) in self._shown:
            views = self._shown[id(weights)][1]
        else:
            views = _views(weights, self.layout)
            self._shown[id(weights)] = (weights, views)
        self.weights, self._views = weights, views

    def _bind(self) -> None:
        """Make parameters views of `weights`, or copies where they cannot be."""
        for i, (parameter, view) in enumerate(zip(self._params, self._views, strict=True)):
            if not self._is_view(i):
                self._check_dtype(i)
                self._bound[i] = _bindable(parameter)
                if self._bound[i]:
                    parameter.data = view
                else:
                    parameter.data.copy_(view)

    def read_buffers(self, into: Vector) -> None:
        """The model's buffers into the tail of `into`."""
        for tensors, target in self._buffers(into):
            for tensor, view in zip(tensors, target, strict=True):
                view.copy_(tensor.tensor)

    def check(self) -> None:
        """Raise Rejected, with the parameter's name, if something else than an update changed the weights."""
        for i, (parameter, version) in enumerate(zip(self._params, self._versions, strict=True)):
            if parameter._version != version or (self._bound[i] and not self._is_view(i) and self._moved(i)):
                raise self._changed(i)
        start, expected = self._window
        seen = self.weights.params[start : start + expected.size]
        if not np.array_equal(seen.view(np.int32), expected.view(np.int32)):
            hit = start + int(np.flatnonzero(seen.view(np.int32) != expected.view(np.int32))[0])
            raise self._changed(next(i for i, s in enumerate(self.layout.params) if s.start <= hit < s.stop))

    def check_structure(self) -> None:
        """Raise Rejected, with the parameter's name, if the model no longer consists of the attached parameters."""
        ours = {id(p): name for name, p in self.signature.params}
        names = [name for name, p in self.model.named_parameters() if id(p) not in ours]
        if names:
            raise Rejected(
                f"parameter {names[0]} is not one that attach() saw",
                where="learner.batches()",
                fix="finish the model (layers, pruning, parametrizations) before learner.attach(model)",
            )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Weights and buffers are, after the block, what they were before it. Inside, weights can be written."""
        before = self.weights
        weights = before.params.copy() if before is self.own else before.params
        if before is not self.own:
            self.own.params[:] = weights
            self._look_at(self.own)
            self._bind()
        moved = {i: p.detach().clone() for i, p in enumerate(self._params) if not self._is_view(i)}
        buffers = [(b, b.tensor.detach().clone()) for b in self._all_buffers()]
        try:
            yield
        finally:
            if before is self.own:
                before.params[:] = weights
            for i, value in moved.items():
                self._params[i].data.copy_(value)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.tensor.copy_(value)
            if before is not self.own:
                self._look_at(before)
                self._bind()
            self._versions = [p._version for p in self._params]

    # ---- gradients

    def grads(self) -> list[torch.Tensor]:
        """The gradients that are there, in flat order."""
        return [p.grad for p in self._params if p.grad is not None]

    def write_into(self, vector: Vector, keep: bool) -> None:
        """Gather into `vector` from here on; `keep`: what was gathered goes along."""
        if vector is self.gradient:
            return
        if keep:
            vector.copy_from(self.gradient)
        if id(vector) not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[id(vector)] = (vector, _views(vector, self.layout))
        self.gradient, self._slots = self._known[id(vector)]

    def gather(self, weight: float | None = None, first: bool = True) -> None:
        """Copy every gradient into `gradient` as float32, zeros where there is none; the latter go to `unused`.

        With a weight, `weight` times the gradients is written (first) or added. Raises Rejected, with the parameter's
        name, for a gradient that is sparse or of a frozen parameter.
        """
        unused = []
        look = _Look(self.gradient.params)
        for (name, parameter), slot, place in zip(self.signature.params, self._slots, self.layout.params, strict=True):
            grad = parameter.grad
            if grad is None:
                if first:
                    slot.zero_()
                if name not in self.signature.frozen:
                    unused.append(name)
                continue
            self._check_grad(name, grad)
            if weight is None:
                look.copy(slot, grad, place)
            elif first:
                slot.copy_(grad).mul_(weight)
            else:
                slot.add_(grad.to(torch.float32) * weight)
        self.unused = tuple(unused)
        self._finite = look.finite() if weight is None else None

    def finite(self) -> bool | None:
        """Whether `gradient` is, with the buffers that were read into it; None where nobody looked yet."""
        return self._finite and finite(self.gradient.floats)

    def divide(self, total: float) -> None:
        """The gradients in `gradient` over `total`."""
        self.gradient.params /= np.float32(total)
        self._finite = None

    # ---- inside

    def _is_view(self, i: int) -> bool:
        return self._bound[i] and self._params[i].data_ptr() == self._views[i].data_ptr()

    def _moved(self, i: int) -> bool:
        """A parameter has left its view: .to() keeps its values, whoever assigned to .data did not."""
        self._check_dtype(i)
        parameter = self._params[i]
        self._bound[i] = False
        return not torch.equal(parameter.detach(), self._views[i].to(parameter.dtype))

    def _watch(self) -> None:
        """Remember the next window of the weights that `check` compares."""
        if self.weights is not self.own:
            self._window = (self._window[0], np.empty(0, np.float32))
            return
        start = self._window[0] + self._window[1].size
        if start >= self.layout.P:
            start = 0
        self._window = (start, self.weights.params[start : start + WINDOW].copy())

    def _changed(self, i: int) -> Rejected:
        return Rejected(
            f"parameter {self.layout.params[i].name} was changed outside the optimizer: the servers do not know of it",
            where="opt.step()",
            fix="load weights before learner.attach(model), clamp them inside forward(), "
            "or change them for an evaluation inside learner.frozen()",
        )

    def _check_dtype(self, i: int) -> None:
        parameter = self._params[i]
        if parameter.dtype not in FLOATS or parameter.device.type != "cpu":
            what = f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
            raise Rejected(
                f"parameter {self.layout.params[i].name} became {what} after attach()",
                fix="keep it float32, bfloat16 or float16 on the CPU",
            )

    def _check_grad(self, name: str, grad: torch.Tensor) -> None:
        if name in self.signature.frozen:
            fix = "requires_grad_(True) before learner.attach(model); freeze it afterwards if need be"
            raise Rejected(f"parameter {name} was frozen at attach() and has a gradient", fix=fix)
        if grad.layout != torch.strided:
            fix = "use a dense gradient: nn.Embedding(..., sparse=False)"
            raise Rejected(f"parameter {name} has a sparse gradient", fix=fix)

    def _all_buffers(self) -> tuple[Buffer, ...]:
        return (*self.signature.float_buffers, *self.signature.int_buffers)

    def _buffers(self, vector: Vector) -> _Places:
        """Floating and integer buffers with their places in `vector`; looked up once for each of a few vectors."""
        known = self._places.get(id(vector))
        if known is None or known[0] is not vector:
            if len(self._places) > KNOWN:
                self._places.clear()
            known = self._places[id(vector)] = (vector, self._places_in(vector))
        return known[1]

    def _places_in(self, vector: Vector) -> _Places:
        if not self._all_buffers():
            return []
        floats, ints = torch.from_numpy(vector.floats), torch.from_numpy(vector.ints)
        return [
            (self.signature.float_buffers, [floats[s.start : s.stop].view(s.shape) for s in self.layout.float_buffers]),
            (self.signature.int_buffers, [ints[s.start : s.stop].view(s.shape) for s in self.layout.int_buffers]),
        ]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of parameters and buffers under all their names, tied ones included."""
        state = {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in self.signature.params}
        state |= {b.name: b.tensor.detach().clone() for b in self._all_buffers()}
        state |= {alias: copy.copy(state[name]) for alias, name in self.signature.tied}
        return state


def _views(vector: Vector, layout: Layout) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        # torch has no tensors that can only be read; learner.guard has an eye on them.
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        flat = torch.from_numpy(vector.params)
    return [flat[s.start : s.stop].view(s.shape) for s in layout.params]


def _bind(parameter: nn.Parameter, view: torch.Tensor) -> bool:
    """Move the parameter's values to `view`, and the parameter too where it can live there."""
    view.copy_(parameter.detach())
    if _bindable(parameter):
        parameter.data = view
        return True
    return False


def _bindable(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.float32 and parameter.is_contiguous()
