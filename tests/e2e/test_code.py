"""R2: the code that was there at the start is the code that runs, also when it is run again after an edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Rudra, job_file

pytest.importorskip("torch")

TRAIN = """
import sys, torch, rudra_zmq as rudra
import helper.words
open("beside.txt", "w").write("written where it runs")
with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(4, 2))
    opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in learner.epochs():
        for x, y in learner.batches(torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64).long())):
            learner.step(torch.nn.functional.cross_entropy(model(x), y))
print("word:", helper.words.WORD, sys.argv[1:], flush=True)
"""


def words(rudra: Rudra, job: str) -> list[str]:
    return [line for line in rudra("logs", job).out.splitlines() if "word:" in line]


def test_an_edited_script_runs_as_edited_and_again_runs_the_old_one(rudra: Rudra, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "helper").mkdir(parents=True)
    (code / "scripts").mkdir()
    (code / "scripts" / "train.py").write_text(TRAIN)
    (code / "helper" / "words.py").write_text("WORD = 'first'\n")
    (code / "big.pt").write_bytes(b"x" * 1000)
    options = ("-s", "run.code=.", "-s", "learners.count=2", "-s", "job.epochs=1")

    first = rudra("run", "--json", *options, "scripts/train.py", "--its own", cwd=code).json
    assert [line.partition("| ")[2] for line in words(rudra, first["job"])] == ["word: first ['--its own']"] * 2
    assert not (code / "beside.txt").exists() and (Path(first["folder"]) / "code" / "beside.txt").exists()
    assert not (Path(first["folder"]) / "code" / "big.pt").exists()

    (code / "helper" / "words.py").write_text("WORD = 'second'\n")
    second = rudra("run", "--json", *options, "scripts/train.py", cwd=code).json
    assert [line.partition("| ")[2] for line in words(rudra, second["job"])] == ["word: second []"] * 2
    third = rudra("again", "--json", first["job"], "-s", "learners.count=1", cwd=tmp_path).json
    assert [line.partition("| ")[2] for line in words(rudra, third["job"])] == ["word: first ['--its own']"]

    shown = [rudra("show", "--json", done["job"]).json for done in (first, second, third)]
    hashes = [row["code_hash"] for row in shown]
    assert len(hashes[0]) == 64 and hashes[0] == hashes[2] != hashes[1]
    assert f"code {hashes[0][:12]}" in rudra("show", first["job"]).out.splitlines()[0]
    used = {row["job"]: row["code"] for row in rudra("df", "--json").json["jobs"]}
    assert all(used[done["job"]] > len(TRAIN) for done in (first, second, third))
    refused = rudra("again", first["job"], "-s", "run.code=.", status=2)
    assert "Fix:" in refused.err
    rudra("rm", "-y", first["job"])
    assert not Path(first["folder"]).exists()


def test_again_at_a_standing_cluster(rudra: Rudra, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "helper").mkdir(parents=True)
    (code / "train.py").write_text(TRAIN)
    (code / "helper" / "words.py").write_text("WORD = 'first'\n")
    (code / "job.toml").write_text('[run]\nscript = "train.py"\ncode = "."\n[learners]\ncount = 1\n')
    rudra("up")
    try:
        job = rudra("submit", "-q", code / "job.toml").out.strip()
        rudra("wait", job)
        (code / "train.py").unlink()
        (code / "helper" / "words.py").write_text("WORD = 'second'\n")
        again = rudra("again", "-q", job).out.strip()
        rudra("wait", again)
        for each in (job, again):
            assert [line.partition("| ")[2] for line in words(rudra, each)] == ["word: first []"]
        (state,) = rudra.home.glob("state/rudra/*")
        assert len(list((state / "bundles").iterdir())) == 1
        rudra("rm", "-y", job)
        assert len(list((state / "bundles").iterdir())) == 1
        rudra("prune", "-y", "--older", "0s")
        assert list((state / "bundles").iterdir()) == []
    finally:
        rudra("down")


def test_a_dry_run_finds_a_task_in_the_code(rudra: Rudra, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/mine_alone.py").write_text("from rudra_zmq.tasks.fashion_mnist import cnn\n")
    file = job_file(tmp_path, '[job]\ntask = "mine_alone:cnn"\n[run]\ncode = "src"\n')
    assert "# memory of its servers, on psd's host: " in rudra("submit", "--dry-run", file).out
