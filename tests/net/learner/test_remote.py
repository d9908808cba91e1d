"""The conversation of a learner with a node, and what it does when either end of it breaks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudra_zmq.core.events import Clock, Lease, Span
from rudra_zmq.errors import RefusedBySecurity, Rejected, Unreachable
from rudra_zmq.learner.exchange import Answer, Gradient
from rudra_zmq.learner.line import NodeLost
from rudra_zmq.learner.remote import Leaving, RemoteExchange
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.codec import refusal
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, Bye, Data, Hello, Log, Push, Refused, Rule, TensorSpec
from tests.net.learner.conftest import spec_in
from tests.net.learner.fake_node import FakeNode, Peer, ramp, settle

SMALL = Attach(params=[TensorSpec("w", [3, 4], "float32")], float_buffers=[TensorSpec("m", [2], "float32")])
LARGE = Attach(params=[TensorSpec("w", [1 << 20, 3], "float32")])  # 12 chunks, more than the credit of 8
Connect = Callable[..., RemoteExchange]


class Desk:
    """An exchange with the vectors of a model."""

    def __init__(self, exchange: RemoteExchange, message: Attach = SMALL) -> None:
        self.exchange = exchange
        self.layout = Layout.of(message)
        self.weights, self.gradient = Vector(self.layout), Vector(self.layout)
        self.weights.params[:] = ramp(self.layout)
        exchange.attach(message, self.layout, self.weights, self.gradient)

    def begin(self) -> Answer:
        self.exchange.rule(Rule(rule="sgd"))
        self.answer = self.exchange.begin(8, 4, 1, 1)
        return self.answer

    def push(self, count: int | None = None) -> Answer:
        self.gradient.params[:] = 0.5
        spans = self.answer.leases[0].spans
        samples = sum(s.count for s in spans) if count is None else count
        self.answer = self.exchange.push(Gradient(self.answer.clock, spans, samples, loss=1.5, rates=(0.1,)))
        return self.answer


def test_a_job_from_hello_to_bye(node: FakeNode, connect: Connect) -> None:
    exchange = connect()
    assert (exchange.job.seed, exchange.job.epochs, exchange.job.minibatch, exchange.chief) == (7, 2, 4, True)
    desk = Desk(exchange)
    assert node.weights is not None and np.array_equal(node.weights.params, ramp(desk.layout))
    first = desk.begin()
    assert first.clock == Clock(1, 0) and first.leases == (Lease((Span(0, 0, 4),)), Lease((Span(0, 4, 8),)))
    desk.gradient.floats[:] = 3.0
    answer = desk.push()
    assert answer.verdict == "accepted" and answer.fresh and answer.ack == 1 and answer.clock == Clock(1, 1)
    assert np.array_equal(desk.weights.params, ramp(desk.layout) - 0.5) and (desk.weights.floats == 3.0).all()
    while not answer.done:
        answer = desk.push()
    exchange.log({"x": 1.0}, 4)
    exchange.leave("done")
    node.wait_for(lambda: bool(node.of(Bye)))
    pushes = node.of(Push)
    assert [p.seq for p in pushes] == [1, 2, 3, 4] and [len(p.groups) for p in pushes] == [1] * 4
    assert [(g.timestamp, g.count) for p in pushes for g in p.groups] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert pushes[0].groups[0].spans == [(0, 0, 4)] and pushes[0].loss == 1.5 and pushes[0].rates == [0.1]
    assert node.of(Data)[0] == Data(samples=8, minibatch=4, accumulate=1, prefetch=1)
    assert node.of(Log) and node.of(Bye)[0].reason == "done"
    assert {hello.role for hello in node.of(Hello)} == {"learner", "pulse"}


def test_a_vector_of_many_chunks_in_both_directions(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect(), LARGE)
    desk.begin()
    desk.push()
    assert np.array_equal(desk.weights.params, ramp(desk.layout) - np.float32(0.5))


def test_a_skipped_batch_carries_no_tensor(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()
    answer = desk.push(count=0)
    assert not answer.fresh and node.of(Push)[0].nbytes == 0
    assert np.array_equal(desk.weights.params, ramp(desk.layout))


def test_want_brings_leases_without_a_push(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()
    answer = desk.exchange.want()
    assert len(answer.leases) == 2 and answer.ack == 0 and not answer.fresh


# ---- the node dies


def once(node: FakeNode, what: Callable[[Peer, Push], object]) -> None:
    """Do this at the next push, and the ordinary thing from then on."""

    def do(peer: Peer, push: Push) -> None:
        node.on_push = node.apply
        what(peer, push)

    node.on_push = do


def test_a_push_that_did_not_arrive_is_repeated_with_its_number(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()
    once(node, lambda peer, push: node.fall())
    answer = desk.push()
    assert [p.seq for p in node.of(Push)] == [1, 1] and node.timestamp == 1
    assert np.array_equal(desk.weights.params, ramp(desk.layout) - 0.5)
    assert answer.ack == 1 and answer.fresh and answer.verdict == "accepted"


def test_a_push_that_was_recorded_is_not_repeated(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()

    def record_and_die(peer: Peer, push: Push) -> None:
        node.record(push)
        node.fall()

    once(node, record_and_die)
    answer = desk.push()
    assert [p.seq for p in node.of(Push)] == [1] and answer.ack == 1
    # The version that it made came with Ready.
    assert answer.fresh and np.array_equal(desk.weights.params, ramp(desk.layout) - 0.5)
    assert answer.leases[0] == Lease((Span(0, 4, 8),))


def test_a_restored_node_voids_the_push_under_way(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()

    def restored() -> None:
        assert node.weights is not None
        node.weights.params[:] = 9.0
        node.timestamp = 40

    once(node, lambda peer, push: node.fall(2, restored))
    answer = desk.push()
    assert [p.seq for p in node.of(Push)] == [1]
    assert answer.verdict == "void" and answer.clock == Clock(2, 40) and answer.fresh
    assert (desk.weights.params == 9.0).all()
    answer = desk.push()
    assert node.of(Push)[-1].generation == 2 and node.of(Push)[-1].seq == 2 and answer.verdict == "accepted"
    # All was said again, in order, before the first grant.
    said = [type(m).__name__ for m in node.heard if not isinstance(m, Hello) or m.role == "learner"]
    assert said == ["Hello", "Attach", "InitDone", "Rule", "Data", "Push", "Hello", "Attach", "Rule", "Data", "Push"]


def test_a_connection_lost_between_two_pushes_is_made_again(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()
    desk.push()
    node.drop()
    node.come_back()
    assert desk.push().ack == 2 and [p.seq for p in node.of(Push)] == [1, 2]


def test_a_node_that_dies_while_its_weights_are_on_their_way(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect(), LARGE)
    desk.begin()

    def half(peer: Peer, push: Push) -> None:
        node.apply(peer, push)
        node.fall()

    once(node, half)
    answer = desk.push()
    assert answer.ack == 1 and np.array_equal(desk.weights.params, ramp(desk.layout) - np.float32(0.5))


def test_a_node_that_moved_is_followed_while_the_old_one_still_listens(
    node: FakeNode, connect: Connect, folder: Path
) -> None:
    desk = Desk(connect())
    desk.begin()
    other_folder = folder / "o"
    other_folder.mkdir()
    other = FakeNode(other_folder, generation=2)
    other.layout, other.weights, other.has_version = node.layout, node.weights, True

    def move(peer: Peer, push: Push) -> None:
        node.generation = 2
        node.announce([f"ipc://{other_folder / 'n1'}"])

    node.on_push = move
    try:
        assert desk.push().verdict == "void"
        assert desk.push().verdict == "accepted" and [p.seq for p in other.of(Push)] == [2]
    finally:
        desk.exchange.close()
        other.close()


def test_a_node_that_says_nothing_is_left_after_the_liveness_time(node: FakeNode, connect: Connect) -> None:
    node.liveness_s = 1.0
    desk = Desk(connect())
    desk.begin()

    def hang(peer: Peer, push: Push) -> None:
        node.mute = True

        def wake() -> None:
            settle(lambda: not desk.exchange._line.stands)
            node.mute = False

        node._reviver = threading.Thread(target=wake)
        node._reviver.start()

    once(node, hang)
    hellos = len(node.of(Hello))
    answer = desk.push()
    assert len(node.of(Hello)) > hellos
    assert answer.ack == 1 and node.timestamp == 1 and [p.seq for p in node.of(Push)] == [1, 1]


def test_a_withheld_grant_is_waited_for_as_long_as_the_node_lives(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()
    pinged: list[int] = []

    def later(peer: Peer, push: Push) -> None:
        pinged.append(node.pings)

        def answer() -> None:
            settle(lambda: node.pings > pinged[0] + 70)  # longer than the liveness time of 3 s
            node.soon.append(lambda: node.apply(peer, push))

        node._reviver = threading.Thread(target=answer)
        node._reviver.start()

    once(node, later)
    assert desk.push().ack == 1
    assert len(node.of(Hello)) == 2 and len(node.of(Push)) == 1 and node.pings > pinged[0] + 70


def test_rubbish_from_a_node_ends_the_connection_and_not_the_learner(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()

    once(node, lambda peer, push: node.router.send(peer.identity, [b"GET / HTTP/1.1"]))
    assert desk.push().ack == 1
    assert [p.seq for p in node.of(Push)] == [1, 1]


def test_weights_of_the_wrong_size_are_not_taken(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()

    once(node, lambda peer, push: node.grant(peer, ack=1, nbytes=4, weights_key=5))
    assert desk.push().ack == 1
    assert np.array_equal(desk.weights.params, ramp(desk.layout) - 0.5)


# ---- giving up


def test_nobody_there_is_one_line_with_the_address_and_a_loss(folder: Any) -> None:
    (folder / "node.json").write_text(json.dumps({"addresses": [f"ipc://{folder}/none"], "generation": 1}))
    with pytest.raises(NodeLost) as error:
        RemoteExchange(spec_in(folder), give_up_s=0.5)
    text = str(error.value)
    assert str(folder) in text and "was not reached for 0.5 s" in text and "Fix: " in text and "\n" not in text
    assert isinstance(error.value, Unreachable)


def test_no_file_of_the_node_is_one_line_and_a_loss(folder: Any) -> None:
    with pytest.raises(NodeLost, match=r"node\.json"):
        RemoteExchange(spec_in(folder), give_up_s=0.3)


def test_a_node_that_stays_away_is_given_up(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect(give_up_s=1.0))
    desk.begin()
    node.drop()
    with pytest.raises(NodeLost):
        desk.push()


def test_who_gets_on_is_not_given_up_though_no_connection_lasts(node: FakeNode, connect: Connect) -> None:
    patience = 1.5
    desk = Desk(connect(give_up_s=patience))
    desk.begin()
    node.leases = [[(0, 4 * k, 4 * k + 4)] for k in range(1000)]
    node.on_push = lambda peer, push: (node.record(push), node.fall())  # type: ignore[func-returns-value]
    assert desk.push().ack == 1
    first = time.monotonic()
    while time.monotonic() < first + patience + 0.3:
        assert not desk.push().done
    assert desk.answer.ack == len(node.of(Push)) > 2


@pytest.mark.parametrize("error", [RefusedBySecurity("wrong token"), Rejected("this is job x")])
def test_a_refusal_at_the_start_is_what_the_node_says(node: FakeNode, connect: Connect, error: Any) -> None:
    node.on_hello = lambda peer, hello: refusal(error)
    with pytest.raises(type(error), match=error.message):
        connect()


def test_an_incarnation_that_is_over_is_a_loss(node: FakeNode, connect: Connect) -> None:
    node.on_hello = lambda peer, hello: Refused(code="not-running", message="incarnation 1 of rank 0 is over")
    with pytest.raises(NodeLost, match="is over"):
        connect()


def test_a_refusal_after_a_reconnect_is_a_loss(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()
    node.drop()
    node.on_hello = lambda peer, hello: Refused(code="rejected", message="taken over")
    node.come_back()
    with pytest.raises(NodeLost, match="taken over"):
        desk.push()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Attach(params=[TensorSpec("w" * 257, [1], "float32")]), "257|256"),
        (Attach(params=[TensorSpec("w", [1] * 17, "float32")]), "16"),
        (Attach(params=[TensorSpec(f"w{i:040}", [1], "float32") for i in range(30_000)]), "size: frame of"),
    ],
    ids=["name", "dimensions", "tensors"],
)
def test_a_model_that_no_message_can_describe(node: FakeNode, connect: Connect, message: Attach, text: str) -> None:
    exchange = connect()
    with pytest.raises(Rejected, match=f"too large to be described: .*({text}).*Fix: ") as caught:
        Desk(exchange, message)
    assert "\n" not in str(caught.value) and not node.of(Attach)


def test_a_model_that_differs_is_refused_with_the_difference(node: FakeNode, connect: Connect) -> None:
    exchange = connect()
    node._attach = lambda peer, message: peer.out.message(  # type: ignore[method-assign]
        refusal(Rejected("another model than the job's: parameter w: shape [3, 4] here, [4, 4] there"))
    )
    with pytest.raises(Rejected, match="parameter w"):
        Desk(exchange)


# ---- leaving


def test_a_learner_that_waits_leaves_when_asked(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect())
    desk.begin()
    node.on_push = lambda peer, push: setattr(node, "stop", True)  # withheld, and the host drains
    answer = desk.push()
    assert answer.done and desk.exchange.leaving
    node.wait_for(lambda: bool(node.of(Bye)))
    assert node.of(Bye)[0].reason == "drain" and [p.seq for p in node.of(Push)] == [1]


def test_a_learner_asked_while_it_computes_pushes_first(node: FakeNode, connect: Connect) -> None:
    desk = Desk(connect(), LARGE)
    desk.begin()
    desk.exchange.ask_to_leave()
    desk.push()
    node.wait_for(lambda: node.timestamp == 1)
    assert [p.seq for p in node.of(Push)] == [1]


def test_a_learner_asked_before_version_0_leaves(node: FakeNode, connect: Connect) -> None:
    exchange = connect()
    node._attach = lambda peer, message: setattr(node, "stop", True)  # type: ignore[method-assign]
    with pytest.raises(Leaving):
        Desk(exchange)


def test_last_words_arrive(node: FakeNode, connect: Connect) -> None:
    exchange = connect()
    exchange.leave("failed", "ValueError: no")
    exchange.leave("drain")
    exchange.close()
    node.wait_for(lambda: bool(node.of(Bye)))
    assert [(bye.reason, bye.text) for bye in node.of(Bye)] == [("failed", "ValueError: no")]


def test_the_pulse_goes_on_while_nothing_is_exchanged(node: FakeNode, connect: Connect) -> None:
    exchange = connect()
    node.wait_for(lambda: node.pings > 5)
    node.drop()
    node.come_back()
    before = node.pings
    node.wait_for(lambda: node.pings > before + 5)
    assert not exchange.leaving
