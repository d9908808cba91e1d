"""Fixtures of the end-to-end tests: a CLI with a home of its own, checked for left-overs."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Rudra, child_env


@pytest.fixture
def rudra(tmp_path: Path) -> Iterator[Rudra]:
    """``rudra(...)`` as a user of this machine would type it; at the end nothing may be left running."""
    home = tmp_path / "home"
    home.mkdir()
    with tempfile.TemporaryDirectory(prefix="rz-") as runtime:  # short: paths of Unix sockets are
        os.chmod(runtime, 0o700)
        cli = Rudra(home, child_env(home, Path(runtime)))
        yield cli
        left = cli.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        sockets = [str(p) for p in Path(runtime).rglob("*") if not p.is_dir()]
    assert not left, f"left running: {left}"
    assert not sockets, f"left behind: {sockets}"
