"""How much memory this process may still take: what the host has left, its cgroups, its limits, the job file's cap.

Owns: where the kernel says so. Must not know: what the memory is for.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from rudra_zmq.node.budget import Limit, size

MARGIN = 64 << 20
"""Bytes left alone whatever is planned: the interpreter's, ZeroMQ's, the kernel's for our sockets."""
SHARE = 0.02
"""And so much of what is free: others take some, too."""
ADDRESSES = 512 << 20
"""Left of an address space: stacks and arenas of threads to come reserve much more than they use."""


def limit(cap: int | None, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Limit:
    """The smallest of all limits; ``cap`` is the job file's, in bytes."""
    found = [*_host(proc), *_cgroup(proc, cgroups), *_addresses(proc)]
    if cap is not None:
        text = f"servers.memory allows {size(cap)}"
        found.append(Limit(cap, text, "raise servers.memory"))
    if not found:
        return Limit(sys.maxsize, "nothing limits it", "take a host with more memory")
    return min(found, key=lambda one: one.nbytes)


def _less(nbytes: int, margin: int = MARGIN) -> int:
    return max(0, nbytes - max(margin, int(SHARE * nbytes)))


def _table(path: Path) -> dict[str, int]:
    """Lines "Name:  123 kB" or "name 123" as bytes; empty where there is no such file."""
    table = {}
    try:
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            words = line.replace(":", " ").split()
            if len(words) >= 2 and words[1].isdigit():
                table[words[0]] = int(words[1]) << (10 if words[2:] == ["kB"] else 0)
    except OSError:
        pass
    return table


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _host(proc: Path) -> Iterator[Limit]:
    info = _table(proc / "meminfo")
    if "MemAvailable" in info:
        left = _less(info["MemAvailable"])
        yield Limit(left, f"this host has {size(left)} to spare", "end what else takes memory here")
    if _number(proc / "sys/vm/overcommit_memory") == 2 and {"CommitLimit", "Committed_AS"} <= set(info):
        left = _less(max(0, info["CommitLimit"] - info["Committed_AS"]))
        yield Limit(left, f"this host commits {size(left)} more and no byte beyond", "set vm.overcommit_memory = 0")


def _cgroup(proc: Path, cgroups: Path) -> Iterator[Limit]:
    """Of every group that this process is in, up to the root; pages of files that nobody uses count as free."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, most, used, idle = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, idle = cgroups / "memory", "total_inactive_file"
            most, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = root / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if folder != root and root not in folder.parents:
                break
            allowed, taken = _number(folder / most), _number(folder / used)
            if allowed is None or taken is None or allowed >= 1 << 62:
                continue
            left = _less(max(0, allowed - taken + _table(folder / "memory.stat").get(idle, 0)))
            where = f"the cgroup {folder.relative_to(root)}" if folder != root else "this container"
            yield Limit(left, f"{where} has {size(left)} to spare", f"raise its {most}")


def _addresses(proc: Path) -> Iterator[Limit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        left = _less(max(0, soft - _table(proc / "self/status").get("VmSize", 0)), ADDRESSES)
        yield Limit(left, f"the limit of its address space leaves {size(left)}", "raise RLIMIT_AS (ulimit -v)")
