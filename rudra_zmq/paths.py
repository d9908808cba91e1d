"""Where things lie: state folder, runtime folder, the files of a job, sockets, the token.

Owns: names, owners and modes of files and folders. Must not know: what is in them.

    <state>/registry.sqlite, endpoint.json, token     psd's own
    <state>/jobs/<id>/                                 `JobFolder`
    <state>/bundles/                                   user code that jobs brought, by its SHA-256
    <state>/runs/<id>/                                 the state folder of one `rudra run`, laid out alike

Folders are made 0700; what another user could have put in the way is refused, never repaired.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rudra_zmq.errors import ConfigError, NotFound, RefusedBySecurity

MAX_IPC_PATH = 100
"""Bytes. The kernel takes 107 with the NUL; ZeroMQ and our own temporary names want some."""

TOKEN_BYTES = 32
SYSTEM_PSD = Path("/var/lib/rudra/psd")
"""State folder of the system's psd, rudra-psd.service."""
SYSTEM_LEARNERD_RUNTIME = Path("/run/rudra-learnerd")

_TOKEN = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
_JOB_ID = re.compile(r"[0-9a-f]{6}")
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "ocfs2"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone", "fuse.juicefs"}
)  # fmt: skip


# ---- folders


def state_folder(configured: str = "", environ: Mapping[str, str] | None = None, mounts: str | None = None) -> Path:
    """The folder that outlives a reboot; made if need be.

    `configured` is paths.state; else systemd's STATE_DIRECTORY; else
    $XDG_STATE_HOME/rudra/<host>-<machine id, 8 hex>, since hosts may share a home folder. ConfigError on a
    network file system (SQLite and rename need a local one), RefusedBySecurity where it is not ours alone.
    """
    env = os.environ if environ is None else environ
    if configured:
        path = Path(configured)
    elif service := env.get("STATE_DIRECTORY", "").partition(":")[0]:
        path = Path(service)
    else:
        path = _base(env, "XDG_STATE_HOME", ".local/state") / "rudra" / f"{os.uname().nodename}-{machine_id()[:8]}"
    check_local(path, mounts)
    return own_folder(path, private=not _given(env, "STATE_DIRECTORY", path))


def check_local(path: Path, mounts: str | None = None) -> None:
    """Raises ConfigError where a state folder would be on a network file system. `mounts`: as /proc/mounts."""
    kind = filesystem_of(path, mounts)
    if kind in _NETWORK:
        fix = "set paths.state (or RUDRA_PATHS_STATE) to a folder on a local disk"
        raise ConfigError(f"the state folder is on a network file system ({kind})", where=str(path), fix=fix)


def runtime_place(configured: str = "", environ: Mapping[str, str] | None = None) -> Path:
    """Where the folder of sockets is, or would be.

    `configured` is paths.runtime; else systemd's RUNTIME_DIRECTORY; else $XDG_RUNTIME_DIR/rudra where that
    session folder is ours; else /tmp/rudra-<uid>.
    """
    env = os.environ if environ is None else environ
    session = env.get("XDG_RUNTIME_DIR", "")
    if configured:
        return Path(configured)
    if service := env.get("RUNTIME_DIRECTORY", "").partition(":")[0]:
        return Path(service)
    if session.startswith("/") and _is_ours(session):
        return Path(session) / "rudra"
    return Path(f"/tmp/rudra-{os.getuid()}")


def runtime_folder(configured: str = "", environ: Mapping[str, str] | None = None) -> Path:
    """The folder of sockets (`runtime_place`); made if need be. RefusedBySecurity where it is not ours alone."""
    env = os.environ if environ is None else environ
    path = runtime_place(configured, env)
    return own_folder(path, private=not _given(env, "RUNTIME_DIRECTORY", path))


def _given(env: Mapping[str, str], name: str, path: Path) -> bool:
    """systemd made this folder, with the unit's mode: others may look, still none may write."""
    return env.get(name, "").partition(":")[0] == str(path)


def _base(env: Mapping[str, str], name: str, below_home: str) -> Path:
    given = env.get(name, "")
    return Path(given) if given.startswith("/") else Path(os.path.expanduser("~")) / below_home


def _is_ours(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def own_folder(path: Path, *, private: bool = True) -> Path:
    """`path` as a folder of mode 0700 that this user owns. RefusedBySecurity where something else is there.

    private False takes a folder that others may enter and read, never one that they may write.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        reason = error.strerror or "it cannot be made"
        raise ConfigError(
            f"cannot make the folder: {reason}", where=str(path), fix="name a folder that you can write"
        ) from None
    other = "set paths.state or paths.runtime to a folder of your own"
    if not stat.S_ISDIR(found.st_mode):
        raise RefusedBySecurity("this is not a folder", where=str(path), fix=f"remove it, or {other}")
    if found.st_uid != os.getuid():
        message = f"the folder belongs to uid {found.st_uid}, not to uid {os.getuid()}"
        raise RefusedBySecurity(message, where=str(path), fix=other)
    if found.st_mode & (0o077 if private else 0o022):
        message = f"others can use the folder (mode {stat.S_IMODE(found.st_mode):04o})"
        raise RefusedBySecurity(message, where=str(path), fix=f"chmod 700 {path}, after a look at what is in it")
    return path


def shared(folder: Path) -> bool:
    """Whether others than this user may enter ``folder``: a unit's, where users work together."""
    try:
        return bool(folder.stat().st_mode & 0o011)
    except OSError:
        return False


def machine_id() -> str:
    """32 hex digits that stay over a reboot; from the host's name where the system has none (containers)."""
    for name in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            text = Path(name).read_text("ascii", "replace").strip()
            if re.fullmatch(r"[0-9a-f]{32}", text):
                return text
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:32]


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds or will hold `path`, "" if unknown. `mounts`: as /proc/mounts."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text("utf-8", "replace")
        except OSError:
            return ""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


# ---- jobs and runs


@dataclass(frozen=True)
class JobFolder:
    """jobs/<id>/ and the names in it. Nothing is made until `make`."""

    root: Path

    def make(self, *, private: bool = True) -> JobFolder:
        """Makes the folder, snapshots/ and logs/; RefusedBySecurity where they are not ours (``private``: alone)."""
        for path in (self.root.parent, self.root, self.snapshots, self.logs):
            own_folder(path, private=private)
        return self

    @property
    def job_toml(self) -> Path:
        return self.root / "job.toml"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def weights(self) -> Path:
        return self.root / "weights.safetensors"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.csv"

    @property
    def code(self) -> Path:
        """The unpacked bundle, on a host whose learners run it."""
        return self.root / "code"

    @property
    def bundle(self) -> Path:
        """A file with the name of the job's bundle: as long as it is there, the bundle is needed."""
        return self.root / "bundle"

    @property
    def decisions(self) -> Path:
        return self.root / "decisions.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, name: str) -> Path:
        """Our own lines of a process: logs/learner-3.log, logs/node-0.log."""
        return self.logs / f"{name}.log"

    def output(self, name: str) -> Path:
        """What a process itself printed, raw: logs/learner-3.out."""
        return self.logs / f"{name}.out"


def job_folder(state: Path, job: str) -> JobFolder:
    """The folder of a job. ConfigError unless `job` is 6 hex digits: it becomes a part of a path."""
    return JobFolder(state / "jobs" / _checked_id(job))


def run_folder(state: Path, run: str) -> Path:
    """The state folder of a private run; its id has the form of a job's."""
    return state / "runs" / _checked_id(run)


def bundles_folder(state: Path) -> Path:
    """Bundles of user code that this host has, by their SHA-256."""
    return state / "bundles"


def registry_file(state: Path) -> Path:
    """The head's registry."""
    return state / "registry.sqlite"


def endpoint_file(state: Path) -> Path:
    """Where psd listens, written by it while it runs."""
    return state / "endpoint.json"


def reload_file(folder: Path, daemon: str) -> Path:
    """What a daemon's last reload came to, beside its lock; there while it runs."""
    return folder / f"{daemon}.reload.json"


def token_file(state: Path) -> Path:
    return state / "token"


def _checked_id(text: str) -> str:
    if not _JOB_ID.fullmatch(text):
        raise ConfigError(f'"{text}" is no id', fix="give 6 hex digits, as `rudra jobs` prints them")
    return text


# ---- sockets and the token


def check_ipc_path(path: Path | str) -> str:
    """ "ipc://PATH" for a socket. ConfigError beyond 100 bytes, where bind would fail with a riddle."""
    raw = os.fsencode(path)
    if len(raw) > MAX_IPC_PATH:
        message = f"the path of a socket has {len(raw)} bytes, at most {MAX_IPC_PATH} work"
        raise ConfigError(
            message, where=str(path), fix="set paths.runtime (or RUDRA_PATHS_RUNTIME) to a shorter folder"
        )
    return f"ipc://{path}"


def psd_endpoint(runtime: Path) -> str:
    """Where a personal psd listens and everybody dials it."""
    return check_ipc_path(runtime / "psd.sock")


def make_token(path: Path, group: bool = False) -> str:
    """The token of `path`, made if there is none: 32 random bytes in hex, mode 0600, or 0640 for a `group`.

    Kept over restarts, so that learners find their way back. Two who make it at once get the same one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(TOKEN_BYTES))
                file.flush()
                os.fchmod(file.fileno(), 0o640 if group else 0o600)
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
    except OSError as error:
        reason = error.strerror or "it cannot be made"
        raise ConfigError(
            f"cannot write the token: {reason}", where=str(path), fix="see to the folder's owner and space"
        ) from None
    return _read_token(path, group)


def read_token(path: Path) -> str:
    """The token's 64 hex digits. NotFound without a file; RefusedBySecurity where others could know it.

    One that is another user's, a unit's, may be readable by its group, through which we have it.
    """
    return _read_token(path, False)


def _read_token(path: Path, group: bool) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound("there is no token", where=str(path), fix="start psd here first: rudra up") from None
    except OSError as error:
        reason = error.strerror or "it cannot be opened"
        raise RefusedBySecurity(
            f"cannot read the token: {reason}", where=str(path), fix="run as psd's own user"
        ) from None
    try:
        found = os.fstat(fd)
        text = os.read(fd, 4096) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(fd)
    fix = f"rm {path}, then start psd again"
    group = group or (found.st_uid != os.getuid() and bool(found.st_mode & 0o040))
    if found.st_uid != os.getuid() and not group:
        raise RefusedBySecurity(
            f"the token belongs to uid {found.st_uid}", where=str(path), fix="run as psd's own user"
        )
    if found.st_mode & (0o037 if group else 0o077):
        message = f"others can read the token (mode {stat.S_IMODE(found.st_mode):04o})"
        raise RefusedBySecurity(message, where=str(path), fix=fix)
    token = text.decode("ascii", "replace").strip()
    if not _TOKEN.fullmatch(token):
        raise RefusedBySecurity("this is no token", where=str(path), fix=fix)
    return token
