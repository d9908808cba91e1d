"""How much memory this process may still take: what the host has left, its cgroups, its limits, the job file's cap.

Owns: where the kernel says so. Must not know: what the memory is for.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from rudra_zmq.cgroups import ROOT, limits, number, table
from rudra_zmq.node.budget import Limit, size

MARGIN = 64 << 20
"""Bytes left alone whatever is planned: the interpreter's, ZeroMQ's, the kernel's for our sockets."""
SHARE = 0.02
"""And so much of what is free: others take some, too."""
ADDRESSES = 512 << 20
"""Left of an address space: stacks and arenas of threads to come reserve much more than they use."""


def limit(cap: int | None, proc: Path = Path("/proc"), cgroups: Path = ROOT) -> Limit:
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


def _host(proc: Path) -> Iterator[Limit]:
    info = table(proc / "meminfo")
    if "MemAvailable" in info:
        left = _less(info["MemAvailable"])
        yield Limit(left, f"this host has {size(left)} to spare", "end what else takes memory here")
    if number(proc / "sys/vm/overcommit_memory") == 2 and {"CommitLimit", "Committed_AS"} <= set(info):
        left = _less(max(0, info["CommitLimit"] - info["Committed_AS"]))
        yield Limit(left, f"this host commits {size(left)} more and no byte beyond", "set vm.overcommit_memory = 0")


def _cgroup(proc: Path, cgroups: Path) -> Iterator[Limit]:
    """Of every group that this process is in, up to the root."""
    for group in limits(proc / "self", cgroups):
        left = _less(group.left)
        yield Limit(left, f"{group.name} has {size(left)} to spare", f"raise its {group.key}")


def _addresses(proc: Path) -> Iterator[Limit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        left = _less(max(0, soft - table(proc / "self/status").get("VmSize", 0)), ADDRESSES)
        yield Limit(left, f"the limit of its address space leaves {size(left)}", "raise RLIMIT_AS (ulimit -v)")
