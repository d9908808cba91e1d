"""The outer shape of the command line: help, usage errors, exit statuses, streams that are closed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from rudra_zmq import commands
from rudra_zmq.cli.base import COMMANDS
from rudra_zmq.cli.main import main

GROUPS = {"config": ["check", "show"], "keys": ["new", "authorize", "revoke", "list"]}


def help_of(capsys: pytest.CaptureFixture[str], *path: str) -> list[str]:
    assert main([*path, "--help"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("simulate", "bench")])  # their own processes
def test_help_begins_with_an_example(capsys: pytest.CaptureFixture[str], name: str) -> None:
    for path in ([name], *([name, part] for part in GROUPS.get(name, []))):
        lines = help_of(capsys, *path)
        assert lines[0].startswith(f"Usage: rudra {' '.join(path)}") and lines[1] == ""
        assert lines[2].strip().startswith("rudra "), lines[:4]
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("package", "paths"), [("sim", [[]]), ("bench", [[], ["update"]])])
def test_help_of_commands_that_are_processes_of_their_own(
    capsys: pytest.CaptureFixture[str], package: str, paths: list[list[str]]
) -> None:
    run = importlib.import_module(f"rudra_zmq.{package}.__main__").main
    for path in paths:
        assert run([*path, "--help"]) == 0
        usage, empty, example, *_ = capsys.readouterr().out.splitlines()
        assert usage.startswith("Usage: rudra ") and empty == ""
        assert example.strip().startswith("rudra ")
    assert run(["--nosuch"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rudra: ") and err.count("\n") == 1 and ". Fix: `rudra " in err


def test_the_table_of_commands_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(help_of(capsys))
    for name in COMMANDS:
        assert f"\n  {name} " in text
    assert text.splitlines()[2].strip().startswith("rudra run ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["jbos"], ["no command 'jbos'", "did you mean jobs?"]),
        (["qqq"], ["no command 'qqq'."]),
        (["jobs", "--jsno"], ["--jsno", "Did you mean '--json'?", "`rudra jobs --help`"]),
        (["jobs", "x"], ["unexpected extra argument (x)"]),
        (["completion"], ["bash, zsh, fish", "`rudra completion --help`"]),
        (["completion", "tcsh"], ["tcsh"]),
        (["run", "-m"], ["-m"]),
        (["run"], ["no job is named"]),
        (["export", "x"], ["FILE"]),
        (["wait", "--timeout", "-3"], ['"-3" is not a duration']),
        (["prune", "--older", "1.2.3d"], ['"1.2.3d" is not a duration']),
        (["logs", "--grep", "("], ["no regular expression"]),
        (["logs", "--since", "yesterday"], ["is no time"]),
        (["logs", "--since", "99999999999d"], ["is no time"]),
        (["logs", "--tail", "-1"], ["-1"]),
        (["init", ""], ["no file is named"]),
        (["export", "x", ""], ["no file is named"]),
        (["--head", "ftp://x", "jobs"], ["ftp://x"]),
        (["run", "/dev/null"], ["/dev/null is no file"]),
        (["init", "/nowhere/train.py"], ["/nowhere/train.py"]),
        (["--head"], ["--head"]),
        *(
            (["keys", "authorize", "a" * 64, name], ["NAME", "1 to 64 of"])
            for name in ("", "bad name", "x" * 80, "x\n")
        ),
        *((["invite", name], ["NAME", "1 to 64 of"]) for name in ("", "a b", "x" * 65, "\udcff")),
        (["invite", "gpu1", "--for", "0s"], ["0s is not within 1s to 7d"]),
        (["invite", "gpu1", "--for", "100000d"], ["100000d is not within 1s to 7d"]),
        *(
            ([name, ""], ["a job was given and is empty"])
            for name in ("stop", "status", "rm", "wait", "follow", "show", "again", "resume", "logs", "why")
        ),
        (["wait", "x", ""], ["a job was given and is empty"]),
        (["export", "", "x"], ["a job was given and is empty"]),
    ],
)
def test_a_usage_error_is_one_line_with_its_fix(
    capsys: pytest.CaptureFixture[str], line: list[str], words: list[str]
) -> None:
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert (
        out == "" and err.startswith("rudra: ") and err.count("\n") == 1 and ". Fix: " in err.replace("? Fix", ". Fix")
    )
    for word in words:
        assert word in err


def test_export_replaces_nothing_but_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Root may replace a device by a file: /dev/null would be one."""
    os.mkfifo(tmp_path / "pipe")
    assert main(["export", "x", str(tmp_path / "pipe"), "--force"]) == 2
    assert (tmp_path / "pipe").is_fifo() and "is no regular file" in capsys.readouterr().err


def test_a_group_without_a_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 2
    assert capsys.readouterr().err.startswith("Usage: rudra config")


def test_init_never_replaces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    assert main(["init", str(file)]) == 0
    compile(file.read_text(), str(file), "exec")
    file.write_text("mine")
    assert main(["init", str(file)]) == 2
    assert file.read_text() == "mine" and "exists" in capsys.readouterr().err


def test_streams_that_are_closed_or_full() -> None:
    code = "import sys; from rudra_zmq.cli.main import main; sys.exit(main(['completion', 'bash']))"
    line = [sys.executable, "-c", code]
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *line], timeout=30)
    assert closed.returncode == 0
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("rudra: No space left on device") and "Fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_has_no_effect_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "j.toml"
    file.write_text('[job]\ntask = "a.b:c"\n[learners]\nmax = 9\n')
    line = "note: learners.max = 9 lets that many take part"
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out.startswith(line)
    assert main(["config", "check", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0].startswith(line.removeprefix("note: "))
    for command in (["run", "--dry-run"], ["submit", "--dry-run"], ["config", "show"]):
        absent = "submit" in command  # is where a task is looked for
        assert main([*command, str(file)]) == (2 if absent else 0)
        out, err = capsys.readouterr()
        assert out and err.startswith(line) and err.count("\n") == 1 + absent
        assert ("rudra: its model cannot be made: task a.b:c: no module named a" in err) == absent


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    code = (
        "import os, sys; gone = sys.argv.pop(); os.mkdir(gone); os.chdir(gone); os.rmdir(gone)\n"
        "from rudra_zmq.cli.main import main; sys.exit(main(['run', 'train.py']))"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "gone")]
    root = {"PYTHONPATH": str(Path(__file__).parents[3]), "HOME": str(tmp_path)}
    done = subprocess.run(line, env=root, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr == "rudra: the folder that this command was called in is gone. Fix: cd to one that is there\n"


def test_why_a_daemon_without_words_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rudra_zmq.cli.cluster import without_words

    assert without_words(tmp_path, 1) == "it ended with status 1 and no word"
    full = os.statvfs_result((4096, 4096, 50, 0, 0, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert without_words(tmp_path, 1) == f"the disk is full ({tmp_path}). Fix: make room on it"


@pytest.mark.parametrize(("status", "ends"), [(0, 1), (130, 130)])
def test_output_that_cannot_be_written_at_the_end(
    status: int, ends: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def command() -> int:
        sys.stdout.write("held back")
        return status

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert commands.run(command, [], "rudra") == ends
        full.flush()  # as Python does at its end, which would make it exit with 120
    assert ("output could not be written" in capsys.readouterr().err) == (status == 0)
