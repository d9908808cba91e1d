"""Records of the control plane: jobs, epochs, learners, hosts and events as its messages tell of them.

Owns their fields and limits; ``control`` has the messages and is what others import. Must not know who says what.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from rudra_zmq.wire.messages.data import Count, Names, Rank, Seconds, Short, Text

Key: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # public, of CURVE
Role: TypeAlias = Literal["read", "submit", "admin", "host"]
JobId: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{6}$")]
Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e11)]  # UTC seconds since 1970
Fates: TypeAlias = Annotated[dict[Short, Count], Meta(max_length=4096)]  # how many, by what
Words: TypeAlias = Annotated[list[Short], Meta(max_length=1024)]
Lines: TypeAlias = Annotated[list[Text], Meta(max_length=64)]
Standing: TypeAlias = Literal["ready", "drained", "banned"]  # of a host, as a person has it
JobState: TypeAlias = Literal[
    "PENDING", "STARTING", "RUNNING", "WAITING", "STOPPING", "STOPPED", "DONE", "FAILED", "LOST"
]


class EpochRow(msgspec.Struct, frozen=True, kw_only=True):
    """One finished epoch of a job; accuracy and losses None until known. Times in seconds."""

    epoch: Count
    samples: Count
    distinct: Count
    updates: Count
    seconds: Seconds
    train_loss: float | None = None
    accuracy: float | None = None
    test_error: float | None = None
    staleness_mean: float = 0.0
    staleness_p95: float = 0.0
    lr: float = 0.0
    lam: Count = 0
    global_batch: Count = 0
    overlap: float = 0.0


class LearnerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the lead sees it; ``silent`` is seconds since it was heard."""

    rank: Rank
    incarnation: Count
    state: Short  # absent | present | torpid | lost | left
    host: Short = ""
    pid: Count = 0
    gradients: Count = 0
    samples_per_s: float = 0.0
    silent: Seconds = 0.0


class WaitRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of a job waits for or works at."""

    who: Short  # node, learner 3, ...
    what: Text  # without figures that change
    since: Seconds | None = None  # how long; None: not written down
    left: Seconds | None = None  # until its deadline; None: it has none, or it is another's
    then: Text = ""  # what happens at the deadline


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What the lead tells each second and what status shows."""

    state: JobState
    reason: Text = ""  # why it waits, stopped or failed
    protocol: Short = ""
    rule: Short = ""
    n: Count = 0
    lam: Count = 0
    declared: Count = 0
    mu: Count = 0
    c: Count = 0
    global_batch: Count = 0
    lr: float = 0.0
    generation: Count = 0
    updates: Count = 0
    epoch: Count = 0
    epochs: Count = 0
    samples: Count = 0  # applied in all epochs
    samples_per_epoch: Count = 0
    seconds: Seconds = 0.0  # running time, pauses left out
    samples_per_s: float = 0.0
    updates_per_s: float = 0.0
    loss: float | None = None
    accuracy: float | None = None
    staleness_mean: float = 0.0
    staleness_p95: float = 0.0
    staleness_max: Count = 0
    histogram: Fates = {}
    overlap: float = 0.0
    accepted: Count = 0
    applied: Count = 0
    pending: Count = 0
    skipped: Count = 0
    drops: Fates = {}
    learners: Annotated[list[LearnerRow], Meta(max_length=65536)] = []
    rows: Annotated[list[EpochRow], Meta(max_length=65536)] = []
    snapshot_age: Seconds | None = None
    memory: Count = 0  # RSS of the node, bytes
    budget: Count = 0  # memory that the job's servers need, as computed before they took it, bytes
    parameters: Count = 0
    weights: Text = ""  # path on the lead's host, once written
    limited_by: Text = ""
    versions: Names = {}
    waits: Annotated[list[WaitRow], Meta(max_length=4096)] = []


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One job of the registry. Times are UTC seconds since 1970 (0: never)."""

    job: JobId
    name: Short
    state: JobState
    created: Time
    started: Time = 0.0
    ended: Time = 0.0
    reason: Text = ""
    generation: Count = 0
    folder: Text = ""
    head: Text = ""
    progress: Progress | None = None
    owner: Short = ""  # name of a key, or local:USER


class EventRow(msgspec.Struct, frozen=True, array_like=True):
    """A line of a job's story, numbered from 1 by the registry."""

    seq: Count
    time: Time
    level: Literal["I", "W", "E"]
    text: Text


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """A learnerd as the head sees it."""

    name: Short
    slots: Count
    free: Count
    pid: Count
    last_seen: Time
    versions: Names = {}
    state: Standing = "ready"
    silent: bool = False  # it cannot be talked to
    labels: Words = []
    devices: Words = []  # declared, by index or UUID
    absent: Words = []  # those of them that are not there
    free_devices: Count = 0
    address: Text = ""  # of the head, as this host reaches it


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a job would get on one host, and what that host lacks for it."""

    host: Short
    ranks: Annotated[list[Rank], Meta(max_length=65536)]
    devices: Words = []
    problems: Lines = []
    memory: Count = 0  # bytes that the host has to spare


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key that the head knows. ``role`` invite: it may join as a host, once. Times as in JobRow (0: never)."""

    key: Key
    name: Short
    role: Role | Literal["invite"]
    added: Time
    expires: Time = 0.0
    revoked: Time = 0.0
