"""The head, by what comes in and what goes out: who may say what, and the requests of the command line."""

from __future__ import annotations

import pytest

from rudra_zmq.head.effects import Send
from rudra_zmq.wire.messages import control as c
from tests.unit.head.world import SCRIPT, TOKEN, TOML, World


def error(reply: object, code: str) -> c.Error:
    assert isinstance(reply, c.Error), reply
    assert reply.code == code, reply
    return reply


# ------------------------------------------------------------------------------------------ who is it


@pytest.mark.parametrize(
    "message",
    [
        c.ListJobs(), c.GetJob(job=""), c.StopJob(job="aaaaaa"), c.HostPing(), c.Ok(),
        c.NodeReport(job="aaaaaa", progress=c.Progress(state="DONE")), c.NodeStop(now=True, state="FAILED", reason=""),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_strangers_are_refused_and_counted(world: World, message: c.Message) -> None:
    error(world.send(b"x", message), "security")
    assert sum(world.head.refused.values()) == 1


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "t", "ü" * 64])
def test_a_wrong_token_opens_nothing(world: World, token: str) -> None:
    error(world.send(b"x", c.Whoami(token=token)), "security")
    error(world.send(b"x", c.Register(token=token, name="a", slots=1, pid=1, boot="b")), "security")
    error(world.send(b"x", c.ListJobs()), "security")
    assert sum(world.head.refused.values()) == 3


def test_roles_do_not_mix(world: World) -> None:
    job = world.running()
    error(world.send(b"cli", c.HostPing()), "security")
    error(
        world.send(b"cli", c.NodeDone(job=job, state="DONE", reason="", progress=c.Progress(state="DONE"))), "security"
    )
    error(world.send(b"a", c.StopJob(job=job)), "security")
    error(world.send(b"node", c.ListJobs()), "security")
    assert world.state_of(job) == "RUNNING"


def test_a_node_speaks_for_its_own_job_alone(world: World) -> None:
    one = world.running(1)
    two = world.submit(1)
    token = world.registry.stored(one).token
    hello = c.NodeHello(job=two, token=token, generation=1, pid=1, addresses=[])
    error(world.send(b"node", hello), "security")
    late = c.NodeHello(job=one, token=token, generation=9, pid=1, addresses=[])
    error(world.send(b"other", late), "security")
    error(world.send(b"node", c.NodeEvent(job=two, level="I", text="x")), "security")
    assert "x" not in world.story(two)


def test_a_message_without_an_id_gets_no_answer(world: World) -> None:
    assert world.head.handle(b"x", "", c.ListJobs(), world.now) == []


def test_a_bug_is_told_and_survived(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(world.registry, "jobs", broken)
    assert "psd has a bug" in error(world.cli(c.ListJobs()), "failed").message
    monkeypatch.undo()
    assert isinstance(world.cli(c.ListJobs()), c.Jobs)


def test_many_connections_cost_bounded_memory(world: World) -> None:
    for n in range(5000):
        world.head.handle(b"p%d" % n, "", c.Whoami(token=TOKEN), world.now + n)
    assert len(world.head._peers) <= 4096
    assert isinstance(world.send(b"p4999", c.ListJobs()), c.Jobs)


# ------------------------------------------------------------------------------------------ submit


def test_submit_is_idempotent_by_request(world: World) -> None:
    first = world.submit(request="same")
    assert world.submit(request="same") == first
    assert len(world.registry.jobs()) == 1
    assert (world.state / "jobs" / first / "job.toml").read_text() == TOML.format(count=2)


@pytest.mark.parametrize(
    ("toml", "code"),
    [("[job", "config"), ("[job]\nnme = 1\n", "config"), ("", "config")],
)
def test_a_bad_file_is_refused_with_nothing_left(world: World, toml: str, code: str) -> None:
    error(world.cli(c.Submit(request="r", name="x", toml=toml, cwd="/tmp")), code)
    assert world.registry.jobs() == []
    assert not (world.state / "jobs").exists()


def test_a_relative_folder_is_refused(world: World) -> None:
    error(world.cli(c.Submit(request="r", name="x", toml=TOML.format(count=1), cwd="here")), "config")


def test_what_can_never_fit_is_refused_where_hosts_are_known(world: World) -> None:
    waits = world.submit(9)
    assert world.state_of(waits) == "PENDING"
    world.wait(0.25)
    assert world.job(waits).reason == "needs 9 slots, no learnerd is registered"
    world.register(slots=4)
    reply = error(world.cli(c.Submit(request="r", name="x", toml=TOML.format(count=9), cwd="/")), "rejected")
    assert "needs 9 slots, the cluster has 4" in reply.message
    assert world.job(waits).reason == "the job needs 9 slots, the cluster has 4"


def test_a_folder_that_cannot_be_made_leaves_no_job(world: World) -> None:
    (world.state / "jobs").write_text("in the way")
    reply = world.cli(c.Submit(request="r", name="x", toml=TOML.format(count=1), cwd="/"))
    assert isinstance(reply, c.Error)
    assert world.registry.jobs() == []


def test_two_submits_of_one_file_are_two_jobs_of_one_name(world: World) -> None:
    one, two = world.submit(name="demo"), world.submit(name="demo")
    assert one != two
    assert world.job("demo").job == two


# ------------------------------------------------------------------------------------------ reading


def test_list_is_newest_first_and_brief(world: World) -> None:
    job = world.running(1)
    row = c.EpochRow(epoch=0, samples=1, distinct=1, updates=1, seconds=1.0)
    learner = c.LearnerRow(rank=0, incarnation=1, state="present")
    world.report(job, rows=[row, row], learners=[learner], histogram={"0": 4}, updates=3)
    later = world.submit()
    reply = world.cli(c.ListJobs())
    assert isinstance(reply, c.Jobs)
    assert [r.job for r in reply.rows] == [later, job]
    progress = reply.rows[1].progress
    assert progress is not None and progress.updates == 3
    assert (len(progress.rows), progress.learners, progress.histogram) == (1, [], {})
    whole = world.job(job).progress
    assert whole is not None and len(whole.rows) == 2 and whole.learners == [learner]


def test_unknown_jobs_are_not_found(world: World) -> None:
    for message in (
        c.GetJob(job="nope"), c.GetJob(job=""), c.StopJob(job="aaaaaa"), c.ResumeJob(job="aaaaaa"),
        c.RemoveJob(job="aaaaaa"), c.GetEvents(job="aaaaaa", after=0, wait=1.0), c.ListFiles(job="aaaaaa"),
        c.ReadFile(job="aaaaaa", path="job.toml", offset=0, limit=1),
    ):  # fmt: skip
        error(world.cli(message), "not-found")


def test_events_come_at_once_or_when_there_is_one(world: World) -> None:
    job = world.submit()
    first = world.cli(c.GetEvents(job=job, after=0, wait=5.0))
    assert isinstance(first, c.Events) and first.rows[0].seq == 1
    last = first.rows[-1].seq
    assert world.cli(c.GetEvents(job=job, after=last, wait=5.0)) is None
    world.register()  # the job starts
    (later,) = world.sent(c.Events)
    assert later.rows[0].seq == last + 1


def test_events_wait_for_a_change_of_state_too(world: World) -> None:
    job = world.running(1)
    last = world.registry.events(job, 0)[-1].seq
    assert world.cli(c.GetEvents(job=job, after=last, wait=5.0, state="RUNNING")) is None
    world.report(job, "WAITING", reason="learner 0 is missing")
    (answer,) = world.sent(c.Events)
    assert (answer.job.state, answer.job.reason) == ("WAITING", "learner 0 is missing")
    now = world.cli(c.GetEvents(job=job, after=last, wait=5.0, state="RUNNING"))
    assert isinstance(now, c.Events)


def test_events_answer_when_the_time_is_up_and_not_before(world: World) -> None:
    job = world.running(1)
    last = world.registry.events(job, 0)[-1].seq
    assert world.cli(c.GetEvents(job=job, after=last, wait=2.0)) is None
    world.wait(1.5)
    assert world.sent(c.Events) == []
    world.wait(0.75)
    (answer,) = world.sent(c.Events)
    assert answer.rows == [] and answer.job.job == job


def test_a_wait_is_at_most_twenty_seconds(world: World) -> None:
    job = world.running(1)
    last = world.registry.events(job, 0)[-1].seq
    world.cli(c.GetEvents(job=job, after=last, wait=1e9))
    world.wait(20.25)
    assert len(world.sent(c.Events)) == 1


def test_nobody_waits_for_a_peer_that_is_gone(world: World) -> None:
    job = world.running(1)
    last = world.registry.events(job, 0)[-1].seq
    world.cli(c.GetEvents(job=job, after=last, wait=20.0))
    world.head.gone(b"cli", world.now)
    world.wait(21.0)
    assert world.sent(c.Events) == []


def test_hosts_show_what_is_free(world: World) -> None:
    world.running(3)
    world.register("b", slots=2, pid=501)
    reply = world.cli(c.ListHosts())
    assert isinstance(reply, c.Hosts)
    assert [(h.name, h.slots, h.free) for h in reply.rows] == [("a", 4, 1), ("b", 2, 2)]


# ------------------------------------------------------------------------------------------ files


def test_files_of_ones_own_folder(world: World) -> None:
    job = world.running(1)
    logs = world.state / "jobs" / job / "logs"
    (logs / "learner-0.out").write_text("hello")
    reply = world.cli(c.ListFiles(job=job))
    assert isinstance(reply, c.Files)
    assert ("logs/learner-0.out", 5) in reply.rows and any(p == "job.toml" for p, _ in reply.rows)
    got = world.cli(c.ReadFile(job=job, path="logs/learner-0.out", offset=1, limit=3))
    assert isinstance(got, c.FileData) and got.data == b"ell"
    error(world.cli(c.ReadFile(job=job, path="../../registry.sqlite", offset=0, limit=9)), "security")


def test_a_log_that_lies_elsewhere_comes_from_its_host(world: World) -> None:
    job = world.running(1)
    assert world.cli(c.ReadFile(job=job, path="logs/learner-0.out", offset=7, limit=9)) is None
    (ask,) = [e for e in world.take() if isinstance(e, Send) and isinstance(e.message, c.ReadFile)]
    assert ask.peer == b"a" and ask.message.offset == 7  # type: ignore[attr-defined]
    world.effects += world.head.answered(b"b", ask.id, c.FileData(data=b"forged", inode=1, size=6), world.now)
    assert world.sent(c.FileData) == []
    world.effects += world.head.answered(b"a", ask.id, c.FileData(data=b"x", inode=1, size=8), world.now)
    (answer,) = world.sent(c.FileData, b"cli")
    assert answer.data == b"x"
    error(world.cli(c.ReadFile(job=job, path="logs/nothing", offset=0, limit=9)), "not-found")


def test_a_host_that_does_not_answer_is_given_up_on(world: World) -> None:
    job = world.running(1)
    world.cli(c.ReadFile(job=job, path="logs/evaluator.out", offset=0, limit=9))
    world.wait(31.0)
    (answer,) = world.sent(c.Error, b"cli")
    assert answer.code == "not-running"


def test_a_daemons_own_log(world: World) -> None:
    world.register()
    assert world.cli(c.ReadLog(host="", offset=3, limit=9)) == c.LogData(data=b"psd", offset=3, run=1)
    assert world.cli(c.ReadLog(host="a", offset=7, limit=9)) is None
    (ask,) = [e for e in world.take() if isinstance(e, Send) and isinstance(e.message, c.ReadLog)]
    assert ask.peer == b"a" and ask.message.offset == 7  # type: ignore[attr-defined]
    world.effects += world.head.answered(b"a", ask.id, c.LogData(data=b"x", offset=7, run=2), world.now)
    assert world.sent(c.LogData, b"cli") == [c.LogData(data=b"x", offset=7, run=2)]
    error(world.cli(c.ReadLog(host="b", offset=0, limit=9)), "not-found")
    world.wait(10.0, alive=())
    error(world.cli(c.ReadLog(host="a", offset=0, limit=9)), "not-running")


def test_lists_are_merged_over_hosts(world: World) -> None:
    job = world.running(1)
    assert world.cli(c.ListFiles(job=job)) is None
    (ask,) = [e for e in world.take() if isinstance(e, Send) and isinstance(e.message, c.ListFiles)]
    reply = c.Files(rows=[("logs/learner-0.out", 4), ("job.toml", 1)])
    world.effects += world.head.answered(b"a", ask.id, reply, world.now)
    (answer,) = world.sent(c.Files, b"cli")
    rows = dict(answer.rows)
    assert rows["logs/learner-0.out"] == 4 and rows["job.toml"] > 1


# ------------------------------------------------------------------------------------------ remove


def test_a_host_that_is_away_is_named_when_its_job_is_removed(world: World) -> None:
    job = world.running(1)
    world.cli(c.StopJob(job=job, now=True))
    for rank in (0, 65535):
        world.exit(job, rank, "ok")
    world.node_exit(job)
    world.effects += world.head.gone(b"a", world.now)
    reply = world.cli(c.RemoveJob(job=job))
    assert isinstance(reply, c.Ok) and reply.text == "what a keeps of it stays, its learnerd is away"


def test_only_what_has_ended_is_removed_and_then_whole(world: World) -> None:
    job = world.running(1)
    error(world.cli(c.RemoveJob(job=job)), "rejected")
    world.cli(c.StopJob(job=job, now=True))
    error(world.cli(c.RemoveJob(job=job)), "rejected")  # something of it still runs
    world.exit(job, 0, "ok")
    world.exit(job, 65535, "ok")
    world.node_exit(job)
    assert world.state_of(job) == "STOPPED"
    reply = world.cli(c.DiskUse())
    assert isinstance(reply, c.DiskUsed) and {row[0] for row in reply.rows} == {job}
    world.take()
    reply = world.cli(c.RemoveJob(job=job))
    assert isinstance(reply, c.Ok) and reply.text == ""
    assert [m.job for m in world.sent(c.RemoveJob, b"a")] == [job]  # its host may have logs in a folder of its own
    assert not (world.state / "jobs" / job).exists()
    error(world.cli(c.GetJob(job=job)), "not-found")


def test_scripts_have_no_evaluator(world: World) -> None:
    world.running(2, toml=SCRIPT)
    assert world.registry.jobs()[0].state == "RUNNING"
