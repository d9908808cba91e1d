"""Deaths that a job survives, and ends that it does not wait for (SCENARIOS S01, S06, S46; R15)."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from .harness import Rudra, job_file, wait_for
from .test_exactly_once import EPOCHS, SAMPLES, arguments, check

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(("protocol", "data"), [("hardsync", "auto"), ("softsync", "auto"), ("softsync", "tcp")])
def test_every_index_once_per_epoch_when_the_node_is_killed(
    rudra: Rudra, tmp_path: Path, protocol: str, data: str
) -> None:
    """It goes on from its newest snapshot; what came after that is void, and computed again.

    Over tcp its successor has other keys, at the same address."""
    rudra.env["RUDRA_PSD_DATA"] = data
    with rudra.start(*arguments(protocol, tmp_path)) as run:
        seen = tmp_path / "seen-2-1.jsonl"

        def middle() -> bool:
            """Rank 2 is well inside the second epoch."""
            return seen.exists() and sum(json.loads(s).get("epoch") == 1 for s in seen.read_text().splitlines()) > 5

        wait_for("some steps of the second epoch", middle, 60, run)
        (node,) = [pid for pid, command in rudra.processes().items() if "rudra_zmq.node" in command]
        os.kill(node, signal.SIGKILL)
        out, err = run.communicate(timeout=200)
    assert run.returncode == 0, out + err
    assert "warning: node ended by signal 9; restart 1 of 5 from the newest snapshot" in err
    done = json.loads(out.strip().splitlines()[-1])
    assert done["generation"] == 2 and [row["distinct"] for row in done["epochs"]] == [SAMPLES] * EPOCHS
    log = Path(done["folder"]) / "decisions.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    (at,) = [i for i, record in enumerate(records) if "restored" in record]
    assert records[at + 1]["update"] == records[at]["restored"] + 1 and records[at + 1]["generation"] == 2
    assert len(list(tmp_path.glob("seen-*.jsonl"))) == 4  # its learners stayed
    check(tmp_path, log)


@pytest.mark.parametrize("when", ["before-join", "before-batches"])
def test_a_script_that_does_not_train_is_not_waited_for(rudra: Rudra, when: str) -> None:
    """S46: learners.deadline is a minute, and twice that where nobody came."""
    began = time.monotonic()
    result = rudra("run", "-s", "learners.count=2", SCRIPTS / "ends_early.py", when, status=8)
    assert time.monotonic() - began < 50
    assert "ended before training began. Fix: iterate learner.batches(...)" in result.err


def test_a_job_whose_scripts_have_all_ended_is_over(rudra: Rudra) -> None:
    keys = ["-s", "learners.count=2", "-s", "learners.on_lost=wait"]
    result = rudra("run", "--json", *keys, SCRIPTS / "ends_early.py", "in-mid-epoch", status=8)
    assert "every learner has ended before the job did, and none will be started again. Fix: " in result.json["reason"]
    assert result.json["samples"] == 8 and Path(result.json["weights"]).exists()


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["hardsync", "softsync"])
def test_a_learner_that_sleeps_for_long_is_replaced(rudra: Rudra, tmp_path: Path, protocol: str) -> None:
    """S06: SIGSTOP past the liveness time; the sleeper is killed before its samples are given to another."""
    with rudra.start(*arguments(protocol, tmp_path)) as run:
        path = tmp_path / "seen-1-1.jsonl"
        wait_for("some steps", lambda: path.exists() and len(path.read_text().splitlines()) > 5, 60, run)
        pid = json.loads(path.read_text().splitlines()[0])["pid"]
        os.kill(pid, signal.SIGSTOP)
        out, err = run.communicate(timeout=200)
    assert run.returncode == 0, out + err
    assert not Path(f"/proc/{pid}").exists()
    check(tmp_path, Path(json.loads(out.strip().splitlines()[-1])["folder"]) / "decisions.jsonl")


@pytest.mark.long
def test_a_learner_that_keeps_the_interpreter_to_itself_is_no_corpse(rudra: Rudra) -> None:
    """Its pulse has no turn for longer than the liveness time, and its step ends all the same."""
    result = rudra("run", "--json", "-s", "learners.count=2", SCRIPTS / "holds_interpreter.py")
    assert "rank 1 is silent for" in result.err and "computes: step_timeout = 10m decides" in result.err
    assert "is killed" not in result.err and "was lost" not in result.err
    done = result.json
    assert [row["distinct"] for row in done["epochs"]] == [640]
    text = (Path(done["folder"]) / "logs" / "learner-1.out").read_text()
    assert text == "begins\ngoes on\n"


@pytest.mark.long
def test_a_last_test_may_take_its_time(rudra: Rudra, tmp_path: Path) -> None:
    path = job_file(
        tmp_path,
        f"""
[job]
task = "slow_test:Task"
epochs = 1
[run]
cwd = "{SCRIPTS}"
[learners]
count = 1
minibatch = 8
[update]
rule = "sgd"
lr = 0.1
""",
    )
    result = rudra("run", "--json", path)
    assert result.json["accuracy"] is not None and "waits for the test of epoch 1" in result.err


def test_a_script_that_prints_too_much(rudra: Rudra, tmp_path: Path) -> None:
    """R15: head and tail are kept, the cut is said; training is not held up."""
    script = tmp_path / "loud.py"
    body = (
        (SCRIPTS / "ends_early.py")
        .read_text()
        .replace("        if when", '        print("x" * 999_999)\n        if when')
    )
    script.write_text(body + '    print("the last line")\n')
    path = job_file(tmp_path, f'[run]\nscript = "{script}"\nargs = ["never"]\n[learners]\ncount = 1\n')
    done = rudra("run", "--json", path).json
    assert done["samples"] == 64
    text = (Path(done["folder"]) / "logs" / "learner-0.out").read_text()
    assert len(text) < 5 << 20 and text.endswith("the last line\n")
    assert "bytes of output cut here]" in text
