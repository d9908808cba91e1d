"""The command line as a person at a terminal, a script and a scheduler use it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from pathlib import Path

import pytest

from .harness import BIN, Rudra, wait_for

SCRIPT = """
import os, sys, time
import torch
import torch.nn.functional as F
import rudra_zmq as rudra

x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
steps = 0
with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(8, 2))
    opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in learner.epochs():
        for xb, yb in learner.batches(data, batch_size=8):
            learner.step(F.cross_entropy(model(xb), yb))
            steps += 1
            print("step", os.getpid(), steps, flush=True)
            time.sleep(float(sys.argv[1]))
        if learner.is_chief:
            learner.log(accuracy=0.25)
print("no end of line", end="")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "counting.py"
    path.write_text(SCRIPT)
    return path


class Terminal:
    """A command whose streams are a terminal of 80 x 24 of its own."""

    def __init__(self, rudra: Rudra, *args: str | Path) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            ["setsid", "-c", str(BIN / "rudra"), *map(str, args)],
            env={**rudra.env, "TERM": "xterm"},
            cwd=rudra.home,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)

    def until(self, words: str, deadline: float = 60.0) -> None:
        """Read until the words are there."""
        end = time.monotonic() + deadline
        while words not in self.text:
            assert time.monotonic() < end, f"no {words!r} within {deadline:g} s:\n{self.text}"
            if not self._read():
                raise AssertionError(f"ended before {words!r}:\n{self.text}")

    def _read(self) -> bool:
        if select.select([self._master], [], [], 0.2)[0]:
            try:
                self.text += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                return False
        return True

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def close(self) -> int:
        """The window is closed; the exit status."""
        os.close(self._master)
        return self.process.wait(60)

    def end(self) -> int:
        """Read to the end; the exit status."""
        while self._read():
            pass
        os.close(self._master)
        return self.process.wait(60)


def test_run_on_a_terminal_is_stopped_and_resumed(rudra: Rudra, script: Path) -> None:
    run = Terminal(rudra, "run", "-s", "learners.count=2", "-s", "job.epochs=4", script, "0.08")
    run.until("epoch 1 of 4: 256 of 256 samples")
    assert "━" in run.text  # the bar
    run.type("\x03")
    assert run.end() == 130
    assert "stopping: running mini-batches are finished" in run.text and "STOPPED" in run.text
    assert "`rudra resume" in run.text and "Traceback" not in run.text
    assert [row["state"] for row in rudra("jobs", "--json").json["jobs"]] == ["STOPPED"]

    watch = Terminal(rudra, "status", "-w")
    assert watch.end() == 0
    assert "stopped on request" in watch.text and "\x1b[J" in watch.text

    done = rudra("resume", "--json")
    assert "submitted as" not in done.err  # the story goes on, it is not told anew
    assert "goes on from" in done.err and "epoch 4 of 4: 256 of 256 samples" in done.err
    value = done.json
    assert value["state"] == "DONE" and value["accuracy"] == 0.25 and value["lambda"] == 2 and value["mu"] == 8
    assert [row["distinct"] for row in value["epochs"]] == [256] * 4
    assert len(done.out.splitlines()) == 1  # data on stdout, all else on stderr


def test_run_when_the_terminal_is_closed(rudra: Rudra, script: Path) -> None:
    run = Terminal(rudra, "run", "-s", "learners.count=2", "-s", "job.epochs=50", script, "0.03")
    run.until("epoch 1 of 50")
    assert run.close() == 130
    value = rudra("status", "--json").json
    assert (value["state"], value["lambda"]) == ("STOPPED", 2) and value["weights"]


def test_a_run_under_nohup_is_followed_from_elsewhere_to_its_end(rudra: Rudra, script: Path) -> None:
    run = subprocess.Popen(
        ["nohup", str(BIN / "rudra"), "run", "-q", "-s", "learners.count=1", "-s", "job.epochs=3", str(script), "0.02"],
        env=rudra.env,
        cwd=rudra.home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for("the job", lambda: ids(rudra), alive=run)
    others = [rudra.start(*verb) for verb in (["follow", "-q"], ["wait"], ["logs", "-f"])]
    wait_for("steps", lambda: "step" in rudra("logs", status=None).out, alive=run)
    run.send_signal(signal.SIGHUP)  # what nohup ignores stays ignored
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert rudra("status", "--json", out.strip()).json["state"] == "DONE"
    for other in others:
        told, err = other.communicate(timeout=30)
        assert other.returncode == 0 and "Traceback" not in err, err
    assert "no end of line" in told


def ids(rudra: Rudra) -> str:
    return rudra("jobs", "-q").out.strip()


def endpoint(rudra: Rudra) -> dict[str, str]:
    (file,) = (rudra.home / "state" / "rudra").glob("*/endpoint.json")
    value: dict[str, str] = json.loads(file.read_text())
    return value


def complete(rudra: Rudra, line: str) -> list[str]:
    """What bash offers at the end of the line."""
    words = line.split(" ")
    code = (
        'source <(rudra completion bash); COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); COMPREPLY=();'
        ' _rudra_completion rudra; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code, "bash", *words], env=rudra.env, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.split()


def test_a_cluster_through_its_days(rudra: Rudra, script: Path, tmp_path: Path) -> None:
    assert rudra("up", "--json").json["hosts"]
    assert rudra("up", status=1).err.count("Fix:") == 1
    submit = rudra.start("submit", "--follow", "-s", "learners.count=2", "-s", "job.epochs=40", script, "0.03")
    job = wait_for("the job", lambda: ids(rudra), alive=submit)
    assert complete(rudra, "rudra status cou") == ["counting"]
    assert job in complete(rudra, f"rudra export {job[:2]}")
    with open(tmp_path / "followed", "w") as out:
        logs = subprocess.Popen([str(BIN / "rudra"), "logs", "-f", job], env=rudra.env, stdout=out)
    wait_for("steps", lambda: "step" in (tmp_path / "followed").read_text(), alive=submit)
    submit.send_signal(signal.SIGINT)
    _, err = submit.communicate(timeout=30)
    assert submit.returncode == 130 and f"`rudra follow {job}` comes back" in err
    waited = rudra("wait", "--timeout", "500ms", job, status=6)
    assert waited.err.startswith("rudra: ") and "Fix:" in waited.err

    psd = endpoint(rudra)["pid"]
    os.kill(int(psd), signal.SIGKILL)
    wait_for("another psd", lambda: endpoint(rudra)["pid"] != psd)
    wait_for("more updates", lambda: rudra("status", "--json", job, status=None).json["generation"] == 2)
    wait_for("training", lambda: rudra("status", "--json", job).json["state"] == "RUNNING")

    rudra("down")
    row = rudra("jobs", "--json").json["jobs"][0]
    assert row["job"] == job and row["state"] == "PENDING" and "rudra up" in row["reason"]
    last = [line.split()[0] for line in rudra("logs", "--tail", "1", job).out.splitlines()]
    assert sorted(last) == ["0:", "0|", "1:", "1|", "node:"]  # the last of each file
    for verb in (["stop"], ["wait"], ["follow"], ["rm", "-y"]):
        refused = rudra(*verb, job, status=None)
        assert refused.status in (2, 4) and "Fix:" in refused.err, refused

    rudra("up")
    assert rudra("stop", "--json", job).json["state"] == "STOPPED"
    assert logs.wait(60) == 0
    followed = (tmp_path / "followed").read_text().splitlines()
    assert Counter(followed) == Counter(rudra("logs", job).out.splitlines())  # through two restarts of psd
    assert max(Counter(line for line in followed if "| step" in line).values()) == 1
    rudra("export", job, tmp_path / "w.safetensors")
    assert rudra("export", job, tmp_path / "w.safetensors", status=2).err.count("Fix:") == 1
    assert rudra("export", job, "/proc/w.safetensors", status=1).err.count("Fix:") == 1
    assert "--yes" in rudra("rm", job, status=2).err
    rudra("rm", "-y", job)
    assert rudra("jobs", "--json").json["jobs"] == []
    rudra("down")


def test_a_run_whose_psd_is_killed_ends_with_the_fix(rudra: Rudra, script: Path) -> None:
    run = rudra.start("run", "-s", "learners.count=1", "-s", "job.epochs=50", script, "0.05")
    wait_for("steps", lambda: "step" in rudra("logs", status=None).out, alive=run)
    (psd,) = (pid for pid, command in rudra.processes().items() if "daemons.psd" in command)
    os.kill(psd, signal.SIGKILL)
    _, err = run.communicate(timeout=30)  # nothing is left that would be waited for
    assert run.returncode == 1
    last = err.splitlines()[-1]
    assert last.startswith("rudra: psd of the private cluster ended") and "Fix: " in last and "rudra resume" in last
    assert rudra("status", "--json").json["state"] == "LOST"


def test_a_runtime_folder_that_is_too_deep_leaves_nothing(rudra: Rudra, tmp_path: Path, script: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir(mode=0o700)
    rudra.env["RUDRA_PATHS_RUNTIME"] = str(deep)
    begun = time.monotonic()
    for verb in (["run", script, "0"], ["up"]):  # whoever finds the mistake, this process or a daemon of it
        refused = rudra(*verb, status=2).err.splitlines()
        assert len(refused) == 1 and "at most 100 work" in refused[0] and refused[0].count("Fix: ") == 1
    assert time.monotonic() - begun < 15  # up says what ended, it does not wait for it
    assert not list(deep.iterdir()) and not list((rudra.home / "state").glob("rudra/*/runs/*"))
    deep.chmod(0o755)
    for verb in (["run", script, "0"], ["up"]):
        assert "others can use the folder" in rudra(*verb, status=5).err


def test_the_written_script_works_alone_and_under_run(rudra: Rudra) -> None:
    rudra("init", "train.py")
    alone = subprocess.run(
        [sys.executable, "train.py"], env=rudra.env, cwd=rudra.home, capture_output=True, text=True, timeout=60
    )
    assert alone.returncode == 0 and "epoch 0: accuracy 0.9" in alone.stdout, alone.stderr
    value = rudra("run", "--json", "-s", "learners.count=2", "-s", "job.epochs=2", "train.py").json
    assert value["state"] == "DONE" and value["accuracy"] > 0.9
    assert [row["distinct"] for row in value["epochs"]] == [4096, 4096]
