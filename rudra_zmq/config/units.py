"""Durations ("30s") and sizes ("64MiB") as people write them. Must not know: which key they stand in."""

from __future__ import annotations

import re

from rudra_zmq.errors import ConfigError

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"(?:\d+(?:\.\d+)?)"
_DURATION = re.compile("".join(rf"(?:({_NUMBER}){unit})?" for unit in _SECONDS))

_BYTES = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(rf"({_NUMBER})\s*({'|'.join(_BYTES)})")


def parse_duration(text: str) -> float:
    """Seconds of "250ms", "60s", "10m", "1h30m", "2d"; the larger unit first. ConfigError on anything else."""
    match = _DURATION.fullmatch(text) if text.isascii() and 0 < len(text) <= 40 else None
    if match is None:
        raise ConfigError(f'"{text}" is not a duration', fix='write it as "250ms", "60s" or "1h30m"')
    return sum(float(value) * unit for value, unit in zip(match.groups(), _SECONDS.values(), strict=True) if value)


def parse_size(text: str) -> int:
    """Bytes of "64MiB", "1.5GiB", "10MB", "512B" (KiB = 1024, kB = 1000). ConfigError on anything else."""
    match = _SIZE.fullmatch(text) if text.isascii() and len(text) <= 40 else None
    if match is None:
        raise ConfigError(f'"{text}" is not a size', fix='write it as "64MiB", "2GiB" or "10MB"')
    return int(float(match[1]) * _BYTES[match[2]])
