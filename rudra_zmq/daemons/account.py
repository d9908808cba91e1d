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
            raise self._refused(path, error) from None

    def _refused(self, path: Path, error: OSError) -> RudraError:
        fix = f"make this user a member of the group {self.name}" if error.errno == errno.EPERM else "see the folder"
        return RudraError(f"cannot be given to {self.name}: {error.strerror}", where=str(path), fix=fix)

    def lend_tree(self, folder: Path) -> str:
        """The same for a folder and what of it is ours, to write into as well; says what went wrong, or "".

        What learners have written there is theirs, links included: it is left as it is. They may write there while
        we walk, so each thing is opened, looked at and lent by its descriptor, never by a name that they can turn into
        a link to what is ours elsewhere.
        """
        try:
            for _, folders, names, here in os.fwalk(folder):
                if os.fstat(here).st_uid == os.geteuid():
                    self._lend(here, 0o770)
                else:
                    folders.clear()
                for name in names:
                    self._lend_named(name, here)
        except OSError as error:
            return str(self._refused(folder, error))
        return ""

    def _lend_named(self, name: str, folder: int) -> None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOENT, errno.EACCES, errno.ENXIO):
                return  # a link, gone, theirs, a socket
            raise
        try:
            found = os.fstat(fd)
            if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                self._lend(fd, 0o770 if found.st_mode & 0o100 else 0o660)
        finally:
            os.close(fd)

    def _lend(self, fd: int, mode: int) -> None:
        os.fchown(fd, -1, self.gid)
        os.fchmod(fd, mode)

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
