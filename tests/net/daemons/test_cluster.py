"""psd, learnerd and a real node; small programs stand for learners. Who dies, who stays, what the job's state says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rudra_zmq.wire.messages import control as c
from tests.net.daemons.conftest import ROOT, Place, until

PROGRAM = """#!{python}
import ctypes, json, os, signal, sys, time
ctypes.CDLL(None).prctl(1, 9)
spec = json.load(open(os.environ["RUDRA_LEARNER"]))
rank, inc = spec["rank"], spec["incarnation"]
print("up", rank, inc, flush=True)
signal.signal(15, lambda *_: sys.exit(0))
"""
SLEEP = "time.sleep(120)\n"


class Cluster:
    """Both daemons and one job."""

    def __init__(self, place: Place, *args: str) -> None:
        self.place = place
        self.psd, self.learnerd = place.psd(*args), place.learnerd("--slots", "4")
        self.client = place.client()
        self.job = ""

    def submit(self, body: str, count: int = 2, more: str = "") -> str:
        program = self.place.home / "learner"
        program.write_text(PROGRAM.format(python=sys.executable) + body)
        program.chmod(0o700)
        script = self.place.home / "x.py"
        script.touch()
        toml = f'[run]\nscript = "{script}"\npython = "{program}"\n[learners]\ncount = {count}\nminibatch = 8\n{more}'
        message = c.Submit(request=os.urandom(4).hex(), name="demo", toml=toml, cwd="/")
        self.job = self.client.call(message, expect=c.Submitted).job
        return self.job

    def row(self) -> c.JobRow:
        return self.client.call(c.GetJob(job=self.job), 20.0, expect=c.JobReply).row

    def wait(self, done: Callable[[c.JobRow], bool], seconds: float = 20.0) -> c.JobRow:
        until(lambda: done(self.row()), f"a state other than {self.row().state}", seconds)
        return self.row()

    def story(self) -> str:
        rows = self.client.call(c.GetEvents(job=self.job, after=0, wait=0.0), 20.0, expect=c.Events).rows
        return "\n".join(f"{row.level} {row.text}" for row in rows)

    def said(self, text: str, seconds: float = 20.0) -> str:
        until(lambda: text in self.story(), repr(text), seconds)
        return self.story()

    def node(self) -> int:
        """PID of the job's node."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and self.psd.pid == _parent(int(entry.name)):
                return int(entry.name)
        return 0

    def learners(self) -> list[int]:
        """PIDs of the learners, by rank."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(int(entry.name)) == self.learnerd.pid:
                found.append(int(entry.name))
        return sorted(found)

    def up(self, count: int = 2) -> list[int]:
        """Wait until so many run; the node serves then."""
        until(lambda: len(self.learners()) == count, "the learners")
        return self.learners()

    def addresses(self) -> dict[str, object]:
        value: dict[str, object] = json.loads((self.place.runtime / f"n-{self.job}.json").read_text())
        return value


def _parent(pid: int) -> int:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state == "Z" else int(parent)


@pytest.fixture
def cluster(place: Place) -> Cluster:
    return Cluster(place)


def test_a_learner_that_raises_fails_the_job_and_all_is_gone(cluster: Cluster) -> None:
    cluster.submit("if rank == 1: raise ValueError('boom')\n" + SLEEP)
    cluster.said("learner 1 failed")
    began = time.monotonic()
    row = cluster.wait(lambda row: row.state == "FAILED", 12.0)
    assert time.monotonic() - began < 10
    assert row.reason == "learner 1 failed: ValueError: boom"
    assert cluster.node() == 0 and cluster.learners() == []
    log = cluster.client.call(
        c.ReadFile(job=cluster.job, path="logs/learner-1.out", offset=0, limit=4096), expect=c.FileData
    )
    assert log.data.startswith(b"up 1 1\nTraceback") and log.data.endswith(b"ValueError: boom\n")
    assert [p.name for p in cluster.place.runtime.glob("*-*")] == []


def test_a_node_that_is_killed_comes_back_and_learners_stay(cluster: Cluster) -> None:
    cluster.submit(SLEEP)
    before = cluster.up()
    node = cluster.node()
    os.kill(node, signal.SIGKILL)
    cluster.said("node ended by signal 9; restart 1 of 5")
    until(lambda: cluster.addresses()["generation"] == 2, "the new address")
    assert cluster.node() not in (0, node)
    assert cluster.learners() == before
    assert cluster.row().generation == 2


def test_the_log_of_a_node_is_capped(cluster: Cluster) -> None:
    cluster.submit(SLEEP)
    cluster.up()
    log = cluster.place.state / "jobs" / cluster.job / "logs" / "node.log"
    with open(log, "ab") as file:
        file.write(b"x" * (5 << 20))
    os.kill(cluster.node(), signal.SIGKILL)
    cluster.said("generation 2) serves")
    until(lambda: log.stat().st_size < 3 << 20, "the cut")
    assert b" bytes of output cut here]" in log.read_bytes()


def test_a_killed_learner_is_the_next_incarnation(cluster: Cluster) -> None:
    cluster.submit(SLEEP)
    victim = cluster.up()[0]
    os.kill(victim, signal.SIGSEGV)
    story = cluster.said("runs again as incarnation 2")
    assert "killed by SIGSEGV" in story
    assert len(cluster.learners()) == 2


def test_a_killed_psd_is_taken_over_by_the_next(cluster: Cluster) -> None:
    cluster.submit(SLEEP)
    before, node = cluster.up(), cluster.node()
    for generation in (2, 3):
        cluster.psd.kill()
        cluster.psd.wait()
        until(lambda pid=node: _parent(pid) == 0, "the end of the old node", 5.0)  # type: ignore[misc]
        assert cluster.learners() == before
        cluster.psd = cluster.place.psd()
        until(lambda g=generation: cluster.addresses()["generation"] == g, "the new address")  # type: ignore[misc]
        node = until(cluster.node, "a node")
    assert cluster.learners() == before
    assert cluster.story().count("psd was started again") == 2


def test_a_killed_learnerd_takes_its_learners_and_the_next_starts_them(cluster: Cluster) -> None:
    cluster.submit(SLEEP)
    cluster.up()
    node = cluster.node()
    cluster.learnerd.kill()
    cluster.learnerd.wait()
    cluster.said("is gone (PID", 5.0)
    cluster.learnerd = cluster.place.learnerd("--slots", "4")
    until(lambda: len(cluster.learners()) == 2, "the learners")
    assert cluster.node() == node
    out = cluster.place.state / "jobs" / cluster.job / "logs" / "learner-0.out"
    until(lambda: out.read_text().splitlines()[-1:] == ["up 0 5"], "the fifth incarnation")


def test_what_was_killed_leaves_nothing_once_its_successor_runs(cluster: Cluster) -> None:
    cluster.submit(SLEEP)
    cluster.up()
    for child in (cluster.psd, cluster.learnerd):
        child.kill()
        child.wait()
    left = {path.name for path in cluster.place.runtime.iterdir()}
    assert left >= {f"l-{cluster.job}-0.json", f"n-{cluster.job}.json", f"n-{cluster.job}.sock", "psd.sock"}
    cluster.psd = cluster.place.psd()
    cluster.client.call(c.StopJob(job=cluster.job, now=True), 20.0, expect=c.Ok)
    cluster.learnerd = cluster.place.learnerd()
    cluster.wait(lambda row: row.state == "STOPPED")
    left = {path.name for path in cluster.place.runtime.iterdir()}
    assert left == {"psd.sock", "psd.sock.lock", "learnerd.lock"}


def test_a_node_that_has_to_be_killed_leaves_no_socket(cluster: Cluster) -> None:
    cluster.submit(SLEEP)
    cluster.up()
    os.kill(cluster.node(), signal.SIGSTOP)
    cluster.client.call(c.StopJob(job=cluster.job, now=True), expect=c.Ok)
    cluster.wait(lambda row: row.state == "STOPPED", 10.0)
    assert not list(cluster.place.runtime.glob("n-*"))


def test_learnerd_drains_on_term_and_its_learners_come_back_with_it(cluster: Cluster) -> None:
    cluster.submit(SLEEP)
    cluster.up()
    cluster.learnerd.send_signal(signal.SIGTERM)
    assert cluster.learnerd.wait(5) == 0
    assert [p.name for p in cluster.place.runtime.glob("l-*")] == []
    cluster.learnerd = cluster.place.learnerd("--slots", "4")
    until(lambda: len(cluster.learners()) == 2, "the learners")


@pytest.mark.parametrize("now", [False, True])
def test_stop_leaves_nothing(cluster: Cluster, now: bool) -> None:
    cluster.submit(SLEEP)
    cluster.up()
    cluster.client.call(c.StopJob(job=cluster.job, now=now), expect=c.Ok)
    row = cluster.wait(lambda row: row.state == "STOPPED", 8.0)
    assert row.reason == "stopped on request"
    assert cluster.node() == 0 and cluster.learners() == []
    cluster.client.call(c.ResumeJob(job=cluster.job), expect=c.Ok)
    cluster.up()
    assert cluster.row().generation == 2


@pytest.mark.parametrize(
    ("how", "after"), [([], "goes on"), (["--private"], "stopped"), (["--lasting", "--private"], "goes on")]
)
def test_psd_ends_its_jobs_and_goes_on_with_them(place: Place, how: list[str], after: str) -> None:
    args = [*how, str(os.getpid())] if how else []
    cluster = Cluster(place, *args)
    cluster.submit(SLEEP)
    cluster.up()
    cluster.psd.send_signal(signal.SIGTERM)
    assert cluster.psd.wait(8) == 0
    until(lambda: cluster.learners() == [], "the end of the learners", 8.0)
    cluster.psd = place.psd(*args)
    if after == "stopped":
        assert cluster.row().state == "STOPPED"
        return
    until(lambda: len(cluster.learners()) == 2, "the learners")
    assert cluster.row().generation == 2


def test_a_second_term_is_at_once(cluster: Cluster) -> None:
    cluster.submit("signal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\n" + SLEEP, 1)
    cluster.up(1)
    out = cluster.place.state / "jobs" / cluster.job / "logs" / "learner-0.out"
    until(lambda: "deaf" in out.read_text(), "a deaf learner")
    cluster.learnerd.send_signal(signal.SIGTERM)
    until(lambda: "stopping" in cluster.place.log("learnerd"), "the first TERM")
    began = time.monotonic()
    cluster.learnerd.send_signal(signal.SIGTERM)
    assert cluster.learnerd.wait(5) == 70
    assert time.monotonic() - began < 3
    assert cluster.learners() == []


def test_a_script_that_is_not_there_on_the_host_fails_with_the_reason(cluster: Cluster) -> None:
    toml = '[run]\nscript = "/x.py"\npython = "/no/python"\n[learners]\ncount = 1\n'
    message = c.Submit(request="r", name="demo", toml=toml, cwd="/")
    cluster.job = cluster.client.call(message, expect=c.Submitted).job
    row = cluster.wait(lambda row: row.state == "FAILED", 12.0)
    assert "there is no interpreter /no/python" in row.reason
    assert cluster.node() == 0


def test_why_names_who_is_waited_for(cluster: Cluster) -> None:
    place = cluster.place
    job = cluster.submit(SLEEP)
    cluster.up()
    env = place.env | {"RUDRA_PATHS_STATE": str(place.state), "RUDRA_PATHS_RUNTIME": str(place.runtime)}
    cli = [sys.executable, "-c", "import sys; from rudra_zmq.cli.main import main; sys.exit(main())", "why"]

    def why(*args: str) -> str:
        done = subprocess.run([*cli, *args], env=env, cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    until(lambda: "for ranks 0, 1, not here yet" in why(job), "the node's word")
    (row,) = [row for row in json.loads(why(job, "--json"))["waits"] if row["who"] == "node"]
    assert 0 < row["since"] < 60 and 60 < row["left"] <= 120 and row["then"] == "the job fails"
    cluster.client.call(c.StopJob(job=job, now=True))
    cluster.wait(lambda row: row.state == "STOPPED")
    assert json.loads(why(job, "--json")) | {"schema_version": 0} == {
        "schema_version": 0, "job": job, "name": "demo", "state": "STOPPED", "reason": "stopped on request", "waits": [],
    }  # fmt: skip
    assert f"job {job} demo is STOPPED: stopped on request" in why(job)
