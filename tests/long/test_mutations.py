"""Are the tests of the protocol's core any good? Small changes of its code must make one of them fail.

mutmut makes the changes (its settings are in pyproject.toml) in a copy of the repository, and runs the tests of core
against each. What no test reaches counts as not noticed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NOTICED = 0.80
HOURS = 1.5


@pytest.mark.long
@pytest.mark.timeout(HOURS * 3600 + 60)
def test_changes_of_sync_and_ledger_are_noticed(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("rudra_zmq", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    # The inner sessions' own folders go where ours is removed, however they end.
    env = {**os.environ, "RUDRA_TEST_ROOT": str(tmp_path)}
    mutmut = [sys.executable, "-m", "mutmut"]
    with (tmp_path / "log").open("w") as log:
        subprocess.run(
            [*mutmut, "run", "--max-children", str(os.cpu_count() or 1)],
            cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=HOURS * 3600, check=False,
        )  # fmt: skip
    said = (tmp_path / "log").read_text().replace("\r", "\n")[-3000:]
    results = []
    for verb in ("export-cicd-stats", "results"):
        done = subprocess.run([*mutmut, verb], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{said}\n{done.stderr}"
        results.append(done.stdout)
    counts = json.loads((tmp_path / "mutants" / "mutmut-cicd-stats.json").read_text())
    noticed = counts["killed"] + counts["timeout"] + counts["segfault"]
    tried = counts["total"] - counts["skipped"]
    print(f"mutations noticed: {noticed} of {tried}", counts)
    assert tried > 100, f"too few mutations to judge by: {counts}\n{said}"
    assert noticed + counts["survived"] + counts["no_tests"] == tried, f"the run broke off: {counts}\n{said}"
    assert noticed >= NOTICED * tried, f"{counts}\n{results[-1]}"
