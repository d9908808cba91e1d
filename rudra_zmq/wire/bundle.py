"""A bundle: the files of a folder of user code as one string of bytes, and the way back.

Owns the format, its bounds and which names may be in it. Must not know: which files belong into one (cli.pack), how
it travels, where it lies.

    "RZB1" | length of the table, 4 bytes, big-endian | table | the files' contents, in the order of the table

The table is MessagePack, ``[[path, bytes, executable], ...]``, sorted by path. It holds plain files and nothing else: a
link, a device, an owner or a time cannot even be said, and equal folders give equal bytes. The SHA-256 of the whole is
the bundle's name.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from rudra_zmq.errors import Rejected, RudraError

MOST_BYTES = 64 << 20
"""Of a bundle in all."""
MOST_FILES = 20_000
MOST_PATH = 1024
_MAGIC = b"RZB1"
_MOST_TABLE = 8 << 20
_PIECE = 1 << 18
NAME = re.compile(r"[0-9a-f]{64}")

_Row: TypeAlias = tuple[Annotated[str, Meta(min_length=1, max_length=MOST_PATH)], Annotated[int, Meta(ge=0)], bool]
_table = msgspec.msgpack.Decoder(Annotated[list[_Row], Meta(max_length=MOST_FILES)])


class Entry(NamedTuple):
    """One file: its path below the folder, with slashes."""

    path: str
    data: bytes
    executable: bool


class Bundle(NamedTuple):
    """A bundle in memory. ``name`` is its SHA-256, 64 hex digits."""

    name: str
    data: bytes


def make(entries: Sequence[Entry]) -> Bundle:
    """The bundle. ValueError for a name that ``unpack`` would refuse."""
    ordered = sorted(entries, key=lambda entry: entry.path.encode())
    for entry in ordered:
        if problem := misnamed(entry.path):
            raise ValueError(f"{entry.path!r} {problem}")
    table = msgspec.msgpack.encode([(entry.path, len(entry.data), entry.executable) for entry in ordered])
    data = b"".join([_MAGIC, len(table).to_bytes(4, "big"), table, *(entry.data for entry in ordered)])
    return Bundle(hashlib.sha256(data).hexdigest(), data)


def misnamed(path: str) -> str:
    """Why a bundle cannot hold a file of this path, or ""."""
    if len(path) > MOST_PATH:
        return f"is longer than {MOST_PATH} characters"
    if path.startswith("/") or not all(part not in ("", ".", "..") for part in path.split("/")):
        return "is no path inside a folder"
    return "" if path.isprintable() and "\\" not in path else "has characters that cannot be shown"


def unpack(bundle: Path, name: str, target: Path) -> Iterator[None]:
    """Make ``target`` hold the files of the bundle that is called ``name``; each step is one file or a quarter of a
    MiB, for a loop to interleave.

    Everything is checked and written beside ``target``, which appears whole in the last step; what has that name
    already stays as it is. Rejected for what is no bundle, RudraError where the disk does not take it.
    """
    work = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(bundle, "rb") as file:
            yield from _check(file, name)
            rows = _read_table(file, os.fstat(file.fileno()).st_size)
            work.mkdir(mode=0o755)
            for row in rows:
                yield from _unpack_one(file, work, row)
        try:
            os.rename(work, target)
        except OSError:
            if not target.is_dir():
                raise
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise _no_bundle(bundle, "two of its paths are in each other's way") from None
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise RudraError(f"the code cannot be unpacked: {reason}", where=str(target), fix="make room there") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check(file: BinaryIO, name: str) -> Iterator[None]:
    """Whether the bytes are those that the name stands for."""
    found = hashlib.sha256()
    while piece := file.read(_PIECE):
        found.update(piece)
        yield
    if found.hexdigest() != name:
        raise _no_bundle(Path(file.name), "its content is not what its name says")
    file.seek(0)


def _read_table(file: BinaryIO, total: int) -> list[_Row]:
    """The table, every name and size of it checked against the bounds and the bundle's own size."""
    where = Path(file.name)
    head = file.read(8)
    length = int.from_bytes(head[4:], "big")
    if head[:4] != _MAGIC or length > min(_MOST_TABLE, total) or total > MOST_BYTES:
        raise _no_bundle(where, "its head is none")
    try:
        rows = _table.decode(file.read(length))
    except msgspec.MsgspecError:
        raise _no_bundle(where, "its table is none") from None
    if 8 + length + sum(size for _, size, _ in rows) != total:
        raise _no_bundle(where, "its sizes do not add up")
    for path, _, _ in rows:
        if problem := misnamed(path):
            raise _no_bundle(where, f"{path!r} {problem}")
    return rows


def _unpack_one(file: BinaryIO, work: Path, row: _Row) -> Iterator[None]:
    path, size, executable = row
    place = work / path
    work.stat()  # a job that was removed meanwhile gets no new folder
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(place, flags, 0o755 if executable else 0o644), "wb") as out:
        while size:
            piece = file.read(min(size, _PIECE))
            if not piece:
                raise _no_bundle(Path(file.name), "it is cut short")
            out.write(piece)
            size -= len(piece)
            yield
    yield


def _no_bundle(where: Path, why: str) -> Rejected:
    return Rejected(f"this is no bundle of code: {why}", where=str(where), fix="submit the job again")
