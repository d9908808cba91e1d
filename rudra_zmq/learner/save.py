"""Weights to a file, as safetensors, whole or not at all.

Owns: the bytes of torch tensors on their way to the disk. Must not know: who saves, or which weights.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch

from rudra_zmq.errors import RudraError
from rudra_zmq.node import tensors


def write_weights(path: Path, state: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `state` to `path` by way of a file beside it. RudraError (one line) where the disk refuses."""
    if path.exists() and not path.is_file():
        raise RudraError("cannot save: this is no regular file", where=str(path), fix="save under another name")
    rows = [_row(name, tensor) for name, tensor in state.items()]
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors.write(temporary, rows, {"format": "pt", **(metadata or {})})
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        fix = "save where there is room and you may write"
        raise RudraError(f"cannot save: {error.strerror}", where=str(path), fix=fix) from None


def _row(name: str, tensor: torch.Tensor) -> tensors.Tensor:
    dtype = tensors.dtype_of(str(tensor.dtype))
    plain = tensor.detach().contiguous()
    values = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return tensors.Tensor(name, dtype, tuple(tensor.shape), tensors.stored(values, dtype))
