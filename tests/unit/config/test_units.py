"""Durations and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.config import parse_duration, parse_size
from rudra_zmq.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("60s", 60.0),
        ("0s", 0.0),
        ("10m", 600.0),
        ("1.5h", 5400.0),
        ("1h30m", 5400.0),
        ("2d3h4m5s6ms", 2 * 86400 + 3 * 3600 + 245.006),
        ("1m1ms", 60.001),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(
    "text",
    ["", "60", "s", "-1s", "1 s", "1s ", "1S", "1m1h", "1s1s", "1e3s", ".5s", "1.s", "٣s", "1" * 50 + "s", "1s\n"],
)
def test_no_durations(text: str) -> None:
    with pytest.raises(ConfigError, match=r'is not a duration\. Fix: write it as "250ms", "60s" or "1h30m"$'):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512B", 512),
        ("0B", 0),
        ("1KiB", 1024),
        ("64MiB", 64 * 2**20),
        ("64 MiB", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("1kB", 1000),
        ("10MB", 10_000_000),
        ("1GB", 10**9),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "64", "MiB", "-1B", "1kib", "1MIB", "1B2B", "٣MB", "1" * 50 + "B", "1B\n"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match=r'is not a size\. Fix: write it as "64MiB", "2GiB" or "10MB"$'):
        parse_size(text)


@given(st.text(max_size=60))
def test_any_text_is_a_number_or_a_config_error(text: str) -> None:
    for parse in (parse_duration, parse_size):
        try:
            assert parse(text) >= 0
        except ConfigError as error:
            assert "\n" not in str(error)
