"""This host with too little of something, told by a /proc and file systems that are made for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rudra_zmq import paths
from rudra_zmq.config import load_rudra
from rudra_zmq.config.host import HostSection, RudraToml
from rudra_zmq.doctor import here
from rudra_zmq.head.registry import Registry
from rudra_zmq.net import keys
from tests.conftest import PrivateHome

MIB, GIB = 1 << 20, 1 << 30
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max locked memory         {locked}             unlimited            bytes
Max open files            {files}              524288               files
"""


def process(proc: Path, pid: str, *, files: str = "65536", locked: str = "unlimited", held: int = 0) -> None:
    folder = proc / pid
    (folder / "fd").mkdir(parents=True)
    (folder / "limits").write_text(LIMITS.format(files=files, locked=locked))
    for fd in range(held):
        (folder / "fd" / str(fd)).touch()


def test_every_mistake_in_the_settings_is_a_finding(private_home: PrivateHome) -> None:
    assert [one for one in here.settings() if str(private_home.config) in str(one)] == []
    (private_home.config / "rudra").mkdir()
    (private_home.config / "rudra/rudra.toml").write_text('[psd]\nlisen = "x"\n[log]\nlevel = "loud"\n')
    found = list(here.settings())
    assert [one.id for one in found] == ["config", "config"] and all(one.level == "error" for one in found)
    assert "did you mean psd.listen?" in found[0].text and found[0].fix == "write psd.listen"


def test_interpreters_and_paths_of_host_that_are_not_there(tmp_path: Path) -> None:
    host = HostSection(
        python={"ml": "/nowhere/python", "ok": shutil.which("sh") or ""}, paths={"d": "/nowhere", "t": str(tmp_path)}
    )
    found = [one.text for one in here.host_section(host)]
    assert found == [
        "[host] python.ml: there is no interpreter /nowhere/python",
        "[host] paths.d: there is no /nowhere",
    ]


@pytest.mark.parametrize("owner", ["psd", "learnerd", "user"])
def test_keys_that_would_be_refused(private_home: PrivateHome, tmp_path: Path, owner: str) -> None:
    assert list(here.own_keys(tmp_path)) == []
    path, _ = keys.make(owner, keys.person_folder())
    assert list(here.own_keys(tmp_path)) == []
    path.chmod(0o644)
    (found,) = here.own_keys(tmp_path)
    assert (found.id, found.level, found.where) == ("key", "error", str(path))
    assert "others can read the secret key (mode 0644)" in found.text
    path.chmod(0o600)
    path.write_text("rubbish")
    (found,) = here.own_keys(tmp_path)
    assert "no secret key" in found.text and f"rm {path}" in found.fix


def test_a_registry_that_psd_cannot_open(private_home: PrivateHome, tmp_path: Path) -> None:
    config = load_rudra([f"paths.state={tmp_path}"]).config
    file = paths.registry_file(paths.state_folder(config.paths.state))
    assert list(here.registries(config, tmp_path / "none")) == []
    file.touch()
    assert list(here.registries(config, tmp_path / "none")) == []
    file.unlink()
    Registry.open(file).close()
    assert list(here.registries(config, tmp_path / "none")) == []
    file.write_bytes(b"torn" * 1000)
    (found,) = here.registries(config, tmp_path / "none")
    assert (found.id, found.level, found.where) == ("registry", "error", str(file))
    assert "file is not a database" in found.text and "move it away" in found.fix


def test_open_files(tmp_path: Path) -> None:
    process(tmp_path, "7", files="256")
    process(tmp_path, "8", files="2000", held=1601)
    process(tmp_path, "9")
    (tight, full) = here.limits([("psd", 7), ("learnerd", 8), ("psd", 9)], False, tmp_path)
    assert (tight.level, tight.text) == ("warning", "psd (PID 7) may have only 256 files open")
    assert (full.level, full.text) == ("error", "learnerd (PID 8) has 1601 of 2000 files open that it may have")
    process(tmp_path, "self", files="512")
    (own,) = here.limits((), False, tmp_path)
    assert own.text.startswith("this shell") and "ulimit -n" in own.fix


def test_locked_memory_counts_where_gpus_are_declared(tmp_path: Path) -> None:
    process(tmp_path, "7", locked=str(8 * MIB))
    assert list(here.limits([("learnerd", 7)], False, tmp_path)) == []
    (found,) = here.limits([("learnerd", 7)], True, tmp_path)
    assert found.id == "locked-memory" and "may pin only 8 MiB" in found.text and "LimitMEMLOCK" in found.fix


def test_own_limits_are_read_from_the_kernel() -> None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert here._limit(Path("/proc/self"), "Max open files") == soft


@pytest.mark.parametrize("version", [1, 2])
def test_what_control_groups_leave(tmp_path: Path, version: int) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cg"
    (proc / "7").mkdir(parents=True)
    (proc / "7/cgroup").write_text("4:memory:/a\n" if version == 1 else "0::/a\n")
    folder = root / ("memory/a" if version == 1 else "a")
    most, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    folder.mkdir(parents=True)

    def look(allowed: int, taken: int) -> list[tuple[str, str]]:
        (folder / most).write_text(f"{allowed}\n")
        (folder / used).write_text(f"{taken}\n")
        # Two daemons of one group are told of once.
        return [(one.level, one.text) for one in here.memory([("psd", 7), ("psd", 7)], proc, root)]

    assert look(8 * GIB, GIB) == [("note", "the cgroup a of psd (PID 7) leaves 7.0 GiB of 8.0 GiB of memory")]
    assert look(8 * GIB, 8 * GIB - 256 * MIB)[0][0] == "warning"
    assert look(8 * GIB, 8 * GIB)[0] == ("error", "the cgroup a of psd (PID 7) leaves 0 MiB of 8.0 GiB of memory")
    (folder / most).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert list(here.memory([("psd", 7)], proc, root)) == []


def disk(monkeypatch: pytest.MonkeyPatch, free: int, inodes: int = 10**6) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=100 * GIB, free=free))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=10**6, f_favail=inodes))


@pytest.mark.parametrize(
    ("free", "inodes", "level", "words"),
    [
        (3 * GIB, 10**6, "", ""),
        (GIB, 10**6, "warning", "nearly full: 1.0 GiB of 100.0 GiB are free"),
        (100 * MIB, 10**6, "error", "nearly full: 100 MiB of"),
        (50 * GIB, 100, "error", "no room for more files: 100 inodes of 1000000"),
    ],
)
def test_the_disk_of_the_state_folder(
    private_home: PrivateHome, monkeypatch: pytest.MonkeyPatch, free: int, inodes: int, level: str, words: str
) -> None:
    disk(monkeypatch, free, inodes)
    found = [one for one in here.state(RudraToml(), system=Path("/nowhere")) if str(private_home.state) in one.text]
    assert [one.level for one in found] == ([level] if level else [])
    assert all(words in one.text and one.id == "disk-full" for one in found)
    assert not (private_home.runtime / "rudra").exists()  # looking makes none


def test_state_on_a_network_file_system(private_home: PrivateHome, tmp_path: Path) -> None:
    mounts = f"/dev/sda / ext4 rw 0 0\nnas:/x {os.path.realpath(private_home.state)} nfs4 rw 0 0\n"
    found = [one for one in here.state(RudraToml(), mounts, Path("/nowhere")) if one.id == "state-folder"]
    assert [one.text for one in found] == ["the state folder is on a network file system (nfs4)"]
    assert "paths.state" in found[0].fix and found[0].level == "error"
    system = tmp_path / "psd"
    system.mkdir()
    mounts = f"/dev/sda / ext4 rw 0 0\nnas:/x {os.path.realpath(system)} ceph rw 0 0\n"
    found = [one for one in here.state(RudraToml(), mounts, system) if one.id == "state-folder"]
    assert [(one.where, one.text[-6:]) for one in found] == [(str(system), "(ceph)")]


def test_a_state_folder_that_others_can_use(private_home: PrivateHome) -> None:
    private_home.state.joinpath("open").mkdir(mode=0o777)
    private_home.state.joinpath("open").chmod(0o777)
    config = load_rudra([f"paths.state={private_home.state}/open"]).config
    (found,) = (one for one in here.state(config, system=Path("/nowhere")) if one.id == "state-folder")
    assert "others can use the folder" in found.text and "chmod 700" in found.fix


def test_a_runtime_folder_that_others_can_use(private_home: PrivateHome) -> None:
    (private_home.runtime / "rudra").mkdir()
    (private_home.runtime / "rudra").chmod(0o770)
    (found,) = (one for one in here.state(RudraToml(), system=Path("/nowhere")) if one.id == "state-folder")
    assert found.where == str(private_home.runtime / "rudra") and "0770" in found.text
