"""weights.safetensors: the weights as a state_dict, and version 0 from such a file.

Owns: names, shapes and dtypes of the model on the way to and from the flat vector. Must not know: when it is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rudra_zmq.errors import NotFound, Rejected
from rudra_zmq.node import tensors
from rudra_zmq.node.snapshot import sync_folder
from rudra_zmq.node.vectors import F32, I64, Vector
from rudra_zmq.wire.layout import Layout, Slice
from rudra_zmq.wire.messages.data import Attach

_SHOWN = 6
_STEP = 1 << 20  # elements looked at or read at a time: no copy of a large tensor


def rows(attach: Attach, layout: Layout, vector: Vector) -> list[tensors.Tensor]:
    """Every key of the state_dict, tied names included, in the model's own dtypes and shapes."""
    table: dict[str, tensors.Tensor] = {}
    for slices, values in _parts(layout, vector):
        for s in slices:
            dtype = tensors.dtype_of(s.dtype)
            table[s.name] = tensors.Tensor(s.name, dtype, s.shape, tensors.stored(values[s.start : s.stop], dtype))
    for alias, name in attach.tied:
        table[alias] = table[name]._replace(name=alias)
    return [table[name] for name in sorted(table)]


def _parts(layout: Layout, vector: Vector) -> tuple[tuple[tuple[Slice, ...], F32 | I64], ...]:
    return (
        (layout.params, vector.params),
        (layout.float_buffers, vector.floats),
        (layout.int_buffers, vector.ints),
    )


def write(path: Path, attach: Attach, layout: Layout, vector: Vector, metadata: Mapping[str, str]) -> int:
    """Write the file whole or not at all; its size in bytes. OSError as the file system has it."""
    temp = path.with_name(f".{path.name}.new")
    try:
        written = tensors.write(temp, rows(attach, layout, vector), metadata)
        os.replace(temp, path)
        sync_folder(path.parent)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    return written.nbytes


def load(path: Path, attach: Attach, layout: Layout, into: Vector) -> None:
    """Version 0 from a file: every parameter must be there under its name or a tied one, buffers where they are.

    NotFound where there is no such file; Rejected with the first differences where it is another model's.
    """
    where = f"job.init = {path}"
    try:
        found, _ = tensors.read_header(path)
        faults = _faults(attach, layout, found)
        if faults:
            more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            text = "; ".join(faults[:_SHOWN]) + more
            raise Rejected(f"the weights are another model's: {text}", where=where, fix="name the right file")
        aliases = {name: alias for alias, name in attach.tied}
        for slices, values in _parts(layout, into):
            for s in slices:
                at = found.get(s.name) or found.get(aliases.get(s.name, ""))
                if at is not None:
                    for start in range(0, s.stop - s.start, _STEP):
                        part = tensors.read(path, at, start, _STEP)
                        values[s.start + start : s.start + start + part.size] = part
    except OSError as error:
        raise NotFound(
            f"cannot be read: {error.strerror}", where=where, fix="give a path that the node can read"
        ) from None
    except ValueError as error:
        raise Rejected(str(error), where=where, fix="give a safetensors file") from None
    if not into.finite():
        raise Rejected("a weight is NaN or infinite", where=where, fix="give other weights")


def _faults(attach: Attach, layout: Layout, found: Mapping[str, tensors.Found]) -> list[str]:
    aliases = {name: alias for alias, name in attach.tied}
    faults = []
    for s in layout.params:
        at = found.get(s.name) or found.get(aliases.get(s.name, ""))
        if at is None:
            faults.append(f"parameter {s.name} is missing")
        elif at.shape != s.shape:
            faults.append(f"parameter {s.name} has shape {list(at.shape)}, the model's {list(s.shape)}")
    for s in (*layout.float_buffers, *layout.int_buffers):
        at = found.get(s.name)
        if at is not None and at.shape != s.shape:
            faults.append(f"buffer {s.name} has shape {list(at.shape)}, the model's {list(s.shape)}")
    known = {s.name for s in (*layout.params, *layout.float_buffers, *layout.int_buffers)}
    known |= {alias for alias, _ in attach.tied}
    return faults + [f"{name} is no tensor of the model" for name in sorted(found) if name not in known]


def first_bad(layout: Layout, vector: Vector) -> str:
    """The name of the first tensor with a NaN or an infinity, "" if there is none."""
    for slices, values in _parts(layout, vector):
        for s in slices:
            part = values[s.start : s.stop]
            if any(not np.isfinite(part[at : at + _STEP]).all() for at in range(0, part.size, _STEP)):
                return s.name
    return ""
