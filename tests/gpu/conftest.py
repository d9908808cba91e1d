"""The device that these tests run on; without one they are skipped, and one line says why."""

from __future__ import annotations

import functools

import pytest

from rudra_zmq.errors import RudraError
from rudra_zmq.update.cuda import Device


@functools.cache
def _found() -> Device | str:
    try:
        return Device(0)
    except RudraError as error:
        return str(error)


def pytest_runtest_setup(item: pytest.Item) -> None:
    found = _found()
    if isinstance(found, str):
        pytest.skip(found)  # from one place, so that the summary has one line for all


@pytest.fixture
def device() -> Device:
    found = _found()
    assert isinstance(found, Device)
    return found
