"""A script gets its host's own interpreter, paths and variables, and its arguments as they were written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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
