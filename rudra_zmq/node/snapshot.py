"""Snapshots of a job: written aside by a thread, whole or not at all; the newest good one is found again.

Owns: the folder snapshots/<generation>-<update>/ with weights.safetensors, state.json and, last,
manifest.json; the checks when one is read; which ones are kept. Must not know: what is in the state, when a
snapshot is due.

A snapshot is written under a temporary name and renamed once every file is on the disk, so a kill at any
moment leaves the old ones good. A damaged one (a file missing, shorter, or another CRC-32 than the manifest
says) is passed over.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rudra_zmq.node import tensors

FORMAT = 1
_NAME = re.compile(r"(\d+)-(\d+)")
_TEMP = ".writing-"
_WEIGHTS, _STATE, _MANIFEST = "weights.safetensors", "state.json", "manifest.json"


class Content(NamedTuple):
    """What one snapshot says; the arrays of ``vectors`` must stay as they are until it is written."""

    generation: int
    update: int
    vectors: Sequence[tensors.Tensor]
    state: Mapping[str, Any]


class Outcome(NamedTuple):
    """How writing ended: ``error`` is "" or one line; ``seconds`` is what it cost."""

    generation: int
    update: int
    error: str
    nbytes: int
    seconds: float


class Loaded(NamedTuple):
    """A snapshot that passed its checks; vectors are read with :func:`vectors`."""

    path: Path
    generation: int
    update: int
    state: dict[str, Any]


class Store:
    """The folder of one job's snapshots. ``keep`` complete ones stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def clean(self) -> int:
        """Remove what a killed writer left, half written or half removed; how many there were."""
        left = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            half_removed = _NAME.fullmatch(path.name) and not (path / _MANIFEST).exists()
            if path.is_dir() and (path.name.startswith(_TEMP) or half_removed):
                left.append(path)
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return len(left)

    def complete(self) -> list[tuple[int, int, Path]]:
        """(generation, update, path) of every snapshot with a manifest, oldest first."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and (path / _MANIFEST).is_file():
                found.append((int(match[1]), int(match[2]), path))
        return sorted(found)

    def newest(self, warn: Callable[[str], None]) -> Loaded | None:
        """The newest good one: highest generation, then highest update. Says what it passed over, and why."""
        for generation, update, path in reversed(self.complete()):
            try:
                return _load(path, generation, update)
            except (OSError, ValueError) as error:
                warn(f"snapshot {path.name} is damaged and is passed over: {error}")
        return None

    def write(self, content: Content) -> Outcome:
        """Write one and let the oldest go. Never raises: the outcome says what went wrong."""
        began = time.monotonic()
        name = f"{content.generation}-{content.update}"
        temp = self.folder / f"{_TEMP}{name}"
        try:
            nbytes = self._write(temp, self.folder / name, content)
        except Exception as error:  # whoever waits for the outcome must hear of it
            shutil.rmtree(temp, ignore_errors=True)
            text = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
            line = f"snapshot at update {content.update} not written: {text}. Fix: make room in {self.folder}"
            return Outcome(content.generation, content.update, line, 0, time.monotonic() - began)
        self._prune()
        return Outcome(content.generation, content.update, "", nbytes, time.monotonic() - began)

    def _write(self, temp: Path, final: Path, content: Content) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir()
        weights = tensors.write(temp / _WEIGHTS, content.vectors, {"update": str(content.update)})
        state = _write_json(temp / _STATE, content.state)
        manifest = {
            "format": FORMAT,
            "generation": content.generation,
            "update": content.update,
            "files": {_WEIGHTS: list(weights), _STATE: list(state)},
        }
        _write_json(temp / _MANIFEST, manifest)
        sync_folder(temp)
        if final.exists():  # a damaged one of the same name
            shutil.rmtree(final)
        os.rename(temp, final)
        sync_folder(self.folder)
        return weights.nbytes + state.nbytes

    def _prune(self) -> None:
        for _, _, path in self.complete()[: -self.keep]:
            # the manifest first: half removed is then no snapshot any more
            (path / _MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def vectors(loaded: Loaded) -> dict[str, tensors.Array]:
    """The vectors of a snapshot by name, flat. OSError, ValueError."""
    path = loaded.path / _WEIGHTS
    found, _ = tensors.read_header(path)
    return {name: tensors.read(path, at) for name, at in found.items()}


def _load(path: Path, generation: int, update: int) -> Loaded:
    manifest = _read_json(path / _MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"it has format {manifest.get('format')}, this version reads {FORMAT}")
    if (manifest.get("generation"), manifest.get("update")) != (generation, update):
        raise ValueError("its manifest is another one's")
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != {_WEIGHTS, _STATE}:
        raise ValueError("its manifest names other files")
    for name, expected in files.items():
        if list(tensors.crc_of(path / name)) != expected:
            raise ValueError(f"{name} is not what the manifest says")
    return Loaded(path, generation, update, _read_json(path / _STATE))


def _write_json(path: Path, value: Mapping[str, Any]) -> tensors.Written:
    data = json.dumps(value, separators=(",", ":"), allow_nan=True).encode()
    with open(path, "wb", buffering=0) as file:
        tensors.write_all(file.fileno(), data)
        os.fsync(file.fileno())
    return tensors.Written(len(data), zlib.crc32(data))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path.name} cannot be read") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no object")
    return value


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Writer:
    """One thread that writes one thing at a time; ``done`` is called in it with the job's result."""

    def __init__(self, done: Callable[[Any], object]) -> None:
        self._done = done
        self._thread: threading.Thread | None = None
        self._working = False

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._working

    def start(self, work: Callable[[], Any]) -> None:
        """Begin; the caller has seen that it is not busy."""
        assert not self._working
        self._working = True

        def run() -> None:
            result = work()
            self._working = False  # before the caller hears of it: it may have more to write
            self._done(result)

        self._thread = threading.Thread(target=run, name="rudra-snapshot", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for what is being written; False where it is not done by then."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self._working
