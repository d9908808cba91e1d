"""Learners of a real node over its memory: the same numbers as over chunks, whatever happens; nothing torn."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rudra_zmq.learner.exchange import Answer, Gradient
from rudra_zmq.learner.remote import RemoteExchange
from rudra_zmq.learner.shared import NotShared, share
from rudra_zmq.net.auth import KeyPair
from rudra_zmq.node.vectors import F32, Vector
from rudra_zmq.wire.compress import Form
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages import data as d
from tests.net.learner.conftest import spec_in
from tests.net.node.conftest import rig_of  # noqa: F401
from tests.net.node.rig import ATTACH, JOB, TOKEN, Rig, gradient, run_rounds, say_bye, toml, wait_for
from tests.net.node.test_hardsync import EPOCHS, MU, SAMPLES, counted, plain_loop, result

Rigs = Callable[..., Rig]


class Worker(RemoteExchange):
    """A learner over the real exchange, without torch; which version it was last shown."""

    version = -1

    def __init__(self, rig: Rig, rank: int, incarnation: int = 1, attach: d.Attach = ATTACH) -> None:
        folder = rig.folder.parent
        node_file = folder / f"node-{rank}.json"
        node_file.write_text(json.dumps({"addresses": [rig.address], "generation": rig.generation, "key": rig.key}))
        key = -1
        if rig.key:
            key = os.memfd_create("key")
            os.write(key, KeyPair.new().secret.encode())
        super().__init__(
            spec_in(
                folder, job=JOB, token=TOKEN, rank=rank, incarnation=incarnation, toml=rig.toml,
                node_file=str(node_file), key_fd=key,
            ),
            give_up_s=20.0,
        )  # fmt: skip
        layout = Layout.of(attach)
        self.own = Vector(layout)
        self.own.params[:] = 1.0
        try:
            self.attach(attach, layout, self.own, Vector(layout, touch=False))
        except BaseException:
            self.close()
            raise

    def _read_shared(self, grant: d.Grant) -> None:
        super()._read_shared(grant)
        if grant.nbytes:
            self.version = grant.version

    @property
    def is_shared(self) -> bool:
        return self._shared is not None

    def step(self, answer: Answer) -> Answer:
        """Compute the first lease, push it."""
        lease = answer.leases[0]
        spans = [tuple(span) for span in lease.spans]
        self.gradient.params[:] = gradient(self.weights.params, spans)  # type: ignore[arg-type]
        return self.push(Gradient(answer.clock, lease.spans, lease.count, loss=1.0))


def together(calls: list[Callable[[], None]], seconds: float = 60.0, main: Callable[[], None] = lambda: None) -> None:
    """Each in a thread of its own, ``main`` in this one; failures are raised."""
    failures: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    main()
    for thread in threads:
        thread.join(seconds)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def life(rig: Rig, rank: int, seen: list[bool], each: Callable[[Worker, Answer], None] | None = None) -> None:
    """A learner from its beginning to the end of the job."""
    worker = Worker(rig, rank)
    try:
        seen.append(worker.is_shared)
        worker.rule(None)
        answer = worker.begin(SAMPLES, MU, 1, 1)
        while not answer.done:
            if each is not None:
                each(worker, answer)
            answer = worker.step(answer)
        worker.leave("done")
    finally:
        worker.close()


def job(
    rig: Rig, each: Callable[[Worker, Answer], None] | None = None, main: Callable[[], None] = lambda: None
) -> tuple[list[bool], c.NodeDone]:
    seen: list[bool] = []
    together([lambda rank=rank: life(rig, rank, seen, each) for rank in range(2)], main=main)  # type: ignore[misc]
    done = rig.psd.wait(c.NodeDone, lambda m: m.progress.generation == rig.generation)
    assert rig.exit_status() == 0, rig.log()
    return seen, done


def with_weights(weights: str, **other: Any) -> str:
    return toml(learners=f'weights = "{weights}"', **other)


@pytest.mark.parametrize(("data", "weights"), [("shm", "shared"), ("shm", "copy"), ("ipc", "copy"), ("ipc", "shared")])
def test_equals_the_plain_loop(rig_of: Rigs, data: str, weights: str, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    rig = rig_of(with_weights(weights, epochs=EPOCHS), shared=data == "shm")
    places: set[bool] = set()
    with caplog.at_level(logging.WARNING):
        seen, done = job(rig, lambda worker, answer: places.add(worker.weights is not worker.own))
    assert seen == [data == "shm"] * 2
    assert (True in places) == (data == "shm" and weights == "shared")
    assert ("copied, not shared" in caplog.text) == (data == "ipc" and weights == "shared")
    np.testing.assert_array_equal(result(rig), plain_loop())
    assert counted(rig) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}
    assert done.state == "DONE" and not done.progress.drops


def test_a_learner_over_memory_beside_one_over_chunks(rig_of: Rigs) -> None:  # noqa: F811
    rig = rig_of(toml(epochs=EPOCHS), shared=True)
    seen: list[bool] = []

    def by_hand() -> None:
        one = rig.learner(1)
        one.hello()
        one.send(ATTACH)
        one.ready()
        one.send(d.Data(samples=SAMPLES, minibatch=0))
        one.grant()
        run_rounds([one])
        say_bye([one])
        one.close()  # a socket belongs to its thread

    together([lambda: life(rig, 0, seen), by_hand])
    rig.psd.wait(c.NodeDone)
    assert seen == [True]
    np.testing.assert_array_equal(result(rig), plain_loop())


def test_a_node_that_is_killed_comes_back_with_other_memory(rig_of: Rigs) -> None:  # noqa: F811
    rig = rig_of(toml(epochs=EPOCHS, snapshot="1ms"), shared=True)
    generations: dict[int, set[int]] = {0: set(), 1: set()}
    due, killed = threading.Event(), threading.Event()

    def main() -> None:  # a node ends with the thread that started it
        assert due.wait(30)
        wait_for("snapshot", lambda: any((rig.folder / "snapshots").glob("1-[1-9]*/manifest.json")))
        rig.kill()
        rig.start()
        killed.set()

    def each(worker: Worker, answer: Answer) -> None:
        assert worker.is_shared
        generations[worker.rank].add(answer.clock.generation)
        if worker.rank == 0 and answer.clock.timestamp == 5:
            due.set()
            assert killed.wait(30)

    job(rig, each, main)
    assert generations == {0: {1, 2}, 1: {1, 2}}
    np.testing.assert_array_equal(result(rig), plain_loop())
    assert counted(rig) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}


def test_a_lost_connection_is_taken_up_over_memory(rig_of: Rigs) -> None:  # noqa: F811
    """The push under way is repeated, or its answer heard, on a new connection: each sample counts once."""
    rig = rig_of(toml(epochs=EPOCHS), shared=True)
    cuts = 0

    def each(worker: Worker, answer: Answer) -> None:
        nonlocal cuts
        if worker.rank == 0 and answer.clock.timestamp in (2, 6):
            cuts += 1
            # The gradient is computed into the slot of the old connection, and pushed over a new one.
            worker._line.hang_up()

    job(rig, each)
    assert cuts == 2
    np.testing.assert_array_equal(result(rig), plain_loop())
    assert counted(rig) == {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}


@pytest.mark.parametrize("how", ["gone", "deaf", "nonce"])
def test_where_it_fails_chunks_are_used_and_one_line_says_so(
    rig_of: Rigs,  # noqa: F811
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = rig_of(toml(epochs=EPOCHS), shared=True)
    reason = "No such file or directory"
    if how == "gone":
        os.unlink(rig.shm)
    elif how == "deaf":
        monkeypatch.setattr("rudra_zmq.learner.shared.ASK_S", 0.2)
        monkeypatch.setattr(share, "__defaults__", (1e-9,))
        reason = "no answer in time"
    else:  # what is written goes to other memory than the node's
        monkeypatch.setattr("rudra_zmq.net.shm.Segment.note", lambda *_: None)
        reason = "what was written cannot be read here"
    with caplog.at_level(logging.WARNING):
        seen, _ = job(rig)
    assert seen == [False, False]
    lines = [r.getMessage() for r in caplog.records if "not shared" in r.getMessage()]
    assert len(lines) == 2 and all("chunks are used" in line for line in lines)
    assert reason in caplog.text or reason in str([r.__dict__ for r in caplog.records])
    np.testing.assert_array_equal(result(rig), plain_loop())


# ------------------------------------------------------------------------------------- strangers, late ones


def plain(layout: Layout) -> Form:
    return Form.of(layout, "float32")


def hello_of(rig: Rig, **other: Any) -> d.Hello:
    fields = {"job": JOB, "token": TOKEN, "rank": 0, "incarnation": 1, "host": "here", "pid": os.getpid()}
    return d.Hello(role="learner", **{**fields, **other})


def test_strangers_get_nothing(rig_of: Rigs) -> None:  # noqa: F811
    rig = rig_of(toml(count=1), shared=True)
    layout = Layout.of(ATTACH)
    with pytest.raises(NotShared, match="no session"):
        share(rig.shm, hello_of(rig), plain(layout), plain(layout))
    learner = rig.learner(0)
    learner.hello(pid=os.getpid())
    with pytest.raises(NotShared, match="no memory to share"):
        share(rig.shm, hello_of(rig), plain(layout), plain(layout))
    learner.send(ATTACH)
    learner.ready()
    with pytest.raises(NotShared, match="wrong token"):
        share(rig.shm, hello_of(rig, token="guess"), plain(layout), plain(layout))
    with pytest.raises(NotShared, match="incarnation 0"):
        share(rig.shm, hello_of(rig, incarnation=0), plain(layout), plain(layout))
    code = (
        "import sys; from tests.net.learner import test_shared as t; from rudra_zmq.wire.layout import Layout\n"
        "hello = t.d.Hello(role='learner', job=t.JOB, token=t.TOKEN, rank=0, incarnation=1, host='here', "
        f"pid={os.getpid()})\n"
        f"try: t.share({rig.shm!r}, hello, *[t.plain(Layout.of(t.ATTACH))] * 2); print('shared')\n"
        "except t.NotShared as error: print(error)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert "is not the learner's" in done.stdout, done
    assert len(share(rig.shm, hello_of(rig), plain(layout), plain(layout)).slots) == 1  # hardsync needs no second one
    drops = rig.psd.newest().drops
    assert drops["bad-token"] == 1 and drops["shm-stranger"] == 2 and drops["old-incarnation"] == 1


def by_memory(rig: Rig, incarnation: int = 1) -> tuple[Any, Any]:
    """A learner of the rig with its memory, by hand."""
    learner = rig.learner(0, incarnation)
    learner.hello(pid=os.getpid())
    learner.send(ATTACH)
    learner.ready()
    memory = share(rig.shm, hello_of(rig, incarnation=incarnation), plain(learner.layout), plain(learner.layout))
    learner.send(d.Data(samples=32, minibatch=0, shared=True))
    return learner, memory


def say(learner: Any, memory: Any, grant: d.Grant, **other: Any) -> None:
    lease = grant.leases[0]
    memory.slots[grant.slot].params[:] = 1.0
    fields: dict[str, Any] = {
        "rank": 0, "incarnation": learner.incarnation, "seq": grant.ack + 1, "generation": grant.generation,
        "key": grant.key, "groups": [d.Group(grant.timestamp, 1, 4, lease)], "nbytes": learner.layout.nbytes,
    }  # fmt: skip
    learner.send(d.Push(**(fields | other)))


def test_a_push_that_no_honest_learner_makes(rig_of: Rigs) -> None:  # noqa: F811
    rig = rig_of(toml(count=1, protocol="async"), shared=True)
    learner, memory = by_memory(rig)
    grant = learner.receive(d.Grant)
    assert grant.shared and grant.nbytes == 0
    future = [d.Group(9, 1, 4, grant.leases[0])]
    for wrong in ({"nbytes": 36}, {"key": grant.key + 1}, {"groups": future}, {"rank": 1}):
        say(learner, memory, grant, **wrong)
    learner.nothing(d.Grant)
    say(learner, memory, grant)
    first = learner.receive(d.Grant)
    assert (first.ack, first.verdict, first.nbytes) == (1, "accepted", learner.layout.nbytes)
    np.testing.assert_array_equal(memory.versions[first.version].params, np.full(10, 0.9, np.float32))
    say(learner, memory, first, finite=False)
    assert learner.receive(d.Grant).verdict == "nonfinite"
    drops = rig.psd.newest().drops
    assert [drops[r] for r in ("incomplete-push", "foreign-push", "future-timestamp", "wrong-rank")] == [1, 1, 1, 1]


def test_chunks_of_one_that_shares_are_dropped(rig_of: Rigs) -> None:  # noqa: F811
    rig = rig_of(toml(count=1, protocol="async"), shared=True)
    learner, memory = by_memory(rig)
    grant = learner.receive(d.Grant)
    learner.send_vector(grant.key, learner.gradient.data)
    say(learner, memory, grant)
    assert learner.receive(d.Grant).verdict == "accepted"
    assert rig.psd.newest().drops["foreign-chunk"] == 1


def test_who_wakes_up_late_writes_where_nobody_reads(rig_of: Rigs) -> None:  # noqa: F811
    rig = rig_of(toml(count=1, protocol="async"), shared=True)
    old, late = by_memory(rig)
    old.receive(d.Grant)
    new, memory = by_memory(rig, incarnation=2)
    grant = new.receive(d.Grant)
    memory.slots[grant.slot].params[:] = 1.0
    for slot in late.slots:
        slot.reals[:] = np.nan
    assert memory.slots[grant.slot].finite()
    say(new, memory, grant)
    after = new.receive(d.Grant)
    assert after.verdict == "accepted" and memory.versions[after.version].finite()
    with pytest.raises(ValueError, match="read-only"):
        memory.versions[0].params[:] = 1.0


def test_lost_incarnations_leave_no_memory_behind(rig_of: Rigs) -> None:  # noqa: F811
    rig = rig_of(toml(count=1, protocol="async"), shared=True)
    assert rig.process is not None
    maps = Path(f"/proc/{rig.process.pid}/maps")
    for incarnation in range(1, 8):
        learner, _ = by_memory(rig, incarnation)
        learner.receive(d.Grant)
        assert maps.read_text().count("rudra-slots") == 1
        names = [os.readlink(f) for f in Path(f"/proc/{rig.process.pid}/fd").iterdir() if f.is_symlink()]
        assert sum("rudra-slots" in name for name in names) <= 2


# ------------------------------------------------------------------------------------------- torn versions

BIG = d.Attach(params=[d.TensorSpec("w", [1 << 18], "float32")])
LARGE = d.Attach(params=[d.TensorSpec("w", [1 << 22], "float32")])  # more chunks than credit: updates come in between
SGD = 'rule = "sgd"\nlr = 0.001\nschedule = {kind = "constant"}'


def uniform(values: F32) -> bool:
    return bool((values == values[0]).all())


def learn(rig: Rig, rank: int, attach: d.Attach, torn: list[str], kinds: Counter[str]) -> None:
    """Each version has one number everywhere. It is looked at in each mini-batch, again and again."""
    worker = Worker(rig, rank, attach=attach)
    try:
        worker.rule(None)
        answer = worker.begin(1 << 20, 4, 1, 1)
        turn = 0
        while not answer.done and not torn:
            kinds["copied" if worker.weights is worker.own else "shown"] += 1
            values = worker.weights.params
            first = float(values[0])
            for _ in range(1 + (rank + turn) % 3):
                if not uniform(values) or float(values[0]) != first:
                    torn.append(f"{answer.clock} of rank {rank}")
            turn += 1
            worker.gradient.params[:] = 1.0 + rank
            lease = answer.leases[0]
            answer = worker.push(Gradient(answer.clock, lease.spans, lease.count))
        if answer.done:
            assert worker.weights is worker.own
            if not uniform(worker.own.params):
                torn.append(f"what rank {rank} kept")
        worker.leave("done")
    finally:
        worker.close()


WITHOUT_HOLDS = (
    "import sys; from rudra_zmq.core import versions; versions.Ring.hold = lambda ring, reader, brief: ring.current; "
    "from rudra_zmq.node.main import main; sys.exit(main())"
)


def watch(rig: Rig, attach: d.Attach = BIG) -> tuple[list[str], Counter[str]]:
    torn: list[str] = []
    kinds: Counter[str] = Counter()
    together([lambda rank=rank: learn(rig, rank, attach, torn, kinds) for rank in range(4)], 3000)  # type: ignore[misc]
    return torn, kinds


def many(protocol: str, versions: int, weights: str, transport: str) -> str:
    job = f"stop = {{updates = {versions}}}"
    cap = {"softsync": "21MB", "async": "16MB"}[protocol]
    memory = f'memory = "{cap}"' if transport == "short" else ""  # three versions, so that learners wait for room
    text = with_weights(weights, count=4, protocol=protocol, update=SGD, job=job, snapshot="none", servers=memory)
    return text + f"[wire]\nencrypt = {'true' if transport == 'sealed' else 'false'}\n"


TRANSPORTS = {"shm": {"shared": True}, "tcp": {"tcp": True}, "sealed": {"tcp": True}, "short": {"shared": True}}
MODELS = {"shm": BIG, "short": BIG, "tcp": LARGE, "sealed": LARGE}
LONG = (pytest.mark.long, pytest.mark.timeout(3600))
KINDS = [("shm", "shared"), ("short", "shared"), ("shm", "copy"), ("tcp", "copy"), ("sealed", "copy")]


@pytest.mark.parametrize(
    ("protocol", "versions"),
    [
        ("softsync", 50),
        ("async", 200),
        pytest.param("softsync", 2_500, marks=LONG),
        pytest.param("async", 10_000, marks=LONG),
    ],
)
@pytest.mark.parametrize(("transport", "weights"), KINDS)
def test_no_version_is_torn(rig_of: Rigs, protocol: str, versions: int, transport: str, weights: str) -> None:  # noqa: F811
    rig = rig_of(many(protocol, versions, weights, transport), **TRANSPORTS[transport])
    torn, kinds = watch(rig, MODELS[transport])
    assert torn == []
    assert rig.psd.wait(c.NodeDone).progress.updates == versions
    assert (kinds["shown"] > versions / 2) == (weights == "shared")


@pytest.mark.parametrize(("transport", "weights"), KINDS)
def test_without_holds_it_would_show(rig_of: Rigs, transport: str, weights: str) -> None:  # noqa: F811
    rig = rig_of(many("async", 10_000, weights, transport), program=["-c", WITHOUT_HOLDS], **TRANSPORTS[transport])
    assert watch(rig, MODELS[transport])[0]


# ---------------------------------------------------------------------------------------- who holds a version


def test_what_was_overwritten_while_the_answer_was_under_way_is_not_kept(rig_of: Rigs) -> None:  # noqa: F811
    """A learner is asked to leave after its push: what it was shown is no longer held, the answer says what is."""
    text = with_weights("shared", count=2, protocol="async", update=SGD, snapshot="none", epochs=1000)
    rig = rig_of(text, shared=True)
    over = threading.Event()

    def push(worker: Worker, answer: Answer, call: Callable[[Gradient], Answer]) -> Answer:
        worker.gradient.params[:] = 1.0
        lease = answer.leases[0]
        return call(Gradient(answer.clock, lease.spans, lease.count))

    def begun(rank: int) -> tuple[Worker, Answer]:
        worker = Worker(rig, rank, attach=BIG)
        worker.rule(None)
        answer = worker.begin(1 << 20, 4, 1, 1)
        return worker, push(worker, answer, worker.push)

    def leaver() -> None:
        worker, answer = begun(0)
        try:
            shown = worker._shown
            assert shown is not None and shown.intact
            worker._seq += 1
            push(worker, answer, lambda gradient: worker._send_push(gradient, worker.gradient) or answer)
            wait_for("overwritten version", lambda: not shown.intact)
            worker.keep()
            assert worker.weights is worker.own and uniform(worker.own.params)
            assert worker._clock.timestamp > answer.clock.timestamp
        finally:
            over.set()
            worker.close()

    def other() -> None:
        worker, answer = begun(1)
        try:
            while not over.is_set():
                answer = push(worker, answer, worker.push)
        finally:
            worker.close()

    together([leaver, other])
