"""A write to weights that can only be read ends the process with a line; any other fault ends it as it always did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

WRITES = {
    "b.data.add_(1.0)": "parameter 0.bias",
    "torch.set_num_threads(4); w.data.clamp_(-1, 1)": "parameter 2.weight",
    "torch.nn.init.ones_(b)": "parameter 0.bias",
    "w.detach().numpy()[5, 2] = 1.0": "parameter 2.weight",
    "t = threading.Thread(target=lambda: b.data.zero_()); t.start(); t.join()": "parameter 0.bias",
    "torch.from_numpy(versions[2].floats).zero_()": "a buffer of the servers",
    "attached.load(versions[0]); attached.load(versions[2]); b.data[5] = 1": "parameter 0.bias",
}
FAULTS = [
    "ctypes.memset(0, 1, 1)",
    "os.kill(os.getpid(), signal.SIGSEGV); signal.pause()",
    "faulthandler._sigsegv()",
    "guard.close(); b.data.zero_()",
]
TOLD = "faulthandler.enable(); guard.watch(versions, attached.layout); "
KEPT = "guard.watch(versions, attached.layout); faulthandler.enable(); guard.close(); ctypes.memset(0, 1, 1)"
CASES = [
    *(f"guard.watch(versions, attached.layout); {code}" for code in (*WRITES, *FAULTS)),
    *(TOLD + code for code in FAULTS),
    KEPT,
]

# One process imports torch; each case is a child of it.
DRIVER = """
import ctypes, faulthandler, json, os, signal, sys, threading
import torch
from rudra_zmq.learner.attach import AttachedModel
from rudra_zmq.learner.guard import guard
from rudra_zmq.net.shm import Segment
from rudra_zmq.node.memory import create, size, vectors
from rudra_zmq.wire.compress import Form

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 300_000))
attached = AttachedModel(model)
form = Form.of(attached.layout, "float32")
owner, _ = create("versions", form, 3, sealed=True)
versions = vectors(Segment.map(os.dup(owner.fd), size(form, 3), writable=False), form, 3)
attached.load(versions[1])
w, b = model[2].weight, model[0].bias
results = []
for code in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 2)
        os.close(1), os.close(read), os.close(write)
        signal.alarm(60)
        assert float(w.detach().sum()) == 0.0
        exec(code)
        os._exit(0)
    os.close(write)
    with open(read) as said:
        text = said.read()
    results.append((os.waitstatus_to_exitcode(os.wait()[1]), text))
print(json.dumps(results))
"""


class Ended(NamedTuple):
    status: int
    err: str


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    root = Path(__file__).parents[3]
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(CASES)],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done
    return {code: Ended(*result) for code, result in zip(CASES, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("code", WRITES)
def test_a_write_is_told_by_name_and_with_the_fix(ended: dict[str, Ended], code: str) -> None:
    status, err = ended[f"guard.watch(versions, attached.layout); {code}"]
    assert status == 1, err
    last = err.splitlines()[-1]
    assert last.startswith(f"rudra: {WRITES[code]} was written in place")
    assert "Fix: " in last and 'learners.weights = "copy" in the job file' in last
    assert "(most recent call first)" in err and 'File "<string>"' in err


@pytest.mark.parametrize("code", FAULTS)
def test_other_faults_are_as_before(ended: dict[str, Ended], code: str) -> None:
    bare, told = ended[f"guard.watch(versions, attached.layout); {code}"], ended[TOLD + code]
    assert bare == (-signal.SIGSEGV, "")
    assert told.status == -signal.SIGSEGV
    assert "Segmentation fault" in told.err and "rudra:" not in told.err


def test_a_handler_that_came_later_stays(ended: dict[str, Ended]) -> None:
    assert ended[KEPT].status == -signal.SIGSEGV and "Segmentation fault" in ended[KEPT].err
