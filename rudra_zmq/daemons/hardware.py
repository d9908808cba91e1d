"""What this host has: GPUs that are there of those declared, memory to spare, versions of what learners run on.

Owns: where the system says so. Must not know: torch and CUDA themselves, which a daemon never loads; jobs.
"""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from rudra_zmq import __version__

PROC = Path("/proc/driver/nvidia")
SMI_S = 10.0
_LISTED = re.compile(r"^\s*(?:GPU (\d+)|MIG \S+\s+Device\s+\d+):.*\(UUID: ((?:GPU|MIG)-[^)]+)\)", re.M)
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\S+)")


def present() -> set[str]:
    """Every GPU of this host, by its index and by its UUID. May take a second: nvidia-smi wakes the driver."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SMI_S, check=True
        )
        return parse_list(listed.stdout)
    return {path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")} | set(_by_proc())


def parse_list(text: str) -> set[str]:
    """Indices and UUIDs in the output of ``nvidia-smi -L``; a MIG device has a UUID alone."""
    return {name for found in _LISTED.findall(text) for name in found if name}


def _by_proc() -> Iterable[str]:
    for file in PROC.glob("gpus/*/information"):
        with contextlib.suppress(OSError):
            yield from re.findall(r"^GPU UUID:\s*(GPU-\S+)", file.read_text("utf-8", "replace"), re.M)


def absent(declared: Sequence[str]) -> tuple[str, ...]:
    """Those of the declared GPUs that are not there."""
    if not declared:
        return ()
    there = present()
    return tuple(name for name in declared if name not in there)


def versions() -> dict[str, str]:
    """Of rudra, Python, torch, the CUDA runtime beside it and the driver, as far as they are installed."""
    found = {"rudra": __version__, "python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    if (cuda := _cuda(found.get("torch", ""))) != "":
        found["cuda"] = cuda
    with contextlib.suppress(OSError):
        if match := _DRIVER.search((PROC / "version").read_text("utf-8", "replace")):
            found["driver"] = match[1]
    return found


def _cuda(torch: str) -> str:
    """Of torch's own mark (2.9.0+cu126), or of the runtime's package."""
    if match := re.search(r"\+cu(\d+)(\d)$", torch):
        return f"{match[1]}.{match[2]}"
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def memory() -> int:
    """Bytes that this host has to spare; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0
