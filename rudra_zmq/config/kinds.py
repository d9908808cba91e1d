"""The kinds of values that keys take: a type, what fits beyond the type, and the English for it.

Owns: bounds of single values. Must not know: keys, files, and what a value is for.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeAlias

from rudra_zmq.config.schema import Says
from rudra_zmq.config.units import parse_duration, parse_size
from rudra_zmq.errors import ConfigError

Fits: TypeAlias = Callable[[Any], bool]


def _from(low: float, high: float = math.inf) -> Fits:
    return lambda value: value is None or low <= value <= high


def _above(low: float) -> Fits:
    return lambda value: value is None or low < value < math.inf


def _matches(pattern: re.Pattern[str]) -> Fits:
    return lambda value: not value or pattern.fullmatch(value) is not None


def _is_text(value: str) -> bool:
    """A text that a file and an argument vector can carry: no NUL, no half of a surrogate pair."""
    try:
        return "\0" not in value and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _is_absolute(value: str) -> bool:
    return not value or (value.startswith("/") and _is_text(value))


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return _is_text(value)
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def _is_argument(value: Any) -> bool:
    return _is_scalar(value) or (isinstance(value, list) and all(map(_is_scalar, value)))


def _is_duration(value: str | None) -> bool:
    try:
        return value is None or parse_duration(value) > 0
    except ConfigError:
        return False


def _is_snapshot(value: str) -> bool:
    return value in ("auto", "none") or _is_duration(value)


def _is_memory(value: str) -> bool:
    try:
        return value == "auto" or parse_size(value) > 0
    except ConfigError:
        return False


def _is_bound(value: int | str) -> bool:
    return value == "none" or (isinstance(value, int) and 1 <= value < 2**62)


def _is_device(value: Any) -> bool:
    return 0 <= value < 1024 if isinstance(value, int) else _DEVICE.fullmatch(value) is not None


def _are_devices(values: tuple[int | str, ...]) -> bool:
    return all(map(_is_device, values)) and len(set(map(str, values))) == len(values)


def _are_names(values: tuple[str, ...]) -> bool:
    return all(NAME.fullmatch(value) for value in values)


def _is_python(value: str) -> bool:
    return _is_absolute(value) or NAME.fullmatch(value) is not None


def _rises(values: tuple[float, ...] | None) -> bool:
    if values is None:
        return True
    return bool(values) and all(a < b < math.inf for a, b in zip((0.0, *values), values, strict=False))


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_DEVICE = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_TASK = re.compile(rf"{_MODULE.pattern}:[A-Za-z_]\w*", re.ASCII)
_A_DURATION = 'a duration such as "250ms", "60s" or "10m"'

_SHARE = re.compile(r"topk:([0-9]{0,3}\.?[0-9]{0,12}(?:[eE]-[0-9]{1,2})?)")


def parse_compress(text: str) -> tuple[str, Fraction] | None:
    """An encoding of gradients and the share that it sends, exactly as written; None where ``text`` is neither."""
    if text in ("none", "float16", "bfloat16", "int8"):
        return ("float32" if text == "none" else text), Fraction(1)
    match = _SHARE.fullmatch(text)
    try:
        share = Fraction(match[1]) if match else Fraction(0)
    except ValueError:
        return None
    return ("topk", share) if 0 < share <= 1 else None


Name: TypeAlias = Annotated[
    str, Says("1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit", _matches(NAME))
]
User: TypeAlias = Annotated[str, Says('the name of a user, such as "rudra-job"', _matches(_USER))]
Task: TypeAlias = Annotated[str | None, Says('a module and a name in it, such as "my.module:task"', _matches(_TASK))]
Module: TypeAlias = Annotated[str, Says('a module such as "my.train"', _matches(_MODULE))]
Text: TypeAlias = Annotated[str, Says("a text in quotes", _is_text)]
Texts: TypeAlias = Annotated[
    tuple[str, ...], Says('a list of texts, such as ["--lr", "0.1"]', lambda v: all(map(_is_text, v)))
]
Pattern: TypeAlias = Annotated[str, Says('a pattern such as "*.bias"', _is_text)]
Variables: TypeAlias = Annotated[dict[str, str], Says("a text in quotes", _is_text)]
Arguments: TypeAlias = Annotated[
    dict[str, Any], Says("a text, a number, true, false, or a list of these", _is_argument)
]
AbsolutePath: TypeAlias = Annotated[str, Says("an absolute path", _is_absolute)]
Python: TypeAlias = Annotated[
    str, Says('an absolute path, or a name that [host] python of the hosts has, such as "ml"', _is_python)
]
Names: TypeAlias = Annotated[
    tuple[str, ...], Says("a list of names such as [\"a\", \"gpu\"], of letters, digits, '.', '_' and '-'", _are_names)
]

Count: TypeAlias = Annotated[int, Says("a whole number from 1 to 100000", _from(1, 100_000))]
CountOrZero: TypeAlias = Annotated[int, Says("a whole number from 0 to 100000", _from(0, 100_000))]
Seed: TypeAlias = Annotated[int, Says("a whole number from 0 to 4294967295", _from(0, 2**32 - 1))]
Batch: TypeAlias = Annotated[int, Says("a whole number from 0 to 2147483647", _from(0, 2**31 - 1))]
Updates: TypeAlias = Annotated[int | None, Says("a whole number of at least 1", _from(1, 2**62))]
StalenessBound: TypeAlias = Annotated[int | Literal["none"], Says('"none" or a whole number of at least 1', _is_bound)]

Positive: TypeAlias = Annotated[float, Says("a number above 0", _above(0))]
MaybePositive: TypeAlias = Annotated[float | None, Says("a number above 0", _above(0))]
NotNegative: TypeAlias = Annotated[float, Says("a number of at least 0", _from(0))]
MaybeNotNegative: TypeAlias = Annotated[float | None, Says("a number of at least 0", _from(0))]
BelowOne: TypeAlias = Annotated[float, Says("a number from 0 to below 1", lambda v: 0 <= v < 1)]
Accuracy: TypeAlias = Annotated[float | None, Says("a number above 0, at most 1", lambda v: v is None or 0 < v <= 1)]
Epochs: TypeAlias = Annotated[
    tuple[float, ...] | None, Says("a list of epochs, rising and above 0, such as [120, 130]", _rises)
]

Compress: TypeAlias = Annotated[
    str,
    Says(
        '"none", "float16", "bfloat16", "int8", or "topk:" and the share that is sent, such as "topk:0.01"',
        lambda v: parse_compress(v) is not None,
    ),
]

Duration: TypeAlias = Annotated[str, Says(_A_DURATION, _is_duration)]
MaybeDuration: TypeAlias = Annotated[str | None, Says(_A_DURATION, _is_duration)]
Memory: TypeAlias = Annotated[str, Says('"auto" or a size such as "8GB" or "512MiB"', _is_memory)]
Snapshot: TypeAlias = Annotated[str, Says(f'"auto", "none" or {_A_DURATION}', _is_snapshot)]

# ---- rudra.toml

_TCP = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]{0,254}):([0-9]{1,5})")
_IPC = re.compile(r"ipc:///[^\0]+")
_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


def parse_ports(text: str) -> tuple[int, int] | None:
    """First and last port of "7740-7799"; (0, 0) for "0", any free port; None where `text` is neither."""
    if text == "0":
        return 0, 0
    match = _PORTS.fullmatch(text)
    if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65535:
        return None
    return int(match[1]), int(match[2])


def parse_listen(text: str) -> tuple[str, int] | None:
    """Host and port of "9733" (this machine alone), "192.0.2.7:9733", "[::]:9733"; None for anything else."""
    host, colon, port = text.rpartition(":")
    host = (host[1:-1] if host.startswith("[") and host.endswith("]") else host) if colon else "127.0.0.1"
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    bracketed = text.startswith("[")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or bracketed != (version == 6):
        return None
    return host, int(port)


def _is_address(lowest_port: int) -> Fits:
    def fits(value: str) -> bool:
        tcp = _TCP.fullmatch(value)
        if tcp is not None:
            return lowest_port <= int(tcp[1]) <= 65535
        return value == "" or _IPC.fullmatch(value) is not None

    return fits


_AN_ADDRESS = 'an address such as "tcp://ps0.example.org:7733", "tcp://[::1]:7733" or "ipc:///PATH"'
Address: TypeAlias = Annotated[str, Says(_AN_ADDRESS, _is_address(1))]
BindAddress: TypeAlias = Annotated[str, Says(_AN_ADDRESS, _is_address(0))]
PublicKey: TypeAlias = Annotated[
    str, Says("64 hex digits, as `rudra keys list` prints them", _matches(re.compile(r"[0-9a-f]{64}")))
]
Listen: TypeAlias = Annotated[
    str,
    Says(
        'a port such as "9733", which is bound on 127.0.0.1, or an address and a port such as "192.0.2.7:9733"',
        lambda v: not v or parse_listen(v) is not None,
    ),
]
Ports: TypeAlias = Annotated[
    str,
    Says(
        'a range within 1024-65535 such as "7740-7799", or "0" for any free port',
        lambda v: parse_ports(v) is not None,
    ),
]
Places: TypeAlias = Annotated[dict[str, str], Says("an absolute path", lambda v: v != "" and _is_absolute(v))]
Devices: TypeAlias = Annotated[
    tuple[int | str, ...],
    Says('a list of GPUs by index or UUID, each once, such as [0, 1] or ["GPU-1dc8..."]', _are_devices),
]
Hosts: TypeAlias = Annotated[
    str | tuple[str, ...],
    Says(
        '"auto", a host or a label, or a list of these such as ["a", "gpu"]',
        lambda v: v and _are_names((v,) if isinstance(v, str) else v),
    ),
]
Slots: TypeAlias = Annotated[int, Says("a whole number from 0 to 4096", _from(0, 4096))]
Threads: TypeAlias = Annotated[int, Says("a whole number from 0 to 1024", _from(0, 1024))]
Keep: TypeAlias = Annotated[int, Says("a whole number from 1 to 1000", _from(1, 1000))]
