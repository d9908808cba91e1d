"""A script gets its host's own interpreter, paths and variables, and its arguments as they were written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tomli

from tests.e2e.harness import Rudra, job_file

SCRIPT = """\
import json, os, sys
import rudra_zmq as rudra
out = {"args": sys.argv[1:], "in": str(rudra.path("in")), "env": os.environ["HOST_ENV"], "python": sys.orig_argv[0]}
out["launcher"] = [name for name in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID") if name in os.environ]
print("GOT " + json.dumps(out), flush=True)
sys.exit(3)
"""


def test_a_script_gets_what_its_host_calls_by_that_name(rudra: Rudra, tmp_path: Path) -> None:
    own = rudra.home / "config" / "rudra" / "rudra.toml"
    data = tmp_path / "a b"
    data.mkdir()
    python = tmp_path / "ml"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(f'[host]\npython.ml = "{python}"\npaths.in = "{data}"\nenv.HOST_ENV = "x y"\n')
    (tmp_path / "train.py").write_text(SCRIPT)
    text = '[run]\nscript = "train.py"\npython = "ml"\nargs = ["--in={path:in}", "$(touch hacked) \'x", "-s"]\n[learners]\ncount = 1\n'
    rudra.env |= {"RANK": "3", "WORLD_SIZE": "4", "SLURM_JOB_ID": "7", "XDG_CONFIG_HOME": str(rudra.home / "config")}
    done = rudra("run", job_file(tmp_path, text), status=8)
    (line,) = [line for line in rudra("logs", "--learner", "0").out.splitlines() if "GOT" in line]
    got = json.loads(line[line.index("{") :])
    assert got["args"] == [f"--in={data}", "$(touch hacked) 'x", "-s"], done.err
    assert (got["in"], got["env"], got["launcher"]) == (str(data), "x y", [])
    assert not (tmp_path / "hacked").exists()


def test_one_refusal_names_everything_that_is_missing(rudra: Rudra, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    text = '[run]\nscript = "train.py"\npython = "ml"\nargs = ["{path:in}", "{path:out}"]\n[learners]\ncount = 2\n'
    done = rudra("run", job_file(tmp_path, text), status=8)
    for key in ("python.ml", "paths.in", "paths.out"):
        assert f"{key} is not set here. Fix: add {key} = " in done.err
    assert "node (PID" not in done.err


def test_a_dry_run_shows_where_a_job_would_go_and_the_memory_it_needs(rudra: Rudra, tmp_path: Path) -> None:
    text = '[job]\ntask = "rudra_zmq.tasks.fashion_mnist:cnn"\n[learners]\ncount = 3\n'
    file = job_file(tmp_path, text)
    assert "# it would wait: no psd answers: " in rudra("submit", "--dry-run", file).out
    absent = job_file(tmp_path, text.replace("fashion_mnist", "nosuch"), "absent.toml")
    refused = rudra("submit", "--dry-run", absent, status=2)
    assert "its model cannot be made: task rudra_zmq.tasks.nosuch:cnn: no module named" in refused.err
    rudra("up")
    try:
        out = rudra("submit", "--dry-run", file).out
        shown, comments = out.split("\n\n# ", 1)
        assert tomli.loads(out) == tomli.loads(shown)  # what is printed can be submitted
        assert comments.splitlines()[1].split()[2:4] == ["0,1,2", "cpu"]
        found = rudra("submit", "--dry-run", "--json", file).json
        (row,) = found["placement"]
        (name,) = [h["name"] for h in rudra("hosts", "--json").json["hosts"]]
        assert (row["host"], row["ranks"], row["problems"]) == (name, [0, 1, 2], [])
        learner = found["memory"]["learner"]
        assert row["memory"] == 3 * learner and row["memory_free"] > 10 * learner
        assert found["memory"]["servers"] == sum(found["memory"]["parts"].values())
        lacking = job_file(tmp_path, text + '[job.task_args]\ndata = "{path:in}"\n', "lacking.toml")
        refused = rudra("submit", "--dry-run", lacking, status=2)
        assert f"# host {name}: paths.in is not set here. Fix: " in refused.out
        assert rudra("jobs", "--json").json["jobs"] == []
        job = rudra("submit", "--follow", "--json", "-s", "job.task_args.limit=3000", file).json
        status = rudra("status", "--json", job["job"]).json
        assert status["memory_budget"] == found["memory"]["servers"]
    finally:
        rudra("down")
