"""The IDX parser, the places looked at, getting the files: from a package, a mirror, or nowhere."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.errors import ConfigError, RudraError
from rudra_zmq.tasks import data


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def tiny(folder: Path, train: int = 5, test: int = 3) -> Path:
    """A data set of a few images in the published layout: one file plain, the others compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for (split, kind), file in data.FILES.items():
        count = train if split == "train" else test
        array = rng.integers(0, 256, (count, 28, 28)) if kind == "images" else np.arange(count) % 10
        if kind == "labels":
            (folder / file.name).write_bytes(idx(array))
        else:
            (folder / f"{file.name}.gz").write_bytes(gzip.compress(idx(array)))
    return folder


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the data: no variable, an empty cache, no package, no apt."""
    monkeypatch.delenv("RUDRA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "PACKAGE_FOLDER", tmp_path / "no-package")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return tmp_path


# --- the parser -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 3, 5), (0,)])
def test_reads_what_was_written(tmp_path: Path, shape: tuple[int, ...], suffix: str) -> None:
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(idx(array)) if suffix else idx(array))
    np.testing.assert_array_equal(data.read_idx(path), array)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "begins with nothing"),
        (b"\0\0\x08", "no IDX file"),
        (b"\0\0\x08\x01\0\0", "no IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x04" + bytes(16), "begins with 00000d01"),
        (b"\0\0\x08\x00", "no IDX file"),
        (b"\0\0\x08\x04" + bytes(16), "begins with 00000804"),
        (b"<html>404 not found</html>", "begins with 3c68746d"),
        (idx(np.zeros((9, 9)))[:-1], "announces 81 bytes and has 80"),
        (idx(np.zeros((9, 9))) + b"x", "announces 81 bytes and has more"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "more than 1 GiB"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_refuses_what_is_no_idx_file(tmp_path: Path, body: bytes, says: str, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(body) if suffix else body)
    with pytest.raises(ConfigError) as caught:
        data.read_idx(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert f"remove {path} and run" in caught.value.fix


@pytest.mark.parametrize("keep", [0, 5, 40, -9])
def test_refuses_a_gzip_file_cut_short(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx(np.random.default_rng(1).integers(0, 256, (50, 50))))[:keep])
    with pytest.raises(ConfigError, match=r"cut short|no IDX file"):
        data.read_idx(path)


def test_a_small_gzip_file_that_unpacks_to_much_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx(np.zeros(4)) + bytes(50_000_000)))
    with pytest.raises(ConfigError, match="announces 4 bytes and has more"):
        data.read_idx(path)


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    folder = tmp_path_factory.mktemp("idx")
    for path in (folder / "x", folder / "x.gz"):
        path.write_bytes(body)
        try:
            array = data.read_idx(path)
        except ConfigError:
            continue
        assert idx(array) == body


# --- a split --------------------------------------------------------------------------------------


def test_a_split_is_its_images_and_labels(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    images, labels = data.load(folder, "train")
    assert (images.shape, images.dtype, labels.tolist()) == ((5, 28, 28), np.uint8, [0, 1, 2, 3, 4])
    first, few = data.load(folder, "train", limit=2)
    np.testing.assert_array_equal(first, images[:2])
    assert few.tolist() == [0, 1]
    assert len(data.load(folder, "test")[1]) == 3


@pytest.mark.parametrize("limit", [0, -1, 6])
def test_a_limit_that_the_split_does_not_have_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match=rf"limit = {limit}, the train split has 5 .*Fix: choose 1 to 5"):
        data.load(tiny(tmp_path), "train", limit=limit)


@pytest.mark.parametrize(
    ("kind", "array", "says"),
    [
        ("labels", np.zeros(4), "5 images and labels of shape"),
        ("labels", np.full(5, 10), "a label 10"),
        ("labels", np.zeros((5, 1)), "labels of shape"),
        ("images", np.zeros((5, 28, 27)), "expected .n, 28, 28."),
        ("images", np.zeros((5, 784)), "expected .n, 28, 28."),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, kind: str, array: np.ndarray, says: str) -> None:
    folder = tiny(tmp_path)
    (folder / data.FILES["train", kind].name).write_bytes(idx(array))
    with pytest.raises(ConfigError, match=says):
        data.load(folder, "train")


# --- the places -----------------------------------------------------------------------------------


def test_the_order_of_places(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"Fashion-MNIST is in neither .* Fix: run python -m"):
        data.find()
    package = tiny(nowhere / "no-package")
    assert data.find() == package
    cache = tiny(nowhere / "cache" / "rudra" / "fashion-mnist")
    assert data.find() == cache
    monkeypatch.setenv("RUDRA_DATA", str(tiny(nowhere / "variable")))
    assert data.find() == nowhere / "variable"
    assert data.find(str(tiny(nowhere / "argument"))) == nowhere / "argument"


def test_the_variable_may_name_a_folder_of_data_sets(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUDRA_DATA", str(tiny(nowhere / "sets" / "fashion-mnist").parent))
    assert data.find() == nowhere / "sets" / "fashion-mnist"


def test_a_place_that_was_named_must_have_the_files(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(nowhere / "cache" / "rudra" / "fashion-mnist")
    with pytest.raises(ConfigError, match=r"data folder .*/gone is not there \(job.task_args.data\)"):
        data.find(str(nowhere / "gone"))
    folder = tiny(nowhere / "half")
    (folder / "t10k-labels-idx1-ubyte").unlink()
    monkeypatch.setenv("RUDRA_DATA", str(folder))
    for call in (data.find, data.fetch):
        with pytest.raises(ConfigError, match=r"has no t10k-labels-idx1-ubyte .nor .gz. \(RUDRA_DATA\)"):
            call()


def test_the_cache_without_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert data.cache_folder() == tmp_path / ".cache" / "rudra" / "fashion-mnist"


# --- getting it -----------------------------------------------------------------------------------


@pytest.fixture
def published(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that a mirror serves, its files being the published ones as far as the checksums tell."""
    folder = nowhere / "published"
    folder.mkdir()
    files = {}
    for key, file in data.FILES.items():
        body = idx(np.zeros((3, 28, 28)) if key[1] == "images" else np.arange(3))
        (folder / f"{file.name}.gz").write_bytes(gzip.compress(body))
        files[key] = file._replace(size=len(body), sha256=hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(data, "FILES", files)
    return folder


@pytest.fixture
def mirror(published: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(published))  # type: ignore[arg-type]

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetch_from_a_mirror(nowhere: Path, mirror: str) -> None:
    place = data.fetch(mirrors=[f"{mirror}/no-such-folder", mirror])
    assert place == data.cache_folder()
    assert entries(place) == sorted(file.name for file in data.FILES.values())
    assert entries(place.parent) == ["fashion-mnist"]
    assert data.load(place, "train")[1].tolist() == [0, 1, 2]
    assert data.fetch(mirrors=[]) == place == data.find()


def test_fetch_into_a_folder_keeps_what_else_is_there(nowhere: Path, mirror: str) -> None:
    (nowhere / "mine").mkdir()
    (nowhere / "mine" / "notes").write_text("keep")
    assert data.fetch(nowhere / "mine", mirrors=[mirror]) == nowhere / "mine"
    assert "notes" in entries(nowhere / "mine")
    assert not data.missing_files(nowhere / "mine")


@pytest.mark.parametrize("damage", ["other bytes", "cut", "no gzip"])
def test_a_file_that_is_not_the_published_one_is_refused(
    nowhere: Path, published: Path, mirror: str, damage: str
) -> None:
    path = published / "t10k-labels-idx1-ubyte.gz"
    body = path.read_bytes()
    path.write_bytes({"other bytes": gzip.compress(b"something else"), "cut": body[:-12], "no gzip": b"<html>"}[damage])
    with pytest.raises(RudraError, match=r"could not get Fashion-MNIST .*Fix: sudo apt-get") as caught:
        data.fetch(mirrors=[mirror])
    assert caught.value.exit_status == 1
    assert entries(nowhere / "cache" / "rudra") == []


def fake_apt(folder: Path, monkeypatch: pytest.MonkeyPatch, download: str) -> None:
    folder.mkdir()
    for name, body in {"apt-get": download, "dpkg": 'exec /bin/cp -r "$1x" "$3"'}.items():
        (folder / name).write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_fetch_from_the_package_with_lists_of_its_own(
    nowhere: Path, published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine's lists have no such package; lists fetched beside the download do."""
    script = """
        case "$*" in
          *Dir::State::lists=*update) touch updated ;;
          *Dir::State::lists=*download*) test -e updated && touch dataset-fashion-mnist_1_all.deb ;;
          *) echo "E: Unable to locate package" >&2; exit 100 ;;
        esac
    """
    fake_apt(nowhere / "empty", monkeypatch, script)
    (nowhere / "empty" / "dpkg").write_text(
        f'#!/bin/sh\nPATH=/usr/bin:/bin\ntest -e "$2" && mkdir -p "$3{data.PACKAGE_FOLDER}" '
        f'&& cp {published}/* "$3{data.PACKAGE_FOLDER}"\n'
    )
    assert data.main(["fetch"]) == 0
    out = capsys.readouterr()
    assert out.out.strip() == str(data.cache_folder()) == str(data.find())
    assert "Debian's package" in out.err
    assert entries(nowhere / "cache" / "rudra") == ["fashion-mnist"]


def test_without_any_source_one_line_says_what_was_tried(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_apt(nowhere / "empty", monkeypatch, 'echo "E: Could not resolve" >&2; exit 100')
    monkeypatch.setattr(data, "MIRRORS", ())
    monkeypatch.setattr(data.fetch, "__defaults__", (None, ()))
    assert data.main(["fetch"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: could not get Fashion-MNIST (Debian's package")
    assert "E: Could not resolve" in last
    assert "RUDRA_DATA" in last
    assert data.main(["where"]) == 2


def test_a_cache_that_cannot_be_written(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nowhere / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere / "file"))
    with pytest.raises(RudraError, match=r"cannot write .*Fix: set XDG_CACHE_HOME"):
        data.fetch()
