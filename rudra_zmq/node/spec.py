"""What psd tells a node at its start, and the parameters of the core that follow from the job file.

Owns: the form of the JSON on stdin. Must not know: what the node does with it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rudra_zmq.config.job import JobFile
from rudra_zmq.core.params import DataParams, LearnerParams, SyncParams
from rudra_zmq.errors import UsageError

PING_S = 1.0
LIVENESS_S = 10.0

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen: an ipc path, ports (first, last) of ``host``, an IP, and addresses to try before others.

    ``shm`` is the path of the socket that hands out shared memory, beside ``ipc``; None: vectors travel in chunks.
    """

    ipc: str | None = None
    shm: str | None = None
    tcp: tuple[int, int] | None = None
    host: str = "127.0.0.1"
    previous: list[str] = []


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``psd_address`` is its control socket, ``ppid`` its PID, ``folder`` the job's; ``toml`` the effective job file.

    ``host`` is what learners of this host say that theirs is; "": unknown. A session that is silent for ``liveness_s``
    is given up; learners ping every ``ping_s``.
    """

    job: Annotated[str, Meta(pattern="^[0-9a-f]{6}$")]
    name: str
    generation: Annotated[int, Meta(ge=1)]
    token: Annotated[str, Meta(min_length=1)]
    psd_address: str
    folder: str
    toml: str
    runtime: str
    ppid: int = 0
    host: str = ""
    bind: Bind = Bind()
    resume: bool = False
    ping_s: Seconds = PING_S
    liveness_s: Seconds = LIVENESS_S


def decode(data: bytes) -> NodeSpec:
    """The spec of a node. UsageError (one line) where it is none."""
    try:
        return msgspec.json.decode(data, type=NodeSpec)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fix = "a node is started by psd, not by hand"
        raise UsageError(f"no spec of a node on stdin: {error}", fix=fix) from None


def sync_params(job: JobFile) -> SyncParams:
    """Section [sync] for the core."""
    sync = job.sync
    return SyncParams(
        protocol=sync.protocol,
        n=sync.n,
        modulation=sync.modulation,
        max_staleness=sync.staleness_bound,
        on_stale=sync.on_stale,
        backup=sync.backup,
        warmup_epochs=sync.warmup_epochs,
    )


def learner_params(job: JobFile) -> LearnerParams:
    """Section [learners] for the core."""
    learners = job.learners
    return LearnerParams(
        count=learners.count,
        min=learners.min,
        max=learners.max,
        minibatch=learners.minibatch,
        global_batch=learners.global_batch,
        on_lost=learners.on_lost,
        deadline=learners.deadline_s,
        step_timeout=learners.step_timeout_s,
    )


def data_params(job: JobFile, samples: int) -> DataParams:
    """N samples per epoch, as the job file would have them."""
    return DataParams(samples=samples, epochs=job.job.epochs, max_updates=job.job.stop.updates or 0)
