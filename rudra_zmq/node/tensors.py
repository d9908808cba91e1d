"""Files of tensors in the safetensors format, written and read without a copy of the whole.

Owns: the format's header and the table of dtypes. Must not know: what the tensors mean. A file is 8 bytes
(length of the header, little endian), the header as JSON, then the bytes of the tensors one after another.

Written here rather than by the safetensors package because that one turns every tensor into a bytes object
first, which doubles the memory of a snapshot, and because NumPy alone cannot hold bfloat16.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

# safetensors' name -> (NumPy's, bytes); bfloat16 travels as the upper half of a float32
_DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("<f8", 8), "F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("<u2", 2),
    "I64": ("<i8", 8), "I32": ("<i4", 4), "I16": ("<i2", 2), "I8": ("i1", 1), "U8": ("u1", 1),
    "BOOL": ("?", 1),
}  # fmt: skip
_TORCH: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_MAX_HEADER = 100 << 20
_PIECE = 1 << 20


class Tensor(NamedTuple):
    """A tensor to write: ``data`` are its elements in C order as ``dtype`` stores them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Array


class Found(NamedTuple):
    """A tensor of a file; ``offset`` counts bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Written(NamedTuple):
    """Size of a file in bytes and the CRC-32 of all of it."""

    nbytes: int
    crc32: int


def dtype_of(torch_name: str) -> str:
    """safetensors' name of a dtype that torch prints as "float32" or "torch.float32"; else ValueError."""
    name = _TORCH.get(torch_name.removeprefix("torch."))
    if name is None:
        raise ValueError(f"dtype {torch_name} cannot be written; known: {', '.join(_TORCH)}")
    return name


def stored(values: Array, dtype: str) -> Array:
    """``values`` as ``dtype`` stores them, rounded to nearest even; a view where nothing has to change."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # a NaN must not round into an infinity
        halves: Array = np.where(np.isnan(values), quiet, rounded).astype("<u2")
        return halves
    return np.ascontiguousarray(values, np.dtype(_DTYPES[dtype][0]))


def write(path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Written:
    """Write a file and force it to the disk. OSError as the file system has it: ``path`` is then torn."""
    header = _header(tensors, metadata)
    crc = 0
    size = 0
    with open(path, "wb", buffering=0) as file:
        for part in (memoryview(header), *map(_bytes_of, tensors)):
            for start in range(0, len(part), _PIECE):
                piece = part[start : start + _PIECE]
                write_all(file.fileno(), piece)
                crc = zlib.crc32(piece, crc)
            size += len(part)
        os.fsync(file.fileno())
    return Written(size, crc)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """All of ``data`` to a descriptor: a nearly full disk takes a part and fails at the next call only."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: npt.NDArray[np.uint8] = tensor.data.reshape(-1).view(np.uint8)
    return flat.data


def _header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        expected = math.prod(tensor.shape) * _DTYPES[tensor.dtype][1]
        if tensor.data.nbytes != expected or tensor.name in table:
            got = tensor.data.nbytes
            raise ValueError(f"tensor {tensor.name!r}: {got} bytes, expected {expected}, or named twice")
        table[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + expected],
        }  # fmt: skip
        end += expected
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, Found], dict[str, str]]:
    """The tensors of a file and its metadata. OSError; ValueError (one line) where it is no such file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ValueError("not a safetensors file")
        text = file.read(length)
    try:
        table = json.loads(text)
        metadata = {str(k): str(v) for k, v in table.pop("__metadata__", {}).items()}
        return {name: _found(name, row, 8 + length, size) for name, row in table.items()}, metadata
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("not a safetensors file: its header cannot be read") from None


def _found(name: str, row: dict[str, object], base: int, size: int) -> Found:
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise TypeError
    numbers = [*shape, *offsets]
    if not all(isinstance(x, int) and x >= 0 for x in numbers):
        raise TypeError
    start, stop = offsets
    expected = math.prod(shape) * _DTYPES[dtype][1]
    if stop - start != expected or base + stop > size:
        raise ValueError(f"tensor {name!r} should have {expected} bytes inside the file")
    return Found(dtype, tuple(shape), base + start, expected)


def read(path: Path, found: Found, start: int = 0, count: int | None = None) -> Array:
    """One tensor, flat, or ``count`` of its elements at most from ``start``; bfloat16 comes as float32.

    OSError; ValueError where the file is shorter by now.
    """
    kind = np.dtype(_DTYPES[found.dtype][0])
    size = found.nbytes // kind.itemsize - start
    size = size if count is None else min(count, size)
    flat: Array = np.fromfile(path, kind, size, offset=found.offset + start * kind.itemsize)
    if flat.size != size:
        raise ValueError(f"{path.name} is shorter than its header says")
    if found.dtype == "BF16":
        wide: Array = (flat.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return flat


def crc_of(path: Path) -> Written:
    """Size and CRC-32 of a file as it is on the disk."""
    crc = 0
    size = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
            size += len(piece)
    return Written(size, crc)
