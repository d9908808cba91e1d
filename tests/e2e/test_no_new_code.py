"""A service that may not make code (systemd's MemoryDenyWriteExecute) still updates weights: with NumPy."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit(77)
import numpy as np
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.rules import GroupSpan, RuleSpec
engine = CpuUpdate(RuleSpec.of("sgd", [GroupSpan(0, 8, 1.0, 0.0)]), 8)
out = np.empty(8, np.float32)
engine.step(np.ones(8, np.float32), [(1.0, np.ones(8, np.float32))], None, 1.0, 1.0, 0.5, out)
print(engine.backend, out.sum())
"""


def test_the_update_without_the_right_to_make_code() -> None:
    pytest.importorskip("llvmlite")
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    if ended.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert (ended.returncode, ended.stdout.split()) == (0, ["numpy", "4.0"]), ended.stderr
