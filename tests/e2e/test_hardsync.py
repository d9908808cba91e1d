"""Hardsync gives the same bits: twice, as one plain process, and after everything was killed in mid-epoch."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rudra_zmq.update.rules import GroupSpan, RuleSpec, new_state, reference_step

from .harness import BIN, Rudra, wait_for

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "blobs.py"
LAM, MU, EPOCHS, SEED = 3, 16, 4, 11


def weights(done: dict[str, Any]) -> dict[str, np.ndarray]:
    return load_file(done["weights"])


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert a[key].tobytes() == b[key].tobytes(), key


def arguments(protocol: str = "hardsync", lam: int = LAM, epochs: int = EPOCHS) -> list[str | Path]:
    return [
        "run", "--json", "-s", f"sync.protocol={protocol}", "-s", f"job.epochs={epochs}", "-s", f"job.seed={SEED}",
        "-s", f"learners.count={lam}", "-s", "learners.threads=1", SCRIPT, str(MU),
    ]  # fmt: skip


def plain_loop(
    lam: int = LAM,
    epochs: int = EPOCHS,
    up: Callable[[int, np.ndarray], np.ndarray] = lambda rank, gradient: gradient,
    down: Callable[[np.ndarray], np.ndarray] = lambda weights: weights,
) -> dict[str, np.ndarray]:
    """One process that averages the same micro-batches in rank order; of rudra only the update's reference.

    ``up`` is what becomes of a rank's gradient on its way, ``down`` of the weights.
    """
    spec = importlib.util.spec_from_file_location("blobs", SCRIPT)
    assert spec is not None and spec.loader is not None
    blobs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(blobs)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model, data = blobs.net(), blobs.data()
    n = len(data)
    flat = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
    rule = RuleSpec(rule="momentum", momentum=0.9, groups=(GroupSpan(0, flat.size, 1.0, 1e-3),))
    state = new_state(rule, flat.size)
    for epoch in range(epochs):
        order = np.argsort(np.random.Philox(key=(SEED, epoch)).random_raw(n), kind="stable")
        for start in range(0, n, lam * MU):
            parts = [order[a : min(a + MU, n)] for a in range(start, min(start + lam * MU, n), MU)]
            total = sum(len(p) for p in parts)
            direct = []
            for rank, part in enumerate(parts):
                load(model, down(flat))
                x, y = data[torch.from_numpy(part)]
                model.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                gradient = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
                direct.append((float(np.float32(len(part) / total)), up(rank, gradient)))
            flat = reference_step(rule, state, flat, direct, None, 1.0, 1.0, 0.05)
    load(model, flat)
    return {k: v.numpy() for k, v in model.state_dict().items()}


def load(model: Any, flat: np.ndarray) -> None:
    at = 0
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.from_numpy(flat[at : at + p.numel()].copy()).view_as(p))
            at += p.numel()


def test_equal_twice_and_to_a_plain_loop(rudra: Rudra) -> None:
    first, second = rudra(*arguments()).json, rudra(*arguments()).json
    assert first["updates"] == EPOCHS * -(-700 // (LAM * MU))
    same(weights(first), weights(second))
    same(weights(first), plain_loop())


@pytest.mark.parametrize("data", ["shm", "ipc", "tcp", "encrypted tcp"])
def test_equal_however_the_vectors_travel(rudra: Rudra, data: str) -> None:
    encrypted = data == "encrypted tcp"
    rudra.env["RUDRA_PSD_DATA"] = data.removeprefix("encrypted ")
    done = rudra("run", "-s", f"wire.encrypt={str(encrypted).lower()}", *arguments(epochs=2)[1:]).json
    same(weights(done), plain_loop(epochs=2))
    assert shares(done) == (LAM if data == "shm" else 0)
    said = (Path(done["folder"]) / "logs" / "node.log").read_text().count("wire.encrypt = false")
    assert said == (1 if data == "tcp" else 0)


def shares(done: dict[str, Any]) -> int:
    """How many learners say that they share the node's memory."""
    logs = (Path(done["folder"]) / "logs").glob("learner-*.log")
    return sum("memory is shared" in log.read_text() for log in logs)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a /dev/shm of its own")
def test_a_dev_shm_of_one_megabyte_is_no_limit(rudra: Rudra, tmp_path: Path) -> None:
    script = tmp_path / "wide.py"
    script.write_text(WIDE)
    command = (
        f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {BIN / 'rudra'} run --json -s learners.count=2 {script}"
    )
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], env=rudra.env, cwd=rudra.home, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run
    done = json.loads(run.stdout.strip().splitlines()[-1])
    assert (done["state"], done["updates"], shares(done)) == ("DONE", 4, 2)


WIDE = """
import torch, rudra_zmq as rudra
data = torch.utils.data.TensorDataset(torch.randn(64, 1000), torch.randn(64, 1000))
with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(1000, 1000))
    opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in learner.epochs():
        for x, y in learner.batches(data, batch_size=8):
            learner.step(((model(x) - y) ** 2).mean())
"""


def test_lambda_one_gives_the_same_bits_under_every_protocol(rudra: Rudra) -> None:
    expected = plain_loop(lam=1, epochs=2)
    for protocol in ("hardsync", "softsync", "async"):
        same(weights(rudra(*arguments(protocol, lam=1, epochs=2)).json), expected)


def test_equal_when_everything_is_killed_in_mid_epoch_and_resumed(rudra: Rudra) -> None:
    with rudra.start(*arguments()) as run:

        def past_two_epochs() -> bool:
            for log in rudra.logs():
                text = log.read_text()
                if f'"update": {2 * 15 + 5}' in text or f'"update":{2 * 15 + 5}' in text:
                    return True
            return False

        wait_for("update 35", past_two_epochs, 60, run)
        for pid in rudra.processes():
            os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=30)
    wait_for("everything dead", lambda: not rudra.processes(), 10)
    (job,) = rudra("jobs", "--json").json["jobs"]
    assert job["state"] == "LOST"
    resumed = rudra("resume", job["job"], "--json").json
    assert resumed["state"] == "DONE"
    assert resumed["generation"] >= 2
    same(weights(resumed), plain_loop())


@pytest.mark.parametrize("how", ["stop", "interrupt"])
def test_equal_when_stopped_and_resumed(rudra: Rudra, how: str) -> None:
    with rudra.start(*arguments(epochs=8)) as run:
        wait_for("an update", lambda: [f for f in rudra.logs() if f.stat().st_size], 60, run)
        if how == "stop":
            rudra("stop")
        else:
            time.sleep(0.1)  # not a synchronisation: any moment of a running job will do
            run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
    assert run.returncode == (0 if how == "stop" else 130)
    resumed = rudra("resume", "--json").json
    assert resumed["state"] == "DONE"
    same(weights(resumed), plain_loop(epochs=8))
