"""The man pages are made of the texts that people read elsewhere, and are in order."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rudra_zmq.cli.base import COMMANDS
from rudra_zmq.config import RudraToml
from rudra_zmq.config.schema import leaves

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("learnerd.8", "psd.8", "rudra.1", "rudra.toml.5")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, ROOT / "bin/manpages.py", folder], check=True, env={"PYTHONPATH": str(ROOT)})
    assert sorted(page.name for page in folder.iterdir()) == sorted(PAGES)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_mandoc_has_nothing_to_say(pages: Path, page: str) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("there is no mandoc. Fix: apt-get install mandoc")
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "all", pages / page], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def rendered(pages: Path, page: str) -> str:
    """As `man` would show it, on lines as long as they come."""
    if shutil.which("mandoc") is None:
        pytest.skip("there is no mandoc. Fix: apt-get install mandoc")
    command = ["mandoc", "-T", "ascii", "-O", "width=500", pages / page]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join("".join(c for i, c in enumerate(text) if c != "\b" and text[i + 1 : i + 2] != "\b").split())


def test_every_command_and_every_setting_is_there(pages: Path) -> None:
    commands = rendered(pages, "rudra.1")
    for name in COMMANDS:
        assert f"rudra {name} " in commands
    assert "Reload" not in commands and "--follow Watch it to its end; Ctrl-C detaches." in commands
    settings = (pages / "rudra.toml.5").read_text()
    for key in leaves(RudraToml):
        section, _, name = key.partition(".")
        assert f"[{section}]" in settings and f"\\fB{name} = " in settings.replace("\\-", "-"), key


def test_exit_statuses_of_daemons_are_those_of_services(pages: Path) -> None:
    text = rendered(pages, "psd.8")
    assert " 78 a command line that cannot be meant" in text and " 2 understood and refused" in text
    assert "--listen ADDRESS" in text and "RELOADING" not in text
