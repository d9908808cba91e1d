"""The CLI and the idle daemons stay light: no torch, no numpy, little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import Rudra

HEAVY = {"torch", "cupy", "numpy"}
PROBE = "import sys, {module}; print(sorted({{m.split('.')[0] for m in sys.modules}} & {heavy!r}))"


@pytest.mark.parametrize(
    "module",
    ["rudra_zmq", "rudra_zmq.daemons.psd", "rudra_zmq.daemons.learnerd", "rudra_zmq.cli.main", "rudra_zmq.cli.run",
     "rudra_zmq.cli.job_commands", "rudra_zmq.cli.logs", "rudra_zmq.cli.file_commands", "rudra_zmq.cli.cluster_commands",
     "rudra_zmq.cli.other_commands"],
)  # fmt: skip
def test_nothing_heavy_is_imported(module: str) -> None:
    code = PROBE.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_help_imports_neither_zmq_nor_msgspec() -> None:
    code = (
        "import sys\nfrom rudra_zmq.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "sys.stderr.write(str(sorted({m.split('.')[0] for m in sys.modules} & {'zmq', 'msgspec', 'rich', 'torch', 'numpy'})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "[]"


def test_idle_daemons_are_small_and_hold_no_torch(rudra: Rudra) -> None:
    rudra("up")
    try:
        seen = {}
        for pid, command in rudra.processes().items():
            for daemon in ("psd", "learnerd"):
                if f"daemons.{daemon}" in command:
                    status = Path(f"/proc/{pid}/status").read_text()
                    seen[daemon] = int(status.split("VmRSS:")[1].split()[0]) / 1024
                    maps = Path(f"/proc/{pid}/maps").read_text()
                    assert "torch" not in maps and "numpy" not in maps
        assert seen.keys() == {"psd", "learnerd"}
        assert all(megabytes < 60 for megabytes in seen.values()), json.dumps(seen)
    finally:
        rudra("down")
