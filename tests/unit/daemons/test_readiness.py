"""What a job needs and a host lacks: every line of the table, all of them at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rudra_zmq.config import job_from_toml
from rudra_zmq.config.host import HostSection
from rudra_zmq.daemons.readiness import interpreter, problems


def job(text: str):  # type: ignore[no-untyped-def]
    return job_from_toml(text, name="x").job


@pytest.mark.parametrize(
    ("text", "host", "expected"),
    [
        ("", HostSection(), sys.executable),
        ("python = '/opt/p'", HostSection(), "/opt/p"),
        ("python = 'ml'", HostSection(python={"ml": "/opt/ml"}), "/opt/ml"),
        ("python = 'ml'", HostSection(python={"other": "/opt/ml"}), ""),
    ],
)
def test_the_interpreter_is_the_hosts_own(text: str, host: HostSection, expected: str) -> None:
    assert interpreter(job(f"[run]\nscript = '/x.py'\n{text}"), host) == expected


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    text = (
        "[run]\nscript = '/no/train.py'\npython = 'ml'\ncwd = '/no/folder'\n"
        "args = ['--in={path:in}', '{path:gone}', '{path:in}']\n"
    )
    host = HostSection(paths={"gone": str(tmp_path / "gone")})
    assert problems(job(text), "/", host) == [
        'python.ml is not set here. Fix: add python.ml = "/.../bin/python" to [host]',
        "run.cwd: there is no folder /no/folder. Fix: make it, or set run.cwd",
        "run.script: there is no file /no/train.py. Fix: put it there, or correct run.script",
        'paths.in is not set here. Fix: add paths.in = "/..." to [host]',
        f"paths.gone: there is no {tmp_path / 'gone'}. Fix: correct it, or mount it",
    ]


def test_a_host_that_has_it_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    text = f"[run]\nscript = '{tmp_path}/train.py'\npython = 'ml'\nargs = ['{{path:in}}']\n"
    host = HostSection(python={"ml": sys.executable}, paths={"in": str(tmp_path)})
    assert problems(job(text), str(tmp_path), host) == []


def test_an_interpreter_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    (line,) = problems(job("[run]\nmodule = 'm'\npython = 'ml'"), "/", HostSection(python={"ml": f"{tmp_path}/python"}))
    assert line == f"python.ml: there is no interpreter {tmp_path}/python. Fix: correct it, or install it there"
