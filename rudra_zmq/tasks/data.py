"""Where Fashion-MNIST lies, how it gets here, and the IDX files that it comes in.

Owns: the places looked at, the checksums, the download, the parser. Must not know: torch, models. Used by the
task, and as `python -m rudra_zmq.tasks.data fetch|where` by the two commands: the folder goes to stdout, the
steps to stderr.

IDX: two zero bytes, a type (8 is unsigned byte), the number of dimensions, each dimension as a big-endian
uint32, the elements (the data set's own page, github.com/zalandoresearch/fashion-mnist).
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rudra_zmq.errors import ConfigError, RudraError

NAME = "fashion-mnist"
PACKAGE = "dataset-fashion-mnist"
PACKAGE_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FETCH = "python -m rudra_zmq.tasks.data fetch"
MIRRORS = (
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)
CLASSES = 10
SIDE = 28

Bytes = npt.NDArray[np.uint8]


class _File(NamedTuple):
    name: str
    size: int
    sha256: str  # of the file unpacked: distributors compress it anew


FILES = {
    ("train", "images"): _File(
        name="train-images-idx3-ubyte",
        size=47040016,
        sha256="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    ("train", "labels"): _File(
        name="train-labels-idx1-ubyte",
        size=60008,
        sha256="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    ("test", "images"): _File(
        name="t10k-images-idx3-ubyte",
        size=7840016,
        sha256="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    ("test", "labels"): _File(
        name="t10k-labels-idx1-ubyte",
        size=10008,
        sha256="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}


# --- where it lies --------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where `fetch` puts it: $XDG_CACHE_HOME/rudra/fashion-mnist, ~/.cache without that variable."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    return root / "rudra" / NAME


def find(data: str | None = None) -> Path:
    """The folder with the four files: `data`, else $RUDRA_DATA, else the cache, else Debian's package.

    A place that the user named must have them; ConfigError says what it lacks.
    """
    named, origin = (data, "job.task_args.data") if data else (os.environ.get("RUDRA_DATA"), "RUDRA_DATA")
    if named:
        return _named(Path(named).expanduser().absolute(), origin)
    places = [cache_folder(), PACKAGE_FOLDER]
    for place in places:
        if not missing_files(place):
            return place
    raise ConfigError(
        f"Fashion-MNIST is in neither {' nor '.join(map(str, places))}",
        fix=f"run {FETCH}, or set RUDRA_DATA to a folder that has it",
    )


def missing_files(folder: Path) -> list[str]:
    """The names of the files that the folder lacks, plain and compressed."""
    return [file.name for file in FILES.values() if _path(folder, file) is None]


def _named(folder: Path, origin: str) -> Path:
    if not folder.is_dir():
        fix = f"correct the path, or remove it and run {FETCH}"
        raise ConfigError(f"the data folder {folder} is not there", where=origin, fix=fix)
    # RUDRA_DATA may be a folder of several data sets.
    lacks = missing_files(folder)
    if lacks and not missing_files(folder / NAME):
        return folder / NAME
    if lacks:
        raise ConfigError(
            f"the data folder {folder} has no {', '.join(lacks)} (nor .gz)",
            where=origin,
            fix=f"put the four files of Fashion-MNIST there, or remove the setting and run {FETCH}",
        )
    return folder


def _path(folder: Path, file: _File) -> Path | None:
    for path in (folder / file.name, folder / f"{file.name}.gz"):
        if path.is_file():
            return path
    return None


# --- the files ------------------------------------------------------------------------------------


def load(folder: Path, split: str, limit: int | None = None) -> tuple[Bytes, Bytes]:
    """Images [n, 28, 28] and labels [n], uint8, of split "train" or "test"; the first `limit` of them.

    Raises ConfigError for files that are cut short, are no IDX files, or do not belong together.
    """
    images, labels = (_read(folder, split, kind) for kind in ("images", "labels"))
    problem = ""
    if images.ndim != 3 or images.shape[1:] != (SIDE, SIDE):
        problem = f"images of shape {list(images.shape)}, expected [n, {SIDE}, {SIDE}]"
    elif labels.shape != images.shape[:1]:
        problem = f"{len(images)} images and labels of shape {list(labels.shape)}"
    elif len(labels) and labels.max() >= CLASSES:
        problem = f"a label {labels.max()}, expected 0 to {CLASSES - 1}"
    if problem:
        raise ConfigError(f"the {split} files in {folder} have {problem}", fix=_replace(folder))
    if limit is not None and not 1 <= limit <= len(images):
        raise ConfigError(
            f"limit = {limit}, the {split} split has {len(images)} images",
            where="job.task_args.limit",
            fix=f"choose 1 to {len(images)}, or leave it out",
        )
    return images[:limit], labels[:limit]


def _read(folder: Path, split: str, kind: str) -> Bytes:
    path = _path(folder, FILES[split, kind])
    if path is None:
        raise ConfigError(f"{folder} has no {FILES[split, kind].name}", fix=_replace(folder))
    return read_idx(path)


def read_idx(path: Path) -> Bytes:
    """The array of an IDX file of unsigned bytes, plain or .gz. ConfigError if it is anything else.

    Memory is bounded by what the header announces, and the header by what such files hold.
    """
    try:
        # GzipFile is a BinaryIO in all that is used here; typeshed has them apart.
        with cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else open(path, "rb") as stream:
            shape = _read_header(stream, path)
            size = math.prod(shape)
            body = stream.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is cut short or no gzip file: {error}", fix=_replace(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="make it readable") from None
    if len(body) != size:
        has = f"{len(body)}" if len(body) < size else "more"
        raise ConfigError(
            f"{path} is truncated or damaged: it announces {size} bytes and has {has}", fix=_replace(path)
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read_header(stream: BinaryIO, path: Path) -> tuple[int, ...]:
    magic = stream.read(4)
    dimensions = magic[3] if len(magic) == 4 else 0
    rest = stream.read(4 * dimensions) if magic[:3] == b"\0\0\x08" and 1 <= dimensions <= 3 else b""
    if not rest or len(rest) != 4 * dimensions:
        begins = magic.hex() or "nothing"
        raise ConfigError(
            f"{path} is no IDX file of unsigned bytes: it begins with {begins}, expected 000008 and 01 to 03",
            fix=_replace(path),
        )
    shape = struct.unpack(f">{dimensions}I", rest)
    if math.prod(shape) > 1 << 30:
        raise ConfigError(f"{path} announces {list(shape)} elements, more than 1 GiB", fix=_replace(path))
    return shape


def _replace(path: Path) -> str:
    return f"remove {path} and run {FETCH}"


# --- how it gets here -----------------------------------------------------------------------------


def fetch(into: Path | None = None, mirrors: Sequence[str] = MIRRORS) -> Path:
    """The folder with the four files, after getting them where no place has them: from Debian's package,
    unpacked without root, else from the data set's home. Each is checked and appears whole or not at all.

    Raises ConfigError where the user named a place that lacks them, RudraError when no source had them.
    """
    if os.environ.get("RUDRA_DATA"):
        return find()
    target = into.absolute() if into else cache_folder()
    for place in (target, cache_folder(), PACKAGE_FOLDER):
        if not missing_files(place):
            return place
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder that you can write"
        raise RudraError(f"cannot write {error.filename}: {error.strerror}", fix=fix) from None
    try:
        _get(scratch, target, mirrors)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _get(scratch: Path, target: Path, mirrors: Sequence[str]) -> None:
    """The four files unpacked in `target`, from the first source that has them all."""
    sources: list[tuple[str, Callable[[], Path]]] = [
        (url, functools.partial(_from_mirror, url, scratch)) for url in mirrors
    ]
    if shutil.which("apt-get") and shutil.which("dpkg"):
        sources.insert(0, (f"Debian's package {PACKAGE}", functools.partial(_from_package, scratch)))
    failures = []
    for label, source in sources:
        _say(f"Fashion-MNIST from {label}")
        try:
            folder = source()
            for file in FILES.values():
                _unpack(folder, scratch, file)
            target.mkdir(exist_ok=True)
            for file in FILES.values():
                (scratch / file.name).replace(target / file.name)
            return
        # URLError is an OSError; so are a broken connection and a full disk.
        except (OSError, EOFError, zlib.error, subprocess.SubprocessError) as error:
            failures.append(f"{label}: {error}")
            _say(f"  {error}")
    raise RudraError(
        f"could not get Fashion-MNIST ({'; '.join(failures)})",
        fix=f"sudo apt-get install {PACKAGE}, or put its four files into a folder and set RUDRA_DATA to it",
    )


def _from_package(scratch: Path) -> Path:
    """Debian's package, unpacked as any user. Where the machine's lists of packages are missing or old, with
    lists of our own beside it: the machine's are left alone."""
    apt = ["apt-get", "-qq"]
    for option in ("Retries=1", "http::Timeout=20", "https::Timeout=20"):
        apt += ["-o", f"Acquire::{option}"]
    try:
        _run([*apt, "download", PACKAGE], scratch)
    except subprocess.SubprocessError:
        (scratch / "apt" / "lists" / "partial").mkdir(parents=True)
        apt += ["-o", f"Dir::State::lists={scratch}/apt/lists/", "-o", f"Dir::Cache={scratch}/apt/"]
        _run([*apt, "update"], scratch)
        _run([*apt, "download", PACKAGE], scratch)
    _run(["dpkg", "-x", str(next(scratch.glob(f"{PACKAGE}_*.deb"))), str(scratch / "package")], scratch)
    return scratch / "package" / PACKAGE_FOLDER.relative_to("/")


def _from_mirror(url: str, scratch: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    for file in FILES.values():
        with (
            urllib.request.urlopen(f"{url}/{file.name}.gz", timeout=30) as response,
            (folder / f"{file.name}.gz").open("wb") as out,
        ):
            shutil.copyfileobj(response, out, 1 << 20)
    return folder


def _run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith("E:")]
        said = (errors or lines or [f"exit status {done.returncode}"])[-1]
        raise subprocess.SubprocessError(f"{command[0]}: {said}")


def _unpack(folder: Path, into: Path, file: _File) -> None:
    """The file of `folder`, plain or .gz, unpacked in `into`; OSError if it is not the published one."""
    source = _path(folder, file)
    if source is None:
        raise OSError(f"there is no {file.name}")
    opener = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rb") as stream:
        body = stream.read(file.size + 1)
    if hashlib.sha256(body).hexdigest() != file.sha256:
        raise OSError(f"{source.name} is not the published file (wrong sha256)")
    (into / file.name).write_bytes(body)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rudra_zmq.tasks.data", description="Fashion-MNIST here")
    parser.add_argument("verb", choices=["fetch", "where"], help="get it if it is missing; say where it lies")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="fetch: the folder to put it in")
    args = parser.parse_args(argv)
    try:
        print(fetch(args.into) if args.verb == "fetch" else find())
    except RudraError as error:
        _say(f"error: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
