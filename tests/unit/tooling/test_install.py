"""What bin/rudra-install refuses, and that a dry run does nothing. tests/hosts installs with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = Path(__file__).resolve().parents[3] / "bin/rudra-install"


def install(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([INSTALL, *args], env=kept | env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--nonsense"], "unknown argument --nonsense"),
        (["--prefix"], "--prefix needs a folder"),
        (["--prefix", "here"], "absolute paths"),
        (["--purge", "--dry-run"], "--purge goes with --uninstall"),
        (["--uninstall", "--dry-run", "--prefix", "/nowhere/at/all"], "nothing was installed there"),
    ],
)
def test_what_cannot_be_meant_is_one_line(args: list[str], text: str) -> None:
    done = install(*args)
    assert done.returncode in (1, 2) and done.stderr.count("\n") == 1, done.stderr
    assert text in done.stderr and "Fix: " in done.stderr


def test_an_interpreter_that_others_cannot_run_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    python = home / "python3"
    # An interpreter whose own files lie in a home: sys.base_prefix says where.
    python.write_text(f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo {home}; else printf '%s\\n' {python} venv -; fi\n")
    python.chmod(0o755)
    done = install("--dry-run", RUDRA_PYTHON=str(python), DESTDIR=str(tmp_path / "dest"))
    assert done.returncode == 1 and "other users may not enter" in done.stderr and "Fix: " in done.stderr


def test_a_dry_run_says_everything_and_does_nothing(tmp_path: Path) -> None:
    python = sys.executable
    if any(not os.stat(folder).st_mode & 0o001 for folder in Path(sys.base_prefix).resolve().parents):
        python = "/usr/bin/python3"
    done = install("--dry-run", "--torch", RUDRA_PYTHON=python, DESTDIR=str(tmp_path / "dest"))
    if "cannot make virtual environments" in done.stderr:
        pytest.skip("no interpreter here is every user's and can make environments. Fix: apt-get install python3-venv")
    assert done.returncode == 0, done.stderr
    for path in ("/usr/local/lib/systemd/system/rudra-psd.service", "/usr/local/bin/rudra", "/etc/rudra/rudra.toml"):
        assert str(tmp_path / "dest") + path in done.stdout
    assert "and torch" in done.stdout and not (tmp_path / "dest").exists()
