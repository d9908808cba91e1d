"""Every field has a limit: no text, list, map or number of a message is without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from rudra_zmq.wire.messages import control, data

MESSAGES = [*get_args(data.ToNode), *get_args(data.FromNode), *get_args(control.Control), control.Envelope]

# Figures for people: a loss that ran away must be shown as what it is, a metric may be anything.
FREE = {"train_loss", "accuracy", "test_error", "loss", "metrics", "staleness_mean", "staleness_p95", "lr", "overlap",
        "samples_per_s", "updates_per_s"}  # fmt: skip


def unlimited(info: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Paths of what has no limit of its own, or is no type for a message at all."""
    if isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        free = isinstance(info, msgspec.inspect.FloatType) and path.split()[0].rpartition(".")[2] in FREE
        limited = free or (info.ge is not None and info.le is not None)
    elif isinstance(info, msgspec.inspect.StrType):
        limited = info.max_length is not None or info.pattern is not None
    elif isinstance(info, msgspec.inspect.BytesType | msgspec.inspect.ListType | msgspec.inspect.DictType):
        limited = info.max_length is not None
    else:
        limited = isinstance(info, PARTS | SIMPLE)
    if not limited:
        yield path
    for part, at in parts(info, path):
        yield from unlimited(part, at)


PARTS = msgspec.inspect.TupleType | msgspec.inspect.UnionType | msgspec.inspect.StructType
SIMPLE = msgspec.inspect.BoolType | msgspec.inspect.NoneType | msgspec.inspect.LiteralType


def parts(info: msgspec.inspect.Type, path: str) -> Iterator[tuple[msgspec.inspect.Type, str]]:
    match info:
        case msgspec.inspect.ListType(item_type=item):
            yield item, f"{path}[]"
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            yield key, f"{path} key"
            yield value, f"{path} value"
        case msgspec.inspect.TupleType(item_types=items):
            yield from ((item, path) for item in items)
        case msgspec.inspect.UnionType(types=types):
            yield from ((item, path) for item in types)
        case msgspec.inspect.StructType(fields=fields, cls=cls):
            yield from ((field.type, f"{cls.__name__}.{field.name}") for field in fields)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_field_has_a_limit(message: type) -> None:
    assert list(unlimited(msgspec.inspect.type_info(message), message.__name__)) == []


def test_a_field_without_one_would_be_found() -> None:
    class Loose(msgspec.Struct):
        text: str
        rows: list[dict[data.Short, int]]

    found = list(unlimited(msgspec.inspect.type_info(Loose), "Loose"))
    assert found == ["Loose.text", "Loose.rows", "Loose.rows[]", "Loose.rows[] value"]
