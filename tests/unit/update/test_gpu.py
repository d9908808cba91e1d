"""The update on a GPU without one: its kernels made into functions of the CPU, under a stand-in for CuPy.

The real twin of every test here is the one of the same name in tests/gpu/test_update.py.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rudra_zmq.update.cuda import Device
from tests.cuda import fake_cupy
from tests.cuda.cases import *  # noqa: F403


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    if fake_cupy.COMPILER is None:
        pytest.skip("no g++ here, which makes the kernels into functions of the CPU")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.module())
    return Device(0)
