"""Folders, their owners and modes; names of files; socket paths; the token."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from rudra_zmq import paths
from rudra_zmq.errors import ConfigError, NotFound, RefusedBySecurity, RudraError

LOCAL = "/dev/root / ext4 rw 0 0\n"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def line_of(error: type[RudraError], call: object, *args: object, **options: object) -> str:
    assert callable(call)
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert type(caught.value) is error
    return str(caught.value)


# ---- folders


def test_a_persons_state_folder_has_the_hosts_name(tmp_path: Path) -> None:
    folder = paths.state_folder(environ={"XDG_STATE_HOME": str(tmp_path / "s")}, mounts=LOCAL)
    assert folder.parent == tmp_path / "s" / "rudra"
    assert folder.name == f"{os.uname().nodename}-{paths.machine_id()[:8]}"
    assert re.fullmatch(r".+-[0-9a-f]{8}", folder.name)
    assert mode(folder) == 0o700


def test_without_xdg_the_state_is_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for environ in ({}, {"XDG_STATE_HOME": "relative"}):
        folder = paths.state_folder(environ=environ, mounts=LOCAL)
        assert folder.parent == tmp_path / ".local" / "state" / "rudra"


def test_settings_beat_systemd_and_systemd_beats_xdg(tmp_path: Path) -> None:
    environ = {
        "STATE_DIRECTORY": f"{tmp_path}/unit:{tmp_path}/other",
        "RUNTIME_DIRECTORY": f"{tmp_path}/run",
        "XDG_STATE_HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    assert paths.state_folder(environ=environ, mounts=LOCAL) == tmp_path / "unit"
    assert paths.state_folder(f"{tmp_path}/mine", environ, LOCAL) == tmp_path / "mine"
    assert paths.runtime_folder(environ=environ) == tmp_path / "run"
    assert paths.runtime_folder(f"{tmp_path}/short", environ) == tmp_path / "short"


def test_a_unit_may_let_others_look_but_not_write(tmp_path: Path) -> None:
    folder = tmp_path / "unit"
    folder.mkdir(mode=0o755)
    environ = {"STATE_DIRECTORY": str(folder), "RUNTIME_DIRECTORY": str(folder)}
    assert paths.state_folder(environ=environ, mounts=LOCAL) == folder
    assert paths.runtime_folder(environ=environ) == folder
    assert "others can use the folder (mode 0755)" in line_of(RefusedBySecurity, paths.runtime_folder, str(folder), {})
    folder.chmod(0o775)
    assert "(mode 0775)" in line_of(RefusedBySecurity, paths.runtime_folder, environ=environ)


def test_the_runtime_folder_of_a_session(tmp_path: Path) -> None:
    folder = paths.runtime_folder(environ={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert folder == tmp_path / "rudra"
    assert mode(folder) == 0o700


@pytest.mark.parametrize("session", ["", "relative", "/no/such/folder"])
def test_without_a_session_the_runtime_folder_is_in_tmp(session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(paths, "own_folder", lambda path, **_: made.append(path) or path)
    assert paths.runtime_folder(environ={"XDG_RUNTIME_DIR": session}) == Path(f"/tmp/rudra-{os.getuid()}")
    assert made == [Path(f"/tmp/rudra-{os.getuid()}")]


def test_somebody_elses_session_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "own_folder", lambda path, **_: path)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert paths.runtime_folder(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) == Path("/tmp/rudra-54321")


def test_what_is_in_the_way_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fix = "set paths.state or paths.runtime to a folder of your own"
    file, link, open_folder = tmp_path / "file", tmp_path / "link", tmp_path / "open"
    file.touch()
    link.symlink_to(tmp_path)
    open_folder.mkdir()
    open_folder.chmod(0o750)
    for path in (file, link):
        assert line_of(RefusedBySecurity, paths.own_folder, path) == (
            f"this is not a folder ({path}). Fix: remove it, or {fix}"
        )
    assert line_of(RefusedBySecurity, paths.own_folder, open_folder) == (
        f"others can use the folder (mode 0750) ({open_folder})."
        f" Fix: chmod 700 {open_folder}, after a look at what is in it"
    )
    assert mode(open_folder) == 0o750
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert line_of(RefusedBySecurity, paths.own_folder, open_folder) == (
        f"the folder belongs to uid {uid}, not to uid {uid + 1} ({open_folder}). Fix: {fix}"
    )


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x" / "y"
    assert line_of(ConfigError, paths.own_folder, path) == (
        f"cannot make the folder: Not a directory ({path}). Fix: name a folder that you can write"
    )


MOUNTS = """\
/dev/root / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/ann/scratch xfs rw 0 0
auto /data autofs rw 0 0
server:/d /data nfs rw 0 0
ann@b: /mnt/with\\040blank fuse.sshfs rw 0 0
broken
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/rudra", "ext4"),
        ("/home", "nfs4"),
        ("/home/ann/.local/state", "nfs4"),
        ("/home/ann/scratch/x", "xfs"),
        ("/home/ann/scratches", "nfs4"),
        ("/homes/ann", "ext4"),
        ("/data/x", "nfs"),
        ("/mnt/with blank/x", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert paths.filesystem_of(Path(path), MOUNTS) == kind


def test_a_link_does_not_hide_a_network_file_system(tmp_path: Path) -> None:
    target = tmp_path / "net"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    mounts = f"{LOCAL}server:/x {target} nfs4 rw 0 0\n"
    assert paths.filesystem_of(tmp_path / "link" / "a" / "b", mounts) == "nfs4"


def test_this_machines_mounts_can_be_read(tmp_path: Path) -> None:
    assert paths.filesystem_of(tmp_path) != ""


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "fuse.sshfs", "lustre"])
def test_state_on_a_network_file_system_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    mounts = f"{LOCAL}server:/x {tmp_path} {kind} rw 0 0\n"
    assert line_of(ConfigError, paths.state_folder, str(path), {}, mounts) == (
        f"the state folder is on a network file system ({kind}) ({path})."
        " Fix: set paths.state (or RUDRA_PATHS_STATE) to a folder on a local disk"
    )
    assert not path.exists()


def test_a_machine_has_an_id_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    first = paths.machine_id()
    assert re.fullmatch(r"[0-9a-f]{32}", first)
    assert paths.machine_id() == first
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "uninitialized\n")
    assert re.fullmatch(r"[0-9a-f]{32}", paths.machine_id())
    assert paths.machine_id() == paths.machine_id()


# ---- names


def test_the_files_of_a_job(tmp_path: Path) -> None:
    job = paths.job_folder(tmp_path, "7f3a01")
    assert not job.root.exists()
    assert job.make() is job
    assert {path.name for path in job.root.iterdir()} == {"snapshots", "logs"}
    assert mode(job.root) == mode(job.logs) == mode(job.snapshots) == 0o700
    job.make()
    root = tmp_path / "jobs" / "7f3a01"
    assert [job.job_toml, job.weights, job.metrics, job.decisions] == [
        root / name for name in ("job.toml", "weights.safetensors", "metrics.csv", "decisions.jsonl")
    ]
    assert job.log("learner-3") == root / "logs" / "learner-3.log"
    assert job.output("learner-3") == root / "logs" / "learner-3.out"


def test_the_files_of_a_state_folder(tmp_path: Path) -> None:
    run = paths.run_folder(tmp_path, "00ff00")
    assert run == tmp_path / "runs" / "00ff00"
    assert paths.registry_file(run) == run / "registry.sqlite"
    assert paths.endpoint_file(run) == run / "endpoint.json"
    assert paths.token_file(run) == run / "token"


@pytest.mark.parametrize("text", ["", "..", "7f3a0", "7f3a011", "7F3A01", "../../x", "7f3a01\n", "a/b/cd"])
def test_an_id_is_six_hex_digits(text: str, tmp_path: Path) -> None:
    for folder in (paths.job_folder, paths.run_folder):
        assert line_of(ConfigError, folder, tmp_path, text).endswith(
            "is no id. Fix: give 6 hex digits, as `rudra jobs` prints them"
        )


# ---- sockets


def test_a_socket_path_has_at_most_100_bytes() -> None:
    assert paths.check_ipc_path("/" + "x" * 99) == "ipc:///" + "x" * 99
    for path in ("/" + "x" * 100, "/" + "ü" * 50):
        assert line_of(ConfigError, paths.check_ipc_path, path) == (
            f"the path of a socket has 101 bytes, at most 100 work ({path})."
            " Fix: set paths.runtime (or RUDRA_PATHS_RUNTIME) to a shorter folder"
        )
    assert paths.psd_endpoint(Path("/run/rudra")) == "ipc:///run/rudra/psd.sock"


# ---- the token


def test_a_token_is_made_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = paths.make_token(path)
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    assert mode(path) == 0o600
    assert paths.make_token(path) == paths.read_token(path) == token
    assert [p.name for p in tmp_path.iterdir()] == ["token"]
    assert paths.make_token(tmp_path / "other") != token


def test_a_token_is_0600_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        paths.make_token(tmp_path / "token")
    finally:
        os.umask(before)
    assert mode(tmp_path / "token") == 0o600


def test_no_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert line_of(NotFound, paths.read_token, path) == (
        f"there is no token ({path}). Fix: start psd here first: rudra up"
    )


def test_tokens_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link, folder = tmp_path / "token", tmp_path / "link", tmp_path / "folder"
    paths.make_token(path)
    link.symlink_to(path)
    folder.mkdir(mode=0o700)
    fix = f"Fix: rm {path}, then start psd again"
    for wrong in (0o640, 0o604, 0o660):
        path.chmod(wrong)
        assert line_of(RefusedBySecurity, paths.read_token, path) == (
            f"others can read the token (mode {wrong:04o}) ({path}). {fix}"
        )
        assert "others can read" in line_of(RefusedBySecurity, paths.make_token, path)
    path.chmod(0o600)
    assert "cannot read the token: " in line_of(RefusedBySecurity, paths.read_token, link)
    assert "this is no token" in line_of(RefusedBySecurity, paths.read_token, folder)
    for text in ("", "x" * 64, "ab" * 31, "ab" * 33, "\xff" * 64):
        path.write_text(text, "latin-1")
        assert line_of(RefusedBySecurity, paths.read_token, path) == f"this is no token ({path}). {fix}"
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert line_of(RefusedBySecurity, paths.read_token, path) == (
        f"the token belongs to uid {uid} ({path}). Fix: run as psd's own user"
    )


def test_a_fifo_in_place_of_the_token_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "token"
    os.mkfifo(path, 0o600)
    assert "this is no token" in line_of(RefusedBySecurity, paths.read_token, path)


def test_a_token_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "no" / "token"
    assert line_of(ConfigError, paths.make_token, path) == (
        f"cannot write the token: No such file or directory ({path}). Fix: see to the folder's owner and space"
    )
