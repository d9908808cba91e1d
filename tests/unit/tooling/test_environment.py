"""bin/lib.sh: which interpreter, when the environment is made anew, and that a failed build leaves nothing.

A script stands in for Python, so that no package is installed: it answers the probe from a file beside it, and as
`-m venv` copies itself into the new environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
COPIED = ("bin", "pyproject.toml", "constraints.txt")

PYTHON = """#!/bin/bash
echo "$@" >>"LOG"
case "$1 $2" in
"- ")
    if [[ $0 != *.venv* ]]; then cat "FACTS$(basename "$0")"; else echo python=3.11.2 && echo "torch=$(cat "TORCH")"; fi
    ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") if [ -e "FAIL" ]; then echo "pip's own words"; exit 1; fi ;;
*download_size.py*) cat "SIZE" ;;
*purelib*) echo "${0%/bin/python}" ;;
*-packages*) echo "/its/site-packages" ;;
*rudra_zmq.tasks.data*) echo "reached the data"; exit 42 ;;
esac
"""


class Checkout:
    """A copy of what the commands read, in a folder with a blank in its name, and the stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"
        self.root.mkdir()
        for name in COPIED:
            source = REPOSITORY / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, self.root / name)
        self.said = {name: folder / name for name in ("LOG", "FACTS", "TORCH", "SIZE", "FAIL")}
        self.python = folder / "python"
        text = PYTHON
        for name, path in self.said.items():
            text = text.replace(name, str(path))
        self.python.write_text(text)
        self.python.chmod(0o755)
        self.answers()

    def answers(self, maker: str = "venv", torch: str = "-", size: str = "200000000") -> None:
        self.probed(self.python, maker, torch)
        self.said["TORCH"].write_text("2.13.0")
        self.said["SIZE"].write_text(size)

    def probed(self, python: Path, maker: str, torch: str) -> None:
        """`python` is the stand-in too, and answers this when it is probed."""
        if python != self.python:
            shutil.copy(self.python, python)
        facts = self.said["FACTS"]
        facts.with_name(facts.name + python.name).write_text(f"{python}\n{maker}\n{torch}\n")

    def run(self, *arguments: str, python: Path | None = None, path: Path | str | None = None) -> tuple[int, list[str]]:
        """Exit status and the lines of bin/quickstart. 42 means: the environment was made, the data came next.

        `python` is RUDRA_PYTHON; with `path` there is none, and that folder is the first on PATH.
        """
        env = {"PATH": f"{path or ''}:/usr/bin:/bin", "HOME": str(self.root.parent)}
        if path is None:
            env["RUDRA_PYTHON"] = str(python or self.python)
        done = subprocess.run(
            [self.root / "bin" / "quickstart", *arguments],
            env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout.splitlines()

    def built(self) -> int:
        """How many environments were made since the last call."""
        log = self.said["LOG"]
        count = log.read_text().count("-m venv") if log.exists() else 0
        log.write_text("")
        return count

    def entries(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_made_once_then_only_checked(checkout: Checkout) -> None:
    assert checkout.run()[0] == 42
    assert checkout.built() == 1
    status, lines = checkout.run()
    assert (status, lines[0]) == (42, "==> Environment: .venv is ready")
    assert "pip" not in checkout.said["LOG"].read_text()
    assert checkout.built() == 0


@pytest.mark.parametrize("change", ["dependency", "constraint", "torch", "stamp gone", "half a stamp", "python gone"])
def test_made_anew_when_what_it_came_from_changed(checkout: Checkout, change: str) -> None:
    checkout.run()
    checkout.built()
    venv = checkout.root / ".venv"
    if change == "dependency":
        path = checkout.root / "pyproject.toml"
        path.write_text(path.read_text().replace("click>=8.1", "click>=8.2"))
    elif change == "constraint":
        (checkout.root / "constraints.txt").write_text("torch==9\n")
    elif change == "torch":
        checkout.said["TORCH"].write_text("2.14.0")
    elif change == "stamp gone":
        (venv / ".rudra-stamp").unlink()
    elif change == "half a stamp":
        (venv / ".rudra-stamp").write_text("root=")
    else:
        (venv / "bin" / "python").unlink()
    assert checkout.run()[0] == 42
    assert checkout.built() == 1


def test_a_copied_environment_is_made_anew(checkout: Checkout) -> None:
    checkout.run()
    checkout.built()
    checkout.root = checkout.root.rename(checkout.root.parent / "else where")
    assert checkout.run()[0] == 42
    assert checkout.built() == 1


def test_settings_of_the_tools_change_nothing(checkout: Checkout) -> None:
    checkout.run()
    checkout.built()
    path = checkout.root / "pyproject.toml"
    assert "[tool.ruff]" in path.read_text()
    path.write_text(path.read_text().replace("[tool.ruff]", "[tool.ruff]\nfix = true"))
    assert checkout.run()[0] == 42
    assert checkout.built() == 0


def test_another_interpreter_that_was_asked_for(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run()
    checkout.built()
    other = tmp_path / "other-python"
    checkout.probed(other, "venv", "-")
    status, lines = checkout.run(python=other)
    assert (status, lines[0]) == (42, f"==> Environment: making .venv with {other}")


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ({"python3": ("venv", "-"), "python3.11": ("venv", "-")}, "python3"),
        ({"python3": ("venv", "-"), "python3.11": ("venv", "2.6.0")}, "python3.11"),
        ({"python3": ("-", "2.6.0"), "python3.11": ("virtualenv", "-")}, "python3.11"),
    ],
)
def test_the_interpreter_that_serves_best(
    checkout: Checkout, tmp_path: Path, candidates: dict[str, tuple[str, str]], chosen: str
) -> None:
    (tmp_path / "path").mkdir()
    for name, (maker, torch) in candidates.items():
        checkout.probed(tmp_path / "path" / name, maker, torch)
    _, lines = checkout.run(path=tmp_path / "path")
    assert lines[0] == f"==> Environment: making .venv with {tmp_path / 'path' / chosen}"


def test_torch_of_the_interpreter_is_used_as_it_is(checkout: Checkout) -> None:
    checkout.answers(torch="2.6.0", size="9999999999")
    status, lines = checkout.run()
    assert status == 42
    assert lines[1] == f"==>   torch 2.6.0 of {checkout.python} is used as it is"
    assert (checkout.root / ".venv" / "rudra-torch.pth").read_text() == "/its/site-packages\n"
    assert "constraints.txt torch" not in checkout.said["LOG"].read_text()


@pytest.mark.parametrize(("size", "says"), [("2740000000", "2740 MB"), ("unknown", "unknown size")])
def test_a_large_torch_with_nobody_to_ask(checkout: Checkout, size: str, says: str) -> None:
    checkout.answers(size=size)
    before = checkout.entries()
    status, lines = checkout.run()
    assert status == 1
    assert [line for line in lines if not line.startswith("==>")] == [
        f"error: torch is a download of {says}. Fix: add --yes, or set RUDRA_PYTHON to an interpreter that has "
        "torch >= 2.4"
    ]
    assert checkout.entries() == before
    assert checkout.run("--yes")[0] == 42


def test_without_ensurepip_one_line_and_nothing_left(checkout: Checkout) -> None:
    checkout.answers(maker="-")
    before = checkout.entries()
    status, lines = checkout.run()
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {checkout.python} cannot make virtual environments")
    assert "apt-get install -y python-venv" in lines[0]
    assert checkout.entries() == before


def test_no_python_that_will_do(checkout: Checkout, tmp_path: Path) -> None:
    for python in (tmp_path / "gone", Path("/bin/false")):
        status, lines = checkout.run(python=python)
        assert status == 1
        assert lines == [f"error: RUDRA_PYTHON={python} is no Python 3.10 or newer. Fix: correct or unset it"]


def by_hand(checkout: Checkout) -> Path:
    """The folder of the programs of a .venv that somebody made with Python itself."""
    made = checkout.root / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True, timeout=60)
    return made / "bin"


def test_an_activated_environment_made_by_hand_is_not_built_from_itself(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    checkout.probed(tmp_path / "path" / "python3", "venv", "2.6.0")
    path = f"{by_hand(checkout)}:{tmp_path / 'path'}"
    status, lines = checkout.run(path=path)
    assert lines[:2] == [
        "==> Environment: .venv is removed, because it is not one that this script finished",
        f"==> Environment: making .venv with {tmp_path / 'path' / 'python3'}",
    ]
    assert status == 42
    assert checkout.run(path=path)[1][0] == "==> Environment: .venv is ready"


def test_an_interpreter_of_the_environment_is_not_taken_through_a_link(checkout: Checkout, tmp_path: Path) -> None:
    link = tmp_path / "linked"
    link.symlink_to(by_hand(checkout) / "python3")
    status, lines = checkout.run(python=link)
    assert (status, (checkout.root / ".venv").exists()) == (1, True)
    assert lines == [f"error: RUDRA_PYTHON={link} is no Python 3.10 or newer. Fix: correct or unset it"]


def test_rudra_python_in_the_environment_itself(checkout: Checkout) -> None:
    python = by_hand(checkout) / "python3"
    status, lines = checkout.run(python=python)
    assert (status, python.exists()) == (1, True)
    assert lines == [
        f"error: RUDRA_PYTHON={python} is in .venv itself, which is made anew. Fix: unset it, or name the one outside"
    ]


def test_a_failed_install_leaves_nothing(checkout: Checkout) -> None:
    before = checkout.entries()
    checkout.said["FAIL"].touch()
    status, lines = checkout.run()
    assert status == 1
    assert lines[-2] == "pip's own words"
    assert lines[-1].startswith("error: ")
    assert checkout.entries() == before


def test_an_unknown_argument(checkout: Checkout) -> None:
    assert checkout.run("--fast") == (2, ["error: unknown argument --fast. Fix: bin/quickstart --help"])


@pytest.mark.parametrize("name", ["rudra", "psd", "learnerd"])
def test_the_shims_name_what_is_missing(name: str, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "bin", tmp_path / "bin", symlinks=True)
    done = subprocess.run([tmp_path / "bin" / name], capture_output=True, text=True, timeout=20, check=False)
    program = tmp_path / ".venv" / "bin" / name
    assert done.returncode == 1
    assert done.stderr == f"error: {program} is not there. Fix: {tmp_path}/bin/quickstart\n"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$(basename "$0"):$1"\n')
    program.chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "bin" / name)
    done = subprocess.run([tmp_path / "bin" / name, "a b"], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == f"{name}:a b\n"
