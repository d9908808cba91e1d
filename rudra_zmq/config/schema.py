"""The structs of a file as a table of dotted keys, and one-line messages about values that do not fit.

Owns: which keys a struct has, near misses, the conversion of one value to its field's type. Must not know:
which file, flag or variable a value came from (the caller passes that as a text), nor what any key means.

A field's type may be Annotated with `Says`: the English for what fits, and a test for what the type cannot
express.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from rudra_zmq.config.write import toml_value
from rudra_zmq.errors import ConfigError


def _anything(_: Any) -> bool:
    return True


@dataclass(frozen=True)
class Says:
    """What a value has to be ("a whole number of at least 1"); `fits` is asked once the type is right."""

    text: str
    fits: Callable[[Any], bool] = _anything


class Leaf(NamedTuple):
    """A key that holds a value. `items`: the struct of an array of tables; `is_map`: a table of free names."""

    type: Any
    says: Says | None
    default: Any
    is_map: bool
    items: type[msgspec.Struct] | None


def _leaf(hint: Any, default: Any) -> Leaf:
    says = None
    if get_origin(hint) is Annotated:
        says = next((extra for extra in hint.__metadata__ if isinstance(extra, Says)), None)
        hint = hint.__origin__
    args = get_args(hint)
    is_tuple = get_origin(hint) is tuple
    items = args[0] if is_tuple and isinstance(args[0], type) and issubclass(args[0], msgspec.Struct) else None
    return Leaf(hint, says, default, get_origin(hint) is dict, items)


@cache
def leaves(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, Leaf]:
    """Every key of the struct and of the structs inside it, dotted, in the order of the file."""
    table: dict[str, Leaf] = {}
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint, key = hints[field.name], prefix + field.name
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            table |= leaves(hint, key + ".")
        else:
            default = field.default
            if default is msgspec.NODEFAULT:
                default = None if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            table[key] = _leaf(hint, default)
    return table


def sections(struct: type[msgspec.Struct]) -> set[str]:
    """The dotted names of the tables: "job", "job.stop", ..."""
    return {key[:dot] for key in leaves(struct) for dot in range(len(key)) if key[dot] == "."}


def build(struct: type[msgspec.Struct], values: Mapping[str, Any], prefix: str = "") -> Any:
    """The struct from converted values by dotted key; what is absent keeps its default."""
    hints = get_type_hints(struct, include_extras=True)
    given: dict[str, Any] = {}
    for name, hint in hints.items():
        key = prefix + name
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            given[name] = build(hint, values, key + ".")
        elif key in values:
            given[name] = values[key]
    return struct(**given)


def flat(struct: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """The other way: every leaf's value by dotted key, free tables one entry per name."""
    out: dict[str, Any] = {}
    for name in struct.__struct_fields__:
        value, key = getattr(struct, name), prefix + name
        if isinstance(value, msgspec.Struct):
            out |= flat(value, key + ".")
        elif isinstance(value, dict) and value:
            out |= {f"{key}.{item}": v for item, v in value.items()}
        else:
            out[key] = value
    return out


def near(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that `word` was probably meant to be, or ""."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else ""


def unknown_key(key: str, struct: type[msgspec.Struct], where: str) -> ConfigError:
    """An error for a key that the struct lacks, with the nearest in its table, else that name elsewhere."""
    known = [*leaves(struct), *sorted(sections(struct))]
    table, _, word = key.rpartition(".")
    here = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == table]
    guess = ""
    if hit := near(word, here):
        guess = f"{table}.{hit}" if table else hit
    if not guess:
        meant = near(word, [k.rpartition(".")[2] for k in known], cutoff=0.8)
        elsewhere = (k for k in known if meant and k.rpartition(".")[2] == meant)
        guess = next(elsewhere, "") or near(key, known, cutoff=0.8)
    if guess:
        return ConfigError(f"unknown key {key}, did you mean {guess}?", where=where, fix=f"write {guess}")
    if here:
        return ConfigError(
            f"unknown key {key}", where=where, fix=f"remove it; [{table}] has {', '.join(here)}" if table else
            f"remove it; the tables are {', '.join(f'[{name}]' for name in here)}",
        )  # fmt: skip
    return ConfigError(f"unknown key {key}", where=where, fix="remove it")


def _shown(value: Any) -> str:
    text = toml_value(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _choices(hint: Any) -> list[Any]:
    return [c for c in get_args(hint) if c != ""] if get_origin(hint) is Literal else []


def misfit(key: str, leaf: Leaf, value: Any, where: str) -> ConfigError:
    """The one line for a value that the key cannot take."""
    choices = _choices(leaf.type)
    if not choices:
        says = "a table" if leaf.is_map or leaf.says is None else leaf.says.text
        return ConfigError(f"{key} cannot be {_shown(value)}", where=where, fix=f"give {says}")
    guess = near(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
    message = f"{key} cannot be {_shown(value)}" + (f", did you mean {_shown(guess)}?" if guess else "")
    listed = ", ".join(toml_value(c) for c in choices)
    only = f"this version supports only {listed}" if len(choices) == 1 else f"this version supports {listed}"
    return ConfigError(message, where=where, fix=only)


def convert(key: str, leaf: Leaf, value: Any, where: str, problems: list[ConfigError]) -> Any:
    """`value` as the field's type. Adds to `problems`, and returns the default, where it does not fit."""
    if leaf.items is not None:
        return _convert_tables(key, leaf, value, where, problems)
    try:
        done = msgspec.convert(value, leaf.type)
        finite = not isinstance(done, float) or math.isfinite(done)
        if finite and (leaf.is_map or leaf.says is None or leaf.says.fits(done)):
            return done
    except msgspec.ValidationError:
        pass
    problems.append(misfit(key, leaf, value, where))
    return leaf.default


def _convert_tables(key: str, leaf: Leaf, value: Any, where: str, problems: list[ConfigError]) -> Any:
    assert leaf.items is not None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        names = ", ".join(leaves(leaf.items))
        problems.append(
            ConfigError(f"{key} cannot be {_shown(value)}", where=where, fix=f"give a list of tables: {names}")
        )
        return leaf.default
    return tuple(_convert_table(f"{key}[{i}]", leaf.items, item, where, problems) for i, item in enumerate(value))


def _convert_table(
    key: str, struct: type[msgspec.Struct], table: dict[str, Any], where: str, problems: list[ConfigError]
) -> Any:
    known, values = leaves(struct), {}
    for name, value in table.items():
        if name in known:
            values[name] = convert(f"{key}.{name}", known[name], value, where, problems)
            continue
        guess = near(name, known)
        hint = f", did you mean {guess}?" if guess else ""
        fix = f"write {guess}" if guess else f"remove it; it takes {', '.join(known)}"
        problems.append(ConfigError(f"unknown key {key}.{name}{hint}", where=where, fix=fix))
    return build(struct, values)
