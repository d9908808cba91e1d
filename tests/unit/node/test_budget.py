"""The memory of a job's servers: the arithmetic, what is said, and where the kernel says what is left."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rudra_zmq.node import headroom
from rudra_zmq.node.budget import Demand, Limit, TooLarge, budget, check
from rudra_zmq.node.spec import Bind
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.unit.node.stage import ATTACH, Peer, Stage

MB = 10**6
DEMAND = Demand(
    version=10 * MB,
    weights=10 * MB,
    slot=4 * MB,
    slots=2,
    state=9 * MB,
    rule="momentum",
    accumulator=9 * MB,
    queue=MB,
    most=4,
    protocol="softsync",
    tests=True,
    snapshots=True,
)
# 8 slots, state, accumulator, 8 queues, 2 for the evaluator, version and state aside
BESIDE = (32 + 9 + 9 + 8 + 20 + 19) * MB


def test_what_a_job_needs() -> None:
    plan = budget(DEMAND, 10**9)
    assert (plan.ring, plan.wanted, plan.nbytes) == (6, 6, 60 * MB + BESIDE)
    assert str(plan) == (
        "the servers of this job need 157.0 MB: 6 versions 60.0 MB, 8 slots 32.0 MB, momentum 9.0 MB, accumulator 9.0 MB, "
        "connections 8.0 MB, evaluator 20.0 MB, snapshot 19.0 MB"
    )
    lone = replace(DEMAND, most=1, slots=1, state=0, rule="sgd", accumulator=0, tests=False, snapshots=False)
    assert str(budget(lone, 0)).endswith("need 26.0 MB: 2 versions 20.0 MB, 1 slot 4.0 MB, connections 2.0 MB")


@pytest.mark.parametrize(
    ("protocol", "spare", "ring"),
    [
        ("softsync", 60, 6),
        ("softsync", 59, 5),
        ("async", 40, 4),
        ("async", 31, 3),
        ("async", 0, 3),
        ("hardsync", 99, 3),
    ],
)
def test_the_ring_gives_way_first(protocol: str, spare: int, ring: int) -> None:
    plan = budget(replace(DEMAND, protocol=protocol), BESIDE + spare * MB)
    assert plan.ring == ring and plan.nbytes == BESIDE + ring * 10 * MB


def test_then_it_is_refused_with_the_numbers() -> None:
    limit = Limit(BESIDE + 30 * MB, "this host has 127.0 MB to spare", "end what else takes memory here")
    check(budget(DEMAND, limit.nbytes), limit)
    tight = limit._replace(nbytes=limit.nbytes - 1)
    with pytest.raises(TooLarge) as refused:
        check(budget(DEMAND, tight.nbytes), tight)
    line = str(refused.value)
    assert line.startswith("the servers of this job need 127.0 MB: 3 versions 30.0 MB, 8 slots 32.0 MB")
    assert "this host has 127.0 MB to spare. Fix: end what else takes memory here, fewer learners" in line
    assert 'servers.snapshot = "none", which saves 19.0 MB' in line
    with pytest.raises(TooLarge) as refused:
        check(budget(replace(DEMAND, snapshots=False), 0), Limit(0, "nothing is left", "buy some"))
    assert "snapshot" not in str(refused.value)


# ------------------------------------------------------------------------------------------ what is left


GB = 10**9
FREE = f"MemTotal: {50 * GB >> 10} kB\nMemAvailable: {20 * GB >> 10} kB\nCommitLimit: {9 * GB >> 10} kB\nCommitted_AS: 0 kB\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_the_host_has_left(tmp_path: Path) -> None:
    def look(cap: int | None = None) -> Limit:
        return headroom.limit(cap, tmp_path / "proc", tmp_path / "cg")

    assert look().text == "nothing limits it"
    write(tmp_path / "proc/meminfo", FREE)
    assert look().nbytes == pytest.approx(19.6 * GB) and look().text == "this host has 19.6 GB to spare"
    assert look(GB) == Limit(GB, "servers.memory allows 1.0 GB", "raise servers.memory")
    assert look(30 * GB).text.startswith("this host")
    write(tmp_path / "proc/sys/vm/overcommit_memory", "2\n")
    assert look().nbytes == pytest.approx(8.82 * GB) and "commits" in look().text


@pytest.mark.parametrize("version", [1, 2])
def test_what_its_cgroups_have_left(tmp_path: Path, version: int) -> None:
    """The tightest of a group and those above it; pages of files that nobody uses can be had."""
    write(tmp_path / "proc/meminfo", FREE)
    root = tmp_path / "cg" / ("memory" if version == 1 else "")
    most, used, idle = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    write(tmp_path / "proc/self/cgroup", "3:cpu,memory:/a/b\n1:cpu:/x\n" if version == 1 else "0::/a/b\n")

    def look() -> Limit:
        return headroom.limit(None, tmp_path / "proc", tmp_path / "cg")

    for folder in (root, root / "a", root / "a/b"):
        write(folder / most, f"{2**63 - 4096}" if version == 1 else "max")
        write(folder / used, f"{GB}")
    assert look().text.startswith("this host")
    write(root / "a/b" / most, f"{6 * GB}")
    assert look().nbytes == pytest.approx(4.9 * GB) and look().text == "the cgroup a/b has 4.9 GB to spare"
    write(root / "a/b/memory.stat", f"anon 1\n{idle} {GB // 2}\n")
    assert look().nbytes == pytest.approx(5.39 * GB)
    write(root / "a" / most, f"{3 * GB}")
    assert look().nbytes == 2 * GB - headroom.MARGIN and "the cgroup a has" in look().text and most in look().fix
    write(root / most, f"{GB // 2}")
    assert look().nbytes == 0 and look().text == "this container has 0 B to spare"


def test_what_its_address_space_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * GB, 2 * GB))
    found = headroom.limit(None)
    assert "address space leaves 0 B" in found.text or 0 < found.nbytes < 2 * GB - headroom.ADDRESSES


# ------------------------------------------------------------------------------------------- on a stage


def test_a_job_that_does_not_fit_fails_with_one_line(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of(servers='memory = "50B"')
    peers = [Peer(stage, 0), Peer(stage, 1)]
    for peer in peers:
        peer.hello()
        peer.say(d.Attach(params=[d.TensorSpec("w", [4], "float32")]))
    assert "servers.memory allows 50 B" in peers[0].take(d.Refused).message
    assert stage.lead.work.model is None
    stage.pass_time(8.0)
    (done,) = stage.all(c.NodeDone)
    assert done.state == "FAILED"
    assert done.reason.startswith("the servers of this job need 144 B: 3 versions 48 B, 2 slots 32 B, connections 64 B")
    assert "servers.memory allows 50 B. Fix: raise servers.memory" in done.reason
    assert [m.level for m in stage.all(c.NodeEvent) if "servers.memory allows" in m.text].count("E") == 1


def test_a_scripts_optimizer_counts_when_it_is_known(stage_of: Callable[..., Stage]) -> None:
    """What is needed in any case is looked at first. 144 B and two vectors for the greediest would not fit, 144 B and sgd do, adam does not."""
    stage = stage_of(update="", servers='memory = "143B"')
    peer = Peer(stage, 0)
    peer.hello()
    peer.say(d.Attach(params=[d.TensorSpec("w", [4], "float32")]))
    assert "need 144 B: 3 versions 48 B, 2 slots 32 B, connections 64 B; serv" in peer.take(d.Refused).message
    for rule, fits in (("sgd", True), ("adam", False)):
        stage = stage_of(update="", servers='memory = "150B"')
        crew = [Peer(stage, 0), Peer(stage, 1)]
        for peer in crew:
            peer.hello()
            peer.say(d.Attach(params=[d.TensorSpec("w", [4], "float32")]))
        crew[0].upload()
        crew[0].ready()
        crew[0].say(d.Rule(rule=rule, groups=[d.GroupRates(0, 4, 0.1, 0.0)]))
        if fits:
            assert crew[0].take(d.RuleReply).rule == "sgd"
            assert len(stage.events("need 144 B: 3 versions")) == 1
        else:
            assert "need 176 B: 3 versions 48 B, 2 slots 32 B, adam 32 B" in crew[0].take(d.Refused).message
            stage.pass_time(8.0)
            assert [m.state for m in stage.all(c.NodeDone)] == ["FAILED"]


def test_a_short_ring_makes_readers_wait_and_loses_nobody(stage_of: Callable[..., Stage]) -> None:
    """async, three versions for four learners: two stop reading in the middle of their weights."""
    stage = stage_of(count=4, protocol="async", epochs=9, servers='memory = "240B"')
    crew = stage.crew(4, samples=64)
    assert stage.lead.work.model is not None and stage.lead.work.model.versions.count == 3
    assert len(stage.events("3 versions instead of 6")) == 1
    for peer in crew:
        peer.hear()
        peer.vector()
    stage.dead |= {crew[0].peer}
    crew[0].push()  # its weights stay on the way
    crew[1].push()
    assert crew[1].none(d.Grant)  # version 1 is being read, 2 is the newest, and one must be left to write
    stage.dead.clear()
    stage.lead.tick()
    grant = crew[1].hear()
    assert grant.timestamp == 2 and grant.ack == 1
    crew[1].vector()
    for _ in range(3):
        for peer in crew[1:]:
            peer.push()
            assert peer.hear().ack == peer.seq
            peer.vector()


def sharing(stage: Stage, count: int) -> list[Peer]:
    """Learners that have mapped the node's memory, with their first grants."""
    crew = [Peer(stage, rank) for rank in range(count)]
    for peer in crew:
        peer.hello()
        peer.say(ATTACH)
    crew[0].upload()
    for session in stage.lead.work.sessions.all:
        session.mapped = True
    for peer in crew:
        peer.ready()
        peer.say(d.Data(samples=1024, minibatch=0, shared=True))
        peer.seq = 0
    for peer in crew:
        assert peer.hear().shared
    return crew


def test_who_waits_for_room_holds_nothing_that_others_wait_for(stage_of: Callable[..., Stage]) -> None:
    """async over shared memory, three versions for three learners: whoever pushes gets on in the end."""
    bind = Bind(shm="unused")
    stage = stage_of(count=3, protocol="async", epochs=9, servers='memory = "200B"', bind=bind)
    crew = sharing(stage, 3)
    assert stage.lead.work.model is not None and stage.lead.work.model.versions.count == 3
    rng = random.Random(1)
    for _ in range(200):
        able = [peer for peer in crew if peer.answered]
        assert able, "all wait for one another"
        rng.choice(able).push()


def test_who_is_late_holds_up_no_round(stage_of: Callable[..., Stage]) -> None:
    """hardsync with one backup, over shared memory: one learner computes on an old version all the time."""
    stage = stage_of(count=3, epochs=9, sync="backup = 1", bind=Bind(shm="unused"))
    crew = sharing(stage, 3)
    for turn in range(30):
        if turn % 5 == 4:
            crew[2].push()
            assert crew[2].hear().ack == crew[2].seq
        for peer in crew[:2]:
            peer.push()
        for peer in crew[:2]:
            assert peer.hear().ack == peer.seq
