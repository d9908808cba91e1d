"""Sync under learners that push, repeat, lie, die at any step, come back and drain, in any order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rudra_zmq.core.events import Clock, GradientId, Leave, Push, Span
from rudra_zmq.core.params import MODULATIONS, DataParams, LearnerParams, SyncParams
from tests.unit.core.world import World

RANKS = st.integers(0, 4)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[SyncParams, LearnerParams, DataParams]:
    count = draw(st.integers(1, 5))
    protocol = draw(st.sampled_from(["hardsync", "softsync", "async"]))
    warmup = draw(st.integers(0, 2)) if protocol != "hardsync" else 0
    sync = SyncParams(
        protocol=protocol,
        n=draw(st.integers(1, count)),
        modulation=draw(st.sampled_from(MODULATIONS)),
        max_staleness=draw(st.none() | st.integers(0, 4)),
        on_stale=draw(st.sampled_from(["drop", "hold"])),
        backup=draw(st.integers(0, count - 1)) if protocol == "hardsync" or warmup else 0,
        warmup_epochs=warmup,
    )
    by_batch = draw(st.booleans())
    learners = LearnerParams(
        count=count,
        min=draw(st.integers(1, count)),
        max=draw(st.sampled_from([0, 5])),
        minibatch=draw(st.integers(1, 4)) if by_batch else 0,
        global_batch=0 if by_batch else draw(st.integers(5, 12)),
        on_lost=draw(st.sampled_from(["shrink", "shrink", "wait", "fail"])),
        deadline=draw(st.sampled_from([0.0, 10.0])),
        step_timeout=100.0,
    )
    return (
        sync,
        learners,
        DataParams(draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.sampled_from([0, 0, 5]))),
    )


class Job(RuleBasedStateMachine):
    @initialize(job=jobs(), mus=st.lists(st.integers(0, 5), min_size=5, max_size=5), prefetch=st.integers(0, 2))
    def begin(self, job: tuple[SyncParams, LearnerParams, DataParams], mus: list[int], prefetch: int) -> None:
        self.prefetch = prefetch
        self.draining = False
        self.world = World(*job)
        self.world.begin(mus, prefetch)

    @rule(pick=st.integers(0, 10))
    def push(self, pick: int) -> None:
        computing = self.world.computing
        if computing:
            self.world.push(computing[pick % len(computing)])

    @rule(pick=st.integers(0, 10), skip=st.booleans())
    def push_nothing_good(self, pick: int, skip: bool) -> None:
        computing = self.world.computing
        if computing:
            self.world.push(computing[pick % len(computing)], skip=skip, finite=skip)

    @rule(pick=st.integers(0, 10))
    def push_part(self, pick: int) -> None:
        computing = self.world.computing
        if computing:
            rank = computing[pick % len(computing)]
            first = self.world.live[rank].grant.leases[0].spans[0]
            self.world.push(rank, spans=(Span(first.epoch, first.start, first.start + (first.count + 1) // 2),))

    @rule(pick=st.integers(0, 10))
    def push_all_that_is_held(self, pick: int) -> None:
        computing = self.world.computing
        if computing:
            rank = computing[pick % len(computing)]
            leases = self.world.live[rank].grant.leases
            self.world.push(rank, spans=tuple(span for lease in leases for span in lease.spans))

    @rule(rank=RANKS)
    def repeat(self, rank: int) -> None:
        learner = self.world.live.get(rank)
        if learner is not None and learner.last is not None:
            before = self.world.sync.counters.accepted
            self.world.repeat(rank)
            assert self.world.sync.counters.accepted == before

    @rule(rank=RANKS)
    def want(self, rank: int) -> None:
        if rank in self.world.computing:
            self.world.want(rank)

    @rule(rank=RANKS, kind=st.sampled_from(["lost", "bye", "fenced"]))
    def leave(self, rank: int, kind: str) -> None:
        if rank in self.world.live:
            self.world.leave(rank, kind)

    @rule(rank=RANKS, mu=st.integers(0, 5))
    def come(self, rank: int, mu: int) -> None:
        self.join(rank, mu)

    def join(self, rank: int, mu: int) -> None:
        if rank not in self.world.live:
            before = self.world.refusals[:]
            self.world.join(rank, mu, self.prefetch)
            if self.world.refusals != before:
                del self.world.live[rank]

    @rule(rank=RANKS)
    def replace_one_that_lives(self, rank: int) -> None:
        world = self.world
        if rank in world.live:
            old = world.live[rank]
            world.join(rank, incarnation=old.incarnation + 1)
            assert (rank, old.incarnation) in [(fence.rank, fence.incarnation) for fence in world.fences]
            world.gone.add((rank, old.incarnation))
            del world.live[rank]
            world.newest[rank] = old.incarnation + 1
            world.live[rank] = type(old)(rank, old.incarnation + 1, 0)
            world.turn(Leave(rank, old.incarnation, "fenced"))

    @rule(rank=RANKS)
    def reconnect(self, rank: int) -> None:
        learner = self.world.live.get(rank)
        if learner is not None:
            self.world.join(rank, learner.mu, self.prefetch, learner.incarnation)

    @rule(
        rank=RANKS,
        seq=st.integers(-1, 9),
        ahead=st.integers(0, 2),
        generation=st.integers(0, 3),
        start=st.integers(0, 40),
    )
    def lie(self, rank: int, seq: int, ahead: int, generation: int, start: int) -> None:
        world = self.world
        incarnation = world.newest.get(rank, 0) + int(seq == 9)
        learner = world.live.get(rank)
        same = learner is not None and incarnation == learner.incarnation
        if same and (seq in (learner.seq, learner.seq + 1) or (learner.seq == 0 and seq > 0)):
            return  # an honest learner could send it
        before = replace(world.sync.counters), world.sync.clock
        clock = Clock(generation, world.timestamp + ahead)
        world.turn(Push(GradientId(rank, incarnation, seq), clock, (Span(0, start, start + 1),), 1))
        assert world.sync.counters.accepted == before[0].accepted and world.sync.clock == before[1]

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(self.world.now + seconds)

    @precondition(lambda self: not self.draining)
    @rule(really=st.integers(0, 9))
    def drain(self, really: int) -> None:
        if really == 0:
            self.draining = True
            self.world.drain()

    @precondition(lambda self: not self.draining and not self.world.over)
    @rule()
    def restart(self) -> None:
        self.world = self.world.restart()
        self.world.begin(prefetch=self.prefetch)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for rank in range(5):  # under on_lost = wait the job does wait for those who left
            self.join(rank, 0)
        world.finish()
        for rank in world.computing:
            world.push(rank)
        assert not world.computing
        if world.finished and world.finished.complete:
            assert len(world.applied) + len(world.skipped) == world.data.samples * world.data.epochs
        assert world.failed or all(learner.answered for learner in world.live.values())
        for decision in world.decisions:
            check_weights(world, decision)


def check_weights(world: World, decision) -> None:
    assert decision.weight_sum > 0
    if world.params.protocol == "hardsync":
        assert all(entry.sigma == 0 and entry.scale == 1.0 for entry in decision.entries)
        assert [e.id for e in decision.entries] == sorted(e.id for e in decision.entries)
        assert abs(decision.weight_sum - 1.0) < 1e-6
    bound = world.params.max_staleness
    if bound is not None:
        assert max(entry.sigma for entry in decision.entries) <= bound


Job.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestJob = Job.TestCase
