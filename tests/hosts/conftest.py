"""The network of a test; it needs root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.hosts.net import Network, why_not


@pytest.fixture(scope="session")
def _possible() -> str:
    return why_not()


@pytest.fixture
def network(_possible: str) -> Iterator[Callable[..., Network]]:
    """``network(3, v6=True)``."""
    if _possible:
        pytest.skip(_possible)
    with ExitStack() as stack:

        def make(count: int = 3, *, v6: bool = False) -> Network:
            net = Network(count, v6=v6)
            stack.callback(net.close)
            return net

        yield make
