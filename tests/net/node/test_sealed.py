"""Encrypted tcp: a job through it gives the same bits, and who does not belong to it changes nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from rudra_zmq.net.addresses import parse
from rudra_zmq.net.auth import KeyPair
from rudra_zmq.net.bulk import BulkSender
from rudra_zmq.net.sockets import WINDOW, Dealer
from rudra_zmq.wire.codec import CHUNK, PREFIX, encode_data
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.net.node.rig import ATTACH, JOB, TOKEN, Learner, Rig, run_rounds, toml, wait_for
from tests.net.node.test_hardsync import EPOCHS, SAMPLES, finish, plain_loop, result

RigOf = Callable[..., Rig]
PATIENCE_S = 10.0


def sealed_rig(rig_of: RigOf, text: str = "", **spec: Any) -> Rig:
    rig = rig_of(text or toml(epochs=EPOCHS), start=False, **spec)
    rig.start(bind={"tcp": [0, 0]})
    assert rig.key
    return rig


def bulk_address(rig: Rig, bulk: d.Bulk) -> str:
    return str(replace(parse(rig.address), port=bulk.port))


def dropped(rig: Rig, reason: str, count: int = 1) -> None:
    """The node counts at least so many."""
    rig.psd.progress(lambda p: p.drops.get(reason, 0) >= count)


@contextmanager
def dialled(dealer: Dealer) -> Iterator[Dealer]:
    try:
        yield dealer
    finally:
        dealer.close()


@contextmanager
def stolen(rig: Rig, bulk: d.Bulk) -> Iterator[zmq.Socket[bytes]]:
    """A plain socket at the bulk port under the identity that a learner was given, once it has left it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
        thief.linger = 0
        thief.setsockopt(zmq.ROUTING_ID, bulk.identity)
        thief.connect(bulk_address(rig, bulk))
        yield thief


def test_a_job_gives_the_bits_of_a_plain_loop(rig_of: RigOf) -> None:
    rig = sealed_rig(rig_of)
    crew = rig.crew(2, SAMPLES)
    assert all(learner.channel is not None for learner in crew)
    assert finish(rig, crew).state == "DONE"
    assert result(rig).tobytes() == plain_loop().tobytes()


def test_plain_tcp_is_said_once_and_has_one_port(rig_of: RigOf) -> None:
    rig = rig_of(toml(epochs=EPOCHS) + "[wire]\nencrypt = false\n", start=False)
    rig.start(bind={"tcp": [0, 0]})
    assert not rig.key
    crew = rig.crew(2, SAMPLES)
    assert all(learner.channel is None for learner in crew)
    assert finish(rig, crew).state == "DONE"
    assert result(rig).tobytes() == plain_loop().tobytes()
    assert len([m for m in rig.psd.all(c.NodeEvent) if "wire.encrypt = false" in m.text]) == 1


# ------------------------------------------------------------------------------------------ the control port


def test_without_curve_nobody_comes_in(rig_of: RigOf) -> None:
    rig = sealed_rig(rig_of)
    with dialled(rig.context.dealer(rig.address, "plain")) as dealer:
        assert not dealer.wait_connected(0.5)
    crew = rig.crew(2, SAMPLES)
    finish(rig, crew)
    assert result(rig).tobytes() == plain_loop().tobytes()


def test_a_node_with_another_key_is_not_spoken_to(rig_of: RigOf) -> None:
    rig = sealed_rig(rig_of)
    with dialled(rig.context.dealer(rig.address, "pinned", curve=(KeyPair.new(), KeyPair.new().public))) as dealer:
        assert not dealer.wait_connected(0.5)
    rig.learner(0).hello()


def test_a_key_does_not_replace_the_token(rig_of: RigOf) -> None:
    rig = sealed_rig(rig_of)
    learner = rig.learner(0)
    learner.connect()
    learner.say_hello(token="0" * 64)
    assert learner.receive(d.Refused).code == "security"
    dropped(rig, "bad-token")


def test_hello_names_the_key_of_its_connection(rig_of: RigOf) -> None:
    rig = sealed_rig(rig_of)
    learner = rig.learner(0)
    learner.connect()
    for key in (KeyPair.new().public, ""):
        learner.say_hello(key=key)
    dropped(rig, "wrong-key", 2)
    learner.nothing(d.Welcome)


@pytest.mark.parametrize("role", ["learner", "pulse", "evaluator"])
def test_an_incarnation_has_one_key(rig_of: RigOf, role: str) -> None:
    rig = sealed_rig(rig_of)
    first = rig.learner(0, role="evaluator" if role == "evaluator" else "learner")
    first.hello()
    other = rig.learner(0, role=role)
    other.connect()
    other.say_hello()
    assert other.receive(d.Refused).code == "security"
    first.hello()  # again, on a new connection


# --------------------------------------------------------------------------------------------- the bulk port


def test_what_is_not_sealed_is_nobodys(rig_of: RigOf) -> None:
    rig = sealed_rig(rig_of)
    crew, bulk = welcomed(rig)
    run_rounds(crew, 1)
    with dialled(rig.context.dealer(bulk_address(rig, bulk), "plain")) as dealer:
        assert dealer.wait_connected(PATIENCE_S)
        for message in (d.Hello(role="learner", job=JOB, token=TOKEN, rank=0, incarnation=9), d.Ping()):
            assert dealer.send(encode_data(message))
        assert dealer.send(encode_data(d.Chunk(key=crew[0].key, offset=0), bytes(40)))
        dropped(rig, "bulk-unknown", 3)
        assert dealer.recv() is None
    finish(rig, crew)
    assert result(rig).tobytes() == plain_loop().tobytes()


def welcomed(rig: Rig) -> tuple[list[Learner], d.Bulk]:
    """Two learners that begin, and what rank 0 was told of its channel."""
    told: list[d.Bulk] = []
    first = rig.learner(0)
    move = first.move
    first.move = lambda bulk: (told.append(bulk), move(bulk))  # type: ignore[assignment,func-returns-value]
    rig.learner = lambda rank, *more, **other: (  # type: ignore[method-assign]
        first if rank == 0 else Rig.learner(rig, rank, *more, **other)
    )
    return rig.crew(2, SAMPLES), told[0]


def test_a_stolen_identity_is_of_no_use(rig_of: RigOf) -> None:
    """Nonsense, frames of another connection, and what was recorded: none of it opens, and nobody is disturbed."""
    rig = sealed_rig(rig_of)
    crew, bulk = welcomed(rig)
    victim = crew[0]
    recorded: list[list[bytes]] = []
    channel = victim.channel
    assert channel is not None
    send = channel.send

    def record(out: Any, frames: Any) -> bool:
        return send(lambda made, copy: recorded.append([bytes(f) for f in made]) or out(made, copy), frames)

    channel.send = record  # type: ignore[method-assign]
    run_rounds(crew, 1)
    assert [len(frames) for frames in recorded] == [2, 1]  # a gradient of one chunk, and its push
    later = struct.pack(">IQ", bulk.connection, 1 << 40)
    wrong = {
        "bulk-replay": recorded,
        "bulk-forged": [[later + bytes(50)], [later + bytes(50), bytes(100)], [later + recorded[1][0][12:]]],
        "bulk-foreign": [[struct.pack(">IQ", n, 1 << 40) + bytes(50)] for n in (77, bulk.connection | 1 << 31)],
        "bulk-cut": [[bytes(12)], [PREFIX], [later + bytes(50)] * 3, [later + bytes(50), bytes(16)]],
    }

    def told() -> bool:
        drops = rig.psd.newest().drops
        return all(drops.get(reason, 0) >= len(list_) for reason, list_ in wrong.items())

    def try_all() -> bool:
        with stolen(rig, bulk) as thief:
            for frames in (frames for list_ in wrong.values() for frames in list_):
                thief.send_multipart(frames)
            thief.poll(200)
            return told()

    with stolen(rig, bulk) as thief:  # the name is taken: the one who has it is not pushed out
        thief.send_multipart(recorded[1])
        thief.poll(200)
    assert not set(wrong) & set(rig.psd.newest().drops)
    victim.close()
    wait_for("drops", try_all)
    victim.hello()
    with stolen(rig, bulk) as thief:  # of a connection that is over
        thief.send_multipart(recorded[1])
        dropped(rig, "bulk-unknown")
    victim.send(ATTACH)
    victim.ready()
    victim.send(d.Data(samples=SAMPLES, minibatch=0))
    victim.grant()
    finish(rig, crew)
    assert result(rig).tobytes() == plain_loop().tobytes()


# ------------------------------------------------------------------------------------------------ slow peers

NBYTES = 48 * CHUNK
BIG = d.Attach(params=[d.TensorSpec("w", [NBYTES // 4], "float32")])


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "sealed"])
def test_a_learner_that_stops_in_mid_vector_holds_up_nobody(rig_of: RigOf, encrypt: bool, way: str) -> None:
    """It takes its window of the node's memory, and the others exchange as before."""
    text = toml(count=3, protocol="async", epochs=50, snapshot="none")
    rig = rig_of(text + f"[wire]\nencrypt = {str(encrypt).lower()}\n", start=False, liveness_s=60.0)
    rig.start(bind={"tcp": [0, 0]})
    crew = [rig.learner(rank, attach=BIG) for rank in range(3)]
    for learner in crew:
        learner.hello()
        learner.send(BIG)
    for learner in crew:
        learner.ready()
        learner.send(d.Data(samples=4000, minibatch=0))
    for learner in crew:
        learner.grant()
    stopped, *others = crew
    for learner in (*others, *others):
        learner.push()
        learner.grant()
    before = resident(rig)
    if way == "down":
        stopped.push()  # and the answer, with its weights, is not read
    else:
        sent = 0

        def send_three(frames: Any) -> bool:
            nonlocal sent
            sent += 1
            return sent <= 3 and stopped._send(frames)

        stopped.compute()
        stopped.sender = BulkSender(send_three, WINDOW)
        stopped.sender.vector(stopped.key, stopped.gradient.data)
        assert stopped.sender.blocked
    for _ in range(4):
        for learner in others:
            learner.push()
            learner.grant()
    # A version more may be held, and what is on its way to the one who does not read.
    assert resident(rig) - before < NBYTES + 2 * (WINDOW + 2) * CHUNK
    if way == "down":
        assert stopped.grant().verdict == "accepted"


def resident(rig: Rig) -> int:
    assert rig.process is not None
    return 4096 * int(Path(f"/proc/{rig.process.pid}/statm").read_text().split()[1])
