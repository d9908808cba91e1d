"""R3: what of a folder goes into a bundle, and what never does."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.cli.pack import pack, pack_job
from rudra_zmq.config import load_job
from rudra_zmq.errors import ConfigError, NotFound, Rejected, RudraError
from rudra_zmq.wire import bundle


def write(root: Path, *names: str, text: str = "x") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def names(root: Path) -> list[str]:
    return [entry.path for entry in pack(root).entries]


def test_version_control_caches_environments_and_checkpoints_stay_behind(tmp_path: Path) -> None:
    write(
        tmp_path, "train.py", "pkg/net.py", ".git/config", "pkg/.git", ".hg/x", "__pycache__/a.py", "pkg/__pycache__/b.pyc",
        ".cache/data.bin", ".mypy_cache/x", ".pytest_cache/x", ".ruff_cache/x", ".venv/bin/python", "env/pyvenv.cfg",
        "env/lib/x.py", "blobs/x.bin", "best.pt", "pkg/last.ckpt", "w.safetensors", "m.pth", "checkpoints/step-1/state",
        "node_modules/x.js", ".ipynb_checkpoints/n.py", "old.pyc",
    )  # fmt: skip
    write(tmp_path, "blobs/CACHEDIR.TAG", text="Signature: 8a477f597d28d172789f06886806bc55")
    assert names(tmp_path) == ["pkg/net.py", "train.py"]


def test_gitignore_is_honoured_at_every_level(tmp_path: Path) -> None:
    write(tmp_path, ".gitignore", text="*.log\n/data/\nout\n!keep.log\n# comment\n*.tmp\n!tiny.pt\n")
    write(tmp_path, "sub/.gitignore", text="!run.log\nsecret.py\n/only-here\n")
    write(
        tmp_path, "a.log", "keep.log", "data/x", "sub/data/x", "out/x", "sub/out", "x.tmp", "sub/run.log", "sub/b.log",
        "sub/secret.py", "sub/deep/secret.py", "secret.py", "sub/only-here", "sub/deep/only-here", "tiny.pt", "big.pt",
    )  # fmt: skip
    assert names(tmp_path) == [
        ".gitignore", "keep.log", "secret.py", "sub/.gitignore", "sub/data/x", "sub/deep/only-here", "sub/run.log",
        "tiny.pt",
    ]  # fmt: skip


def test_gitignore_of_the_repository_above_counts_and_of_no_folder_beyond(tmp_path: Path) -> None:
    write(tmp_path, ".gitignore", text="*\n")
    write(tmp_path, "repo/.git/HEAD")
    write(tmp_path, "repo/.gitignore", text="/src/gen/\n*.csv\n")
    write(tmp_path, "repo/src/train.py", "repo/src/gen/x.py", "repo/src/sub/gen/x.py", "repo/src/a.csv")
    assert names(tmp_path / "repo" / "src") == ["sub/gen/x.py", "train.py"]
    write(tmp_path, "alone/train.py")
    assert names(tmp_path / "alone") == ["train.py"]


def test_links_are_not_followed_and_devices_are_none(tmp_path: Path) -> None:
    code = tmp_path / "code"
    write(tmp_path, "code/train.py", "outside/secret")
    os.symlink(tmp_path / "outside", code / "data")
    os.symlink(tmp_path / "outside" / "secret", code / "secret")
    os.symlink("train.py", code / "same.py")
    os.mkfifo(code / "fifo")
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{short}/s")
        os.link(f"{short}/s", code / "sock") if os.stat(short).st_dev == code.stat().st_dev else None
        packed = pack(code)
    assert [entry.path for entry in packed.entries] == ["train.py"] and packed.links == {"data", "secret", "same.py"}


def test_equal_folders_are_one_bundle_and_an_edit_is_another(tmp_path: Path) -> None:
    for folder, order in (("a", ["train.py", "pkg/net.py"]), ("b", ["pkg/net.py", "train.py"])):
        write(tmp_path / folder, *order)
        os.utime(tmp_path / folder / "train.py", (len(folder), 77))
    (tmp_path / "a" / "pkg" / "net.py").chmod(0o600)
    first = bundle.make(pack(tmp_path / "a").entries)
    assert first == bundle.make(pack(tmp_path / "b").entries)
    write(tmp_path / "a", "train.py", text="y")
    assert first.name != bundle.make(pack(tmp_path / "a").entries).name


def test_over_the_limit_the_ten_largest_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_BYTES", 20_000)
    for i in range(14):
        (tmp_path / f"f{i:02}").write_bytes(b"x" * (1000 + i * 100))
    with pytest.raises(Rejected) as caught:
        pack(tmp_path)
    said = str(caught.value)
    assert all(f"f{i:02} " in said for i in range(4, 14)) and not any(f"f{i:02} " in said for i in range(4))
    assert said.index("f13") < said.index("f04") and "14 files" in said and "Fix:" in said
    monkeypatch.setattr(bundle, "MOST_BYTES", 1 << 20)
    assert len(pack(tmp_path).entries) == 14
    monkeypatch.setattr(bundle, "MOST_FILES", 13)
    with pytest.raises(Rejected, match="14 files"):
        pack(tmp_path)


def test_a_sparse_file_of_a_terabyte_costs_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Rejected, match="huge"):
        pack(tmp_path)


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "private").mkdir()
    real = os.open

    def guarded(path: object, *given: Any, **named: Any) -> int:
        if path == "private":  # root, who runs tests too, may read everything
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", guarded)
    with pytest.raises(RudraError, match="Permission denied") as caught:
        pack(tmp_path)
    assert caught.value.where == "private" and caught.value.fix


def test_what_goes_while_it_is_looked_at_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).touch()
    real = os.stat

    def vanishing(path: Any, **named: Any) -> os.stat_result:
        if path == "b.py":
            (tmp_path / "b.py").unlink()
        return real(path, **named)

    monkeypatch.setattr(os, "stat", vanishing)
    assert [entry.path for entry in pack(tmp_path).entries] == ["a.py", "c.py"]


def test_nothing_to_send(tmp_path: Path) -> None:
    write(tmp_path, "a.pt")
    with pytest.raises(Rejected, match="no file"):
        pack(tmp_path)
    with pytest.raises(NotFound):
        pack(tmp_path / "nowhere")
    write(tmp_path, "a\nb.py")
    with pytest.raises(Rejected, match="cannot be shown"):
        pack(tmp_path)


# ------------------------------------------------------------------------------------------- of a job


def job(root: Path, run: str, name: str = "job.toml") -> Path:
    write(root, name, text=f"[run]\n{run}\n")
    return root / name


def test_paths_of_a_job_hold_inside_its_code(tmp_path: Path) -> None:
    write(tmp_path, "src/scripts/train.py", "src/sub/x")
    file = job(tmp_path, 'code = "src"\nscript = "src/scripts/train.py"\ncwd = "src/sub"')
    run = load_job(file).job.run
    assert (run.code, run.script, run.cwd) == (str(tmp_path / "src"), "scripts/train.py", "sub")
    made = pack_job(load_job(file).job)
    assert load_job(job(tmp_path, 'code = "src"\nscript = "src/scripts/train.py"')).job.run.cwd == ""
    assert load_job(job(tmp_path, 'code = "."\nscript = "src/scripts/train.py"')).job.run.cwd == ""
    assert made is not None and b"scripts/train.py" in made.data and b"job.toml" not in made.data


@pytest.mark.parametrize(("run", "said"), [
    ('code = "src"\nscript = "train.py"', "lies outside run.code"),
    ('code = "src"\nscript = "src/train.py"\ncwd = "."', "run.cwd"),
    ('code = "nowhere"\nscript = "train.py"', "no folder"),
    ('code = "train.py"\nscript = "train.py"', "is no folder"),
])  # fmt: skip
def test_a_job_whose_paths_lie_outside(tmp_path: Path, run: str, said: str) -> None:
    write(tmp_path, "train.py", "src/train.py")
    with pytest.raises(ConfigError, match=said):
        load_job(job(tmp_path, run))


def test_a_script_that_would_not_be_in_it(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "real.py")
    write(tmp_path, ".gitignore", text="train.py\n")
    os.symlink("real.py", tmp_path / "link.py")
    with pytest.raises(ConfigError, match="left out"):
        pack_job(load_job(job(tmp_path, 'code = "."\nscript = "train.py"')).job)
    with pytest.raises(ConfigError, match="is a link"):
        pack_job(load_job(job(tmp_path, 'code = "."\nscript = "link.py"')).job)
    assert pack_job(load_job(job(tmp_path, 'script = "train.py"')).job) is None


def test_a_gitignore_that_is_a_folder_says_nothing(tmp_path: Path) -> None:
    write(tmp_path, ".gitignore/a.py", "b.py")
    assert names(tmp_path) == [".gitignore/a.py", "b.py"]


@pytest.mark.parametrize("folder", ["/", "/usr/.."])
def test_the_whole_file_system_is_no_code(folder: str) -> None:
    with pytest.raises(ConfigError, match="whole file system"):
        pack(Path(folder))
