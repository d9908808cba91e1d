"""Memory limits of control groups, of both versions, as the kernel tells of them.

Owns: where they are written. Must not know: what the memory is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Group:
    """A group that limits memory; bytes. ``idle``: pages of files that nobody uses, which count as ``used``."""

    name: str  # "the cgroup a/b", or "this container"
    most: int
    used: int
    idle: int
    key: str  # the file with the limit

    @property
    def left(self) -> int:
        """Bytes that can still be had."""
        return max(0, self.most - self.used + self.idle)


def limits(process: Path = Path("/proc/self"), root: Path = ROOT) -> Iterator[Group]:
    """Every group that a process (its folder in /proc) is in, up to the root, and that limits memory."""
    try:
        lines = (process / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top, most, used, idle = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, idle = root / "memory", "total_inactive_file"
            most, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = top / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if folder != top and top not in folder.parents:
                break
            allowed, taken = number(folder / most), number(folder / used)
            if allowed is None or taken is None or allowed >= _NO_LIMIT:
                continue
            name = f"the cgroup {folder.relative_to(top)}" if folder != top else "this container"
            yield Group(name, allowed, taken, table(folder / "memory.stat").get(idle, 0), most)


def table(path: Path) -> dict[str, int]:
    """Lines "Name:  123 kB" or "name 123" as bytes; empty where there is no such file."""
    found = {}
    try:
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            words = line.replace(":", " ").split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0]] = int(words[1]) << (10 if words[2:] == ["kB"] else 0)
    except OSError:
        pass
    return found


def number(path: Path) -> int | None:
    """The number in a file of one; None where there is none."""
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
