"""TARGET on the command line: what is rudra's and what is the script's own (R1, S59)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rudra_zmq.cli.jobs_given import TargetCommand, code_hash, load_target, submission, target_arguments
from rudra_zmq.errors import ConfigError, UsageError

seen: dict[str, Any] = {}


@click.command(cls=TargetCommand)
@click.option("--json", "as_json", is_flag=True)
@click.option("--timeout")
@target_arguments
def probe(**given: Any) -> None:
    seen.clear()
    seen.update(given)


@pytest.mark.parametrize(
    ("line", "args", "module", "sets", "as_json"),
    [
        (["train.py"], ("train.py",), None, (), False),
        (["--json", "train.py", "--log", "x"], ("train.py", "--log", "x"), None, (), True),
        (["train.py", "--json", "-s", "a b", "--", "-m"], ("train.py", "--json", "-s", "a b", "--", "-m"), None, (), False),
        (["-s", "sync.n=2", "--timeout", "3s", "train.py", "-s", "x"], ("train.py", "-s", "x"), None, ("sync.n=2",), False),
        (["-m", "my.train", "--json", "-s", "1"], ("--json", "-s", "1"), "my.train", (), False),
        (["--json", "-m", "my.train"], (), "my.train", (), True),
        (["job.toml", "--json", "-s", "sync.n=2"], ("job.toml",), None, ("sync.n=2",), True),
        (["-mmy.train", "--json"], ("--json",), "my.train", (), False),
        (["-m", "my.train", "--", "-x"], ("--", "-x"), "my.train", (), False),
        (["-ssync.n=2", "train.py", "--json"], ("train.py", "--json"), None, ("sync.n=2",), False),
        (["--json", "--set", "a=b.toml", "train.py", "x.toml"], ("train.py", "x.toml"), None, ("a=b.toml",), True),
        (["--", "train.py", "-h"], ("train.py", "-h"), None, (), False),
        (["--set=job.seed=2", "train.py", "value with blanks", ""], ("train.py", "value with blanks", ""), None,
         ("job.seed=2",), False),
    ],
)  # fmt: skip
def test_everything_after_the_name_is_the_scripts_own(
    line: list[str], args: tuple[str, ...], module: str | None, sets: tuple[str, ...], as_json: bool
) -> None:
    result = CliRunner().invoke(probe, line)
    assert result.exit_code == 0, result.output
    assert (seen["args"], seen["module"], seen["sets"], seen["as_json"]) == (args, module, sets, as_json)


@pytest.mark.parametrize("line", [["-m"], ["-s"], ["--timeout"], ["--json", "-s"]])
def test_an_option_without_its_value_is_refused(line: list[str]) -> None:
    result = CliRunner().invoke(probe, line)
    assert result.exit_code == 2 and "requires an argument" in result.output


def test_unknown_option_before_the_name_is_refused() -> None:
    assert CliRunner().invoke(probe, ["--jsno", "train.py"]).exit_code == 2


def test_no_target_and_arguments_after_a_job_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no job is named"):
        load_target((), None, ())
    with pytest.raises(UsageError, match="after the job file"):
        load_target((str(tmp_path / "a.toml"), "--x"), None, ())
    with pytest.raises(ConfigError):
        load_target((str(tmp_path / "a.toml"),), None, ())


def test_submission_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    first = submission(load_target(("train.py", "--a b"), None, ("learners.count=2",)))
    assert first.name == "train"
    assert "--a b" in first.toml
    assert first.cwd == str(tmp_path)
    (tmp_path / "train.py").write_text("print(2)\n")
    second = submission(load_target(("train.py", "--a b"), None, ("learners.count=2",)))
    assert first.request != second.request
    assert len(first.code_hash) == 12 and first.code_hash != second.code_hash
    assert code_hash("", "") == ""
