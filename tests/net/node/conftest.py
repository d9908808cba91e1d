"""Nodes for the tests of this folder, ended with them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.net.node.rig import Rig


@pytest.fixture
def rig_of() -> Iterator[Callable[..., Rig]]:
    """Makes a node of a job file; a short folder, since the paths of sockets are short."""
    rigs: list[Rig] = []
    folders: list[tempfile.TemporaryDirectory[str]] = []

    def make(text: str, start: bool = True, **spec: Any) -> Rig:
        folders.append(tempfile.TemporaryDirectory(prefix="n"))
        rig = Rig(Path(folders[-1].name), text, **spec)
        rigs.append(rig)
        if start:
            rig.start()
        return rig

    yield make
    for rig in rigs:
        rig.close()
    for folder in folders:
        folder.cleanup()
