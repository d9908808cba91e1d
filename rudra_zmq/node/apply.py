"""Carries out what the core decided: folds gradients, makes version i+1 of the weights from version i.

Owns: the accumulator, the averaging of buffers, the rate of an update. Must not know: why an update is due, who is
present, where versions go.

Buffers: floating ones become the mean over the update's gradients weighted by their samples (summed in float64),
integer ones the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rudra_zmq.core.events import Decision, Fold
from rudra_zmq.node.rule import JobRates, scaled_groups
from rudra_zmq.node.slots import Slot, SlotTable
from rudra_zmq.node.vectors import F32, Vector
from rudra_zmq.node.versions import Versions
from rudra_zmq.update.cpu import CpuUpdate
from rudra_zmq.update.rules import RuleSpec
from rudra_zmq.wire.layout import Layout


class NotFinite(Exception):
    """The sum of finite gradients was not finite: weights and state are void."""


class _Buffers:
    """Running mean and maximum of the buffers of one update."""

    def __init__(self, layout: Layout) -> None:
        self._floats = np.zeros(layout.BF, np.float64)
        self._ints = np.zeros(layout.BI, np.int64)
        self._count = 0

    def add(self, slot: Slot) -> None:
        if self._floats.size:
            self._floats += slot.vector.floats * np.float64(slot.count)
        if self._ints.size:
            if self._count:
                np.maximum(self._ints, slot.vector.ints, out=self._ints)
            else:
                self._ints[:] = slot.vector.ints
        self._count += slot.count

    def finish(self, out: Vector) -> None:
        if self._floats.size:
            out.floats[:] = self._floats / self._count
            self._floats.fill(0.0)
        if self._ints.size:
            out.ints[:] = self._ints
        self._count = 0


class Applier:
    """The rule at work on one job. ``rates``: the job file's, or None where the chief of a script sends them."""

    def __init__(
        self,
        layout: Layout,
        spec: RuleSpec,
        versions: Versions,
        slots: SlotTable,
        *,
        rates: JobRates | None,
        script_rates: Sequence[float] = (),
        threads: int = 1,
    ) -> None:
        self._layout = layout
        self._versions = versions
        self._slots = slots
        self._rates = rates
        self._script_rates = tuple(script_rates)
        self._update = CpuUpdate(spec, layout.P, threads)
        self._accumulator: F32 | None = None
        self._buffers = _Buffers(layout)

    @property
    def spec(self) -> RuleSpec:
        """The rule in force."""
        return self._update.spec

    @property
    def script_rates(self) -> tuple[float, ...]:
        """The rates in force, one per group of a script's optimizer; empty under a rule of the job file."""
        return self._script_rates

    def fold(self, fold: Fold) -> None:
        """Sum a gradient into the accumulator; its slot is free after this."""
        slot = self._slots.slot(fold.id.rank, fold.id.incarnation, fold.slot)
        if self._accumulator is None:
            self._accumulator = np.zeros(self._layout.P, np.float32)
        elif fold.first:
            self._accumulator.fill(0.0)
        self._update.fold(self._accumulator, fold.scale, slot.vector.gradient)
        self._take(slot)

    def update(self, decision: Decision, protocol: str, global_batch: int) -> float:
        """Write the next version and publish it; the rate that it was made with. NotFinite if the sum is not."""
        lr = self._rate(decision, protocol, global_batch)
        target = self._versions.begin()
        direct = []
        slots = []
        for entry in decision.entries:
            if not entry.folded:
                slot = self._slots.slot(entry.id.rank, entry.id.incarnation, entry.slot)
                direct.append((entry.coefficient, slot.vector.gradient))
                slots.append(slot)
        folded = None
        if len(direct) < len(decision.entries):
            assert self._accumulator is not None
            folded = (decision.fold_coefficient, self._accumulator)
        report = self._update.step(
            self._versions.current.params, direct, folded, decision.weight_sum, decision.s_bar, lr, target.params
        )
        if not report.finite:
            raise NotFinite
        for slot in slots:
            self._take(slot)
        self._buffers.finish(target)
        self._versions.publish()
        return lr

    def _take(self, slot: Slot) -> None:
        self._buffers.add(slot)
        slot.count = 0

    def _rate(self, decision: Decision, protocol: str, global_batch: int) -> float:
        if self._rates is not None:
            return self._rates.at(decision.progress, protocol, global_batch)
        if decision.rates is not None and len(decision.rates) == len(self.spec.groups):
            self._script_rates = decision.rates
        spans = [(g.start, g.stop, g.weight_decay) for g in self.spec.groups]
        lr, groups = scaled_groups(self._script_rates, spans)
        if lr > 0 and groups != self.spec.groups:
            # A script's scheduler moved its groups apart, if only by how it rounds.
            self._update.regroup(groups)
        return lr

    # --------------------------------------------------------------------------------------- snapshot

    def state(self, into: dict[str, Any] | None = None) -> dict[str, Any]:
        """A copy of the optimiser's state; arrays of ``into`` are used again."""
        return self._update.state_dict(into)

    def restore(self, state: Mapping[str, Any]) -> None:
        """The state of a snapshot; ValueError (one line) if it is another rule's or another model's."""
        self._update.load_state_dict(state)

    def close(self) -> None:
        """End the threads."""
        self._update.close()
