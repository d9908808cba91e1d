"""Fake nodes and learners' exchanges that are closed at the end of each test, whatever became of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.learner.remote import RemoteExchange
from rudra_zmq.learner.spec import LearnerSpec
from tests.net.learner.fake_node import TOML, FakeNode


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: socket paths are limited."""
    path = Path(tempfile.mkdtemp(prefix="ln"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def node(folder: Path) -> Iterator[FakeNode]:
    found = FakeNode(folder)
    yield found
    found.close()
    assert not found.failures, found.failures


@pytest.fixture
def spec(folder: Path) -> LearnerSpec:
    return spec_in(folder)


def spec_in(folder: Path, **other: Any) -> LearnerSpec:
    fields: dict[str, Any] = {
        "job": "ab12cd", "rank": 0, "incarnation": 1, "role": "learner", "token": "t", "threads": 1, "host": "here",
        "node_file": str(folder / "node.json"), "log": str(folder / "learner.log"), "output": str(folder),
        "toml": TOML, "cwd": str(folder), "ppid": os.getppid(),
    }  # fmt: skip
    return LearnerSpec(**{**fields, **other})


@pytest.fixture
def connect(spec: LearnerSpec) -> Iterator[Callable[..., RemoteExchange]]:
    made: list[RemoteExchange] = []

    def make(spec: LearnerSpec = spec, give_up_s: float = 10.0) -> RemoteExchange:
        made.append(RemoteExchange(spec, give_up_s=give_up_s))
        return made[-1]

    yield make
    for exchange in made:
        exchange.close()
