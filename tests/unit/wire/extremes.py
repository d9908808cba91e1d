"""Well-formed messages whose fields lie at their limits, or next to them: what no check of the codec keeps out."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

NARROW = 8  # items of the lists and maps that are drawn


def extreme(cls: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a message or record; ``fields`` are drawn otherwise."""
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    return st.builds(cls, **({field.name: of(field.type) for field in info.fields} | fields))


def of(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a type."""
    match info:
        case msgspec.inspect.IntType(ge=int() as low, le=int() as high):
            return st.sampled_from(sorted({n for n in (low, low + 1, high // 2, high - 1, high) if low <= n <= high}))
        case msgspec.inspect.FloatType(ge=None, le=None):
            return st.sampled_from(
                [0.0, -0.0, 1.0, -1.8e308, 1.8e308, 5e-324, float("inf"), float("-inf"), float("nan")]
            )
        case msgspec.inspect.FloatType(ge=low, le=high):
            return st.sampled_from([float(low or 0), 5e-324, 1.0, float(high or 0) / 2, float(high or 0)])
        case msgspec.inspect.StrType(pattern=str()):
            return st.sampled_from(["000000", "ffffff"])
        case msgspec.inspect.StrType(max_length=most) if most:
            most = min(most, 5000)
            return st.sampled_from(["", "x", "x" * most, "\0" * most, "\U0001f642" * min(most, 300), "a\nb", "../.."])
        case msgspec.inspect.BytesType(min_length=least, max_length=most):
            return st.sampled_from([bytes(least or 0), b"\xff" * min(most or 4096, 4096)])
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case msgspec.inspect.StructType(cls=cls):
            return extreme(cls)
    return compound(info)


def compound(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.ListType(item_type=item, min_length=least):
            return st.lists(of(item), min_size=least or 0, max_size=NARROW) | of(item).map(lambda one: [one] * NARROW)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of(key), of(value), max_size=NARROW)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(of, items))
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(of, types))
    raise AssertionError(f"no strategy for {info}")
