"""Every error that a user can cause: its class, its code on the wire and its exit status, in one table.

Owns: the tree below, the exit statuses, the one-line form "what (where). Fix: how". Must not know: who
raises them.

    RudraError                failed               1    anything that has no narrower name
    |-- UsageError            usage                2    a command line that cannot be meant (a daemon: 78)
    |-- ConfigError           config               2    rudra.toml, job.toml, -s, RUDRA_* (a daemon: 78)
    |-- Rejected              rejected             2    understood and refused: another signature, say
    |-- NotFound              not-found            3    no such job, host, file on the other side
    |   `-- NotRunning        not-running          3    it exists, and does not run
    |-- Unreachable           unreachable          4    nobody answers at the address
    |-- RefusedBySecurity     security             5    token, owner, file mode
    |-- TimedOut              timed-out            6    a deadline passed
    |-- SomeHostsFailed       some-hosts-failed    7    others did it
    |-- JobFailed             job-failed           8    the job itself ended as FAILED
    |-- AlreadyRunning        already-running      1    a daemon, a second time
    `-- Interrupted           interrupted          130  Ctrl-C

0 is success, 70 a shut-down that had to be forced.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_UNREACHABLE = 4
EXIT_SECURITY = 5
EXIT_TIMED_OUT = 6
EXIT_SOME_HOSTS = 7
EXIT_JOB_FAILED = 8
EXIT_FORCED = 70
EXIT_CONFIG_DAEMON = 78
EXIT_INTERRUPTED = 130

# Texts arrive from other processes too; a line that fills the screen hides the fix at its end.
MAX_TEXT = 2000


def one_line(text: str) -> str:
    """`text` bounded, with each run of blanks and line breaks as one blank, and the unprintable escaped."""
    flat = " ".join(text.split())
    if not flat.isprintable():
        flat = "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in flat)
    return flat if len(flat) <= MAX_TEXT else flat[: MAX_TEXT - 3] + "..."


def _without_stop(text: str) -> str:
    text = text.rstrip()
    return text[:-1] if text.endswith(".") and not text.endswith("..") else text


class RudraError(Exception):
    """An error with a place and a fix. `str()` is one line: "message (where). Fix: fix"."""

    code: ClassVar[str] = "failed"
    exit_status: ClassVar[int] = EXIT_FAILED

    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = one_line(_without_stop(message))
        self.where = one_line(where)
        self.fix = one_line(_without_stop(fix))

    def __str__(self) -> str:
        text = f"{self.message} ({self.where})" if self.where else self.message
        return f"{text}. Fix: {self.fix}" if self.fix else text

    def __reduce__(self) -> tuple[object, ...]:
        return from_wire, self.to_wire()

    @property
    def daemon_exit_status(self) -> int:
        """The status for systemd: 78 (RestartPreventExitStatus) where starting again cannot help."""
        return EXIT_CONFIG_DAEMON if isinstance(self, (UsageError, ConfigError)) else self.exit_status

    def to_wire(self) -> tuple[str, str, str, str]:
        """(code, message, where, fix): what a reply carries, and what `from_wire` takes."""
        return self.code, self.message, self.where, self.fix


class UsageError(RudraError):
    code = "usage"
    exit_status = EXIT_USAGE


class ConfigError(RudraError):
    code = "config"
    exit_status = EXIT_USAGE


class Rejected(RudraError):
    code = "rejected"
    exit_status = EXIT_USAGE


class NotFound(RudraError):
    code = "not-found"
    exit_status = EXIT_NOT_FOUND


class NotRunning(NotFound):
    code = "not-running"


class Unreachable(RudraError):
    code = "unreachable"
    exit_status = EXIT_UNREACHABLE


class RefusedBySecurity(RudraError):
    code = "security"
    exit_status = EXIT_SECURITY


class TimedOut(RudraError):
    code = "timed-out"
    exit_status = EXIT_TIMED_OUT


class SomeHostsFailed(RudraError):
    code = "some-hosts-failed"
    exit_status = EXIT_SOME_HOSTS


class JobFailed(RudraError):
    code = "job-failed"
    exit_status = EXIT_JOB_FAILED


class AlreadyRunning(RudraError):
    code = "already-running"


class Interrupted(RudraError):
    code = "interrupted"
    exit_status = EXIT_INTERRUPTED


CLASSES: dict[str, type[RudraError]] = {
    cls.code: cls
    for cls in (
        RudraError, UsageError, ConfigError, Rejected, NotFound, NotRunning, Unreachable, RefusedBySecurity,
        TimedOut, SomeHostsFailed, JobFailed, AlreadyRunning, Interrupted,
    )
}  # fmt: skip


def of_daemon(status: int, message: str, where: str = "", fix: str = "") -> RudraError:
    """The error of a daemon of ours that ended with ``status``, and said ``message``."""
    found = (cls for cls in CLASSES.values() if cls.exit_status == status)
    cls = ConfigError if status == EXIT_CONFIG_DAEMON else next(found, RudraError)
    return cls(message, where=where, fix=fix)


def from_wire(code: str, message: str, where: str = "", fix: str = "") -> RudraError:
    """The error that a reply carries. A code of a newer version becomes a plain RudraError that names it."""
    cls = CLASSES.get(code)
    if cls is None:
        return RudraError(f"{message} [{code}]", where=where, fix=fix)
    return cls(message, where=where, fix=fix)
