"""The evaluator's mailbox: newest wins, the last always, an evaluator that dies."""

from __future__ import annotations

import numpy as np
import pytest

from rudra_zmq.core.events import Clock
from rudra_zmq.node.evaluate import Mailbox
from rudra_zmq.node.vectors import Vector
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, TensorSpec


@pytest.fixture
def layout() -> Layout:
    return Layout.of(Attach(params=[TensorSpec("w", [4], "float32")]))


def _weights(layout: Layout, value: float) -> Vector:
    vector = Vector(layout)
    vector.params[:] = value
    return vector


def _put(box: Mailbox, layout: Layout, epoch: int, now: float = 0.0) -> None:
    box.put(epoch, Clock(1, 10 * epoch), _weights(layout, float(epoch)), now)


def test_newest_wins_while_the_evaluator_is_busy(layout: Layout) -> None:
    box = Mailbox(layout)
    _put(box, layout, 0)
    first = box.take(0.0)
    assert first is not None and first.epoch == 0
    for epoch in (1, 2, 3):
        _put(box, layout, epoch)
    assert box.take(0.0) is None
    np.testing.assert_array_equal(first.vector.params, 0.0)  # what is being tested is not written to
    assert box.result(0, Clock(1, 0), 1.0)
    second = box.take(5.0)
    assert second is not None and second.epoch == 3
    np.testing.assert_array_equal(second.vector.params, 3.0)


def test_two_buffers_are_enough(layout: Layout) -> None:
    box = Mailbox(layout)
    seen = set()
    for epoch in range(20):
        _put(box, layout, epoch)
        parcel = box.take(0.0)
        if parcel:
            seen.add(id(parcel.vector))
        if epoch % 3 == 0 and box.testing:
            assert box.result(box.testing.epoch, box.testing.clock, 1.0)
    assert len(seen) <= 2


def test_a_result_of_something_else_is_refused(layout: Layout) -> None:
    box = Mailbox(layout)
    assert not box.result(0, Clock(1, 0), 1.0)
    _put(box, layout, 1)
    box.take(0.0)
    assert not box.result(1, Clock(2, 10), 1.0)
    assert not box.result(0, Clock(1, 10), 1.0)
    assert box.result(1, Clock(1, 10), 1.0)
    assert not box.result(1, Clock(1, 10), 1.0)


def test_an_evaluator_that_dies_gets_it_again(layout: Layout) -> None:
    box = Mailbox(layout)
    _put(box, layout, 4)
    assert box.take(0.0) is not None
    box.gone(0.5)
    again = box.take(1.0)
    assert again is not None and again.epoch == 4


def test_an_evaluator_that_dies_gets_the_newer_one(layout: Layout) -> None:
    box = Mailbox(layout)
    _put(box, layout, 0)
    box.take(0.0)
    _put(box, layout, 1)
    box.gone(0.5)
    again = box.take(1.0)
    assert again is not None and again.epoch == 1
    box.gone(0.5)
    box.gone(0.5)
    assert box.due is not None and box.due.epoch == 1


def test_since_when_it_is_waited_for(layout: Layout) -> None:
    box = Mailbox(layout)
    _put(box, layout, 0, now=100.0)
    assert box.since == 100.0
    box.take(110.0)
    _put(box, layout, 1, now=120.0)
    assert box.since == 110.0  # what comes meanwhile makes the test under way no younger
    box.result(0, Clock(1, 0), 7.0)
    assert (box.since, box.longest) == (120.0, 7.0)
    box.take(130.0)
    box.gone(140.0)
    assert box.since == 140.0
