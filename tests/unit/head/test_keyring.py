"""Which keys come in, what each may say, whose the jobs are, and that a revocation ends what is open."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.errors import NotFound, Rejected
from rudra_zmq.head.keyring import NEEDS, Keyring, Origin, allows, local_grade
from rudra_zmq.head.registry import SCHEMA_VERSION, Registry
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message
from tests.unit.head.world import BOOT, TOKEN, World

ALICE, BOB, EVE, HOST, INVITE = ("a" * 64, "b" * 64, "e" * 64, "1" * 64, "2" * 64)


@pytest.fixture
def ring(world: World) -> Keyring:
    return world.head.keyring


def say(world: World, peer: bytes, message: Message, key: str = "", uid: int = -1) -> Any:
    """A message of a connection that proved ``key``; the reply."""
    request = f"k{next(world.ids)}"
    world.keys[peer] = key
    world.do(world.head.handle(peer, request, message, world.now, Origin(key, uid)))
    return world.reply(peer, request)


def enter(world: World, peer: bytes, key: str, name: str, role: c.Role) -> Any:
    """Authorised, connected, introduced."""
    world.head.keyring.authorize(key, name, role, world.now)
    reply = say(world, peer, c.Whoami(), key)
    assert isinstance(reply, c.Ok), reply


def submit(world: World, peer: bytes, key: str) -> Any:
    toml = '[job]\ntask = "rudra_zmq.tasks.fashion_mnist:cnn"\n[learners]\ncount = 1\n'
    request = f"r{next(world.ids)}"
    reply = say(world, peer, c.Submit(request=request, name="demo", toml=toml, cwd="/tmp"), key)
    return reply


# ------------------------------------------------------------------------------------------------- the door


def test_the_door_knows_three_kinds_of_keys(ring: Keyring) -> None:
    ring.authorize(ALICE, "alice", "submit", 10.0)
    ring.invite(INVITE, "b", 60.0, 10.0)
    assert [ring.verdict(key, 20.0) for key in (ALICE, INVITE, EVE)] == [200, 200, 400]
    assert ring.verdict(INVITE, 70.0) == 500
    ring.revoke("alice", 30.0)
    assert ring.verdict(ALICE, 31.0) == 500
    ring.authorize(ALICE, "alice", "admin", 40.0)
    assert [ring.verdict(ALICE, 41.0), ring.live(ALICE, 41.0).role] == [200, "admin"]  # type: ignore[union-attr]


def test_a_head_that_is_restarted_knows_what_it_knew(world: World, ring: Keyring) -> None:
    ring.authorize(ALICE, "alice", "read", 10.0)
    ring.authorize(BOB, "bob", "admin", 11.0)
    ring.revoke("bob", 12.0)
    before = ring.rows()
    world.restart_head()
    assert world.head.keyring.rows() == before
    assert [world.head.keyring.verdict(key, 20.0) for key in (ALICE, BOB)] == [200, 500]


def test_a_key_that_is_let_in_loses_nothing_silently(world: World, ring: Keyring) -> None:
    ring.authorize(HOST, "gpu1", "host", 1.0)
    ring.invite(INVITE, "gpu2", 1e12, 1.0)
    ring.authorize(ALICE, "alice", "read", 1.0)
    before = ring.rows()
    for key, name, role in [(HOST, "eve", "submit"), (HOST, "gpu1", "admin"), (INVITE, "gpu2", "host"),
                            (ALICE, "alice", "host"), (ALICE, "eve", "admin")]:  # fmt: skip
        with pytest.raises(Rejected, match="is let in already: ") as caught:
            ring.authorize(key, name, role, 2.0)  # type: ignore[arg-type]
        assert "rudra keys revoke" in caught.value.fix
    assert ring.rows() == before
    for name, role, was in (("al", "read", "(before: alice, read)"), ("al", "admin", "(before: al, read)")):
        reply: Any = world.cli(c.AuthorizeKey(key=ALICE, name=name, role=role))  # type: ignore[arg-type]
        assert reply.text.endswith(was)
    ring.revoke("gpu1", 3.0)
    assert ring.authorize(HOST, "eve", "submit", 4.0).name == "eve"


def test_a_name_is_one_living_keys(ring: Keyring) -> None:
    ring.authorize(ALICE, "alice", "submit", 1.0)
    with pytest.raises(Rejected, match="there is a key named alice"):
        ring.authorize(BOB, "alice", "submit", 2.0)
    ring.revoke("alice", 3.0)
    ring.authorize(BOB, "alice", "submit", 4.0)  # the same person with a new key
    with pytest.raises(Rejected):
        ring.authorize(ALICE, "alice", "submit", 5.0)


def test_what_revoke_takes_for_a_key(ring: Keyring) -> None:
    twin = ALICE[:-1] + "b"
    ring.authorize(ALICE, "alice", "submit", 1.0)
    ring.authorize(twin, "ann", "submit", 1.0)
    for word in (ALICE[:7], "nobody", EVE):
        with pytest.raises(NotFound):
            ring.revoke(word, 2.0)
    with pytest.raises(Rejected, match="2 keys begin"):
        ring.revoke(ALICE[:8], 2.0)
    assert ring.verdict(ALICE, 3.0) == ring.verdict(twin, 3.0) == 200
    assert [row.name for row in ring.revoke(twin, 4.0)] == ["ann"]
    with pytest.raises(NotFound):
        ring.revoke("ann", 5.0)


# ------------------------------------------------------------------------------------------------- roles


def test_every_message_of_the_command_line_has_a_role(world: World) -> None:
    said = {kind for kind, (role, _) in world.head._handlers.items() if role == "cli"}
    admin = {c.AuthorizeKey, c.RevokeKey, c.Invite, c.ForgetHost, c.SetHost}
    assert said == set(NEEDS) | admin and not set(NEEDS) & admin
    assert all(NEEDS[kind] == "read" for kind in said if kind.__name__.startswith(("List", "Get", "Read")))


@pytest.mark.parametrize("kind", sorted(NEEDS, key=lambda kind: kind.__name__))
def test_who_may_say_it(kind: type) -> None:
    order = ["read", "submit", "admin"]
    allowed = [grade for grade in order if allows(grade, kind)]  # type: ignore[arg-type]
    assert allowed == order[order.index(NEEDS[kind]) :]
    assert not allows("host", kind) and not allows("invite", kind)


def test_a_role_is_enforced_and_counted(world: World) -> None:
    enter(world, b"1", ALICE, "alice", "read")
    assert isinstance(say(world, b"1", c.ListJobs(), ALICE), c.Jobs)
    for message in (c.RevokeKey(key="alice"), c.StopJob(job="000000")):
        reply = say(world, b"1", message, ALICE)
        assert reply.code == "security" and "role read may not" in reply.message, reply
    assert submit(world, b"1", ALICE).code == "security"
    assert world.head.refused == {"role": 3}


def test_a_host_key_is_no_persons_and_the_other_way_round(world: World) -> None:
    world.head.keyring.authorize(HOST, "h1", "host", world.now)
    assert say(world, b"1", c.Whoami(), HOST).code == "security"
    enter(world, b"2", ALICE, "alice", "admin")
    register = c.Register(token="", name="mine", slots=1, pid=1, boot=BOOT)
    assert say(world, b"2", register, ALICE).code == "security"
    assert isinstance(say(world, b"1", register, HOST), c.Registered)
    reply = say(world, b"2", c.ListHosts(), ALICE)
    assert [row.name for row in reply.rows] == ["h1"]  # a host is its key, not what it calls itself


def test_the_token_is_no_substitute_for_a_key_nor_the_other_way_round(world: World) -> None:
    assert say(world, b"1", c.Whoami(token=TOKEN), EVE).code == "security"
    assert say(world, b"1", c.ListJobs(), EVE).code == "security"
    assert say(world, b"2", c.Whoami()).code == "security"
    register = c.Register(token="", name="h", slots=1, pid=1, boot=BOOT)
    assert say(world, b"2", register).code == "security"


def test_an_identity_is_of_use_to_its_own_key_alone(world: World) -> None:
    enter(world, b"1", ALICE, "alice", "admin")
    enter(world, b"2", BOB, "bob", "read")
    assert say(world, b"1", c.ListJobs(), BOB).code == "security"
    assert say(world, b"1", c.ListJobs()).code == "security"
    assert isinstance(say(world, b"1", c.ListJobs(), ALICE), c.Jobs)


def test_grades_of_this_machine() -> None:
    me = os.getuid()
    assert [local_grade(uid, me) for uid in (-1, 0, me, me + 1)] == ["admin", "admin", "admin", "submit"]


# ------------------------------------------------------------------------------------------------- owners


def test_a_job_is_its_owners(world: World) -> None:
    enter(world, b"alice", ALICE, "alice", "submit")
    enter(world, b"b", BOB, "bob", "submit")
    enter(world, b"r", EVE, "root", "admin")
    world.register()
    job = submit(world, b"alice", ALICE).job
    assert say(world, b"b", c.GetJob(job=job), BOB).row.owner == "alice"
    for message in (c.StopJob(job=job), c.ResumeJob(job=job), c.RemoveJob(job=job)):
        reply = say(world, b"b", message, BOB)
        assert reply.code == "security" and "belongs to alice, not to bob" in reply.message, reply
    assert world.head.refused == {"owner": 3}
    assert isinstance(say(world, b"alice", c.StopJob(job=job, now=True), ALICE), c.Ok)
    second = submit(world, b"alice", ALICE).job
    assert isinstance(say(world, b"r", c.StopJob(job=second, now=True), EVE), c.Ok)


def test_a_local_user_is_not_the_key_of_the_same_name(world: World) -> None:
    other = os.getuid() + 4321
    assert isinstance(say(world, b"l", c.Whoami(token=TOKEN), uid=other), c.Ok)
    world.register()
    toml = '[job]\ntask = "rudra_zmq.tasks.fashion_mnist:cnn"\n[learners]\ncount = 1\n'
    job = say(world, b"l", c.Submit(request="x", name="demo", toml=toml, cwd="/tmp"), uid=other).job
    assert world.job(job).owner == f"local:{other}"
    enter(world, b"k", ALICE, str(other), "submit")
    assert say(world, b"k", c.StopJob(job=job), ALICE).code == "security"
    assert isinstance(world.cli(c.StopJob(job=job, now=True)), c.Ok)  # psd's own user


# ------------------------------------------------------------------------------------------------- revocation


def test_revocation_ends_what_is_open(world: World) -> None:
    enter(world, b"alice", ALICE, "alice", "submit")
    world.register()
    job = submit(world, b"alice", ALICE).job
    after = len(world.registry.events(job, 0))
    world.effects += world.head.handle(
        b"alice",
        "held",
        c.GetEvents(job=job, after=after, wait=20.0, state=world.job(job).state),
        world.now,
        Origin(ALICE),
    )
    assert world.reply(b"alice", "held") is None
    assert isinstance(world.cli(c.RevokeKey(key="alice")), c.Ok)
    held: Any = world.reply(b"alice", "held")
    assert held.code == "security" and "was revoked" in held.message
    later = say(world, b"alice", c.ListJobs(), ALICE)
    assert later.code == "security" and "was revoked" in later.message
    assert world.head.refused == {"revoked-key": 1}


def test_the_learners_of_a_revoked_host_are_lost_at_once(world: World) -> None:
    world.head.keyring.authorize(HOST, "a", "host", world.now)
    register = c.Register(token="", name="a", slots=4, pid=500, boot=BOOT)
    assert isinstance(say(world, b"h", register, HOST), c.Registered)
    job = world.submit(2)
    world.hello(job)
    for rank in (0, 1):
        started = c.LearnerStarted(job=job, rank=rank, incarnation=1, pid=700 + rank)
        assert isinstance(say(world, b"h", started, HOST), c.Ok)
    world.report(job)
    world.take()
    assert isinstance(world.cli(c.RevokeKey(key=HOST[:8])), c.Ok)
    gone = world.sent(c.LearnerGone)
    assert {(m.rank, m.kind, m.lowest) for m in gone} >= {(0, "lost", 5), (1, "lost", 5)}  # 3 restarts each
    assert say(world, b"h", c.HostPing(), HOST).code == "security"
    # Let in again with one that did not stop: it ends, and starts with a number that the node takes.
    world.head.keyring.authorize(HOST, "a", "host", world.now)
    register = c.Register(token="", name="a", slots=4, pid=500, boot=BOOT, running=[(job, 0, 2, 0), (job, 1, 2, 701)])
    assert isinstance(say(world, b"h2", register, HOST), c.Registered)
    assert [(m.ranks, m.leave) for m in world.sent(c.StopLearners, b"h2")] == [([0], True), ([1], True)]
    world.take()
    for rank, incarnation, kind in ((0, 1, "signal"), (0, 2, "ok"), (1, 2, "ok")):
        ended = c.LearnerExit(
            job=job, rank=rank, incarnation=incarnation, evaluator=False, kind=kind, status=0, respawn=True
        )  # fmt: skip
        assert isinstance(say(world, b"h2", ended, HOST), c.Ok)
    starts = [(m.ranks, m.incarnation) for m in world.sent(c.StartLearners, b"h2")]
    assert [ranks for ranks, _ in starts] == [[0], [1]] and all(incarnation >= 5 for _, incarnation in starts)


def test_the_learners_of_a_host_that_is_silent_when_it_is_revoked_are_lost_too(world: World) -> None:
    world.head.keyring.authorize(HOST, "a", "host", world.now)
    register = c.Register(token="", name="a", slots=4, pid=500, boot=BOOT)
    assert isinstance(say(world, b"h", register, HOST), c.Registered)
    job = world.submit(1)
    world.hello(job)
    assert isinstance(say(world, b"h", c.LearnerStarted(job=job, rank=0, incarnation=1, pid=700), HOST), c.Ok)
    world.report(job)
    world.do(world.head.gone(b"h", world.now))
    assert world.sent(c.LearnerGone) == []
    assert isinstance(world.cli(c.ForgetHost(name="a")), c.Ok)
    assert [(m.rank, m.kind, m.lowest) for m in world.sent(c.LearnerGone) if not m.evaluator] == [(0, "lost", 5)]


# ------------------------------------------------------------------------------------------------- invitations


def public(world: World) -> None:
    world.head._desk._public = "f" * 64


def test_an_invitation_is_of_use_once(world: World) -> None:
    public(world)
    assert isinstance(world.cli(c.Invite(key=INVITE, name="h1", seconds=60.0)), c.Keys)
    for message in (c.Whoami(), c.ListJobs(), c.Register(token="", name="x", slots=1, pid=1, boot=BOOT)):
        assert say(world, b"j", message, INVITE).code == "security"
    joined = say(world, b"j", c.Join(key=HOST), INVITE)
    assert isinstance(joined, c.Joined) and joined.name == "h1"
    assert world.head.keyring.verdict(INVITE, world.now) == 500
    assert say(world, b"j", c.Join(key=EVE), INVITE).code == "security"
    row = world.head.keyring.live(HOST, world.now)
    assert row is not None and (row.name, row.role) == ("h1", "host")


def test_an_invitation_ends_by_itself_and_by_the_next_one(world: World) -> None:
    public(world)
    world.cli(c.Invite(key=INVITE, name="h1", seconds=60.0))
    world.cli(c.Invite(key=EVE, name="h1", seconds=60.0))
    assert say(world, b"j", c.Join(key=HOST), INVITE).code == "security"
    world.now += 61.0
    assert say(world, b"j", c.Join(key=HOST), EVE).code == "security"
    assert world.head.keyring.verdict(HOST, world.now) == 400


def test_nobody_is_invited_to_a_head_without_a_key(world: World) -> None:
    reply: Any = world.cli(c.Invite(key=INVITE, name="h1", seconds=60.0))
    assert reply.code == "rejected" and "rudra keys new psd" in reply.fix


def test_only_an_invitation_may_join(world: World) -> None:
    for role in ("admin", "host"):
        world.head.keyring.authorize(ALICE, "alice", role, world.now)  # type: ignore[arg-type]
        assert say(world, b"alice", c.Join(key=EVE), ALICE).code == "security"
        world.head.keyring.revoke("alice", world.now)
    assert say(world, b"l", c.Join(key=EVE)).code == "security"


def test_a_host_that_is_forgotten(world: World) -> None:
    world.head.keyring.authorize(HOST, "h1", "host", world.now)
    register = c.Register(token="", name="h1", slots=1, pid=1, boot="elsewhere")
    assert isinstance(say(world, b"h", register, HOST), c.Registered)
    reply: Any = world.cli(c.ForgetHost(name="h1"))
    assert isinstance(reply, c.Ok) and "revoked" in reply.text
    assert world.cli(c.ListHosts()).rows == []  # type: ignore[union-attr]
    assert world.head.keyring.verdict(HOST, world.now) == 500
    assert world.cli(c.ForgetHost(name="h1")).code == "not-found"  # type: ignore[union-attr]
    world.register()
    assert world.cli(c.ForgetHost(name="a")).code == "failed"  # type: ignore[union-attr]  # alive, by token


# ------------------------------------------------------------------------------------------------- the registry


def test_an_older_registry_learns_of_keys_and_owners(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    Registry.open(path).close()
    db = sqlite3.connect(path)
    db.execute("DROP TABLE keys")
    db.execute("ALTER TABLE jobs DROP COLUMN owner")
    db.execute("INSERT INTO jobs (id, request, name, state, toml, cwd, origins, code_hash, again, token, created)"
               " VALUES ('00000a', 'r', 'n', 'DONE', '', '', '{}', '', '', 't', 1)")  # fmt: skip
    db.execute("PRAGMA user_version = 2")
    db.commit()
    db.close()
    reader = Registry.open_readonly(path)
    assert [row.owner for row in reader.jobs()] == [""]
    reader.close()
    writer = Registry.open(path)
    writer.save_keys([c.KeyRow(key=ALICE, name="alice", role="read", added=1.0)])
    assert [row.name for row in writer.key_rows()] == ["alice"] and writer.get("00000a").row.owner == ""
    writer.close()
    assert sqlite3.connect(path).execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
