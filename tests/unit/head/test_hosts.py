"""Several hosts: what is checked before a start, who takes learners, who is forgotten, where a node is reached."""

from __future__ import annotations

from typing import Any

import pytest

from rudra_zmq.head.effects import Send
from rudra_zmq.head.fleet import Fleet
from rudra_zmq.wire.messages import control as c
from tests.unit.head.world import BOOT, TOKEN, World

DAY = 86400.0


def join(world: World, name: str, *, slots: int = 2, boot: str = "elsewhere", **more: Any) -> None:
    message = c.Register(token=TOKEN, name=name, slots=slots, pid=500, boot=boot, **more)
    assert isinstance(world.send(name.encode(), message), c.Registered)


def rows(world: World) -> dict[str, c.HostRow]:
    reply = world.cli(c.ListHosts())
    assert isinstance(reply, c.Hosts)
    return {row.name: row for row in reply.rows}


def on_hosts(world: World, hosts: str, count: int = 2) -> str:
    toml = f'[job]\ntask = "rudra_zmq.tasks.fashion_mnist:cnn"\n[learners]\ncount = {count}\nhosts = {hosts}\n'
    return world.submit(count, toml=toml.replace("{", "{{").replace("}", "}}"))


# ------------------------------------------------------------------------------------------ before a start


def test_one_table_and_one_refusal(world: World) -> None:
    for name in ("a", "b", "d"):
        join(world, name)
    world.lacks = {b"a": ["python.ml is not set here"], b"d": ["paths.in: there is no /x", "run.cwd: no"]}
    job = world.submit(6)
    assert world.nodes_started() == []
    row = world.job(job)
    assert row.state == "FAILED"
    assert row.reason == (
        "2 of its 3 hosts cannot run it: a: python.ml is not set here; d: paths.in: there is no /x; d: run.cwd: no"
    )
    story = world.story(job)
    assert "W host a: python.ml is not set here\nW host d: paths.in: there is no /x\nW host d: run.cwd: no" in story
    assert all(row.free == row.slots for row in rows(world).values())


def test_seats_are_held_while_hosts_are_asked(world: World) -> None:
    join(world, "a", slots=3)
    world.inspects = False
    first, second = world.submit(2), world.submit(2)
    (ask,) = [e for e in world.take() if isinstance(e, Send) and isinstance(e.message, c.CheckJob)]
    assert rows(world)["a"].free == 1
    assert world.job(second).reason == "needs 2 slots, 1 free"
    world.do(world.head.answered(b"a", ask.id, c.Checked(), world.now))
    assert world.state_of(first) == "STARTING"


def test_a_host_that_vanishes_while_it_is_asked_puts_the_job_back(world: World) -> None:
    join(world, "a")
    world.inspects = False
    job = world.submit(2)
    world.do(world.head.gone(b"a", world.now))
    assert world.state_of(job) == "PENDING"
    world.inspects = True
    world.take()
    join(world, "b")
    assert world.state_of(job) == "STARTING"


def test_a_job_that_is_stopped_while_its_hosts_are_asked_does_not_start(world: World) -> None:
    join(world, "a")
    world.inspects = False
    job = world.submit(2)
    (ask,) = [e for e in world.take() if isinstance(e, Send) and isinstance(e.message, c.CheckJob)]
    world.cli(c.StopJob(job=job))
    world.do(world.head.answered(b"a", ask.id, c.Checked(), world.now))
    assert world.state_of(job) == "STOPPED"
    assert world.nodes_started() == []


def test_hosts_that_differ_are_told_of_and_a_patch_level_of_python_is_not(world: World) -> None:
    join(world, "a", versions={"python": "3.11.2", "torch": "2.9.0", "rudra": "0.1.0"})
    join(world, "b", versions={"python": "3.11.9", "torch": "2.8.1", "rudra": "0.1.0"})
    job = world.submit(4)
    assert "W its hosts differ: torch 2.9.0 on a, 2.8.1 on b\n" in world.story(job) + "\n"


# ------------------------------------------------------------------------------------------ where it goes


def test_names_and_labels_choose(world: World) -> None:
    join(world, "a")
    join(world, "b", labels=["fast"])
    job = on_hosts(world, '["fast"]')
    assert "gets 2 slots on b" in world.story(job)
    assert world.job(on_hosts(world, '"a"')).state == "STARTING"
    assert world.job(on_hosts(world, '["fast"]')).reason == "needs 2 slots, 0 free"


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ('"fats"', "no host and no label is called fats, did you mean fast?"),
        ('"fast"', "the job needs 3 slots, fast has 2"),
    ],
)
def test_what_can_never_be_is_refused_at_once(world: World, hosts: str, message: str) -> None:
    join(world, "a")
    join(world, "b", labels=["fast"])
    toml = f'[job]\ntask = "m:t"\n[learners]\ncount = 3\nhosts = {hosts}\n'
    reply = world.cli(c.Submit(request="r", name="x", toml=toml, cwd="/tmp"))
    assert isinstance(reply, c.Error)
    assert (reply.code, reply.message) == ("rejected", message)


def test_each_learner_gets_a_device_of_its_own_and_a_lost_one_keeps_it(world: World) -> None:
    join(world, "a", slots=4, devices=["0", "1", "2"], absent=["1"])
    first, second = world.submit(1), world.submit(1)
    for job in (first, second):
        world.hello(job, peer=job.encode())
    given = [start.devices for start in world.sent(c.StartLearners, b"a")]
    assert given == [["0"], ["2"]]
    third = world.submit(1)
    assert world.job(third).reason == "needs 1 device, 0 free"
    assert (rows(world)["a"].free_devices, rows(world)["a"].absent) == (0, ["1"])
    join(world, "a", slots=4, devices=["0", "1", "2"], running=[(first, 0, 1, 7), (second, 0, 1, 8)])
    world.wait(1)
    assert world.state_of(third) == "STARTING"


def test_a_restarted_head_knows_who_has_which_device(world: World) -> None:
    join(world, "a", devices=["0", "1"])
    job = world.submit(1)
    world.restart_head()
    join(world, "a", devices=["0", "1"], running=[(job, 0, 1, 7)])
    other = world.submit(1)
    world.hello(other, peer=b"other")
    (start,) = world.sent(c.StartLearners, b"a")
    assert start.devices == ["1"]


def test_a_plan_changes_nothing(world: World) -> None:
    join(world, "a", slots=3, devices=["GPU-x", "GPU-y", "GPU-z"])
    world.lacks = {b"a": ["paths.in is not set here"]}
    toml = '[job]\ntask = "m:t"\n[learners]\ncount = 2\n'
    reply = world.cli(c.PlanJob(name="x", toml=toml, cwd="/tmp"))
    assert isinstance(reply, c.Planned)
    (row,) = reply.rows
    assert (row.host, row.ranks, row.devices) == ("a", [0, 1], ["GPU-x", "GPU-y"])
    assert (row.problems, row.memory) == (["paths.in is not set here"], 1 << 30)
    assert rows(world)["a"].free == 3
    never = world.cli(c.PlanJob(name="x", toml=toml.replace("2", "4"), cwd="/tmp"))
    assert isinstance(never, c.Error)  # as a submit would be
    assert (never.code, never.message) == ("rejected", "the job needs 4 devices, the cluster has 3")
    world.lacks = {}
    world.submit(2)
    reply = world.cli(c.PlanJob(name="x", toml=toml, cwd="/tmp"))
    assert isinstance(reply, c.Planned)
    assert (reply.rows, reply.reason) == ([], "needs 2 devices, 1 free")


# ------------------------------------------------------------------------------------------ drain, ban


def decide(world: World, host: str, state: Any) -> c.Message | None:
    return world.cli(c.SetHost(host=host, state=state))


def test_a_drained_host_keeps_what_runs_and_takes_nothing_new(world: World) -> None:
    running = world.running(2)
    assert decide(world, "a", "drained") == c.Ok(text="a takes no new learners")
    assert world.sent(c.StopLearners) == []
    waiting = world.submit(1)
    assert world.job(waiting).reason == "needs 1 slot, 0 free (a is drained)"
    assert world.state_of(running) == "RUNNING"
    decide(world, "a", "ready")
    assert world.state_of(waiting) == "STARTING"


def test_learners_leave_a_banned_host_for_another_one(world: World) -> None:
    job = world.running(2)
    join(world, "b")
    decide(world, "a", "banned")
    (stop,) = world.sent(c.StopLearners, b"a")
    assert (sorted(stop.ranks), stop.leave) == ([0, 1, 65535], True)
    for rank in (0, 1):
        world.exit(job, rank, "ok", respawn=True)
    world.wait(1, alive=(b"a", b"b"))
    (start,) = world.sent(c.StartLearners, b"b")
    assert start.ranks == [0, 1]
    assert start.incarnation > 1
    assert "learner 0 moves from a to b" in world.story(job)


def test_a_banned_host_without_another_one_takes_its_learners_back_when_it_may(world: World) -> None:
    job = world.running(2)
    decide(world, "a", "banned")
    world.exit(job, 1, "ok", respawn=True)
    world.wait(1)
    world.register(pid=501, running=[(job, 0, 1, 9)])
    assert world.sent(c.StartLearners) == []
    decide(world, "a", "ready")
    (start,) = world.sent(c.StartLearners, b"a")
    assert 1 in start.ranks


def test_decisions_outlive_the_head_and_a_host_that_nobody_knows_has_none(world: World) -> None:
    join(world, "a")
    decide(world, "a", "banned")
    world.restart_head()
    assert (rows(world)["a"].state, rows(world)["a"].silent) == ("banned", True)
    join(world, "a")
    assert (rows(world)["a"].state, rows(world)["a"].free) == ("banned", 0)
    reply = decide(world, "aa", "drained")
    assert isinstance(reply, c.Error)
    assert (reply.code, reply.message, reply.fix) == ("not-found", "there is no host aa", "write a")


# ------------------------------------------------------------------------------------------ memory of hosts


def test_a_host_that_is_away_still_counts_for_what_can_ever_fit(world: World) -> None:
    join(world, "a", slots=4)
    world.restart_head()
    join(world, "b", slots=2)
    assert world.job(world.submit(4)).reason == "needs 4 slots, 2 free (a is silent)"


def test_after_seven_days_of_silence_a_host_is_forgotten(world: World) -> None:
    join(world, "a")
    join(world, "b")
    world.now += 5
    world.wait(1, alive=(b"b",))
    assert rows(world)["a"].silent
    world.now += 7 * DAY - 10
    world.wait(1, alive=(b"b",))
    assert set(rows(world)) == {"a", "b"}
    world.now += 10
    world.wait(1, alive=(b"b",))
    assert set(rows(world)) == {"b"}


# ------------------------------------------------------------------------------------------ addresses

SOCKET = "ipc:///run/n"


@pytest.mark.parametrize(
    ("boot", "reached", "bound", "expected"),
    [
        (BOOT, "", [SOCKET], [SOCKET]),
        ("b", "10.0.0.1", [SOCKET], []),
        ("b", "10.0.0.1", [SOCKET, "tcp://0.0.0.0:7740"], ["tcp://10.0.0.1:7740"]),
        ("b", "10.0.0.1", ["tcp://10.0.0.1:7740"], ["tcp://10.0.0.1:7740"]),
        ("b", "203.0.113.5", ["tcp://10.0.0.1:7740"], ["tcp://203.0.113.5:7740", "tcp://10.0.0.1:7740"]),
        ("b", "fd00::1", ["tcp://[::]:7740"], ["tcp://[fd00::1]:7740"]),
        ("b", "10.0.0.1", ["tcp://127.0.0.1:7740"], ["tcp://10.0.0.1:7740"]),
        (BOOT, "", ["tcp://0.0.0.0:7740"], ["tcp://127.0.0.1:7740"]),
        (BOOT, "10.0.0.1", [SOCKET, "tcp://0.0.0.0:7740"], [SOCKET, "tcp://10.0.0.1:7740", "tcp://127.0.0.1:7740"]),
    ],
)
def test_where_a_host_reaches_a_node(boot: str, reached: str, bound: list[str], expected: list[str]) -> None:
    fleet = Fleet([], boot=BOOT, lives=lambda pid: True)
    message = c.Register(token="", name="x", slots=1, pid=1, boot=boot, reached=reached)
    assert fleet.addresses(fleet.register(b"x", message, 0.0), bound) == expected
