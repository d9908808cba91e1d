"""Learner and evaluator as processes, against a scripted node: what they print, obey, leave behind and exit with."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rudra_zmq
from rudra_zmq.daemons.output import last_words
from rudra_zmq.learner.spec import LearnerSpec
from rudra_zmq.wire.messages.data import Attach, Bye, Data, Evaluate, Finish, Log, Push, TestResult
from tests.net.learner.conftest import spec_in
from tests.net.learner.fake_node import FakeNode, Peer

PATIENCE = 60.0
HEAD = """
import sys
import torch
from torch.nn import functional
from torch.utils.data import Dataset
import rudra_zmq as rudra

class Points(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((3,), float(index)), index % 2
"""
LOOP = """
with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(3, 2))
    learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in learner.epochs():
        for x, y in learner.batches(Points(), {options}):
            {inside}
            learner.step(functional.cross_entropy(model(x), y))
    {after}
"""


def script(inside: str = "pass", after: str = "pass", options: str = "") -> str:
    return HEAD + LOOP.format(inside=inside, after=after, options=options)


class Stage:
    """A folder with a node in it, and processes that are gone at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self.node: FakeNode | None = None

    def serve(self, toml: str) -> FakeNode:
        self.toml = toml
        self.node = FakeNode(self.folder, toml=toml, liveness_s=20.0)
        return self.node

    def start(self, env: dict[str, str] | None = None, **spec: Any) -> subprocess.Popen[str]:
        found: LearnerSpec = spec_in(self.folder, **{"toml": self.toml, "ppid": os.getpid(), **spec})
        path = self.folder / "spec.json"
        path.write_bytes(msgspec.json.encode(found))
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(rudra_zmq.__file__).parent.parent),
            "RUDRA_LEARNER": str(path),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": os.environ["TMPDIR"],
            **(env or {}),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "rudra_zmq.learner.process"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, **spec: Any) -> tuple[int, str, str]:
        """(exit status, stdout, stderr)."""
        process = self.start(**spec)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def script(self, text: str, *args: str) -> FakeNode:
        """A node whose job is this script."""
        (self.folder / "train.py").write_text(text)
        quoted = ", ".join(json.dumps(arg) for arg in args)
        where = f'script = "train.py"\nargs = [{quoted}]'
        return self.serve(f"[job]\nepochs = 2\nseed = 7\n[run]\n{where}\n[learners]\ncount = 1\nminibatch = 4\n")

    def task(self, name: str, text: str) -> FakeNode:
        """A node whose job is a task."""
        (self.folder / f"{name}.py").write_text(text)
        where = f'task = "{name}:Task"'
        return self.serve(f"[job]\n{where}\nepochs = 2\nseed = 7\n[learners]\ncount = 1\nminibatch = 4\n")


@pytest.fixture
def stage(folder: Path) -> Iterator[Stage]:
    found = Stage(folder)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()
    if found.node is not None:
        found.node.close()
        assert not found.node.failures, found.node.failures


def test_a_script_runs_as_by_hand_and_trains_to_the_end(stage: Stage) -> None:
    after = 'learner.log(accuracy=0.25); print(sys.argv[1:], learner.rank, "RUDRA_LEARNER" in __import__("os").environ, torch.get_num_threads())'
    node = stage.script(script(after=after), "--log", "a b", "-s")
    code, out, err = stage.run(threads=1)
    assert (code, err) == (0, "")
    assert out.strip() == "['--log', 'a b', '-s'] 0 False 1"
    assert [push.groups[0].spans[0][:2] for push in node.of(Push)] == [(0, 0), (0, 4), (1, 0), (1, 4)]
    assert node.of(Log)[0].metrics == {"accuracy": 0.25} and node.of(Log)[0].epoch == 1
    assert node.of(Bye)[0].reason == "done"
    log = (stage.folder / "learner.log").read_text()
    assert " I learner[0] started job=ab12cd incarnation=1" in log and " I learner[0] ended reason=done" in log
    assert " metrics accuracy=0.25 epoch=1 step=4" in log


def test_workers_load_data_for_a_script_without_a_main_guard(stage: Stage) -> None:
    node = stage.script(script(inside="print(sorted(x[:, 0].tolist()))", options="num_workers=2"))
    code, out, err = stage.run()
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert sorted(lines[0] + lines[1]) == sorted(lines[2] + lines[3]) == [float(i) for i in range(8)]
    assert node.of(Data)[0].prefetch == 4 and node.of(Bye)[0].reason == "done"


WORKERS = """
import os

def say(worker):
    print("worker", os.getpid(), os.getppid(), flush=True)
"""


def test_workers_and_their_fork_server_end_with_a_learner_that_is_killed(stage: Stage) -> None:
    options = "num_workers=2, worker_init_fn=say"
    stage.script(WORKERS + script(inside="print('here', flush=True); __import__('signal').pause()", options=options))
    process = stage.start()
    assert process.stdout is not None
    seen: list[str] = []
    while len(seen) < 3:
        line = process.stdout.readline()
        assert line, "the learner ended before its workers were there"
        seen += [line] if line.startswith(("worker ", "here")) else []
    helpers = {int(pid) for line in seen for pid in line.split()[1:]}
    assert len(helpers) == 3
    descriptors = [os.pidfd_open(pid) for pid in helpers]
    try:
        process.kill()
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], PATIENCE)[0], "a worker or its fork server is still there"
    finally:
        for pid, descriptor in zip(helpers, descriptors, strict=True):
            if not select.select([descriptor], [], [], 0)[0]:
                os.kill(pid, signal.SIGKILL)
            os.close(descriptor)


def test_the_script_s_own_exception_is_shown_whole_and_fails_the_job(stage: Stage) -> None:
    node = stage.script(script(inside="1 / 0"))
    code, _, err = stage.run()
    assert code == 1
    assert (
        "Traceback" in err and 'train.py", line' in err and err.strip().endswith("ZeroDivisionError: division by zero")
    )
    node.wait_for(lambda: bool(node.of(Bye)))
    assert (node.of(Bye)[0].reason, node.of(Bye)[0].text) == ("failed", "ZeroDivisionError: division by zero")


def test_memory_that_python_does_not_get_is_a_failure_with_its_traceback(stage: Stage) -> None:
    node = stage.script(script(inside="bytearray(1 << 62)"))
    code, _, err = stage.run()
    assert code == 1 and "Traceback" in err and 'train.py", line' in err
    assert last_words(err.encode()) == "MemoryError"
    node.wait_for(lambda: bool(node.of(Bye)))
    assert (node.of(Bye)[0].reason, node.of(Bye)[0].text) == ("failed", "MemoryError")


def test_an_interrupt_is_a_loss_and_told_as_nothing_else(stage: Stage) -> None:
    """By its exit status, as every death by a signal: the rank is started again."""
    node = stage.script(script(inside="raise KeyboardInterrupt"))
    code, _, _ = stage.run()
    node.drop()
    assert code == -signal.SIGINT and node.of(Data) and not node.of(Bye)


def test_an_error_of_ours_is_one_line_with_the_fix(stage: Stage) -> None:
    stage.script(script().replace("SGD(model.parameters(), lr=0.1)", "NAdam(model.parameters())"))
    code, _, err = stage.run()
    assert code == 2
    assert err.startswith("rudra: NAdam has no rule on the servers") and "Fix: use torch.optim.SGD" in err
    assert err.count("\n") == 1


def test_no_node_is_one_line_and_status_75(stage: Stage) -> None:
    node = stage.script(script())
    node.announce([f"ipc://{stage.folder}/none"])
    text = (stage.folder / "train.py").read_text()
    (stage.folder / "train.py").write_text(
        "import rudra_zmq.learner.remote as remote\nremote.RemoteExchange.__init__.__kwdefaults__['give_up_s'] = 0.3\n"
        + text
    )
    code, _, err = stage.run()
    assert code == 75 and err.startswith("rudra: the node of job ab12cd was not reached") and err.count("\n") == 1


def test_sigterm_finishes_the_step_pushes_and_leaves(stage: Stage) -> None:
    inside = "print('computing', flush=True); __import__('time').sleep(0.5 if learner.seq == 2 else 0)"
    node = stage.script(script(inside=inside, after="print('after', flush=True)"))
    process = stage.start()
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "after\n", "")
    assert [push.seq for push in node.of(Push)] == [1, 2] and node.of(Bye)[0].reason == "drain"


def test_sigterm_while_waiting_for_others_ends_at_once(stage: Stage) -> None:
    node = stage.script(script())
    node._attach = lambda peer, message: None  # type: ignore[method-assign]
    process = stage.start()
    node.wait_for(lambda: bool(node.of(Attach)))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=5.0)
    assert (process.returncode, err) == (0, "")
    assert [bye.reason for bye in node.of(Bye)] == ["drain"]


def test_a_learner_ends_with_the_process_that_started_it(stage: Stage) -> None:
    stage.script(script(inside="print(__import__('os').getpid(), flush=True); __import__('time').sleep(600)"))
    path = stage.folder / "spec.json"
    starter = (
        "import json, os, subprocess, sys; path = sys.argv[1]; spec = json.load(open(path));"
        "spec['ppid'] = os.getpid(); json.dump(spec, open(path, 'w'));"
        "subprocess.run([sys.executable, '-m', 'rudra_zmq.learner.process'])"
    )
    path.write_bytes(msgspec.json.encode(spec_in(stage.folder, toml=stage.toml)))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(rudra_zmq.__file__).parent.parent)}
    env |= {"RUDRA_LEARNER": str(path), "TMPDIR": os.environ["TMPDIR"]}
    parent = subprocess.Popen([sys.executable, "-c", starter, str(path)], env=env, stdout=subprocess.PIPE, text=True)
    stage.processes.append(parent)
    assert parent.stdout is not None
    learner = int(parent.stdout.readline())
    parent.kill()
    end = time.monotonic() + 10.0
    while Path(f"/proc/{learner}").exists() and "\nState:\tZ" not in Path(f"/proc/{learner}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_learner_without_its_starter_does_not_start(stage: Stage) -> None:
    stage.script(script())
    code, out, err = stage.run(ppid=1 if os.getpid() != 1 else 2)
    assert code == 1 and out == "" and "has ended" in err and err.count("\n") == 1


def test_a_second_join_is_refused(stage: Stage) -> None:
    stage.script(script() + "\nwith rudra.join() as again:\n    pass\n")
    code, _, err = stage.run()
    # RUDRA_LEARNER is gone by then: what the process starts is not this learner.
    assert code == 1 and "joined its job already" in err


TASK = """
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

class Task:
    def model(self):
        return torch.nn.Linear(3, 2)

    def dataset(self, split):
        x = torch.arange(24.0).reshape(8, 3) if split == "train" else torch.zeros(6, 3)
        return TensorDataset(x, torch.arange(len(x)) % 2)

    def loss(self, model, batch):
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        assert not model.training and not torch.is_grad_enabled()
        scores = model(x)
        return {"correct": int((scores.argmax(1) == y).sum()), "count": len(y), "loss_sum": 2.0 * len(y)}
"""


def test_a_task_trains_without_a_script(stage: Stage) -> None:
    node = stage.task("mytask", TASK)
    code, out, err = stage.run()
    assert (code, out, err) == (0, "", "")
    assert len(node.of(Push)) == 4 and all(push.loss is not None for push in node.of(Push))


def test_a_task_that_raises_shows_its_traceback(stage: Stage) -> None:
    stage.task("badtask", TASK.replace("return torch.nn.Linear(3, 2)", 'raise ValueError("no such layer")'))
    code, _, err = stage.run()
    assert code == 1 and "Traceback" in err and err.strip().endswith("ValueError: no such layer")


def test_a_task_that_is_not_there_is_one_line(stage: Stage) -> None:
    stage.serve('[job]\ntask = "nowhere_at_all:Task"\n')
    code, _, err = stage.run()
    assert code == 2 and "nowhere_at_all" in err and "Fix: " in err and err.count("\n") == 1


def test_an_evaluator_tests_what_comes_and_ends_when_told(stage: Stage) -> None:
    node = stage.task("mytask", TASK)
    results = 0

    def attach(peer: Peer, message: Attach) -> None:
        FakeNode._attach(node, peer, message)  # makes the weights
        assert node.weights is not None
        node.weights.params[:] = [0, 0, 0, 0, 0, 0, 1, 0]  # bias for class 0: half of the test labels
        send(peer, 0)

    def send(peer: Peer, epoch: int) -> None:
        assert node.weights is not None
        nbytes = len(node.weights.data)
        peer.out.message(Evaluate(epoch=epoch, generation=1, timestamp=epoch + 5, key=9 + epoch, nbytes=nbytes))
        peer.out.vector(9 + epoch, node.weights.data)

    answer = node._answer

    def take(peer: Peer, message: Any) -> None:
        nonlocal results
        if isinstance(message, TestResult):
            results += 1
            if results == 1:
                send(peer, 1)
            else:
                peer.out.message(Finish())
        else:
            answer(peer, message)

    node._answer = take  # type: ignore[method-assign]
    node._attach = attach  # type: ignore[method-assign]
    code, out, err = stage.run(role="evaluator", rank=65535)
    assert (code, out, err) == (0, "", "")
    found = node.of(TestResult)
    assert [(r.epoch, r.timestamp) for r in found] == [(0, 5), (1, 6)]
    assert found[0].metrics == {"accuracy": 0.5, "test_error": 0.5, "loss": 2.0} and found[0].seconds > 0
    assert " I evaluator tested epoch=0" in (stage.folder / "learner.log").read_text()
