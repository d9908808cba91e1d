"""The rules that fit on a page: scales, histogram, permutation, slots, versions, credit, parameters."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rudra_zmq.core.credit import ReceiveWindow, SendWindow
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.core.permutation import permutation
from rudra_zmq.core.slots import Slots, may_fold, slots_needed
from rudra_zmq.core.staleness import Histogram, float32, mean_sigma, scale
from rudra_zmq.core.versions import Ring, ring_size


@pytest.mark.parametrize(
    ("modulation", "sigma", "expected"),
    [
        ("none", 9, 1.0),
        ("n", 9, 1 / 5),
        ("n", 0, 1 / 5),
        ("average", 9, 1 / 2.5),
        ("staleness", 0, 1.0),
        ("staleness", 1, 1.0),
        ("staleness", 4, 1 / 4),
        ("inverse-sqrt", 0, 1.0),
        ("inverse-sqrt", 9, 1 / 3),
    ],
)
def test_scale(modulation: str, sigma: int, expected: float) -> None:
    assert scale(modulation, sigma, 5, 2.5) == expected


def test_scale_never_raises_the_rate() -> None:
    # 1-softsync has <sigma> = 0.967 at lambda 30: 1/<sigma> would be above 1.
    assert scale("average", 0, 1, 0.967) == 1.0
    with pytest.raises(ValueError, match="unknown modulation 'loud'"):
        scale("loud", 1, 1, 1.0)


def test_mean_sigma_of_a_vector_clock() -> None:
    assert mean_sigma(8, [7, 5, 3]) == 2.0
    assert mean_sigma(1, [0, 0]) == 0.0


def test_float32_is_what_numpy_rounds_to() -> None:
    for value in (1 / 3, 0.1, 1e-8, 3.0):
        assert float32(value) == float(np.float32(value))


def test_histogram() -> None:
    empty = Histogram()
    assert (empty.total, empty.mean, empty.max, empty.p95) == (0, 0.0, 0, 0)
    histogram = Histogram()
    for sigma in range(20):
        histogram.add(sigma)
    assert (histogram.total, histogram.mean, histogram.max, histogram.p95) == (20, 9.5, 19, 18)
    histogram.add(2, 20)
    assert (histogram.p95, histogram.total) == (17, 40)
    assert list(histogram.to_json())[:3] == ["0", "1", "2"]
    assert Histogram(json.loads(json.dumps(histogram.to_json()))).counts == histogram.counts


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60))
def test_p95_is_the_smallest_that_95_of_100_do_not_exceed(sigmas: list[int]) -> None:
    histogram = Histogram()
    for sigma in sigmas:
        histogram.add(sigma)
    assert histogram.mean == pytest.approx(sum(sigmas) / len(sigmas))
    assert sum(s <= histogram.p95 for s in sigmas) >= 0.95 * len(sigmas)
    assert sum(s < histogram.p95 for s in sigmas) < 0.95 * len(sigmas)


def test_permutation_is_one_of_n_and_depends_on_seed_and_epoch() -> None:
    order = permutation(1, 0, 1000)
    assert order.dtype == np.int64 and order.shape == (1000,)
    assert sorted(order) == list(range(1000))
    assert np.array_equal(order, permutation(1, 0, 1000)), "the same seed draws the same ones"
    assert not np.array_equal(order, permutation(1, 1, 1000))
    assert not np.array_equal(order, permutation(2, 0, 1000))
    assert not np.array_equal(permutation(1, 2, 1000), permutation(2, 1, 1000))
    assert permutation(1, 0, 0).shape == (0,)
    assert permutation(-1, 0, 5).shape == (5,)
    with pytest.raises(ValueError, match="-1 samples"):
        permutation(1, 0, -1)


def test_permutation_is_the_same_in_every_version() -> None:
    # A job that goes on under another NumPy must draw the same samples.
    assert permutation(7, 3, 10).tolist() == PERMUTATION_7_3_10


PERMUTATION_7_3_10 = [2, 5, 9, 7, 3, 0, 6, 8, 4, 1]


def test_slots() -> None:
    slots = Slots()
    assert (slots.free, slots.writing) == (0, 0)
    assert slots.hold() == 0
    assert slots.free == 1
    with pytest.raises(ValueError, match="slot 0 already holds"):
        slots.hold()
    slots.writing = 1
    assert slots.hold() == 1
    assert slots.free is None
    slots.release(0)
    assert slots.free == 0
    with pytest.raises(ValueError):
        slots.release(0)
    assert Slots(3).count == 3


@pytest.mark.parametrize(
    ("protocol", "lam", "affordable", "size"),
    [
        ("hardsync", 30, 99, 3),
        ("softsync", 4, 99, 6),
        ("async", 30, 10, 10),
        ("async", 30, 1, 3),
        ("softsync", 1, 9, 2),
        ("hardsync", 1, 9, 2),
    ],
)
def test_ring_size(protocol: str, lam: int, affordable: int, size: int) -> None:
    assert ring_size(protocol, lam, affordable) == size


@pytest.mark.parametrize(
    ("lam", "affordable", "backup", "size"), [(9, 99, 1, 5), (9, 99, 2, 6), (2, 99, 1, 4), (9, 4, 1, 4), (1, 9, 0, 2)]
)
def test_ring_size_with_backup(lam: int, affordable: int, backup: int, size: int) -> None:
    assert ring_size("hardsync", lam, affordable, backup) == size


class Readers(RuleBasedStateMachine):
    """However readers dawdle, the next update has a buffer and no reader sees one change."""

    @initialize(size=st.integers(3, 6))
    def begin(self, size: int) -> None:
        self.ring = Ring(size)
        self.reads: dict[str, int] = {}

    @rule(reader=st.sampled_from("abcdef"))
    def hold(self, reader: str) -> None:
        self.reads.pop(reader, None)
        index = self.ring.hold(reader)
        assert (index is None) == (len(self.free()) < 2)
        if index is not None:
            assert index == self.ring.current
            self.reads[reader] = index

    @rule(reader=st.sampled_from("abcdef"))
    def release(self, reader: str) -> None:
        self.ring.release(reader)
        self.reads.pop(reader, None)

    @rule()
    def update(self) -> None:
        index = self.ring.next()
        assert index in self.free()
        self.ring.publish(index)
        assert self.ring.current == index

    def free(self) -> set[int]:
        return set(range(self.ring.size)) - set(self.reads.values()) - {self.ring.current}

    @invariant()
    def never_stuck(self) -> None:
        if hasattr(self, "ring"):
            assert self.ring.free == len(self.free()) >= 1
            assert self.ring.must_copy == (len(self.free()) < 2) != self.ring.room()


TestReaders = Readers.TestCase


def test_brief_readers_need_no_spare_buffer() -> None:
    """An only learner on two buffers; members of rounds on three while one who joins reads an old version."""
    ring = Ring(2)
    for update in range(5):
        assert not ring.room() and ring.hold("a") is None
        assert ring.room(brief=True) and ring.hold("a", brief=True) == ring.current == update % 2
        ring.release("a")
        ring.publish(ring.next())
    ring = Ring(3)
    assert ring.hold("joins") == 0
    for _ in range(5):
        ring.publish(ring.next())
        assert ring.current != 0
        assert [ring.hold(member, brief=True) for member in "abc"] == [ring.current] * 3
        assert ring.hold("joins too") is None
        for member in "abc":
            ring.release(member)


@pytest.mark.parametrize(
    ("protocol", "most", "n", "slots", "folds"),
    [
        ("hardsync", 8, 1, 1, False),
        ("async", 8, 1, 1, False),
        ("softsync", 1, 1, 1, False),
        ("softsync", 8, 8, 1, False),
        ("softsync", 8, 5, 1, False),
        ("softsync", 8, 4, 2, False),
        ("softsync", 8, 3, 2, False),
        ("softsync", 8, 2, 2, True),
    ],
)
def test_slots_that_can_be_written(protocol: str, most: int, n: int, slots: int, folds: bool) -> None:
    assert (slots_needed(protocol, most, n), may_fold(protocol, most, n)) == (slots, folds)


def test_ring_guards() -> None:
    with pytest.raises(ValueError, match="needs 2 buffers, not 1"):
        Ring(1)
    ring = Ring(3)
    with pytest.raises(ValueError, match="buffer 0 is being read"):
        ring.publish(0)


def test_credit_keeps_a_window_under_way() -> None:
    sender, receiver = SendWindow(4), ReceiveWindow(4)
    assert [sender.spend() for _ in range(5)] == [True] * 4 + [False]
    receiver.receive()
    assert receiver.due() == 0, "half a window is handed back at a time"
    receiver.receive()
    assert receiver.due() == 2
    assert receiver.due() == 0
    sender.earn(2)
    assert sender.available == 2
    receiver.receive()
    assert receiver.due() == 0 and receiver.due(flush=True) == 1 and receiver.due(flush=True) == 0


def test_credit_odd_window_and_liars() -> None:
    receiver = ReceiveWindow(3)
    receiver.receive()
    assert receiver.due() == 0
    receiver.receive()
    receiver.receive()
    with pytest.raises(ValueError, match="more than 3 chunks"):
        receiver.receive()
    assert receiver.due() == 3
    receiver.receive()
    sender = SendWindow(2)
    for chunks in (1, 0, -1):
        with pytest.raises(ValueError, match="0 are under way"):
            sender.earn(chunks)
    sender.spend()
    sender.earn(1)
    for window in (SendWindow, ReceiveWindow):
        with pytest.raises(ValueError, match="lets nothing pass"):
            window(0)
        assert window(1).window == 1


@pytest.mark.parametrize(
    ("params", "count", "text"),
    [
        (SyncParams(protocol="loose"), 4, "sync.protocol = 'loose' is none of hardsync, softsync, async"),
        (SyncParams(modulation="loud"), 4, "sync.modulation = 'loud'"),
        (SyncParams(on_stale="wait"), 4, "sync.on_stale = 'wait'"),
        (SyncParams(n=0), 4, r"sync.n = 0 is outside \[1, 4\]"),
        (SyncParams(n=5), 4, r"sync.n = 5 is outside \[1, 4\]"),
        (SyncParams(max_staleness=-1), 4, "sync.max_staleness = -1 is negative"),
        (SyncParams(protocol="hardsync", backup=4), 4, r"sync.backup = 4 is outside \[0, 3\]"),
        (SyncParams(protocol="hardsync", backup=-1), 4, r"sync.backup = -1 is outside"),
        (SyncParams(backup=1), 4, "sync.backup = 1 needs hardsync, softsync waits for nobody"),
        (SyncParams(warmup_epochs=-1), 4, "sync.warmup_epochs = -1 is negative"),
    ],
)
def test_sync_params_refused(params: SyncParams, count: int, text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        params.validate(count)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "params",
    [
        SyncParams(n=4, max_staleness=0),
        SyncParams(protocol="hardsync", backup=3),
        SyncParams(protocol="async", backup=1, warmup_epochs=1),
    ],
)
def test_sync_params_accepted(params: SyncParams) -> None:
    params.validate(4)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (LearnerParams(on_lost="cry"), "learners.on_lost = 'cry'"),
        (LearnerParams(count=0), "learners.count = 0"),
        (LearnerParams(min=0), "learners.min = 0, count = 4, max = 4 must ascend"),
        (LearnerParams(min=5), "learners.min = 5"),
        (LearnerParams(max=3), "max = 3"),
        (LearnerParams(minibatch=-1), "cannot be negative"),
        (LearnerParams(global_batch=-1), "cannot be negative"),
        (LearnerParams(minibatch=0, global_batch=3), "learners.global_batch = 3 is less than a sample for each of 4"),
        (LearnerParams(minibatch=0, global_batch=4, max=5), "each of 5"),
        (LearnerParams(deadline=-1), "learners.deadline"),
        (LearnerParams(deadline=math.nan), "learners.deadline"),
        (LearnerParams(step_timeout=0), "learners.step_timeout"),
    ],
)
def test_learner_params_refused(params: LearnerParams, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        params.validate()


def test_learner_params_accepted() -> None:
    LearnerParams(count=1, min=1, deadline=0, minibatch=0, global_batch=1).validate()
    assert LearnerParams(count=3, max=9).most == 9
    LearnerParams(count=3, max=9).validate()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (DataParams(0, 1), "0 samples are too few"),
        (DataParams(1, 0), "job.epochs = 0"),
        (DataParams(1, 1, -1), "-1 updates"),
        (DataParams(2**37 + 1, 1), "137438953473 samples are more than 137438953472"),
        (DataParams(2**37, 2**16 + 1), "137438953472 samples in each of 65537 epochs"),
    ],
)
def test_data_params_refused(params: DataParams, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        params.validate()
    DataParams(1, 1).validate()
    DataParams(2**37, 2**16).validate()
