"""Keys set in a file that a person wrote: what else is in it stays, and what cannot be done is not half done."""

from __future__ import annotations

import pytest

from rudra_zmq.config.edit import with_values
from rudra_zmq.errors import ConfigError

VALUES = {"head.address": "tcp://a:1", "head.key": "k"}
LINES = 'key = "k"\naddress = "tcp://a:1"\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", '[head]\nkey = "k"\naddress = "tcp://a:1"\n'),
        (
            "# mine\n[log]\nlevel = 'debug'\n",
            '# mine\n[log]\nlevel = \'debug\'\n\n[head]\nkey = "k"\naddress = "tcp://a:1"\n',
        ),
        ("[head] # where\naddress = 'x' # old\n[log]\n", '[head] # where\nkey = "k"\naddress = "tcp://a:1"\n[log]\n'),
    ],
)
def test_lines_are_added_or_replaced(before: str, after: str) -> None:
    assert with_values(before, VALUES, "f") == after
    assert with_values(after, VALUES, "f") == after


@pytest.mark.parametrize(
    "before", ["head = {address = 'x'}\n", "head.address = 'x'\n", '[head]\naddress = """\nx"""\n']
)
def test_what_cannot_be_changed_by_lines_is_left_alone(before: str) -> None:
    with pytest.raises(ConfigError, match=r"set head\.address = "):
        with_values(before, VALUES, "f")
