"""What topk holds back at a learner, through gradients that count, that are refused, repeated or not finite."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from rudra_zmq.learner.feedback import Feedback
from rudra_zmq.learner.packing import Packing
from rudra_zmq.node.vectors import Packed, Vector
from rudra_zmq.wire.compress import Form
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, Ready, Residual, TensorSpec

LAYOUT = Layout.of(
    Attach(
        params=[TensorSpec("w", [8], "float32")],
        float_buffers=[TensorSpec("f", [1], "float32")],
        int_buffers=[TensorSpec("i", [1], "int64")],
    )
)
FORM = Form.of(LAYOUT, "topk", Fraction(1, 4))


def gradient(*values: float) -> Vector:
    vector = Vector(LAYOUT)
    vector.params[:] = values
    vector.floats[:] = 0.5
    vector.ints[:] = 3
    return vector


def sent(packed: Packed) -> list[float]:
    back = Vector(LAYOUT)
    packed.decode(back)
    assert (back.floats[0], back.ints[0]) == (0.5, 3)
    return back.params.tolist()


class Line:
    """A link that keeps what is said, and gives what a test puts in."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        self.said: list[object] = []
        self._values = values

    def send(self, message: object) -> None:
        self.said.append(message)

    def send_vector(self, key: int, values: np.ndarray) -> None:
        self.said.append((key, values))

    def expect(self, key: int, into: np.ndarray) -> np.ndarray:
        into[:] = self._values
        return into

    def finish(self, receiver: np.ndarray) -> None:
        pass


FIRST = (1.0, 2.0, 3.0, 4.0, -5.0, 0.0, 0.0, 0.5)
LEFT = [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.5]


def test_what_is_not_sent_is_added_to_the_next_one() -> None:
    feedback, into = Feedback(8), Packed(FORM)
    assert feedback.pack(gradient(*FIRST), into, 1)
    assert sent(into) == [0, 0, 0, 4, -5, 0, 0, 0]
    feedback.answered(1, True)
    assert feedback.pack(gradient(*[1.0] * 8), into, 2)
    assert sent(into) == [0, 3, 4, 0, 0, 0, 0, 0]
    feedback.answered(2, True)
    assert feedback.residual.tolist() == [2, 0, 0, 1, 1, 1, 1, 1.5]


@pytest.mark.parametrize("accepted", [True, False])
def test_a_refused_gradient_changes_nothing(accepted: bool) -> None:
    feedback, into = Feedback(8), Packed(FORM)
    feedback.pack(gradient(*FIRST), into, 1)
    feedback.answered(1, accepted)
    assert feedback.residual.tolist() == (LEFT if accepted else [0.0] * 8)
    feedback.answered(1, True)  # told twice, or too late
    assert feedback.residual.tolist() == (LEFT if accepted else [0.0] * 8)


def test_a_repeated_gradient_is_the_same_one() -> None:
    feedback, into, again = Feedback(8), Packed(FORM), Packed(FORM)
    feedback.pack(gradient(*FIRST), into, 1)
    feedback.pack(gradient(*FIRST), again, 1)
    assert bytes(into.data) == bytes(again.data)
    feedback.answered(1, True)
    assert feedback.residual.tolist() == LEFT


def test_one_that_is_not_finite_is_no_gradient() -> None:
    feedback, into = Feedback(8), Packed(FORM)
    assert not feedback.pack(gradient(np.nan, *FIRST[1:]), into, 1)
    feedback.answered(1, True)
    assert feedback.residual.tolist() == [0.0] * 8
    assert not feedback.stays()


def test_what_is_said_is_named_by_its_gradient() -> None:
    feedback, into, line = Feedback(8), Packed(FORM), Line()
    feedback.say(line)  # type: ignore[arg-type]
    assert not line.said  # there is nothing yet
    feedback.pack(gradient(*FIRST), into, 5)
    feedback.say(line, 5)  # type: ignore[arg-type]
    feedback.answered(5, True)
    feedback.pack(gradient(*FIRST), into, 6)
    feedback.say(line, 5)  # type: ignore[arg-type]
    feedback.say(line)  # type: ignore[arg-type]
    feedback.say(line, 6)  # type: ignore[arg-type]
    messages, vectors = line.said[::2], line.said[1::2]
    assert [m.seq for m in messages if isinstance(m, Residual)] == [5, 5, 5, 6]
    for message, (key, values) in zip(messages, vectors, strict=True):  # type: ignore[misc]
        assert key == message.key
        assert (values.tolist() == LEFT) == (message.seq == 5)
    assert feedback.stays()


def test_another_generation_begins_with_what_it_is_told() -> None:
    feedback, into = Feedback(8), Packed(FORM)
    feedback.pack(gradient(*FIRST), into, 1)
    feedback.answered(1, True)
    feedback.pack(gradient(*FIRST), into, 2)
    ready = {"timestamp": 0, "key": 1, "nbytes": 1}
    feedback.hear(Line(), Ready(generation=1, **ready), 1)  # type: ignore[arg-type]
    assert feedback.residual.tolist() == LEFT
    line = Line(np.arange(8, dtype=np.float32))
    feedback.hear(line, Ready(generation=2, residual=9, **ready), 1)  # type: ignore[arg-type]
    assert feedback.residual.tolist() == list(range(8))
    feedback.answered(2, True)  # of the generation before
    assert feedback.residual.tolist() == list(range(8))
    feedback.hear(Line(), Ready(generation=3, **ready), 2)  # type: ignore[arg-type]
    assert feedback.residual.tolist() == [0.0] * 8


def test_a_slot_of_the_node_is_written_in_place() -> None:
    weights, slot = Vector(LAYOUT), Packed(FORM)
    packing = Packing(FORM, Form.of(LAYOUT, "float32"), weights)
    packed, finite = packing.pack(gradient(*FIRST), slot, 1, None)
    assert packed is slot and finite and packing.incoming is weights
    other, finite = packing.pack(gradient(*FIRST), None, 1, None)
    assert other is not slot and bytes(other.data) == bytes(slot.data)
