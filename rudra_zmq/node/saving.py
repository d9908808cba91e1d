"""When a snapshot is made, and what is in it; going on from one.

Owns: the policy (servers.snapshot), the copy that is written aside, the record of a restore in the decision log. Must
not know: how a snapshot lies on the disk (snapshot.py).

auto: version 0, every end of an epoch, every five minutes, the last two never closer together than fifty times what
one cost; and every planned stop. A duration: version 0, so often, and planned stops. none: never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rudra_zmq.core.sync import Sync
from rudra_zmq.errors import RudraError
from rudra_zmq.node import snapshot, spec
from rudra_zmq.node.evaluate import Mailbox
from rudra_zmq.node.figures import Figures
from rudra_zmq.node.model import Model
from rudra_zmq.node.residuals import Residuals
from rudra_zmq.node.snapshot import Content, Loaded, Outcome, Store, Writer
from rudra_zmq.node.vectors import F32, Vector
from rudra_zmq.node.work import Work
from rudra_zmq.wire.messages.data import Attach

EVERY_S = 300.0
COSTS = 50.0


class Saving:
    """``written`` is called in the loop with the outcome of each snapshot."""

    def __init__(self, work: Work, written: Callable[[Outcome], None], residuals: Residuals) -> None:
        self._work = work
        self._residuals = residuals
        self._written = written
        self._store = Store(work.folder / "snapshots", work.job.servers.keep)
        self._writer = Writer(lambda outcome: work.off_loop(lambda: self._done(outcome)))
        self._aside: Vector | None = None
        self._optimiser: dict[str, Any] = {}
        self._last = -math.inf  # when the last one was begun
        self._cost = 0.0
        self.saved: int | None = None  # update of the newest good one
        self.at = 0.0  # when that was written
        self.on = work.job.servers.snapshot != "none"

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._writer.busy or self._residuals.gathering

    def wait(self, seconds: float) -> bool:
        """Wait for the one that is being written; False where it takes longer."""
        return self._writer.join(seconds)

    # ------------------------------------------------------------------------------------------- policy

    def consider(self, epoch_done: bool) -> None:
        """After each turn of the core and each second: make one if it is due."""
        if not self.on or self.busy:
            return
        since = self._work.clock() - self._last
        every = self._work.job.servers.snapshot_s
        if every is not None:
            due = since >= every
        else:
            due = since >= COSTS * self._cost and (epoch_done or since >= EVERY_S)
        if due:
            self.save()

    def save(self, finished: str = "") -> bool:
        """Copy the state of now aside and write it; False where one is being written or nothing is new.

        ``finished`` says that training is over and why: who goes on from it has nothing left to train.
        """
        work = self._work
        model, sync, figures = work.model, work.sync, work.figures
        if not self.on or self.busy or model is None or sync is None or figures is None or model.applier is None:
            return False
        if self.saved == sync.clock.timestamp and not finished:
            return False
        work.check_weights()
        self._last = work.clock()
        if self._aside is None:
            self._aside = Vector(model.layout)
        self._aside.copy_from(model.versions.current)
        self._optimiser = model.applier.state(self._optimiser or None)
        work.account()
        state = {
            "sync": sync.state(),
            "attach": msgspec.to_builtins(model.attach),
            "rule": model.rule_state(),
            "samples": figures.samples,
            "figures": figures.state(),
            "settled": work.metrics.settled,
            # At a planned stop they are leaving, and all are to come again.
            "members": [] if work.stopping else sync.counted,
            "finished": finished,
        }
        aside, clock = self._aside, sync.clock

        def write(residuals: Mapping[int, F32]) -> None:
            vectors = model.vectors(aside, self._optimiser, residuals)
            content = Content(clock.generation, clock.timestamp, vectors, state)
            work.decisions.flush()
            self._writer.start(lambda: self._write(content))

        self._residuals.gather(write)
        return True

    def _write(self, content: Content) -> Outcome:
        """In the writer's thread. What the snapshot builds on is on the disk before it."""
        self._work.decisions.sync()
        return self._store.write(content)

    def _done(self, outcome: Outcome) -> None:
        self._cost = outcome.seconds
        if outcome.error:
            self._work.seldom("snapshot", "W", f"{outcome.error} (training goes on)")
        else:
            self.saved = outcome.update
            self.at = self._work.clock()
        self._written(outcome)

    # ------------------------------------------------------------------------------------------ restore

    def restore(self) -> str:
        """Go on from the newest good snapshot, if there is one; why training is over, if it is.

        Raises RudraError where it is another job's: its signature or its rule no longer fit the job file.
        """
        work = self._work
        left = self._store.clean()
        if left:
            work.event("I", f"removed {left} unfinished snapshot{'s' if left > 1 else ''}")
        if not work.spec.resume:
            return ""
        loaded = self._store.newest(work.warn)
        if loaded is None:
            work.event("W", "no snapshot: the job begins anew")
            work.decisions.restored(0, work.spec.generation)
            return ""
        try:
            self._take(loaded)
        except (KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
            fix = f"remove {loaded.path}, or start a new job"
            raise RudraError(f"snapshot does not fit the job: {error}", where=str(loaded.path), fix=fix) from None
        work.decisions.restored(loaded.update, work.spec.generation)
        work.event("I", f"goes on from update {loaded.update} (snapshot {loaded.path.name})")
        self.saved, self.at = loaded.update, work.clock()
        return str(loaded.state["finished"])

    def _take(self, loaded: Loaded) -> None:
        work, state = self._work, loaded.state
        model = Model(msgspec.convert(state["attach"], Attach), work.job, work.limit(), work.shares)
        model.restore_rule(state["rule"])
        vectors = snapshot.vectors(loaded)
        model.restore(vectors)
        self._residuals.restore(model.residuals(vectors))
        figures = Figures(int(state["samples"]))
        figures.restore(state["figures"])
        sync = Sync(
            spec.sync_params(work.job),
            spec.learner_params(work.job),
            spec.data_params(work.job, figures.samples),
            generation=work.spec.generation,
            state=state["sync"],
        )
        if sync.clock.timestamp != loaded.update:
            raise ValueError(f"its clock says update {sync.clock.timestamp}")
        work.model, work.figures, work.sync = model, figures, sync
        work.say_budget()
        if work.evaluated:
            work.mailbox = Mailbox(model.layout)
        for epoch, error in sorted(work.metrics.results().items()):
            if figures.untested(epoch):
                figures.tested(epoch, {"test_error": error})
        work.metrics.settled = int(state["settled"])
        work.members = frozenset(int(rank) for rank in state.get("members", ()))
        work.metrics.rewrite(figures.rows)
