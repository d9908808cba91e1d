"""The model of the job once its signature is known: layout, memory, rule, and whether version 0 exists.

Owns: what belongs together from the first Attach on, what memory it demands, the vectors of a snapshot. Must
not know: sessions, messages on their way, why anything happens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rudra_zmq.config.job import JobFile
from rudra_zmq.core.slots import may_fold, slots_needed
from rudra_zmq.errors import Rejected
from rudra_zmq.net.sockets import WINDOW
from rudra_zmq.node import budget, tensors
from rudra_zmq.node import rule as rules
from rudra_zmq.node.apply import Applier
from rudra_zmq.node.budget import Demand, Limit
from rudra_zmq.node.slots import SlotTable
from rudra_zmq.node.vectors import F32, Vector
from rudra_zmq.node.versions import Versions
from rudra_zmq.update.rules import RULES, RuleSpec
from rudra_zmq.wire.codec import CHUNK
from rudra_zmq.wire.compress import forms
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import Attach, Rule

_STATE, _RESIDUAL = "state.", "residual."


def update_threads() -> int:
    """Threads that an update gets on this host: half of the cores, since the learners compute on them too."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def slots_of(job: JobFile) -> int:
    """Vectors that are kept for the gradients of each learner."""
    return slots_needed(job.sync.protocol, job.learners.most, job.sync.n)


def demand(job: JobFile, layout: Layout, spec: RuleSpec | None) -> Demand:
    """``spec`` None: a script's optimizer, which nobody knows yet; there is room for the greediest."""
    up, down = forms(job.wire, layout)
    rule = max(RULES, key=lambda name: len(RULES[name].state)) if spec is None else spec.rule
    most = job.learners.most
    return Demand(
        weights=layout.nbytes,
        version=down.nbytes,
        masters=0 if down.codec == "float32" else 2,
        slot=up.nbytes,
        residuals=8 * layout.P if up.codec == "topk" else 0,
        slots=slots_of(job),
        state=4 * layout.P * len(RULES[rule].state),
        rule="optimizer" if spec is None else rule,
        accumulator=4 * layout.P if may_fold(job.sync.protocol, most, job.sync.n) else 0,
        queue=min(WINDOW * CHUNK, max(up.nbytes, down.nbytes)),
        most=most,
        protocol=job.sync.protocol,
        tests=job.kind == "task",
        snapshots=job.servers.snapshot != "none",
        backup=job.sync.backup,
        decoded=4 * layout.P if up.codec in ("int8", "topk") else 0,
    )


class Model:
    """Raises Rejected (one line) where the signature has no layout, or the job file's rule does not fit it.

    And where the memory that it takes is more than ``limit``, before any of it is taken.
    """

    def __init__(self, attach: Attach, job: JobFile, limit: Limit, shared: bool = False) -> None:
        """``shared``: slots and versions lie where learners of this host can map them."""
        self.attach = attach
        self.job = job
        self.layout = Layout.of(attach)
        self.up, self.down = forms(job.wire, self.layout)  # of gradients, of weights
        self._limit = limit
        spec = rules.job_spec(job.update, self.layout, frozenset(attach.frozen)) if job.update.rule else None
        self.budget = budget.budget(self._demand(spec), limit.nbytes)
        # Of an optimizer that nobody knows yet nothing is certain; the rest is needed in any case.
        certain = self.budget if spec else self.budget.with_state(replace(self._demand(None), state=0))
        budget.check(certain, limit)
        self.versions = Versions(self.layout, self.budget.ring, shared, self.down)
        self.slots = SlotTable(self.layout, self._slots, shared, self.up)
        self.exists = False  # version 0, or a restored one, is in place
        self.applier: Applier | None = None
        if spec is not None:
            self._install(spec, ())

    @property
    def ruled_by_job(self) -> bool:
        """Whether the job file names the rule."""
        return bool(self.job.update.rule)

    def offer(self, rule: Rule) -> bool:
        """A script's optimizer: whether it rules. Rejected where it cannot, or differs from the first one."""
        if self.ruled_by_job:
            return False
        spec, rates = rules.script_spec(rule, self.layout)
        if self.applier is None:
            self.budget = self.budget.with_state(self._demand(spec))
            budget.check(self.budget, self._limit)
            self._install(spec, rates)
        elif difference := rules.differs(self.applier.spec, spec):
            fix = "give every learner the same optimizer"
            raise Rejected(f"another optimizer than the job's: {difference}", fix=fix)
        return True

    def _install(self, spec: RuleSpec, rates: tuple[float, ...]) -> None:
        self.applier = Applier(
            self.layout,
            spec,
            self.versions,
            self.slots,
            rates=rules.JobRates(self.job.update, self.job.job.epochs) if self.ruled_by_job else None,
            script_rates=rates,
            threads=update_threads(),
        )

    def rate(self, protocol: str, global_batch: int) -> float:
        """The first rate, for people."""
        if self.ruled_by_job:
            return rules.JobRates(self.job.update, self.job.job.epochs).first(protocol, global_batch)
        return max(self.applier.script_rates, default=0.0) if self.applier else 0.0

    # ---------------------------------------------------------------------------------------- memory

    @property
    def _slots(self) -> int:
        return slots_of(self.job)

    def _demand(self, spec: RuleSpec | None) -> Demand:
        return demand(self.job, self.layout, spec)

    # -------------------------------------------------------------------------------------- snapshot

    def vectors(
        self, aside: Vector, optimiser: Mapping[str, Any], residuals: Mapping[int, F32]
    ) -> list[tensors.Tensor]:
        """A snapshot's tensors: the vector's three parts, the optimiser's state, residuals by rank; all flat."""
        rows: list[tuple[str, tensors.Array]] = [
            ("params", aside.params),
            ("floats", aside.floats),
            ("ints", aside.ints),
        ]
        rows += [(_STATE + name, array) for name, array in optimiser.items()]
        rows += [(f"{_RESIDUAL}{rank}", array) for rank, array in residuals.items()]
        return [
            tensors.Tensor(name, "I64" if array.dtype == np.int64 else "F32", (array.size,), array)
            for name, array in rows
        ]

    def restore(self, vectors: Mapping[str, tensors.Array]) -> None:
        """Weights and optimiser's state of a snapshot. KeyError, ValueError where they are another model's."""
        target = self.versions.begin()
        for name, part in (("params", target.params), ("floats", target.floats), ("ints", target.ints)):
            if vectors[name].shape != part.shape or vectors[name].dtype != part.dtype:
                raise ValueError(f"its {name} are another model's")
            part[:] = vectors[name]
        if self.applier is not None:
            state = {name[len(_STATE) :]: v for name, v in vectors.items() if name.startswith(_STATE)}
            self.applier.restore(state)
        self.versions.publish()
        self.exists = True

    def residuals(self, vectors: Mapping[str, tensors.Array]) -> dict[int, F32]:
        """Those of a snapshot by rank, where gradients still have any. ValueError where they are another model's."""
        if self.up.codec != "topk":
            return {}
        found = {}
        for name, values in vectors.items():
            if name.startswith(_RESIDUAL):
                if values.shape != (self.layout.P,) or values.dtype != np.float32:
                    raise ValueError("its residuals are another model's")
                found[int(name[len(_RESIDUAL) :])] = values.view(np.float32)
        return found

    def rule_state(self) -> dict[str, Any] | None:
        """The rule and the rates in force, for a snapshot; None where there is no rule yet."""
        if self.applier is None:
            return None
        return {"spec": rules.spec_to_json(self.applier.spec), "rates": list(self.applier.script_rates)}

    def restore_rule(self, state: Mapping[str, Any] | None) -> None:
        """A script's rule of a snapshot (the job file's is known anyway)."""
        if state is not None and not self.ruled_by_job:
            spec = rules.spec_from_json(state["spec"])
            self.budget = self.budget.with_state(self._demand(spec))
            budget.check(self.budget, self._limit)
            self._install(spec, tuple(state["rates"]))

    def close(self) -> None:
        """End the threads of the update."""
        if self.applier is not None:
            self.applier.close()
