"""TOML text from values: just what the two kinds of file need. Must not know: which keys there are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rudra_zmq.errors import one_line

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def toml_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    def escaped(ch: str) -> str:
        if ch in _SHORT:
            return _SHORT[ch]
        return f"\\u{ord(ch):04X}" if ch < " " or "\x7f" <= ch <= "\x9f" or "\u2028" <= ch <= "\u2029" else ch

    return '"' + "".join(map(escaped, text)) + '"'


def toml_value(value: Any) -> str:
    """One value on one line, tables inline. Types that no key takes (dates) are written as texts."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, msgspec.Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        pairs = [f"{toml_key(str(k))} = {toml_value(v)}" for k, v in value.items() if v is not None]
        return "{" + ", ".join(pairs) + "}"
    return _quoted(str(value))


def toml_tables(values: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> str:
    """A file from dotted keys, in their order: one [table] per prefix, values that are None left out.

    `notes` puts a comment after a key's value.
    """
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        if value is None:
            continue
        table, _, name = key.rpartition(".")
        note = one_line((notes or {}).get(key, ""))
        line = f"{toml_key(name)} = {toml_value(value)}" + (f"  # {note}" if note else "")
        tables.setdefault(table, []).append(line)
    return "\n".join("\n".join((f"[{table}]", *lines, "")) for table, lines in tables.items())
