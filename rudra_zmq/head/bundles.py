"""Bundles of user code on a host's disk: put there in pieces, read in pieces, removed when no job needs them.

Owns <state>/bundles/ and the mark of need in each job's folder. Must not know: what is in a bundle, who asks for one.
The head and the learnerd of one state folder share what is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

from rudra_zmq import paths
from rudra_zmq.errors import ConfigError, NotFound, Rejected, RudraError
from rudra_zmq.wire.bundle import NAME

FORGET_S = 3600.0
"""What no job needs goes after this long: its job may be about to be submitted, or it was cut off."""


def place(state: Path, name: str) -> Path:
    """Where the bundle is or would be. ConfigError for what is no name: it becomes a part of a path."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is no bundle's name", fix="submit the job again")
    return paths.bundles_folder(state) / name


def have(state: Path, name: str) -> bool:
    """Whether it is there, whole."""
    return place(state, name).is_file()


def read(state: Path, name: str, offset: int, limit: int) -> tuple[bytes, int]:
    """A piece, and the size of the whole. NotFound."""
    try:
        with open(place(state, name), "rb") as file:
            return os.pread(file.fileno(), limit, offset), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        fix = "submit the job again"
        raise NotFound(f"there is no code {name[:12]}", where=str(paths.bundles_folder(state)), fix=fix) from None


def need(folder: paths.JobFolder, name: str) -> None:
    """From now on the job of this folder needs it. OSError."""
    folder.bundle.write_text(name, "ascii")


def needed(folder: paths.JobFolder) -> str:
    """The bundle that a job needs, or ""."""
    with contextlib.suppress(OSError):
        return _marked(folder)
    return ""


def _marked(folder: paths.JobFolder) -> str:
    try:
        name = folder.bundle.read_bytes().decode("ascii", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return name if NAME.fullmatch(name) else ""


def collect(state: Path, removed: str = "", now: float | None = None) -> None:
    """Remove what no job of this state folder needs: ``removed`` (a removed job's) at once, the rest when it is old.

    Where it cannot be read what a job needs, everything stays.
    """
    now = time.time() if now is None else now
    try:
        there = [entry for entry in os.scandir(paths.bundles_folder(state)) if entry.is_file(follow_symlinks=False)]
        jobs = list(os.scandir(state / "jobs")) if there and (state / "jobs").is_dir() else []
        wanted = {_marked(paths.JobFolder(Path(entry.path))) for entry in jobs}
    except OSError:
        return
    for entry in there:
        with contextlib.suppress(OSError):
            if entry.name not in wanted and (entry.name == removed or now - entry.stat().st_mtime > FORGET_S):
                os.unlink(entry.path)


class Incoming:
    """One bundle on its way to the disk, written in order and checked as it comes."""

    def __init__(self, state: Path, name: str, size: int) -> None:
        """RudraError where the disk does not take it."""
        self.name, self.size, self.held = name, size, 0
        self._target = place(state, name)
        self._part = self._target.with_name(f".{name}.{secrets.token_hex(4)}")
        self._sum: Any = hashlib.sha256()
        try:
            paths.own_folder(self._target.parent)
            self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._full(error) from None

    def write(self, data: bytes) -> bool:
        """The next bytes; true once it is whole, checked and in place.

        Rejected where it is not what its name says, RudraError on a full disk: it is gone then.
        """
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            self._sum.update(data)
            self.held += len(data)
            if self.held < self.size:
                return False
            if self.held > self.size or self._sum.hexdigest() != self.name:
                self.drop()
                raise Rejected(f"what came is not the code {self.name[:12]}", fix="submit the job again")
            os.fsync(self._fd)
            os.replace(self._part, self._target)
        except OSError as error:
            self.drop()
            raise self._full(error) from None
        os.close(self._fd)
        self._fd = -1
        return True

    def _full(self, error: OSError) -> RudraError:
        reason = error.strerror or "it cannot be written"
        return RudraError(f"the code was not stored: {reason}", where=str(self._target.parent), fix="make room there")

    def drop(self) -> None:
        """Give it up."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._part.unlink(missing_ok=True)


def _used(target: Path) -> int | None:
    """Bytes of a bundle that is here, and in use from now on: its job is about to come. None where it is not."""
    try:
        os.utime(target)
        return target.stat().st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or "it cannot be used"
        raise RudraError(f"the code is stored, and {reason}", where=str(target), fix="see to that disk") from None


class Uploads:
    """Bundles that are on their way from the command line; few at once, none for ever."""

    MOST = 8
    PATIENCE_S = 60.0

    def __init__(self, state: Path) -> None:
        self._state = state
        self._coming: dict[str, tuple[Incoming, float]] = {}

    def put(self, name: str, size: int, offset: int, data: bytes, now: float) -> int:
        """Bytes that are held after it; a piece that does not continue them is not taken."""
        target = place(self._state, name)
        if (held := _used(target)) is not None:
            return held
        coming = self._coming.get(name, (None, 0.0))[0]
        if coming is not None and coming.size != size:
            coming.drop()
            coming = None
        if coming is None:
            if len(self._coming) >= self.MOST:
                raise RudraError(f"{self.MOST} bundles of code are on their way already", fix="try again in a minute")
            collect(self._state)
            coming = Incoming(self._state, name, size)
        self._coming[name] = (coming, now)
        if data and offset == coming.held:
            try:
                whole = coming.write(data)
            except RudraError:
                del self._coming[name]
                raise
            if whole:
                del self._coming[name]
        return coming.held

    def expire(self, now: float) -> None:
        """Give up on those that nobody goes on with."""
        for name in [name for name, (_, heard) in self._coming.items() if now - heard > self.PATIENCE_S]:
            self._coming.pop(name)[0].drop()
