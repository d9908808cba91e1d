"""The command: flags, the JSON object, one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rudra_zmq.sim.__main__ import main

JOB = """
[job]
name = "small"
task = "rudra_zmq.tasks.fashion_mnist:cnn"
epochs = 2
[learners]
count = 4
minibatch = 8
[sync]
protocol = "softsync"
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def simulate(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main([*args, "--time-only", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out.splitlines()[-1])


def test_the_object(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = simulate(capsys, job, "--compute", "gaussian:10ms,0.1", "--rounds", "200", "--discard", "10")
    assert told["schema_version"] == 1 and told["job"] == "small" and told["state"] == "DONE"
    assert (told["protocol"], told["n"], told["lambda"], told["mu"], told["c"]) == ("softsync", 1, 4, 8, 4)
    assert (told["updates"], told["gradients"], told["samples"]) == (200, 800, 6400)
    assert told["samples_per_s"] == pytest.approx(3200, rel=0.05)
    assert told["accuracy"] is None and told["weights"] is None and told["overlap"] == 1.0
    assert told["staleness"]["mean"] == pytest.approx(0.75, rel=0.01)
    assert sum(told["staleness"]["histogram"].values()) == 760
    assert told["staleness"]["max"] >= told["staleness"]["p95"] >= 1
    (epoch,) = told["epochs"]
    assert (epoch["epoch"], epoch["samples"], epoch["distinct"], epoch["accuracy"]) == (0, 102 * 32, 102 * 32, None)
    assert epoch["seconds"] == pytest.approx(1.02, rel=0.05)


def test_flags_over_the_file(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = (job, "--learners", "30", "-s", "sync.n=15", "--compute", "exponential:20ms", "--straggler", "1x3")
    told = simulate(capsys, *args, "--rounds", "300", "--seed", "4")
    assert (told["lambda"], told["n"], told["c"]) == (30, 15, 2)
    assert told["staleness"]["mean"] == pytest.approx(14.5, rel=0.01)
    slow, rest = told["gradients_by_rank"].pop("29"), list(told["gradients_by_rank"].values())
    assert slow < min(rest) and slow == pytest.approx(sum(rest) / 29 / 3, rel=0.25)
    assert simulate(capsys, *args, "--rounds", "300", "--seed", "4")["seconds"] == told["seconds"]
    assert simulate(capsys, *args, "--rounds", "300")["seconds"] != told["seconds"]


def test_hardsync_and_a_link(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = simulate(
        capsys, job, "-s", "sync.protocol=hardsync", "--link", "8mbit,0ms", "--size", "10kB", "--rounds", "50"
    )
    assert told["staleness"]["histogram"] == {"0": 80} and told["protocol"] == "hardsync"
    # 20 ms of computing; the slowest waits for four vectors of 10 ms down, and its own 10 ms up.
    assert told["seconds"] / 50 == pytest.approx(0.07, rel=0.02)
    assert told["overlap"] < 0.5


def test_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    told = simulate(capsys, "--learners", "2", "--rounds", "40", "-s", "sync.protocol=async")
    assert (told["protocol"], told["lambda"], told["mu"], told["n"]) == ("async", 2, 32, 2)


def test_a_mini_batch_that_is_no_whole_number(capsys: pytest.CaptureFixture[str]) -> None:
    told = simulate(capsys, "--learners", "4", "--rounds", "40", "-s", "learners.global_batch=10")
    assert told["mu"] == 2.5 and told["global_batch"] == 10


def test_for_a_person(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([job, "--rounds", "40"]) == 0
    out, err = capsys.readouterr()
    assert err == "note: times alone; nothing is trained\n"
    assert "softsync, n = 1, lambda = 4, c = 4" in out and "(lambda-1)/c = 0.750" in out
    assert main([job, "--rounds", "40", "--link", "1gbit,1ms", "--size", "1MB", "-s", "sync.protocol=hardsync"]) == 0
    out, _ = capsys.readouterr()
    assert "1gbit,1ms" in out and "hardsync: 0" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--compute", "fast"], "--compute"),
        (["--straggler", "5x3"], "5 stragglers among 4 learners"),
        (["--straggler", "many"], "--straggler"),
        (["--link", "1gbit,1ms"], "give both or none"),
        (["--link", "1,1", "--size", "1kB"], "--link"),
        (["--link", "1gbit,1ms", "--size", "big"], '"big" is not a size'),
        (["--rounds", "10", "--discard", "10"], "10 of 10 rounds are left out"),
        (["--learners", "none"], "--learners"),
        (["--rounds", "0"], "--rounds"),
        (["-s", "sync.n=5"], "sync.n = 5"),
        (["-s", "sync.m=5"], "sync.m"),
        (["--loud"], "--loud"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    job: str, args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([job, "--time-only", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("rudra: ") and said in err


def test_a_missing_file_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["absent.toml"]) == 2
    assert "absent.toml" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "rudra simulate" in capsys.readouterr().out
