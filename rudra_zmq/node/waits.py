"""What each process of a job waits for, since when, until when, and what follows then: for `rudra why`.

Owns the words. Must not know: who asks. Nothing here decides; the deadlines are those of opening, core and ending.
"""

from __future__ import annotations

import math

from rudra_zmq.core.sync import Sync
from rudra_zmq.node.ending import Ending
from rudra_zmq.node.opening import Opening
from rudra_zmq.node.work import Work
from rudra_zmq.wire.messages.control import WaitRow

KILLED = "its process is killed and started again"


def waits(work: Work, opening: Opening, ending: Ending) -> list[WaitRow]:
    """A row for each that waits or computes; seconds, by the node's clock. Texts have no figures that change."""
    if ending.over:
        return ending.waiting()
    if not work.started or work.sync is None:
        return opening.waiting()
    now = work.clock()
    return [*_too_few(work, work.sync, now), *_lost(work, work.sync, now), *_at_work(work.sync, now)]


def _too_few(work: Work, sync: Sync, now: float) -> list[WaitRow]:
    waiting = sync.waiting
    if waiting is None:
        return []
    bounded = waiting.deadline < math.inf
    row = WaitRow(
        who="node",
        what=f"for learners: {waiting.present} present, {waiting.needed} needed",
        since=max(0.0, now - waiting.deadline + work.job.learners.deadline_s) if bounded else None,
        left=max(0.0, waiting.deadline - now) if bounded else None,
        then="the job fails" if bounded else "",
    )
    return [row]


def _lost(work: Work, sync: Sync, now: float) -> list[WaitRow]:
    then = {"shrink": "the job goes on without it", "fail": "the job fails", "wait": "it is waited for on"}
    patience = work.job.learners.deadline_s
    return [
        WaitRow(
            who=f"learner {rank}",
            what="was lost; its next process is awaited",
            since=max(0.0, patience - left),
            left=left,
            then=then[work.job.learners.on_lost],
        )
        for rank, left in sync.crew.lost(now)
    ]


def _at_work(sync: Sync, now: float) -> list[WaitRow]:
    """Who computes, and who waits for them."""
    steps = sync.crew.steps(now)
    rows = [
        WaitRow(
            who=f"learner {rank}",
            what="computes its first mini-batch" if first else "computes a mini-batch",
            since=max(0.0, seconds),
            left=max(0.0, most - seconds),
            then=KILLED,
        )
        for rank, first, seconds, most in steps
    ]
    others = ", ".join(str(step[0]) for step in steps[:8]) + (", ..." if len(steps) > 8 else "")
    what = "for samples, which others hold, or for an update"
    if sync.protocol == "hardsync":
        what = f"for the gradients of this round: of rank {others}" if steps else "for the next round"
    left = max((most - seconds for _, _, seconds, most in steps), default=None)
    rows += [
        WaitRow(who=f"learner {rank}", what=what, left=None if left is None else max(0.0, left))
        for rank in sync.crew.idle
    ]
    return sorted(rows, key=lambda row: int(row.who.split()[1]))
