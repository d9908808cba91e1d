"""What a user can get wrong: one line with the fix, the right exit status, never a traceback, nothing left."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from .harness import Result, Rudra, job_file, wait_for

TASK = 'job.task="rudra_zmq.tasks.fashion_mnist:small"'
JOBS = Path(__file__).parents[2] / "etc" / "rudra" / "jobs"

RAISES = """
import torch
class task:
    def model(self):
        raise RuntimeError("no such layer")
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.zeros(64, 2), torch.zeros(64))
    def loss(self, model, batch):
        return model(batch[0]).sum()
    def metrics(self, model, batch):
        return {"correct": 0, "count": 1, "loss_sum": 0.0}
"""


def one_line(result: Result, *words: str) -> None:
    """The last line of stderr says it all."""
    assert "Traceback" not in result.err + result.out, result.err
    line = result.err.strip().splitlines()[-1]
    assert line.startswith("rudra: "), result.err
    assert "Fix:" in line, line
    for word in words:
        assert word in line, line


def test_unknown_key(rudra: Rudra, tmp_path: Path) -> None:
    path = job_file(tmp_path, '[job]\ntask = "a.b:c"\n[sync]\nprotocl = "async"\n')
    one_line(rudra("run", path, status=2), "protocl", "did you mean", "protocol")


def test_no_such_job_file(rudra: Rudra, tmp_path: Path) -> None:
    one_line(rudra("run", tmp_path / "no.toml", status=2), "no.toml")


@pytest.mark.parametrize("n", ["0", "5"])
def test_n_outside_the_declared_count(rudra: Rudra, n: str) -> None:
    one_line(rudra("run", "-s", f"sync.n={n}", JOBS / "fashion-softsync.toml", status=2), "sync.n")


def test_missing_task(rudra: Rudra, tmp_path: Path) -> None:
    one_line(rudra("run", job_file(tmp_path, "[job]\nepochs = 1\n"), status=2), "task")


def test_task_that_is_not_there(rudra: Rudra) -> None:
    result = rudra("run", "-s", "job.task=rudra_zmq.tasks.fashion_mnist:cnm", JOBS / "fashion-softsync.toml", status=8)
    assert "cnm" in result.err and "did you mean" in result.err


def test_task_that_raises_in_model(rudra: Rudra, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(RAISES)
    path = job_file(tmp_path, '[job]\ntask = "broken:task"\n[learners]\ncount = 2\n')
    result = rudra("run", path, status=8, cwd=tmp_path)
    assert "no such layer" in result.err
    assert "no such layer" in rudra("status").out
    log = rudra("logs", "--learner", "failed").out
    assert "Traceback" in log and "no such layer" in log  # the learner's own is shown whole


def test_data_folder_that_is_not_there(rudra: Rudra, tmp_path: Path) -> None:
    rudra.env["RUDRA_DATA"] = str(tmp_path / "nowhere")
    result = rudra("run", JOBS / "fashion-softsync.toml", status=8)
    assert str(tmp_path / "nowhere") in result.err and "Fix:" in result.err


def test_truncated_idx_file(rudra: Rudra, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (folder / name).write_bytes(bytes([0, 0, 8, 3 if "images" in name else 1, 0, 0, 234, 96, 0, 0]))
    rudra.env["RUDRA_DATA"] = str(folder)
    result = rudra("run", JOBS / "fashion-softsync.toml", status=8)
    # the evaluator may come to its file before a learner comes to its own
    assert re.search(r"(train|t10k)-images-idx3-ubyte", result.out + result.err), result
    assert "Fix:" in result.err


def test_mini_batch_larger_than_the_data(rudra: Rudra) -> None:
    result = rudra(
        "run", "-s", "job.task_args.limit=100", "-s", "learners.minibatch=101", JOBS / "fashion-softsync.toml", status=8
    )
    assert "101" in result.err and "100" in result.err and "Fix:" in result.err


def test_submit_without_a_psd(rudra: Rudra) -> None:
    one_line(rudra("submit", JOBS / "fashion-softsync.toml", status=4), "psd", "rudra up")


def test_unknown_job_and_command(rudra: Rudra) -> None:
    one_line(rudra("status", "abc123", status=3))
    one_line(rudra("stauts", status=2), "status")


def test_second_up_and_down_twice(rudra: Rudra) -> None:
    rudra("up")
    try:
        one_line(rudra("up", status=1), "PID")
    finally:
        rudra("down")
    one_line(rudra("down", status=3))


def test_two_runs_of_one_file_are_two_jobs_of_one_name(rudra: Rudra, tmp_path: Path) -> None:
    args = ["run", "-q", "-s", "job.task_args.limit=400", "-s", "job.epochs=1", JOBS / "fashion-softsync.toml"]
    first, second = rudra(*args).out.strip(), rudra(*args).out.strip()
    jobs = rudra("jobs", "--json").json["jobs"]
    assert [j["job"] for j in jobs] == [second, first]
    assert {j["name"] for j in jobs} == {"fashion-softsync"}


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_run(rudra: Rudra, times: int) -> None:
    with rudra.start("run", JOBS / "fashion-softsync.toml") as run:
        wait_for("an update", lambda: [f for f in rudra.logs() if f.stat().st_size], 60, run)
        run.send_signal(signal.SIGINT)
        err = ""
        if times == 2:
            assert run.stderr is not None
            for line in run.stderr:
                err += line
                if "Ctrl-C again" in line:
                    break
            else:
                raise AssertionError(f"it never said what the next Ctrl-C does:\n{err}")
            run.send_signal(signal.SIGINT)
        _, rest = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in err + rest
    wait_for("nothing left running", lambda: not rudra.processes(), 10)
    (job,) = rudra("jobs", "--json").json["jobs"]
    assert job["state"] == ("STOPPED" if times == 1 else "LOST")
