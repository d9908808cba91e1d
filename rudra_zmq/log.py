"""Log lines: one format for every process, on stderr, in journald, in files.

    2026-12-01T04:18:24.003Z I learner[3] progress job=7f3a01 step=1240 loss=2.3104

Owns: the form of a line (UTC time, level, unit, constant sentence, key=value pairs), JSON with the same keys,
reopening of rotated files, rate limits. Must not know: what is logged, or which process this is beyond its
unit's name.

Only loggers from `get` come here; a user's own use of `logging` in a learner is left as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_ROOT = "rudra"
_PRIORITY = {"D": 7, "I": 6, "W": 4, "E": 3}
_RESERVED = ("time", "level", "unit", "sentence")
_MOST_KEYS = 1024


# ---- the form of a line


def _letter(level: int) -> str:
    if level >= logging.WARNING:
        return "E" if level >= logging.ERROR else "W"
    return "I" if level >= logging.INFO else "D"


def timestamp(seconds: float) -> str:
    """UTC with milliseconds: 2026-12-01T04:18:24.003Z."""
    whole, ms = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{ms:03d}Z"


def _printable(text: str) -> str:
    """Line breaks and control characters escaped: a value from elsewhere forges neither a line nor a colour."""
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)


def _plain(value: Any) -> Any:
    """What both formats make of a value: numbers, booleans, None and texts as they are, lists by item."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _word(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ",".join(map(_word, value))
    if isinstance(value, dict):
        return ",".join(f"{key}:{_word(item)}" for key, item in value.items())
    return str(value)


def _quoted(text: str) -> str:
    if text and not any(ch in text for ch in " \"='\\") and text.isprintable():
        return text
    return '"' + _printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def logfmt(pairs: Mapping[str, Any]) -> str:
    """ "rank=3 reason="no answer"": values with blanks are quoted, line breaks escaped."""
    return " ".join(f"{key}={_quoted(_word(_plain(value)))}" for key, value in pairs.items())


@dataclass(frozen=True)
class _Message:
    """What a record carries. As a text it is sentence and pairs, for handlers that are not ours."""

    unit: str
    sentence: str
    pairs: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.sentence} {logfmt(self.pairs)}".rstrip()


class _TextFormatter(logging.Formatter):
    def __init__(self, journald: bool) -> None:
        super().__init__()
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        unit, sentence, pairs = _parts(record)
        letter = _letter(record.levelno)
        start = f"<{_PRIORITY[letter]}>" if self._journald else f"{timestamp(record.created)} "
        line = f"{start}{letter} {unit} {_printable(sentence)}"
        return f"{line} {logfmt(pairs)}" if pairs else line


class _JsonFormatter(logging.Formatter):
    def __init__(self, journald: bool) -> None:
        super().__init__()
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        unit, sentence, pairs = _parts(record)
        letter = _letter(record.levelno)
        own = (timestamp(record.created), letter, unit, sentence)
        row: dict[str, Any] = dict(zip(_RESERVED, own, strict=True))
        row |= {f"{key}_" if key in _RESERVED else key: _plain(value) for key, value in pairs.items()}
        start = f"<{_PRIORITY[letter]}>" if self._journald else ""
        return start + msgspec.json.encode(row, enc_hook=str).decode()


def _parts(record: logging.LogRecord) -> tuple[str, str, Mapping[str, Any]]:
    message: object = record.msg
    if isinstance(message, _Message):
        return message.unit, message.sentence, message.pairs
    return _unit, record.getMessage(), {}


# ---- where lines go


def is_journal(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """Whether `stream` is the pipe to journald: $JOURNAL_STREAM names its device and inode."""
    wanted = (os.environ if environ is None else environ).get("JOURNAL_STREAM", "")
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return wanted == f"{found.st_dev}:{found.st_ino}"


def priority(level: Level) -> str:
    """What a line of ours that no logger writes begins with: "<3>" and the like for journald, else ""."""
    return f"<{_PRIORITY[_letter(LEVELS[level])]}>" if is_journal(sys.stderr) else ""


class _StreamHandler(logging.Handler):
    """Writes to a stream. A full disk or a closed pipe loses the line and nothing else."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(self.format(record) + "\n")
            self._stream.flush()


class _FileHandler(logging.Handler):
    """Appends to a file, and opens it again once it was renamed or removed (logrotate's `create`)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def emit(self, record: logging.LogRecord) -> None:
        line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            self._follow()
            os.write(self._fd, line)

    def _follow(self) -> None:
        ours = os.fstat(self._fd)
        with contextlib.suppress(FileNotFoundError):
            named = self._path.stat()
            if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino):
                return
        fresh = self._open()
        os.close(self._fd)
        self._fd = fresh

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        super().close()


class Memory(logging.Handler):
    """Keeps the newest lines, for who asks over the control plane. `limit`: bytes, at most."""

    def __init__(self, limit: int = 262144) -> None:
        super().__init__()
        self.run = int(time.time() * 1000)
        """Tells this process's lines from those of the one before."""
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._start = self._end = 0

    def emit(self, record: logging.LogRecord) -> None:
        line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        self._lines.append(line)
        self._end += len(line)
        while self._end - self._start > self._limit:
            self._start += len(self._lines.popleft())

    def read(self, offset: int, limit: int) -> tuple[int, bytes]:
        """Where they begin, and up to ``limit`` bytes from ``offset`` (of all that was ever written) or from the oldest
        line that is left."""
        self.acquire()
        try:
            begin = min(max(offset, self._start), self._end)
            held = b"".join(self._lines)[begin - self._start :]
        finally:
            self.release()
        return begin, held[:limit]


_unit = "rudra"


def setup(
    unit: str,
    *,
    level: Level = "info",
    fmt: Format = "text",
    stream: TextIO | None = None,
    file: Path | None = None,
    memory: Memory | None = None,
) -> None:
    """Send this process's lines to `file` if one is given, else to `stream` (default: stderr); and to `memory`.

    A second call replaces the first. OSError where the file cannot be opened.
    """
    global _unit
    handler: logging.Handler
    if file is not None:
        handler, journald = _FileHandler(file), False
    else:
        stream = sys.stderr if stream is None else stream
        handler, journald = _StreamHandler(stream), is_journal(stream)
    handler.setFormatter(_JsonFormatter(journald) if fmt == "json" else _TextFormatter(journald))
    _unit = unit
    root = logging.getLogger(_ROOT)
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    if memory is not None:
        memory.setFormatter(_JsonFormatter(False) if fmt == "json" else _TextFormatter(False))
        root.addHandler(memory)
    root.setLevel(LEVELS[level])
    root.propagate = False


# ---- what code calls


class Logger:
    """`log.info("learner lost", rank=3)`: a constant sentence, its values as pairs.

    `unit` "" is the process's own (of `setup`); `bound` pairs come first on every line.
    """

    def __init__(self, unit: str = "", bound: Mapping[str, Any] | None = None) -> None:
        self._unit = unit
        self._bound = dict(bound or {})
        self._logger = logging.getLogger(_ROOT)

    def bind(self, **pairs: Any) -> Logger:
        """A logger whose every line carries these pairs too."""
        return Logger(self._unit, self._bound | pairs)

    def enabled(self, level: Level) -> bool:
        """For pairs that cost something to make."""
        return self._logger.isEnabledFor(LEVELS[level])

    def debug(self, sentence: str, /, **pairs: Any) -> None:
        self._write(logging.DEBUG, sentence, pairs)

    def info(self, sentence: str, /, **pairs: Any) -> None:
        self._write(logging.INFO, sentence, pairs)

    def warning(self, sentence: str, /, **pairs: Any) -> None:
        self._write(logging.WARNING, sentence, pairs)

    def error(self, sentence: str, /, **pairs: Any) -> None:
        self._write(logging.ERROR, sentence, pairs)

    def exception(self, sentence: str, error: BaseException, /, **pairs: Any) -> None:
        """One line with exc= at ERROR; the traceback, a line of its own for each of its lines, at DEBUG."""
        self._write(logging.ERROR, sentence, {**pairs, "exc": f"{type(error).__name__}: {error}"})
        if self._logger.isEnabledFor(logging.DEBUG):
            for text in "".join(traceback.format_exception(error)).splitlines():
                self._write(logging.DEBUG, "traceback", {"line": text})

    def limited(self, limiter: RateLimiter, level: Level, sentence: str, /, **pairs: Any) -> None:
        """At most one line of this sentence per `limiter.seconds`; the next one says for how many: "(x42)"."""
        if not self._logger.isEnabledFor(LEVELS[level]):
            return
        times = limiter.admit(sentence)
        if times:
            self._write(LEVELS[level], f"{sentence} (x{times})" if times > 1 else sentence, pairs)

    def _write(self, level: int, sentence: str, pairs: Mapping[str, Any]) -> None:
        if not self._logger.isEnabledFor(level):
            return
        message = _Message(self._unit or _unit, sentence, {**self._bound, **pairs})
        self._logger.handle(self._logger.makeRecord(_ROOT, level, "", 0, message, (), None))


def get(unit: str = "") -> Logger:
    """A logger; modules may take it at import, before `setup`.

    Without `setup`, as in a script that runs alone, lines go where the script's own `logging` sends them.
    """
    return Logger(unit)


class RateLimiter:
    """Lets one of a kind through per `seconds`, and counts the rest. Safe between threads; memory is bounded."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}

    def admit(self, key: str = "") -> int:
        """How many events a line written now stands for (itself included), or 0: write none."""
        now = self._clock()
        with self._lock:
            last, held = self._seen.get(key, (None, 0))
            if last is not None and now - last < self.seconds:
                self._seen[key] = (last, held + 1)
                return 0
            if len(self._seen) >= _MOST_KEYS and key not in self._seen:
                self._forget(now)
            self._seen[key] = (now, 0)
            return held + 1

    def _forget(self, now: float) -> None:
        """Drop what has nothing left to say; if every key is busy, the oldest."""
        idle = [key for key, (last, held) in self._seen.items() if not held and now - last >= self.seconds]
        for key in idle or [min(self._seen, key=lambda key: self._seen[key][0])]:
            del self._seen[key]
