"""Another user to run learners as, and what of ours that user may see.

Owns the look-up of the account, the capabilities that it takes to become it, and the modes of what is handed over.
Must not know: what learners are. DESIGN: user code runs as somebody who can neither talk as learnerd nor change its
files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rudra_zmq.errors import ConfigError, RudraError

UMASK = 0o007  # what a learner writes can be read and removed by learnerd, which is in its group
_CAPABILITIES = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4


@dataclass(frozen=True)
class Account:
    """``groups``: all of them, so that a drop-in's `video` or `render` is not lost."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` as the account's: caches go to its own home."""
        own = {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}
        return {name: value for name, value in env.items() if name != "XDG_CACHE_HOME"} | own

    def lend(self, path: Path, mode: int) -> None:
        """Give a file or folder of ours to the account's group, with this mode. Raises RudraError."""
        try:
            os.chown(path, -1, self.gid)
            os.chmod(path, mode)
        except OSError as error:
            fix = (
                f"make this user a member of the group {self.name}" if error.errno == errno.EPERM else "see the folder"
            )
            raise RudraError(f"cannot be given to {self.name}: {error.strerror}", where=str(path), fix=fix) from None

    def lend_tree(self, folder: Path) -> str:
        """The same for a folder and what of it is ours, to write into as well; says what went wrong, or "".

        What learners have written there is theirs, links included: it is left as it is.
        """
        try:
            for root, folders, names in os.walk(folder):
                if os.lstat(root).st_uid == os.geteuid():
                    self.lend(Path(root), 0o770)
                else:
                    folders.clear()
                for path in (Path(root, name) for name in names):
                    found = path.lstat()
                    if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode):
                        self.lend(path, 0o770 if found.st_mode & 0o100 else 0o660)
        except RudraError as error:
            return str(error)
        except OSError as error:
            return f"{folder} cannot be given to {self.name}: {error.strerror}"
        return ""

    def lend_file(self, path: Path) -> None:
        """Make a file that the account may write, in a folder that it may not."""
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise RudraError(f"cannot be made: {error.strerror}", where=str(path), fix="see the folder") from None
        self.lend(path, 0o660)


def account(name: str) -> Account | None:
    """The account ``name``; None for "" (learners run as we do). ConfigError where it is none, or cannot be become.

    From then on no program that this process starts has any of its capabilities.
    """
    if not name:
        return None
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        fix = f"make it (systemd-sysusers), or unset host.user: useradd --system {name}"
        raise ConfigError(f"there is no user {name}", where="host.user", fix=fix) from None
    if found.pw_uid == 0:
        raise ConfigError("learners do not run as root", where="host.user", fix="name a user without rights")
    missing = [text for text, bit in _CAPABILITIES.items() if not _effective() >> bit & 1]
    if missing:
        fix = "start it by rudra-learnerd.service, or unset host.user"
        raise ConfigError(f"becoming {name} takes {', '.join(missing)}", where="host.user", fix=fix)
    ctypes.CDLL(None).prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    groups = tuple(sorted(set(os.getgrouplist(name, found.pw_gid))))
    return Account(name, found.pw_uid, found.pw_gid, groups, found.pw_dir)


def _effective() -> int:
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
