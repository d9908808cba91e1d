"""Where each parameter and buffer of a model lies in its flat vector; the difference of two signatures.

Owns the arithmetic of the layout alone. Must not know NumPy, torch or who holds the memory.

    bytes of a vector      [float32 * P][float32 * BF][pad to 8][int64 * BI]

P counts the elements of all parameters in the order of ``named_parameters()``, BF those of the floating
buffers, BI those of the integer and boolean ones. Whatever a tensor's dtype, it travels as float32 or int64.

    >>> from rudra_zmq.wire.messages.data import Attach, TensorSpec
    >>> a = Attach(params=[TensorSpec("w", [2, 3], "float32"), TensorSpec("b", [3], "float32")],
    ...            int_buffers=[TensorSpec("steps", [], "int64")])
    >>> layout = Layout.of(a)
    >>> layout.P, layout.BF, layout.BI, layout.int_offset, layout.nbytes
    (9, 0, 1, 40, 48)
    >>> layout.params[1]
    Slice(name='b', shape=(3,), dtype='float32', start=6, stop=9)
    >>> diff(a, Attach(params=[TensorSpec("w", [2, 4], "float32"), TensorSpec("b", [3], "float32")]))
    ['parameter w: shape [2, 3] here, [2, 4] there', 'integer buffer steps: here alone']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rudra_zmq.errors import Rejected
from rudra_zmq.wire.messages.data import Attach, TensorSpec

MAX_ELEMENTS = 1 << 40
RESERVED = "__metadata__"  # in the header of a safetensors file
SMALLER = "train a smaller model"
_LIMIT = 12  # lines of a diff; the rest is counted

PARAMETER_DTYPES = frozenset({"float32", "float16", "bfloat16", "float64"})
INTEGER_DTYPES = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})


@dataclass(frozen=True, slots=True)
class Slice:
    """One tensor: elements [start, stop) of its own part (parameters, float buffers or integer buffers)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a model's vectors. ``P``, ``BF``, ``BI`` in elements; ``int_offset``, ``nbytes`` in bytes."""

    params: tuple[Slice, ...]
    float_buffers: tuple[Slice, ...]
    int_buffers: tuple[Slice, ...]
    P: int
    BF: int
    BI: int

    @property
    def int_offset(self) -> int:
        """Byte at which the integer buffers begin: the next multiple of 8."""
        return (4 * (self.P + self.BF) + 7) // 8 * 8

    @property
    def nbytes(self) -> int:
        """Bytes of a vector: parameters and buffers."""
        return self.int_offset + 8 * self.BI if self.BI else 4 * (self.P + self.BF)

    @classmethod
    def of(cls, attach: Attach) -> Layout:
        """The layout of a signature. Raises Rejected, with the tensor's name, where there is none."""
        seen: set[str] = set()
        params, count = _place(attach.params, "parameter", PARAMETER_DTYPES, seen)
        floats, float_count = _place(attach.float_buffers, "buffer", PARAMETER_DTYPES, seen)
        ints, int_count = _place(attach.int_buffers, "integer buffer", INTEGER_DTYPES, seen)
        if not count:
            raise Rejected("the model has no parameters", fix="attach a model with something to train")
        if (elements := count + float_count + int_count) > MAX_ELEMENTS:
            raise Rejected(f"the model has {elements} elements, more than {MAX_ELEMENTS}", fix=SMALLER)
        aliases: set[str] = set()
        for alias, name in attach.tied:
            if name not in seen or alias in seen or alias in aliases:
                fix = "give each other name of a tensor once"
                raise Rejected(f"tied name {alias} stands for {name}: one is unknown, or the other taken", fix=fix)
            aliases.add(_named("tied name", alias))
        trained = {one.name for one in params}
        for name in attach.frozen:
            if name not in trained:
                raise Rejected(f"frozen parameter {name} is no parameter of the model", fix="freeze what is there")
        return cls(params, floats, ints, count, float_count, int_count)


def _place(
    specs: Sequence[TensorSpec], what: str, dtypes: frozenset[str], seen: set[str]
) -> tuple[tuple[Slice, ...], int]:
    slices = []
    at = 0
    for spec in specs:
        if _named(what, spec.name) in seen:
            raise Rejected(f"{what} {spec.name} is named twice", fix="give each tensor a name of its own")
        if spec.dtype not in dtypes:
            fix = f"use one of {', '.join(sorted(dtypes))}"
            raise Rejected(f"{what} {spec.name} has dtype {spec.dtype}", fix=fix)
        seen.add(spec.name)
        size = 1
        for n in spec.shape:
            size *= n
        if at + size > MAX_ELEMENTS:
            raise Rejected(f"{what} {spec.name} takes the model past {MAX_ELEMENTS} elements", fix=SMALLER)
        slices.append(Slice(spec.name, tuple(spec.shape), spec.dtype, at, at + size))
        at += size
    return tuple(slices), at


def _named(what: str, name: str) -> str:
    if not name or not name.isprintable() or name == RESERVED:
        fix = "give it a printable name that safetensors files have no use for"
        raise Rejected(f"{what} {name!r} has no name that can be written", fix=fix)
    return name


def diff(here: Attach, there: Attach) -> list[str]:
    """How two signatures differ: a line per tensor, at most a dozen and the number of the rest; [] if equal.

    ``here`` is the one that the reader of the lines has (the refused learner's), ``there`` the job's.
    """
    lines: list[str] = []
    for what, a, b in (
        ("parameter", here.params, there.params),
        ("buffer", here.float_buffers, there.float_buffers),
        ("integer buffer", here.int_buffers, there.int_buffers),
    ):
        lines += _diff_list(what, a, b)
    if not lines and sorted(here.tied) != sorted(there.tied):
        lines.append("tied parameters: " + _ties(here) + " here, " + _ties(there) + " there")
    if not lines and sorted(here.frozen) != sorted(there.frozen):
        lines.append("frozen parameters: " + _some(here.frozen) + " here, " + _some(there.frozen) + " there")
    if len(lines) > _LIMIT:
        lines[_LIMIT:] = [f"and {len(lines) - _LIMIT} more"]
    return lines


def _diff_list(what: str, here: Sequence[TensorSpec], there: Sequence[TensorSpec]) -> list[str]:
    theirs = {spec.name: spec for spec in there}
    ours = {spec.name for spec in here}
    lines = []
    for spec in here:
        other = theirs.get(spec.name)
        if other is None:
            lines.append(f"{what} {spec.name}: here alone")
        elif list(spec.shape) != list(other.shape):
            lines.append(f"{what} {spec.name}: shape {list(spec.shape)} here, {list(other.shape)} there")
        elif spec.dtype != other.dtype:
            lines.append(f"{what} {spec.name}: {spec.dtype} here, {other.dtype} there")
    lines += [f"{what} {spec.name}: there alone" for spec in there if spec.name not in ours]
    if not lines:
        for i, (a, b) in enumerate(zip(here, there, strict=False)):
            if a.name != b.name:
                return [f"{what}s in another order from number {i} on: {a.name} here, {b.name} there"]
    return lines


def _ties(attach: Attach) -> str:
    return _some([f"{alias}={name}" for alias, name in attach.tied])


def _some(names: Sequence[str]) -> str:
    return (", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")) or "none"
