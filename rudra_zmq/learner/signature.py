"""What a model is to the servers: its parameters and buffers, in order, by name, shape and dtype.

Owns: the names, the ties, and what cannot be trained here, refused with the tensor's name and the fix. Must not
know: memory, servers, optimizers.

Names are the keys of the bare model's state_dict: the wrappers of torch.compile and of DataParallel leave no trace.
Tied parameters are one tensor with several names. Parameters frozen at this point (requires_grad False) are part of
the model, and no update moves them. Buffers that are not persistent stay a learner's own, as state_dict has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rudra_zmq.errors import Rejected, RudraError
from rudra_zmq.wire.messages.data import Attach, TensorSpec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A persistent buffer, found anew each time: modules may replace the tensor."""

    name: str
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that the module holds now."""
        value = self.owner._buffers[self.key]
        if value is None:
            raise Rejected(f"buffer {self.name} is gone", fix="keep every buffer that attach() saw")
        return value


@dataclass(frozen=True, slots=True)
class Signature:
    """The model's tensors in flat order. ``tied``: (other name, first name); ``frozen``: names."""

    params: tuple[tuple[str, nn.Parameter], ...]
    float_buffers: tuple[Buffer, ...]
    int_buffers: tuple[Buffer, ...]
    tied: tuple[tuple[str, str], ...]
    frozen: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        """Raises Rejected, one line with the tensor's name and the fix, for a model that cannot be trained here."""
        _refuse_others(model)
        _refuse_layers(model)
        params: dict[int, tuple[str, nn.Parameter]] = {}
        buffers: dict[int, Buffer] = {}
        tied: list[tuple[str, str]] = []
        for name, owner, key in _places(model):
            parameter = owner._parameters.get(key)
            tensor = parameter if parameter is not None else owner._buffers.get(key)
            if tensor is None:
                continue
            if id(tensor) in params or id(tensor) in buffers:
                first = params[id(tensor)][0] if id(tensor) in params else buffers[id(tensor)].name
                tied.append((name, first))
            elif parameter is not None:
                _check("parameter", name, parameter, FLOATS)
                params[id(tensor)] = (name, parameter)
            elif key not in owner._non_persistent_buffers_set:
                _check("buffer", name, tensor, FLOATS + INTEGERS)
                buffers[id(tensor)] = Buffer(name, owner, key)
        if not params:
            raise Rejected("the model has no parameters", fix="attach a model with something to train")
        _refuse_shared(list(params.values()))
        return cls(
            params=tuple(params.values()),
            float_buffers=tuple(b for b in buffers.values() if b.tensor.dtype in FLOATS),
            int_buffers=tuple(b for b in buffers.values() if b.tensor.dtype in INTEGERS),
            tied=tuple(tied),
            frozen=frozenset(name for name, p in params.values() if not p.requires_grad),
        )

    def message(self) -> Attach:
        """The signature as it goes over the wire."""
        return Attach(
            params=[_spec(name, p) for name, p in self.params],
            float_buffers=[_spec(b.name, b.tensor) for b in self.float_buffers],
            int_buffers=[_spec(b.name, b.tensor) for b in self.int_buffers],
            tied=list(self.tied),
            frozen=[name for name, _ in self.params if name in self.frozen],
        )


def _refuse_others(model: object) -> None:
    if not isinstance(model, nn.Module):
        text = f"the model is {type(model).__name__}, not a torch.nn.Module"
        raise Rejected(text, fix="attach an nn.Module; a task's model() has to return one")


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, key) of every parameter and buffer, each module once, parameters of a module first.

    The order is that of named_parameters(); a module that is used twice gives its other names too.
    """

    def visit(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
        for key in (*module._parameters, *module._buffers):
            yield prefix + key, module, key
        for key, child in module._modules.items():
            if child is not None:
                hidden = _wraps(module) == key
                yield from visit(child, prefix if hidden else f"{prefix}{key}.")

    return visit(model, "")


def _wraps(module: nn.Module) -> str:
    """The name under which a wrapper holds what it wraps, "" for an ordinary module."""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    return "_orig_mod" if type(module).__name__ == "OptimizedModule" else ""


def _check(what: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if is_lazy(tensor):
        raise _refusal(what, name, "has no shape yet", "run one batch through the model before attach()")
    if tensor.layout != torch.strided:
        raise _refusal(what, name, f"is sparse ({tensor.layout})", "make it dense: tensor.to_dense()")
    if tensor.device.type == "meta":
        raise _refusal(what, name, "has no memory (device meta)", 'model.to_empty(device="cpu"), then initialise it')
    if tensor.device.type != "cpu":
        raise _refusal(what, name, f"is on {tensor.device}", 'this version trains on the CPU: model.to("cpu")')
    if any(stride == 0 and n > 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise _refusal(what, name, "has elements that lie in one place (expand)", "contiguous() or clone() it")
    if tensor.dtype not in dtypes:
        fix = "make it real: torch.view_as_real" if tensor.dtype.is_complex else _dtype_fix(what, tensor)
        raise _refusal(what, name, f"is {str(tensor.dtype).removeprefix('torch.')}", fix)


def _dtype_fix(what: str, tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.float64:
        return "the servers hold float32: model.float() before attach()"
    if what == "parameter":
        return "parameters are float32, bfloat16 or float16: register_buffer() for anything else"
    return "register_buffer(..., persistent=False) keeps it out of the model's state"


def _refusal(what: str, name: str, is_what: str, fix: str) -> RudraError:
    return Rejected(f"{what} {name} {is_what}", where="learner.attach()", fix=fix)


def _refuse_layers(model: nn.Module) -> None:
    """Layers whose parameters are not what a server can hold, as their options say."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        weight = f"{name}.weight".lstrip(".")
        if module.sparse:
            fix = "nn.Embedding(..., sparse=False)"
            raise _refusal("parameter", weight, "would get sparse gradients", fix)
        if module.max_norm is not None:
            fix = "max_norm=None, and scale what the layer gives in forward()"
            raise _refusal("parameter", weight, "is written by its layer in forward() (max_norm)", fix)


def _refuse_shared(params: list[tuple[str, nn.Parameter]]) -> None:
    """Two parameters over one memory would be two masters of the same weights."""
    extents = []
    for name, p in params:
        if p.numel():
            length = 1 + sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True))
            extents.append((p.untyped_storage().data_ptr(), p.storage_offset(), p.storage_offset() + length, name))
    extents.sort()
    for (storage, _, stop, other), (next_storage, start, _, name) in pairwise(extents):
        if storage == next_storage and start < stop:
            fix = "tie them by using one Parameter for both, or clone() one"
            raise _refusal("parameter", name, f"shares memory with {other}", fix)
