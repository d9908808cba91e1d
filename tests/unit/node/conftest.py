"""Stages of this folder's tests, closed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.node.stage import Stage

RULE = 'rule = "sgd"\nlr = 0.5\nschedule = {kind = "constant"}'


@pytest.fixture
def stage_of(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Makes a lead of a job file's parts."""
    stages: list[Stage] = []

    def make(
        *,
        count: int = 2,
        protocol: str = "hardsync",
        epochs: int = 2,
        minibatch: int = 4,
        job: str = "",
        learners: str = "",
        sync: str = "",
        update: str = RULE,
        snapshot: str = "none",
        servers: str = "",
        task: bool = False,
        **spec: Any,
    ) -> Stage:
        target = 'task = "no.such:task"' if task else ""
        run = "" if task else '[run]\nscript = "train.py"'
        text = f"""
[job]
name = "stage"
epochs = {epochs}
{target}
{job}
{run}
[learners]
count = {count}
minibatch = {minibatch}
{learners}
[sync]
protocol = "{protocol}"
{sync}
[update]
{update}
[servers]
snapshot = "{snapshot}"
{servers}
"""
        stages.append(Stage(tmp_path, text, **spec))
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()
