"""Setting keys in a TOML file that a person may have written: comments and all other keys stay.

Owns the few edits of text that this takes, and the proof that they did what was meant. Must not know which keys.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

from rudra_zmq.config.layers import parse_toml
from rudra_zmq.config.write import toml_key, toml_value
from rudra_zmq.errors import ConfigError


def with_values(text: str, values: Mapping[str, str], label: str) -> str:
    """The text of a file with ``values`` ("table.key" -> text) set. ConfigError where it is written so that it cannot
    be done by adding lines and taking lines away."""
    wanted = copy.deepcopy(parse_toml(text, label))
    lines = text.splitlines()
    for dotted, value in values.items():
        table, _, key = dotted.rpartition(".")
        place = wanted.setdefault(table, {})
        if isinstance(place, dict):
            place[key] = value
        _set(lines, table, key, f"{toml_key(key)} = {toml_value(value)}")
    done = "\n".join(lines) + "\n"
    try:
        right = parse_toml(done, label) == wanted
    except ConfigError:
        right = False
    if not right:
        said = ", ".join(f"{key} = {toml_value(value)}" for key, value in values.items())
        raise ConfigError("the file is written in a way that is not changed here", where=label, fix=f"set {said} in it")
    return done


def _set(lines: list[str], table: str, key: str, line: str) -> None:
    header = re.compile(rf"\s*\[\s*{re.escape(table)}\s*\]\s*(#.*)?")
    start = next((i for i, text in enumerate(lines) if header.fullmatch(text)), None)
    if start is None:
        lines += ["", f"[{table}]", line] if lines else [f"[{table}]", line]
        return
    end = next((i for i in range(start + 1, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
    for i in range(start + 1, end):
        if re.match(rf"\s*{re.escape(key)}\s*=", lines[i]):
            lines[i] = line
            return
    lines.insert(start + 1, line)
