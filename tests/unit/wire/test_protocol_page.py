"""docs/PROTOCOL.rst against the code, field by field, both ways: names, types, limits, defaults, who may say what."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from rudra_zmq import errors
from rudra_zmq.wire import codec, seal
from rudra_zmq.wire.messages import control, data

PAGE = Path(__file__).parents[3] / "docs" / "PROTOCOL.rst"

NAMED: dict[str, Any] = {
    "flag": bool,
    "count": data.Count,
    "rank": data.Rank,
    "number": float,
    "seconds": data.Seconds,
    "time": control.Time,
    "factor": data.Factor,
    "short": data.Short,
    "text": data.Text,
    "toml": control.Toml,
    "jobid": control.JobId,
    "spans": data.SpanList,
    "state": control.JobState,
}

# ----------------------------------------------------------------------------------- what the code says


def spell(info: inspect.Type) -> str:
    """A type and its limits, as the page writes them."""
    for name, named in NAMED.items():
        if info == inspect.type_info(named):
            return name
    return bare(info)


def bare(info: inspect.Type) -> str:
    """The same without the names of the page's own types."""
    match info:
        case inspect.BoolType():
            return "boolean"
        case inspect.IntType(ge=low, le=high):
            return f"integer {low} to {high}"
        case inspect.FloatType(ge=None, le=None):
            return "float"
        case inspect.FloatType(ge=low, le=high):
            return f"float {low:g} to {high:g}"
        case inspect.StrType(pattern=str() as pattern):
            return f"string {pattern}"
        case inspect.StrType(max_length=most):
            return f"string, {most} characters"
        case inspect.BytesType(max_length=most):
            return f"{most} bytes"
        case inspect.NoneType():
            return "nil"
        case inspect.LiteralType(values=values):
            return " | ".join(sorted(map(str, values)))
        case inspect.StructType(cls=cls):
            return cls.__name__
    return compound(info)


def compound(info: inspect.Type) -> str:
    match info:
        case inspect.ListType(item_type=item, min_length=least, max_length=most):
            return f"{f'{least} to ' if least else ''}{most} x {spell(item)}"
        case inspect.DictType(key_type=key, value_type=value, max_length=most):
            return f"{most} x {spell(key)}: {spell(value)}"
        case inspect.TupleType(item_types=items):
            return f"[{', '.join(map(spell, items))}]"
        case inspect.UnionType(types=types):
            return " or ".join(sorted(map(spell, types), key=lambda word: word == "nil"))
    raise AssertionError(f"the page has no words for {info}")


def named_types() -> list[tuple[str, str]]:
    """The page's own types; the words of ``state`` have a part of their own."""
    return [
        (name, "string, see Job states" if name == "state" else bare(inspect.type_info(named)))
        for name, named in NAMED.items()
    ]


def default(field: inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return {list: "[]", dict: "{}"}[field.default_factory]
    if field.default is msgspec.NODEFAULT:
        return ""
    if field.default is None:
        return "nil"
    return f'"{field.default}"' if isinstance(field.default, str) else str(field.default).lower()


def fields_of(cls: type) -> list[tuple[str, str, str]]:
    """Name, type and default of each field."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return [(field.name, spell(field.type), default(field)) for field in info.fields]


def tags(union: Any) -> set[str]:
    return {f"{cls.__struct_config__.tag}" for cls in get_args(union)}


MESSAGES = {
    f"{cls.__struct_config__.tag}": cls
    for union in (data.ToNode, data.FromNode, control.Control)
    for cls in get_args(union)
}
RECORDS = {
    cls.__name__: cls
    for module in (data, control)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct) and cls not in {data.Message, *MESSAGES.values()}
}

# ----------------------------------------------------------------------------------- what the page says


class Page:
    """Sections by title, with the tables and the part that they stand in."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tables: dict[str, list[list[str]]] = {}
        self.parts: dict[str, list[str]] = {}  # title of a part -> titles in it
        title = part = ""
        lines = text.splitlines()
        for i, line in enumerate(lines):
            if i and re.fullmatch(r"(=+|-+)", line) and len(line) == len(lines[i - 1]) and line[0] in "=-":
                title = lines[i - 1].strip("`")
                if line[0] == "=":
                    part = title
                else:
                    assert title not in self.parts.get(part, []), f"{title} stands there twice"
                    self.parts.setdefault(part, []).append(title)
            elif re.fullmatch(r"=+(  =+)+", line) and title not in self.tables:
                self.tables[title] = table(lines[i:])

    def body(self, title: str) -> str:
        """The text of a part without sections."""
        return self.text.split(f"\n{title}\n{'=' * len(title)}\n", 1)[1].split("\n===", 1)[0]

    def rows(self, title: str) -> list[list[str]]:
        return self.tables.get(title, [])


def table(lines: list[str]) -> list[list[str]]:
    """Cells of a simple table whose first line is ``lines[0]``, without its head."""
    starts = [match.start() for match in re.finditer(r"=+", lines[0])]
    ends = next((i for i, line in enumerate(lines) if not line), len(lines))
    bars = [i for i, line in enumerate(lines[:ends]) if line == lines[0]]
    spans = list(zip(starts, [*starts[1:], None], strict=True))
    return [[line[start:stop].strip() for start, stop in spans] for line in lines[bars[-2] + 1 : bars[-1]]]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(PAGE.read_text("utf-8"))


def described(page: Page) -> dict[str, list[tuple[str, str, str]]]:
    titles = [title for part in page.parts.values() for title in part]
    return {title: [(row[0], row[1], row[2]) for row in page.rows(title)] for title in titles}


@pytest.mark.parametrize("tag", MESSAGES)
def test_each_message(page: Page, tag: str) -> None:
    assert described(page).get(tag) == fields_of(MESSAGES[tag])


@pytest.mark.parametrize("name", RECORDS)
def test_each_record(page: Page, name: str) -> None:
    assert described(page).get(name) == fields_of(RECORDS[name])


def test_the_page_describes_nothing_else(page: Page) -> None:
    with_fields = {title for title, rows in described(page).items() if rows}
    assert with_fields <= {*MESSAGES, *RECORDS}
    assert {title for title in described(page) if title not in {*MESSAGES, *RECORDS}} == set()


def test_every_field_has_a_meaning(page: Page) -> None:
    for title in [*MESSAGES, *RECORDS]:
        for row in page.rows(title):
            assert len(row) == 4 and row[3], f"{title}.{row[0]}"


def test_who_may_say_what(page: Page) -> None:
    both = set(page.parts["Both ways"])
    assert set(page.parts["From a learner to the node"]) | both == tags(data.ToNode)
    assert set(page.parts["From the node to a learner"]) | both == tags(data.FromNode)
    on_control = [title for part, titles in page.parts.items() if part.startswith("Control:") for title in titles]
    assert set(on_control) & set(MESSAGES) == tags(control.Control)


def test_types(page: Page) -> None:
    assert [(row[0], row[1]) for row in page.rows("Types")] == named_types()


def test_errors(page: Page) -> None:
    ours = {code: str(cls.exit_status) for code, cls in errors.CLASSES.items()}
    assert {row[0]: row[1] for row in page.rows("Errors")} == ours


def test_reasons(page: Page) -> None:
    assert [row[0] for row in page.rows("What is dropped")] == list(codec.REASONS)


def test_reasons_at_the_bulk_port(page: Page) -> None:
    assert [row[0].strip("`") for row in page.rows("Encryption")] == list(seal.REASONS)


def test_job_states(page: Page) -> None:
    assert set(re.findall(r"[A-Z]{4,}", page.body("Job states"))) == set(get_args(control.JobState))


def test_figures(page: Page) -> None:
    from rudra_zmq.net.sockets import WINDOW

    assert {row[0]: row[1] for row in page.rows("Frames")} == {
        "protocol": str(codec.PROTOCOL),
        "accepted": ", ".join(map(str, sorted(codec.ACCEPTED))),
        "payload of a chunk": str(codec.CHUNK),
        "frame 0, data plane": str(codec.MAX_HEADER),
        "frame, control plane": str(codec.MAX_CONTROL),
        "credit": str(WINDOW),
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [("epoch ", "epoxh "), ("count", "short"), ("  0  ", "  1  "), ("``log``", "``lag``")],
    ids=["name", "type", "default", "message"],
)
def test_a_difference_would_be_found(page: Page, old: str, new: str) -> None:
    start = page.text.index("\n``log``\n")
    changed = page.text[:start] + page.text[start:].replace(old, new, 1)
    assert described(Page(changed)).get("log") != fields_of(data.Log)
