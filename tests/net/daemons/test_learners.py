"""learnerd's supervision, with small programs in the place of a learner's interpreter."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.config.host import HostSection
from rudra_zmq.daemons.code import Code
from rudra_zmq.daemons.learners import Learners
from rudra_zmq.daemons.spawn import Supervisor
from rudra_zmq.errors import RudraError
from rudra_zmq.head.ranks import EVALUATOR
from rudra_zmq.net.loop import Loop
from rudra_zmq.wire import bundle
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

JOB = "abc123"
HEAD = """#!{python}
import json, os, signal, sys, time
spec = json.load(open(os.environ["RUDRA_LEARNER"]))
rank, inc = spec["rank"], spec["incarnation"]
"""


class Host:
    """A learnerd without its connection: orders go in by hand, ``told`` is what the head would hear."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state, self.runtime = folder / "state", folder / "run"
        self.state.mkdir(mode=0o700)
        self.runtime.mkdir(mode=0o700)
        self.loop = Loop()
        self.supervisor = Supervisor(self.loop)
        self.loop.on_signal(signal.SIGCHLD, self.supervisor.reap)
        self.told: list[c.LearnerStarted | c.LearnerExit] = []
        self.learners = Learners(
            self.loop,
            self.supervisor,
            state=self.state,
            runtime=self.runtime,
            host=HostSection(name="here"),
            tell=self.told.append,
            code=Code(self.loop, self.state, self._head),
        )
        self.pieces: list[c.GetBundle] = []  # that were asked for
        self.answers: Callable[[c.GetBundle], Message] = lambda _: c.Error(code="not-found", message="no code here")

    def _head(self, message: c.GetBundle, then: Callable[[Message], None]) -> None:
        self.pieces.append(message)
        answer = self.answers(message)
        self.loop.after(0.0, lambda: then(answer))

    def start(self, body: str, ranks: list[int] | None = None, **kw: Any) -> str:
        program = self.folder / "python"
        program.write_text(HEAD.format(python=sys.executable) + body)
        program.chmod(0o700)
        (self.folder / "x.py").touch()
        head = f'[run]\nscript = "{self.folder}/x.py"\n{kw.pop("run", "")}\n'
        table = f'{head}python = "{kw.pop("python", program)}"\nenv = {{ MINE = "yes" }}\n'
        order = c.StartLearners(
            job=JOB, generation=1, name="demo", token="tok", toml=table, cwd=kw.pop("cwd", str(self.folder)),
            ranks=[0] if ranks is None else ranks, evaluator=kw.pop("evaluator", False), addresses=["ipc:///n"],
            threads=kw.pop("threads", 0), restarts=kw.pop("restarts", 3), **kw,
        )  # fmt: skip
        return self.learners.start(order)

    def until(self, done: Callable[[], object], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"it did not happen in time: {self.told}"
            self.loop.turn(0.2)

    @property
    def exits(self) -> list[c.LearnerExit]:
        return [m for m in self.told if isinstance(m, c.LearnerExit)]

    @property
    def starts(self) -> list[c.LearnerStarted]:
        return [m for m in self.told if isinstance(m, c.LearnerStarted)]

    def out(self, name: str = "learner-0") -> str:
        return (self.state / "jobs" / JOB / "logs" / f"{name}.out").read_text()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.supervisor.kill_all()
    made.until(lambda: not len(made.supervisor))
    made.loop.close()


def test_a_learner_gets_its_spec_and_leaves_nothing(host: Host) -> None:
    text = host.start(
        'open("seen", "w").write(json.dumps([spec, dict(os.environ), sys.argv[1:], os.getcwd()]))\n', threads=2
    )
    assert text == f"2 threads each, {len(os.sched_getaffinity(0))} cores"
    spec_file, node_file = host.runtime / f"l-{JOB}-0.json", host.runtime / f"n-{JOB}.json"
    assert [stat.S_IMODE(p.stat().st_mode) for p in (spec_file, node_file)] == [0o600, 0o600]
    assert json.loads(node_file.read_text()) == {"addresses": ["ipc:///n"], "generation": 1, "key": ""}
    host.until(lambda: host.exits)
    spec, env, argv, cwd = json.loads((host.folder / "seen").read_text())
    assert argv == ["-m", "rudra_zmq.learner.process"] and cwd == str(host.folder)
    assert (spec["rank"], spec["incarnation"], spec["role"], spec["token"]) == (0, 1, "learner", "tok")
    assert (spec["threads"], spec["host"], spec["ppid"]) == (2, "here", os.getpid())
    assert spec["node_file"] == str(node_file) and spec["log"].endswith(f"jobs/{JOB}/logs/learner-0.log")
    assert Path(spec["output"]).is_dir()
    assert env["MINE"] == "yes" and env["OMP_NUM_THREADS"] == "2" and "RANK" not in env
    (end,) = host.exits
    assert (end.kind, end.status, end.respawn) == ("ok", 0, False)
    assert list(host.runtime.iterdir()) == [] and host.learners.count == 0


def test_threads_are_the_cores_shared_by_the_learners_of_the_job(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert host.start("", [0, 1, 2], evaluator=True) == "2 threads each, 8 cores"
    host.until(lambda: len(host.exits) == 4)
    assert host.start("", list(range(9))) == "1 thread each, 8 cores"


def test_an_error_is_told_with_its_last_line_and_not_repeated(host: Host) -> None:
    host.start("print('before'); raise ValueError('boom')\n")
    host.until(lambda: host.exits)
    (end,) = host.exits
    assert (end.kind, end.status, end.respawn, end.text) == ("error", 1, False, "ValueError: boom")
    assert end.tail.startswith("before\nTraceback")
    assert host.learners.count == 0


def test_a_signal_is_a_loss_and_the_next_incarnation_follows(host: Host) -> None:
    began = time.monotonic()
    host.start("if inc < 9: os.kill(os.getpid(), 11)\n", restarts=2, incarnation=7)
    host.until(lambda: len(host.exits) == 3)
    assert [(e.kind, e.incarnation, e.respawn, e.status) for e in host.exits] == [
        ("signal", 7, True, -11), ("signal", 8, True, -11), ("ok", 9, False, 0),
    ]  # fmt: skip
    assert [s.incarnation for s in host.starts] == [7, 8, 9]
    assert host.exits[0].text == "killed by SIGSEGV"
    assert time.monotonic() - began > 1.4  # 0.5 s, then 1 s
    assert host.out() == "\n[rudra: incarnation 8]\n[rudra: incarnation 9]\n".lstrip("\n")


def test_restarts_are_used_up(host: Host) -> None:
    host.start("os.kill(os.getpid(), 9)\n", restarts=1)
    host.until(lambda: len(host.exits) == 2)
    assert [(e.kind, e.respawn) for e in host.exits] == [("signal", True), ("signal", False)]
    assert host.learners.count == 0 and list(host.runtime.iterdir()) == []


def test_a_node_that_is_not_reached_is_a_loss(host: Host) -> None:
    host.start("print('no node at ipc:///n'); sys.exit(75)\n", restarts=0)
    host.until(lambda: host.exits)
    (end,) = host.exits
    assert (end.kind, end.status, end.text) == ("signal", 75, "no node at ipc:///n")


def test_running_tells_who_waits_to_start_again(host: Host) -> None:
    host.start("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)\n", [0, 1], evaluator=True)
    host.until(lambda: host.exits)
    pids = {s.rank: s.pid for s in host.starts}
    assert sorted(host.learners.running()) == [
        (JOB, 0, 1, pids[0]),
        (JOB, 1, 1, 0),
        (JOB, EVALUATOR, 1, pids[EVALUATOR]),
    ]
    assert host.learners.count == 2


def test_stop_ends_all_also_those_that_wait(host: Host) -> None:
    host.start("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)\n", [0, 1], evaluator=True)
    host.until(lambda: host.exits)
    host.learners.stop(c.StopLearners(job=JOB, ranks=[], grace=5.0))
    host.until(lambda: len(host.exits) == 4)
    ends = {(e.rank, e.incarnation): (e.kind, e.respawn) for e in host.exits[1:]}
    assert ends == {(0, 1): ("ok", False), (1, 2): ("ok", False), (EVALUATOR, 1): ("ok", False)}
    assert list(host.runtime.iterdir()) == [] and host.learners.running() == []


def test_stop_of_one_rank_leaves_the_others(host: Host) -> None:
    host.start("time.sleep(60)\n", [0, 1])
    host.learners.stop(c.StopLearners(job=JOB, ranks=[1], grace=5.0))
    host.until(lambda: host.exits)
    assert [rank for _, rank, _, _ in host.learners.running()] == [0]
    assert (host.runtime / f"n-{JOB}.json").exists()


def test_who_ignores_term_is_killed_after_the_grace(host: Host) -> None:
    host.start("signal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(60)\n")
    host.until(lambda: host.out() == "deaf\n")
    host.learners.stop(c.StopLearners(job=JOB, grace=0.2))
    host.until(lambda: host.exits, 5.0)
    assert (host.exits[0].kind, host.exits[0].status) == ("ok", -9)


def test_a_drain_leaves_well_and_will_come_back(host: Host) -> None:
    body = (
        "signal.signal(15, lambda *_: sys.exit(0))\nprint('up', flush=True)\n"
        "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    host.start(body, [0, 1])
    host.until(lambda: host.exits and host.out() == "up\n")
    host.learners.drain(20.0)
    host.until(lambda: len(host.exits) == 3)
    assert all((e.kind, e.respawn) == ("ok", True) for e in host.exits[1:])
    with pytest.raises(RudraError, match="stopping"):
        host.start("")


def test_a_removed_job_leaves_nothing_on_its_host(host: Host) -> None:
    host.start("time.sleep(60)\n")
    folder = host.state / "jobs" / JOB
    host.learners.remove(JOB)
    assert folder.exists()  # something of it runs
    host.learners.stop(c.StopLearners(job=JOB, grace=0.0))
    host.until(lambda: host.exits)
    host.learners.remove(JOB)
    assert not folder.exists()
    host.learners.remove(JOB)  # told twice, or never here


def test_a_fence_kills_that_incarnation_alone(host: Host) -> None:
    host.start("time.sleep(60)\n")
    host.learners.kill(c.KillLearner(job=JOB, rank=0, incarnation=2, reason="another"))
    host.learners.kill(c.KillLearner(job=JOB, rank=0, incarnation=1, reason="no step for 600 s"))
    host.until(lambda: len(host.starts) == 2)
    (end,) = host.exits
    assert (end.kind, end.respawn, end.text) == ("signal", True, "killed on purpose: no step for 600 s")
    assert host.starts[1].incarnation == 2


def test_a_repeated_order_starts_nobody_twice(host: Host) -> None:
    host.start("time.sleep(60)\n", [0])
    host.start("time.sleep(60)\n", [0, 1], incarnation=5)
    assert len(host.supervisor) == 2
    assert [(s.rank, s.incarnation) for s in host.starts] == [(0, 1), (0, 1), (1, 5)]


def test_the_nodes_new_address_is_in_the_file(host: Host) -> None:
    host.start("time.sleep(60)\n")
    places = ["ipc:///m", "tcp://127.0.0.1:1"]
    host.learners.moved(c.NodeMoved(job=JOB, generation=2, addresses=places, key="public"))
    file = host.runtime / f"n-{JOB}.json"
    assert json.loads(file.read_text()) == {"addresses": places, "generation": 2, "key": "public"}
    host.learners.moved(c.NodeMoved(job="ffffff", generation=2, addresses=[]))


@pytest.mark.parametrize(
    ("kw", "message"),
    [({"python": "/no/python"}, "no interpreter /no/python"), ({"cwd": "/no/where"}, "no folder /no/where")],
)
def test_what_no_learner_could_start_with_is_refused_at_once(host: Host, kw: dict[str, Any], message: str) -> None:
    with pytest.raises(RudraError, match=message):
        host.start("", **kw)
    assert host.told == [] and host.learners.count == 0


def test_what_cannot_be_executed_is_told_as_such(host: Host) -> None:
    bad = host.folder / "bad"
    bad.write_text("#!/no/such/interpreter\n")
    bad.chmod(0o700)
    host.start("", python=str(bad))
    host.until(lambda: host.exits)
    assert (host.exits[0].kind, host.exits[0].respawn) == ("spawn", False)
    assert "cannot be started" in host.exits[0].text
    assert list(host.runtime.iterdir()) == []


def test_a_job_can_come_again(host: Host) -> None:
    host.start("")
    host.until(lambda: host.exits)
    host.start("print('again')\n", incarnation=5)
    host.until(lambda: len(host.exits) == 2)
    assert host.exits[1].incarnation == 5 and host.out() == "again\n"


# ------------------------------------------------------------------------------------------- code of its own


def serve(host: Host, code: bundle.Bundle, piece: int = 1000) -> None:
    """The head that has it."""
    host.answers = lambda ask: c.FileData(data=code.data[ask.offset : ask.offset + piece], inode=0, size=len(code.data))


def package() -> bundle.Bundle:
    return bundle.make(
        [
            bundle.Entry("pkg/__init__.py", b"word = 'from the bundle'\n" + b"#" * 3000, False),
            bundle.Entry("sub/data.txt", b"data", False),
            bundle.Entry("tool", b"#!/bin/sh\necho tool\n", True),
        ]
    )


SAYS = "import pkg, subprocess\nprint(pkg.word, os.getcwd(), subprocess.check_output([sys.path[1] + '/tool'], text=True))\n"


def test_code_is_fetched_once_and_is_first_on_the_path(host: Host) -> None:
    code = package()
    serve(host, code)
    said = host.start(SAYS, ranks=[0, 1], bundle=code.name, run='code = "/home/me"\ncwd = "sub"')
    assert code.name[:12] in said and host.starts == []
    host.until(lambda: len(host.exits) == 2)
    assert {m.kind for m in host.exits} == {"ok"}, host.exits
    folder = host.state / "jobs" / JOB / "code"
    assert host.out() == f"from the bundle {folder}/sub tool\n\n"
    assert [ask.offset for ask in host.pieces] == list(range(0, len(code.data), 1000))
    host.start(SAYS, bundle=code.name, run='code = "/home/me"\ncwd = "sub"')
    host.until(lambda: len(host.exits) == 3)
    assert len(host.pieces) == -(-len(code.data) // 1000)
    host.learners.remove(JOB)
    assert list((host.state / "bundles").iterdir()) == list((host.state / "jobs").iterdir()) == []


def test_code_goes_on_where_the_head_was_cut_off(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rudra_zmq.daemons.code.RETRY_S", 0.0)
    code, cut = package(), [1000, 2000]
    serve(host, code)
    whole = host.answers

    def flaky(ask: c.GetBundle) -> Message:
        if ask.offset in cut:
            cut.remove(ask.offset)
            return c.Error(code="unreachable", message="away")
        return whole(ask)

    host.answers = flaky
    host.start("print('ran')\n", bundle=code.name, run='code = "/home/me"')
    host.until(lambda: len(host.exits) == 1)
    assert host.out() == "ran\n" and not cut
    assert [ask.offset for ask in host.pieces][:5] == [0, 1000, 1000, 2000, 2000]


@pytest.mark.parametrize("what", ["missing", "other", "long", "garbage", "folder"])
def test_code_that_cannot_be_had_fails_the_learners_and_says_why(host: Host, what: str) -> None:
    code = package()
    name, run = code.name, 'code = "/home/me"'
    if what == "other":
        serve(host, bundle.Bundle(name, code.data[:-1] + b"x"))
    elif what == "long":
        host.answers = lambda ask: c.FileData(data=b"x" * 1000, inode=0, size=1500)
    elif what == "garbage":
        name = "0" * 64
        host.answers = lambda ask: c.Ok()
    elif what == "folder":
        serve(host, code)
        run += '\ncwd = "nowhere"'
    host.start("print('ran')\n", ranks=[0, 1], bundle=name, run=run)
    host.until(lambda: len(host.exits) == 2)
    said = {"missing": "no code here", "other": "not the code", "long": "not the code", "garbage": "answer is none",
            "folder": "no folder nowhere"}[what]  # fmt: skip
    for exit in host.exits:
        assert exit.kind == "spawn" and said in exit.text, exit
    assert host.learners.count == 0 and host.starts == []
    if what != "folder":
        assert list((host.state / "bundles").iterdir() if (host.state / "bundles").exists() else []) == []


def test_learners_that_wait_for_code_can_be_stopped(host: Host) -> None:
    code = package()
    held: list[Callable[[], None]] = []
    host.learners._code._ask = lambda message, then: held.append(
        lambda: then(c.FileData(data=code.data[message.offset :], inode=0, size=len(code.data)))
    )
    host.start("print('ran')\n", ranks=[0, 1], bundle=code.name, run='code = "/home/me"')
    host.until(lambda: len(held) == 1)
    assert [(rank, pid) for _, rank, _, pid in host.learners.running()] == [(0, 0), (1, 0)]
    host.learners.stop(c.StopLearners(job=JOB, grace=1.0))
    assert [m.kind for m in host.exits] == ["ok", "ok"] and host.learners.running() == []
    held[0]()  # and what comes now starts nobody
    host.until((host.state / "jobs" / JOB / "code").is_dir)
    host.loop.turn(0.05)
    assert host.starts == []


def test_a_host_that_is_shut_out_ends_all_and_can_start_again(host: Host) -> None:
    body = "if rank == 1 and spec['incarnation'] == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    host.start(body, [0, 1])
    host.until(lambda: host.exits)
    host.learners.leave(5.0)
    host.until(lambda: len(host.exits) == 3)
    assert {(e.rank, e.incarnation, e.kind, e.respawn) for e in host.exits[1:]} == {
        (0, 1, "ok", True),
        (1, 2, "ok", True),
    }
    assert host.learners.running() == []
    host.start(body, [0, 1], incarnation=5)
    assert {(rank, incarnation) for _, rank, incarnation, _ in host.learners.running()} == {(0, 5), (1, 5)}
