"""Pushes that are right, repeated, wrong, or not finite; grants with and without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rudra_zmq.core.events import Grant, Lease, Span
from rudra_zmq.node.work import Diverged
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.unit.node.stage import ATTACH, Peer, Stage

StageOf = Callable[..., Stage]
ASYNC = {"protocol": "async", "sync": "n = 2"}


def _again(stage: Stage, old: Peer) -> Peer:
    """The same process on another socket, up to its weights."""
    peer = Peer(stage, old.rank, old.incarnation, name=f"again-{old.rank}-{stage.now}")
    peer.hello()
    peer.say(ATTACH)
    peer.ready()
    peer.seq = old.seq
    return peer


def _data(peer: Peer) -> None:
    peer.say(d.Data(samples=32, minibatch=0))


def test_weights_are_sent_only_if_they_are_others_than_the_learner_holds(stage_of: StageOf) -> None:
    stage = stage_of(protocol="softsync", sync="n = 1")
    zero, one = stage.crew(2)
    assert zero.hear().nbytes == 0 and one.hear().nbytes == 0
    zero.push(1.0)
    grant = zero.hear()
    assert (grant.verdict, grant.timestamp, grant.nbytes) == ("accepted", 0, 0)
    one.push(3.0)
    grant = one.hear()
    assert (grant.timestamp, grant.nbytes) == (1, 16)
    np.testing.assert_array_equal(one.vector(), 1.0 - 0.5 * 2.0)  # the mean of 1 and 3, rate 0.5
    zero.push(1.0)
    assert zero.hear().timestamp == 1 and zero.vector()[0] == 0.0


def test_the_answer_names_the_version_that_the_push_made(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, one = stage.crew(2)
    for i in range(1, 4):
        zero.push()
        assert zero.hear().timestamp == 2 * i - 1
        one.push()
        assert one.hear().timestamp == 2 * i
    lines = [json.loads(x) for x in (stage.folder / "decisions.jsonl").read_text().splitlines()]
    assert [x["mean_sigma"] for x in lines] == [0, 1, 1, 1, 1, 1]  # (lambda - 1) / c


# --------------------------------------------------------------------------------------- lost connections


def test_an_answer_that_falls_due_while_a_learner_comes_back_waits_for_its_data(stage_of: StageOf) -> None:
    stage = stage_of()
    zero, one = stage.crew(2)
    zero.push()
    again = Peer(stage, 0, name="again")
    again.hello()
    again.say(ATTACH)
    one.push()  # the round is complete
    assert again.none(d.Grant)
    again.ready()
    _data(again)
    grant = again.hear()
    assert (grant.ack, grant.verdict, grant.timestamp, grant.nbytes) == (1, "accepted", 1, 16)
    assert again.vector()[0] == 0.5 and again.none(d.Grant)


def test_a_push_whose_answer_was_lost_is_answered_and_not_applied_again(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, _ = stage.crew(2)
    stage.dead.add(zero.peer)
    zero.push(1.0)
    again = _again(stage, zero)
    np.testing.assert_array_equal(again.vector(), 0.5)
    _data(again)
    grant = again.hear()
    assert (grant.ack, grant.verdict, grant.nbytes, grant.timestamp) == (1, "accepted", 0, 1)
    again.seq = 0
    again.push(1.0, seq=1, key=grant.key)  # it repeats what it does not know to be answered
    assert again.none(d.Grant)
    sync = stage.lead.work.sync
    assert sync is not None and sync.counters.accepted == 1 and sync.clock.timestamp == 1
    again.seq = 1
    again.push(1.0)
    assert again.hear().ack == 2


def test_a_push_that_was_lost_is_repeated_under_the_key_of_its_grant(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, one = stage.crew(2)
    first = zero.hear()
    zero.say(d.Chunk(key=first.key, offset=0), b"x" * 8)  # half of it, then the connection ends
    one.push()
    again = _again(stage, zero)
    _data(again)
    grant = again.hear()
    assert (grant.ack, grant.key, grant.leases, grant.slot) == (0, first.key, first.leases, first.slot)
    again.push(2.0, timestamp=0)
    answer = again.hear()
    assert (answer.ack, answer.verdict, answer.timestamp) == (1, "accepted", 2)
    assert answer.nbytes == 16  # it was computed from version 0: whatever else it was sent, it gets version 2


def test_a_withheld_answer_comes_on_the_new_connection(stage_of: StageOf) -> None:
    stage = stage_of()
    zero, one = stage.crew(2)
    zero.push(1.0)
    again = _again(stage, zero)
    _data(again)
    assert again.none(d.Grant)
    again.grant = zero.grant
    again.seq = 0
    again.push(1.0)
    assert again.none(d.Grant)
    one.push(1.0)
    assert again.hear().ack == 1
    sync = stage.lead.work.sync
    assert sync is not None and sync.counters.accepted == 2


# --------------------------------------------------------------------------------------- what is not taken


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"timestamp": 5}, "future-timestamp"),
        ({"seq": 0}, "replay"),
        ({"rank": 1}, "wrong-rank"),
        ({"incarnation": 2}, "wrong-rank"),
        ({"key": 12345}, "foreign-push"),
        ({"nbytes": 12}, "incomplete-push"),
        ({"samples": 99}, "refused"),
    ],
)
def test_what_no_honest_learner_sends(stage_of: StageOf, wrong: dict[str, Any], reason: str) -> None:
    stage = stage_of(**ASYNC)
    zero, one = stage.crew(2)
    zero.push(100.0, **wrong)
    assert stage.drops()[reason] >= 1
    assert zero.none(d.Grant)
    one.push(1.0)
    one.hear()
    np.testing.assert_array_equal(one.vector(), 0.5)
    sync = stage.lead.work.sync
    assert sync is not None and sync.counters.accepted == 1


@pytest.mark.parametrize("counts", [[2], [1, 1], [1, 5, 1]])
def test_more_than_one_gradient_is_no_learners_push(stage_of: StageOf, counts: list[int]) -> None:
    stage = stage_of(**ASYNC)
    zero, one = stage.crew(2)
    (lease, *_) = zero.hear().leases
    zero.push(100.0, groups=[d.Group(0, count, 4, lease) for count in counts])
    refused = zero.take(d.Refused)
    assert refused.message.startswith(f"{sum(counts)} gradients in {len(counts)} groups")
    assert (refused.code, refused.where) == ("rejected", "push") and refused.fix
    assert stage.drops() == {"refused": 1} and stage.events("rank 0 is refused")
    one.push(1.0)
    one.hear()
    np.testing.assert_array_equal(one.vector(), 0.5)
    zero.push(1.0, seq=1)  # its gradient is still due
    assert zero.hear().verdict == "accepted"


@pytest.mark.parametrize(("seq", "reason"), [(3, "refused"), (2**40, "refused"), (0, "replay")])
def test_numbers_that_do_not_follow(stage_of: StageOf, seq: int, reason: str) -> None:
    stage = stage_of(**ASYNC)
    zero, one = stage.crew(2)
    zero.push(1.0)
    zero.hear()
    zero.push(100.0, seq=seq)
    assert stage.drops() == {reason: 1} and zero.none(d.Grant)
    one.push(1.0)
    one.hear()
    np.testing.assert_array_equal(one.vector(), 0.0)


def test_a_replayed_push_changes_nothing(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, one = stage.crew(2)
    push = zero.push(1.0)
    zero.hear()
    for _ in range(3):
        zero.say(push)
    one.push(1.0)
    one.hear()
    assert stage.drops()["replay"] == 3 and zero.none(d.Grant)
    np.testing.assert_array_equal(one.vector(), 0.0)


def test_chunks_of_nobody(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, _ = stage.crew(2)
    grant = zero.hear()
    zero.say(d.Chunk(key=1, offset=0), b"x" * 16)
    zero.say(d.Chunk(key=grant.key, offset=8), b"x" * 8)
    zero.say(d.Chunk(key=grant.key, offset=0), b"x" * 17)
    drops = stage.drops()
    assert drops["foreign-chunk"] == 1 and drops["chunk-gap"] == 1 and drops["chunk-range"] == 1
    zero.push(1.0)
    assert zero.hear().verdict == "accepted"


def test_messages_out_of_place(stage_of: StageOf) -> None:
    stage = stage_of(count=1)
    peer = Peer(stage, 0)
    peer.hello(pulse=True)
    peer.say(d.Push(rank=0, incarnation=1, seq=1, generation=1, key=1, groups=[d.Group(0, 1, 0, [])], nbytes=0))
    peer.say(d.Want())
    peer.say(d.TestResult(epoch=0, generation=1, timestamp=0, metrics={}, seconds=1.0))
    stage.say(peer.pulse, ATTACH)
    assert stage.drops() == {"early-push": 1, "early-want": 1, "out-of-place": 2}
    peer.say(d.Data(samples=32, minibatch=0))
    assert "Data before the weights" in peer.take(d.Refused).message
    peer.say(d.Credit(chunks=3))
    assert stage.drops()["credit"] == 1


def test_a_gradient_with_a_nan_is_refused_named_and_given_back(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC, epochs=1)
    zero, one = stage.crew(2, samples=8, prefetch=0)
    lease = zero.hear().leases[0]
    zero.push(float("nan"))
    grant = zero.hear()
    assert grant.verdict == "nonfinite" and grant.leases[0] == lease  # once more
    zero.push(float("inf"))
    assert len(stage.events("a gradient of rank 0 is NaN or infinite")) == 1  # and not once a push
    assert zero.none(d.Grant)  # nothing is left to lease
    one.push(float("nan"))
    assert zero.hear().leases[0] == [(0, 4, 8)]
    zero.push(1.0)
    sync = stage.lead.work.sync
    assert sync is not None and sync.finished  # what was refused twice counts as skipped: the epoch ends
    assert stage.drops()["nonfinite"] == 3
    np.testing.assert_array_equal(zero.hear() and zero.vector(), 0.5)
    assert stage.lead.report.progress().rows[0].samples == 4


def test_a_skipped_batch_has_no_tensor(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, _ = stage.crew(2)
    zero.hear()
    zero.push(samples=0, nbytes=0)
    grant = zero.hear()
    assert (grant.verdict, grant.timestamp) == ("skipped", 0)
    zero.push(1.0)
    assert zero.hear().verdict == "accepted"
    assert stage.lead.report.progress().skipped == 1
    courier = stage.lead.work.post.to(zero.peer)
    assert len(courier.inbox._expected) == 1  # the key of the skipped batch is forgotten


def test_want_is_answered_at_once_and_without_weights(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, one = stage.crew(2)
    first = zero.hear()
    one.push(1.0)
    zero.say(d.Want())
    grant = zero.hear()
    assert len(grant.leases) > len(first.leases)
    assert (grant.timestamp, grant.nbytes, grant.key, grant.ack) == (0, 0, first.key, 0)
    spans = [span for lease in grant.leases for span in lease]
    zero.grant = grant
    zero.push(1.0, spans=spans, samples=sum(b - a for _, a, b in spans))
    answer = zero.hear()
    assert (answer.verdict, answer.timestamp, answer.nbytes) == ("accepted", 2, 16)


def test_a_push_of_another_generation_is_void(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC, generation=2)
    zero, _ = stage.crew(2)
    zero.hear()
    zero.push(1.0, generation=1, timestamp=40, seq=41)
    grant = zero.hear()
    assert (grant.ack, grant.verdict, grant.generation, grant.timestamp) == (41, "void", 2, 0)
    zero.push(1.0)
    assert zero.hear().verdict == "accepted"


def test_folding_frees_a_slot(stage_of: StageOf) -> None:
    """One learner pushes all the time while c is 4: its oldest gradients are folded, nobody waits."""
    stage = stage_of(count=4, protocol="softsync", sync='n = 1\nmodulation = "none"')
    crew = stage.crew(4, samples=64)
    for value in (1.0, 2.0, 3.0, 6.0):
        crew[0].push(value)
        assert crew[0].hear().verdict == "accepted"
    np.testing.assert_array_equal(crew[0].vector(), 1.0 - 0.5 * 3.0)
    line = json.loads((stage.folder / "decisions.jsonl").read_text())
    assert line["folded"] == [True, True, False, False]


def test_an_update_that_overflows_ends_the_node(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    peers = [Peer(stage, rank) for rank in range(2)]
    for peer in peers:
        peer.hello()
        peer.say(ATTACH)
    peers[0].upload()
    for peer, mu in zip(peers, (12, 4), strict=True):
        peer.ready()
        peer.say(d.Data(samples=32, minibatch=mu))
    with pytest.raises(Diverged, match=r"at update 1 the weights are not finite.*Fix: lower the learning rate"):
        peers[0].push(3e38)  # it weighs 12/8


def test_weights_that_overflow_are_found_by_the_first_gradient_that_follows(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, one = stage.crew(2)
    for _ in range(3):
        zero.push(3e38)  # 1.5e38 each: the third takes the weights past float32
    assert not np.isfinite(zero.hear() and zero.vector()).any()
    with pytest.raises(Diverged, match="at update 3"):
        one.push(float("nan"))


def test_one_late_gradient_is_no_warning(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC, epochs=1)
    fast, slow = stage.crew(2, samples=40, prefetch=0)
    slow.hear()
    for _ in range(9):
        fast.push()
    assert not stage.events("mean staleness")
    slow.push()
    assert not stage.events("mean staleness")  # 0.9: one of ten was old


def test_staleness_of_a_learner_that_keeps_old_weights_is_a_warning(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC, epochs=1)
    fast, slow = stage.crew(2, samples=48, prefetch=0)
    for _ in range(6):
        fast.push()
        slow.push(timestamp=0)
    assert stage.lead.report.progress().rows[0].staleness_mean > 3.0
    assert stage.events("mean staleness of epoch 1")


def test_weights_that_are_not_finite_at_the_end_are_a_failure(stage_of: StageOf) -> None:
    stage = stage_of(count=1, epochs=1, protocol="async", snapshot="auto")
    (peer,) = stage.crew(1, samples=12)
    for _ in range(3):
        peer.push(3e38)
    stage.settle()
    peer.say(d.Bye(reason="done"))
    stage.settle()
    (done,) = stage.all(c.NodeDone)
    assert done.state == "FAILED" and "at update 3 the weights are not finite" in done.reason
    assert [p.name for p in (stage.folder / "snapshots").iterdir()] == ["1-0"]


def test_a_grant_of_another_slot_has_a_key_of_its_own(stage_of: StageOf) -> None:
    """What is pushed next has to lie where the core will look for it, whatever brought the change about."""
    stage = stage_of(protocol="softsync", sync="n = 1")  # c = 2: there is another one
    zero, _ = stage.crew(2)
    first = zero.hear()
    sync = stage.lead.work.sync
    assert sync is not None and first.slot == 0
    lease = Lease((Span(0, 0, 4),))
    stage.lead.exchange.grant(Grant(0, 1, ack=0, verdict="", clock=sync.clock, leases=(lease,), slot=1))
    second = zero.hear()
    assert second.slot == 1 and second.key != first.key
    zero.say(d.Chunk(key=first.key, offset=0), b"x" * 16)
    assert stage.drops()["foreign-chunk"] == 1


def test_leases_are_bounded(stage_of: StageOf) -> None:
    stage = stage_of(**ASYNC)
    zero, _ = stage.crew(2, samples=32_000, prefetch=1024)
    assert len(zero.hear().leases) == 65
    for _ in range(1000):
        zero.say(d.Want())
    messages = [m for m in zero.box if not isinstance(m, tuple)]
    assert max(len(m.leases) for m in messages if isinstance(m, d.Grant)) <= 600
    assert any(isinstance(m, d.Refused) and "without a push" in m.message for m in messages)


# ------------------------------------------------------------------------------- the slow and the stopped


def test_unequal_learners_wait_for_nobody_and_weigh_what_they_bring(stage_of: StageOf) -> None:
    """S26, softsync, c = 3: two quick ones with 6 samples, a slow one with 2; each answer comes in the push's turn."""
    stage = stage_of(count=3, protocol="softsync", learners="", epochs=9)
    crew = []
    for rank in range(3):
        peer = Peer(stage, rank)
        peer.hello()
        peer.say(ATTACH)
        crew.append(peer)
    crew[0].upload(0.0)
    for peer, mu in zip(crew, (6, 6, 2), strict=True):
        peer.ready()
        peer.say(d.Data(samples=96, minibatch=mu))
    for order in ("0102", "1012", "0011"):
        for rank in order:
            push = crew[int(rank)].push(1.0 + int(rank))
            assert [group.samples for group in push.groups] == [(6, 6, 2)[int(rank)]]
            assert crew[int(rank)].hear().ack == push.seq
    stage.lead.work.decisions.flush()
    records = [json.loads(line) for line in (stage.folder / "decisions.jsonl").read_text().splitlines()]
    assert [record["counts"] for record in records] == [[6, 6, 6], [2, 6, 6], [6, 2, 6], [6, 6, 6]]
    for record in records:  # mu_k / (c * the mean of the mini-batches), and the scale by staleness
        expected = [count * scale / 14 for count, scale in zip(record["counts"], record["scales"], strict=True)]
        assert record["coefficients"] == pytest.approx(expected)


def test_a_stopped_learner_holds_up_nobody(stage_of: StageOf) -> None:
    """async: its weights stay where it stopped reading them, the others go on, and no more memory is taken."""
    stage = stage_of(count=4, protocol="async")
    crew = stage.crew(4, samples=4096)
    assert stage.lead.work.model is not None
    versions = stage.lead.work.model.versions
    for peer in crew:
        peer.hear()
    crew[3].push()
    assert crew[3].none(d.Refused)
    stage.dead.add(crew[2].peer)  # takes nothing from here on, in the middle of an exchange
    crew[2].push()
    allocated = set()
    for _ in range(50):
        for peer in (crew[0], crew[1], crew[3]):
            seq = peer.push().seq
            assert peer.hear().ack == seq
            peer.vector()
            allocated.add(versions.allocated)
    assert max(allocated) <= 6 and stage.state() == "RUNNING"
    stage.dead.clear()
    stage.lead.tick()
    assert crew[2].hear().ack == 1
