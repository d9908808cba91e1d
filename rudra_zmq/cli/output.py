"""How the command line speaks: tables, JSON, times, notes. Data goes to stdout, all else to stderr.

Knows nothing of jobs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

SCHEMA_VERSION = 1
SHORTEST_NAME = 8
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?( of [\d,]+)?( ?(%|s|[KMG]?i?B))?")


def is_terminal() -> bool:
    """Whether stdout is a terminal: else tables are plain columns."""
    return sys.stdout.isatty()


def colour() -> bool:
    """NO_COLOR and TERM=dumb are honoured."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def emit_json(value: dict[str, Any]) -> None:
    """One object on one line, with the schema's version first."""
    sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **value}) + "\n")
    sys.stdout.flush()


def say(text: str = "") -> None:
    """A line of data."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line that is not data; where nobody can read it, nothing is lost."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def drop_terminal() -> None:
    """The terminal is gone: what would still be written to it goes nowhere, what goes to files goes on."""
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        if stat.S_ISCHR(os.fstat(fd).st_mode):
            os.dup2(null, fd)
    os.close(null)


def fitted(text: str) -> str:
    """The text, cut to one row of the terminal where stdout is one."""
    width = shutil.get_terminal_size().columns if is_terminal() else 0
    return text if not width or len(text) <= width else text[: width - 3] + "..."


@contextlib.contextmanager
def screen() -> Iterator[None]:
    """What is said inside takes the place of the terminal's contents, as much of it as fits."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield
    columns, rows = shutil.get_terminal_size()
    lines = [line[:columns] + "\x1b[K\n" for line in text.getvalue().splitlines()[: rows - 1]]
    sys.stdout.write("\x1b[H" + "".join(lines) + "\x1b[J")
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table: aligned columns, the head bold on a terminal, where names give way if it is too narrow.

    Columns of numbers are right-aligned.
    """
    body = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(head), *(len(row[k]) for row in body)]) for k, head in enumerate(columns)]
    right = [bool(body) and all(_number(row[k]) for row in body) for k in range(len(columns))]
    if is_terminal() and "name" in columns:
        k = columns.index("name")
        excess = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns
        widths[k] = max(min(widths[k], SHORTEST_NAME), widths[k] - max(0, excess))
        for row in body:
            row[k] = row[k] if len(row[k]) <= widths[k] else row[k][: widths[k] - 2] + ".."

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    head = line([c.upper() for c in columns])
    say(f"\x1b[1m{head}\x1b[0m" if colour() else head)
    for row in body:
        say(line(row))


def _number(text: str) -> bool:
    return text in ("", "-") or _NUMBER.fullmatch(text) is not None


def utc(when: float) -> str | None:
    """ISO 8601 with milliseconds and Z, as in files and --json; None for never."""
    if not when:
        return None
    return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def local(when: float) -> str:
    """Local time with offset, as in tables."""
    return datetime.fromtimestamp(when).astimezone().strftime("%Y-%m-%d %H:%M:%S %z") if when else "-"


def ago(when: float) -> str:
    """ "3 m ago"."""
    if not when:
        return "-"
    seconds = max(0, round(time.time() - when))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def span(seconds: float) -> str:
    """A duration in its two largest units at most."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = int(seconds / 60)
    if minutes < 100:
        return f"{minutes} m {int(seconds % 60):02d} s" if minutes < 10 else f"{minutes} m"
    return f"{minutes // 60} h {minutes % 60:02d} m"


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def percent(value: float | None) -> str:
    """0.8872 as "88.72 %"; "-" for unknown."""
    return "-" if value is None else f"{100 * value:.2f} %"
