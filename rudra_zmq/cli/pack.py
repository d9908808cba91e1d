"""The user's code as a bundle: which files of ``run.code`` go into it.

Owns what is left out: what .gitignore names, version control, caches, environments, checkpoints, links and devices; and
the bound on the size. Must not know: the format (wire.bundle), how it travels.

Links are never followed, not even inside the folder: what they point to may be anything on the next host.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rudra_zmq.cli.output import note, size
from rudra_zmq.config import JobFile
from rudra_zmq.errors import ConfigError, NotFound, Rejected
from rudra_zmq.wire import bundle

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

NEVER = frozenset(
    {".git", ".hg", ".svn", ".jj", "__pycache__", ".cache", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    | {".hypothesis", ".tox", ".nox", ".venv", ".eggs", "node_modules", ".ipynb_checkpoints", ".DS_Store"}
)  # fmt: skip
"""Names of files and folders that are in no bundle."""
CHECKPOINTS = ("*.pt", "*.pth", "*.ckpt", "*.safetensors", "checkpoints/", "*.py[cod]", "*.swp")
"""Left out too, unless a .gitignore says otherwise ("!tiny.pt")."""
MARKS = ("CACHEDIR.TAG", "pyvenv.cfg")
"""A folder that holds one of these is a cache, or an environment of Python."""
NAMED = 10


def pack_job(job: JobFile) -> bundle.Bundle | None:
    """The bundle of a job whose file says ``run.code``, with a word about links that stay behind; else None.

    Rejected over the bound, with the largest paths; ConfigError where the script would not be in it.
    """
    if not job.run.code:
        return None
    packed = pack(Path(job.run.code))
    if packed.links:
        shown = ", ".join(sorted(packed.links)[:3]) + (", ..." if len(packed.links) > 3 else "")
        note(f"note: links are not followed, and not in the bundle: {shown}")
    if job.run.script and job.run.script not in {entry.path for entry in packed.entries}:
        why = "is a link" if job.run.script in packed.links else "is left out (see .gitignore)"
        fix = "name it in .gitignore with a ! before it, or give another run.script"
        raise ConfigError(f"run.script: {job.run.script} {why}", where=job.run.code, fix=fix)
    return bundle.make(packed.entries)


@dataclass
class Packed:
    """The files of a folder; ``links`` are paths that were left out because they are links."""

    entries: list[bundle.Entry] = field(default_factory=list)
    links: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Found:
    path: str
    bytes: int


def pack(folder: Path) -> Packed:
    """All files of ``folder`` that belong into a bundle. Rejected over the bound or without a file."""
    if os.path.realpath(folder) == "/":
        fix = "name the folder of your code"
        raise ConfigError("run.code: it is the whole file system", where=str(folder), fix=fix)
    packed = Packed()
    found: list[_Found] = []
    root = _open_folder(folder)
    try:
        for path in _walk(root, "", _above(folder), packed.links):
            with contextlib.suppress(FileNotFoundError):  # it was there a moment ago
                found.append(_Found(path, os.stat(path, dir_fd=root, follow_symlinks=False).st_size))
        _check(folder, found)
        packed.entries = [entry for item in found if (entry := _read(folder, root, item.path)) is not None]
    finally:
        os.close(root)
    # A file may have grown since it was looked at.
    _check(folder, [_Found(entry.path, len(entry.data)) for entry in packed.entries])
    return packed


def _open_folder(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(f"run.code: {error.strerror}", where=str(folder), fix="name the folder of your code") from None


def _check(folder: Path, found: list[_Found]) -> None:
    total = sum(item.bytes for item in found)
    room = bundle.MOST_BYTES - (64 + 2 * bundle.MOST_PATH) - sum(len(item.path.encode()) + 16 for item in found)
    if not found:
        fix = "name the folder of your code; see its .gitignore"
        raise Rejected("run.code: there is no file to send", where=str(folder), fix=fix)
    if total > room or len(found) > bundle.MOST_FILES:
        largest = sorted(found, key=lambda item: (-item.bytes, item.path))[:NAMED]
        named = ", ".join(f"{item.path} {size(item.bytes)}" for item in largest)
        raise Rejected(
            f"the code has {size(total)} in {len(found)} files, at most {size(bundle.MOST_BYTES)} in"
            f" {bundle.MOST_FILES} files are sent; the largest: {named}",
            where=str(folder),
            fix="name what is no code in .gitignore, and put data where the hosts can read it",
        )


def _walk(root: int, base: str, rules: list[_Rules], links: set[str]) -> Iterator[str]:
    """Paths of plain files below ``base``, by name; folders are entered, links are not."""
    try:
        names = sorted(_listed(root, base))
    except (FileNotFoundError, NotADirectoryError):  # it was there a moment ago
        return
    except OSError as error:
        raise _unreadable(base or ".", error) from None
    present = {name for name, _ in names}
    if base and not present.isdisjoint(MARKS):
        return
    if any(name == ".gitignore" and stat.S_ISREG(mode) for name, mode in names):  # as git: no link, no folder
        rules = [*rules, _Rules(base, _spec(_text(root, base)))]
    for name, mode in names:
        path = f"{base}/{name}" if base else name
        if name in NEVER or _ignored(rules, path, stat.S_ISDIR(mode)):
            continue
        if stat.S_ISDIR(mode):
            yield from _walk(root, path, rules, links)
        elif stat.S_ISLNK(mode):
            links.add(path)
        elif stat.S_ISREG(mode):
            if problem := bundle.misnamed(path):
                raise Rejected(f"{path!r} {problem}", fix="rename it, or name it in .gitignore")
            yield path


def _listed(root: int, base: str) -> Iterator[tuple[str, int]]:
    """Name and mode of what is in a folder, without what goes while it is looked at."""
    fd = os.open(base or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    try:
        with os.scandir(fd) as listing:
            for entry in listing:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_mode
    finally:
        os.close(fd)


def _read(folder: Path, root: int, path: str) -> bundle.Entry | None:
    """None where it is gone, or no plain file, by now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root)
        with os.fdopen(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                return None
            return bundle.Entry(path, file.read(bundle.MOST_BYTES + 1), bool(mode & stat.S_IXUSR))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(str(folder / path), error) from None


def _unreadable(path: str, error: OSError) -> ConfigError:
    fix = "make it readable, or name it in .gitignore"
    return ConfigError(f"run.code: the code cannot be read: {error.strerror}", where=path, fix=fix)


# ------------------------------------------------------------------------------------------- .gitignore


@dataclass(frozen=True)
class _Rules:
    """A .gitignore: where it lies, below the folder; or, ``above``, what leads from there to the folder."""

    base: str
    spec: GitIgnoreSpec
    above: str = ""

    def verdict(self, path: str) -> bool | None:
        """Whether it leaves ``path`` out; None where it has no word on it."""
        inner = path[len(self.base) + 1 :] if self.base else self.above + path
        return self.spec.check_file(inner).include


def _spec(text: str) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(text.splitlines())


def _text(root: int, base: str) -> str:
    entry = _read(Path(base), root, f"{base}/.gitignore" if base else ".gitignore")
    return "" if entry is None else entry.data.decode("utf-8", "replace")


def _above(folder: Path) -> list[_Rules]:
    """What is always left out, then the .gitignore of the folders above, up to that of the repository."""
    rules = [_Rules("", _spec("\n".join(CHECKPOINTS)))]
    real = Path(os.path.realpath(folder))
    parents = list(real.parents)
    top = next((i for i, parent in enumerate(parents) if (parent / ".git").exists()), None)
    if top is None or (real / ".git").exists():
        return rules
    for parent in reversed(parents[: top + 1]):
        try:
            text = (parent / ".gitignore").read_text("utf-8", "replace")
        except OSError:
            continue
        rules.append(_Rules("", _spec(text), f"{real.relative_to(parent).as_posix()}/"))
    return rules


def _ignored(rules: list[_Rules], path: str, is_folder: bool) -> bool:
    """The nearest .gitignore that has a word on it decides."""
    shown = f"{path}/" if is_folder else path
    return next((said for rule in reversed(rules) if (said := rule.verdict(shown)) is not None), False)
