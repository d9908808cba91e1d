"""Where settings come from: TOML files, -s flags, RUDRA_* variables; later layers win key by key.

Owns: reading a file within bounds, finding the line of a key, the values of flags and variables. Must not
know: what the keys mean, or which layers a kind of file has.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from rudra_zmq.config.schema import Leaf, convert, leaves, misfit, near, sections, unknown_key
from rudra_zmq.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Struct = type[msgspec.Struct]
MAX_FILE = 262_144
"""Bytes of a file that is read: what a message to the head carries at most."""

LEVEL_FILE, LEVEL_ENVIRONMENT, LEVEL_SET = 1, 2, 3


@dataclass(frozen=True)
class Setting:
    """A value as it came. `place` is what messages and origins say: "job.toml:7", "-s sync.n=2"."""

    value: Any
    place: str
    level: int


def read_text(path: Path) -> str:
    """The file's text; ConfigError where there is none, where it is no text, or more than MAX_FILE bytes."""
    try:
        # Not waiting for who may never write into a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError("it is no plain file", where=str(path), fix="it has to be a TOML file")
            data = file.read(MAX_FILE + 1)
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=str(path), fix="check the path") from None
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise ConfigError(f"cannot read the file: {reason}", where=str(path), fix="make it readable") from None
    if len(data) > MAX_FILE:
        raise ConfigError(
            f"the file has more than {MAX_FILE // 1024} KiB", where=str(path), fix="it has to be a TOML file"
        )
    try:
        return data.decode("utf-8-sig")  # with or without the mark that some editors begin a file with
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        fix = "mend that line: TOML is text in UTF-8"
        raise ConfigError("the file is not UTF-8 text", where=f"{path}:{line}", fix=fix) from None


def parse_toml(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        said = re.sub(r"\s*\((?:at line (\d+), column \d+|at end of document)\)$", "", str(error))
        line = re.search(r"at line (\d+)", str(error))
        where = f"{label}:{line[1]}" if line else label
        raise ConfigError(
            f"not valid TOML: {said}", where=where, fix='write it as key = value, texts in "quotes"'
        ) from None


_PART = r'(?:[A-Za-z0-9_-]+|"[^"]*"|\'[^\']*\')'
_HEADER = re.compile(rf"\s*\[\[?\s*({_PART}(?:\s*\.\s*{_PART})*)\s*\]")
_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")


def lines_of(text: str) -> dict[str, int]:
    """Dotted key (and table) -> its first line. Close enough for messages: this does not parse."""
    found: dict[str, int] = {}
    prefix, quote = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:
            quote = "" if quote in line else quote
            continue
        if header := _HEADER.match(line):
            prefix = _joined(header[1])
            found.setdefault(prefix, number)
        elif key := _KEY.match(line):
            found.setdefault(f"{prefix}.{_joined(key[1])}" if prefix else _joined(key[1]), number)
        quote = next((q for q in ('"""', "'''") if line.count(q) % 2), "")
    return found


def _joined(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in re.findall(_PART, dotted))


def places_in(text: str, label: str) -> Callable[[str], str]:
    """A function from a key to "label:line": its own line, or that of the nearest table around it."""
    lines = lines_of(text)

    def place(key: str) -> str:
        parts = key.replace("[", ".").split(".")
        for length in range(len(parts), 0, -1):
            if (line := lines.get(".".join(parts[:length]))) is not None:
                return f"{label}:{line}"
        return label

    return place


def collect(
    struct: Struct,
    table: Mapping[str, Any],
    place: Callable[[str], str],
    level: int,
    problems: list[ConfigError],
) -> dict[str, Setting]:
    """The leaves of a parsed table; `problems` gets the keys that the struct lacks."""
    known, tables = leaves(struct), sections(struct)
    found: dict[str, Setting] = {}

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for name, value in values.items():
            key = prefix + name
            leaf = known.get(key)
            if leaf is not None and leaf.is_map and isinstance(value, dict):
                found.update({f"{key}.{item}": Setting(v, place(f"{key}.{item}"), level) for item, v in value.items()})
            elif leaf is not None:
                found[key] = Setting(value, place(key), level)
            elif key not in tables:
                problems.append(unknown_key(key, struct, place(key)))
            elif isinstance(value, dict):
                walk(value, key + ".")
            else:
                problems.append(misfit(key, Leaf(dict, None, None, False, None), value, place(key)))

    walk(table, "")
    return found


def owner_of(struct: Struct, key: str) -> str:
    """The free table that a key is a name of ("run.env" for "run.env.HOME"), or ""."""
    maps = (name for name, leaf in leaves(struct).items() if leaf.is_map)
    return next((name for name in maps if key.startswith(name + ".")), "")


def leaf_of(struct: Struct, key: str) -> Leaf | None:
    """The leaf of a dotted key, or of one name in a free table."""
    if owner := owner_of(struct, key):
        leaf = leaves(struct)[owner]
        return Leaf(get_args(leaf.type)[1], leaf.says, None, False, None)
    return leaves(struct).get(key)


def from_word(struct: Struct, key: str, raw: str, where: str) -> Any:
    """The value of a flag or variable: TOML, or the bare word where it is none or the key takes a text."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
        value = parsed["value"] if len(parsed) == 1 else raw
    except (ValueError, RecursionError):
        if raw[:1] in ("'", '"', "[", "{"):
            raise ConfigError(
                f"the value of {key} is not valid TOML", where=where, fix="close its quotes and brackets"
            ) from None
        value = raw
    leaf = leaf_of(struct, key)
    if leaf is not None and not isinstance(value, str):
        as_value: list[ConfigError] = []
        as_word: list[ConfigError] = []
        convert(key, leaf, value, where, as_value)
        convert(key, leaf, raw, where, as_word)
        if as_value and not as_word:
            return raw
    return value


def from_sets(struct: Struct, sets: Sequence[str], problems: list[ConfigError]) -> dict[str, Setting]:
    """The settings of `-s key=value` flags; the last of two for one key wins."""
    found: dict[str, Setting] = {}
    for text in sets:
        where = f"-s {text}" if len(text) <= 100 else f"-s {text[:97]}..."
        key, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or not all(key.split(".")):
            problems.append(ConfigError(f'"{text}" is no setting', where="-s", fix="write -s table.key=value"))
            continue
        try:
            table: Any = from_word(struct, key, raw, where)
        except ConfigError as error:
            problems.append(error)
            continue
        for part in reversed(key.split(".")):
            table = {part: table}
        found |= collect(struct, table, lambda _, where=where: where, LEVEL_SET, problems)  # type: ignore[misc]
    return found


def variable_of(key: str) -> str:
    """ "log.level" -> RUDRA_LOG_LEVEL."""
    return "RUDRA_" + key.upper().replace(".", "_")


def from_environment(struct: Struct, environ: Mapping[str, str], problems: list[ConfigError]) -> dict[str, Setting]:
    """The settings of RUDRA_* variables; an empty one counts as absent.

    Only near misses of a variable are refused: others of that prefix are a learner's own, and not settings.
    """
    found: dict[str, Setting] = {}
    variables = {variable_of(key): key for key, leaf in leaves(struct).items() if not leaf.is_map}
    for name, raw in environ.items():
        key = variables.get(name)
        if key is not None and raw:
            try:
                found[key] = Setting(from_word(struct, key, raw, name), name, LEVEL_ENVIRONMENT)
            except ConfigError as error:
                problems.append(error)
        elif key is None and (guess := _meant(name, variables)):
            fix = f"set {guess} instead"
            problems.append(
                ConfigError(f"unknown variable {name}, did you mean {guess}?", where="environment", fix=fix)
            )
    return found


def _meant(name: str, variables: Mapping[str, str]) -> str:
    for table in {key.partition(".")[0] for key in variables.values()}:
        start = variable_of(table) + "_"
        if name.startswith(start):
            rest = [variable[len(start) :] for variable in variables if variable.startswith(start)]
            found = near(name[len(start) :], rest, cutoff=0.7)
            return start + found if found else ""
    return ""
