"""The job file: every key, its kind and its default.

Owns: the frozen structs that a job file becomes, and what follows from one section alone. Must not know:
files and flags, or what the core, the servers and the learners make of the values.

Durations stay as written; the properties that end in `_s` are seconds. The structs do not check themselves:
`config.load` is the door that does.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, TypeAlias

import msgspec

from rudra_zmq.config import kinds
from rudra_zmq.config.units import parse_duration, parse_size

Rule: TypeAlias = Literal[
    "", "sgd", "momentum", "nesterov", "adagrad", "rudra-adagrad", "rmsprop", "adam", "adamw"
]  # fmt: skip
ScheduleKind: TypeAlias = Literal["", "constant", "step", "exponential", "power", "cosine"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a file."""


class Stop(Section, frozen=True):
    """Ends a job before its epochs do: at a test accuracy (0..1), a running time, a number of updates."""

    accuracy: kinds.Accuracy = None
    time: kinds.MaybeDuration = None
    updates: kinds.Updates = None

    @property
    def time_s(self) -> float | None:
        return None if self.time is None else parse_duration(self.time)


class JobSection(Section, frozen=True):
    name: kinds.Name = ""
    task: kinds.Task = None
    epochs: kinds.Count = 1
    seed: kinds.Seed = 1
    init: kinds.Text = ""
    task_args: kinds.Arguments = {}
    stop: Stop = Stop()


class RunSection(Section, frozen=True):
    """One's own script. `python` is a path or the name of an interpreter of the hosts; "": what learnerd runs under.

    `cwd` "" is the job file's folder, or the caller's where there is no file; a loaded job has it absolute.
    `code` is a folder that goes with the job; a loaded job has it absolute, and `script` and `cwd` as paths inside it
    (`cwd` "": the folder itself).
    """

    script: kinds.Text = ""
    module: kinds.Module = ""
    args: kinds.Texts = ()
    python: kinds.Python = ""
    env: kinds.Variables = {}
    cwd: kinds.Text = ""
    code: kinds.Text = ""


class LearnersSection(Section, frozen=True):
    """`minibatch` of a loaded job is 0 where `global_batch` was given instead."""

    count: kinds.Count = 4
    min: kinds.Count = 1
    max: kinds.CountOrZero = 0
    minibatch: kinds.Count = 32
    global_batch: kinds.Batch = 0
    hosts: kinds.Hosts = "auto"
    device: Literal["auto", "cpu"] = "auto"
    weights: Literal["auto", "shared", "copy"] = "auto"
    threads: kinds.Threads = 0
    on_lost: Literal["shrink", "wait", "fail"] = "shrink"
    deadline: kinds.Duration = "60s"
    restarts: kinds.CountOrZero = 3
    step_timeout: kinds.Duration = "10m"

    @property
    def host_names(self) -> tuple[str, ...]:
        """Hosts and labels that learners may run on; (): all hosts."""
        names = (self.hosts,) if isinstance(self.hosts, str) else self.hosts
        return () if "auto" in names else names

    @property
    def most(self) -> int:
        """The largest lambda that the job may grow to."""
        return self.max or self.count

    @property
    def deadline_s(self) -> float:
        return parse_duration(self.deadline)

    @property
    def step_timeout_s(self) -> float:
        return parse_duration(self.step_timeout)

    def global_batch_of(self, lam: int) -> int:
        """Samples of one mini-batch of each of `lam` learners."""
        return self.global_batch or self.minibatch * lam


class SyncSection(Section, frozen=True):
    protocol: Literal["hardsync", "softsync", "async"] = "softsync"
    n: kinds.Count = 1
    modulation: Literal["auto", "none", "n", "average", "staleness", "inverse-sqrt"] = "auto"
    max_staleness: kinds.StalenessBound = "none"
    on_stale: Literal["drop", "hold"] = "drop"
    backup: kinds.CountOrZero = 0
    warmup_epochs: kinds.CountOrZero = 0

    @property
    def staleness_bound(self) -> int | None:
        return None if isinstance(self.max_staleness, str) else self.max_staleness


class Schedule(Section, frozen=True):
    """How the rate moves. An epoch is as many samples as the data has; what a kind does not read is None.

    A loaded job has a kind: "cosine" where none was given, "constant" where a script's optimizer decides.
    """

    kind: ScheduleKind = ""
    epochs: kinds.Epochs = None
    gamma: kinds.MaybePositive = None
    power: kinds.MaybePositive = None


class Group(Section, frozen=True):
    """Parameters whose names match a shell pattern; weight_decay None is the job's own."""

    match: kinds.Pattern = ""
    lr_scale: kinds.NotNegative = 1.0
    weight_decay: kinds.MaybeNotNegative = None


class UpdateSection(Section, frozen=True):
    """`rule` "" of a loaded job: the script's own optimizer decides, and nothing else here counts."""

    rule: Rule = ""
    lr: kinds.Positive = 0.03
    momentum: kinds.BelowOne = 0.9
    beta1: kinds.BelowOne = 0.9
    beta2: kinds.BelowOne = 0.999
    eps: kinds.Positive = 1e-8
    rho: kinds.BelowOne = 0.99
    weight_decay: kinds.NotNegative = 0.0
    clip_norm: kinds.MaybePositive = None
    reference_batch: kinds.Batch = 0
    scaling: Literal["none", "sqrt", "linear"] = "none"
    schedule: Schedule = Schedule()
    groups: tuple[Group, ...] = ()


class ServersSection(Section, frozen=True):
    architecture: Literal["base"] = "base"
    shards: Literal[1] = 1
    device: Literal["auto", "cpu"] = "auto"
    snapshot: kinds.Snapshot = "auto"
    keep: kinds.Keep = 2
    memory: kinds.Memory = "auto"

    @property
    def memory_bytes(self) -> int | None:
        """What the servers may take at most; None: what the host has."""
        return None if self.memory == "auto" else parse_size(self.memory)

    @property
    def snapshot_s(self) -> float | None:
        """Seconds between snapshots where a duration was given, else None."""
        return None if self.snapshot in ("auto", "none") else parse_duration(self.snapshot)


class WireSection(Section, frozen=True):
    """How gradients go up and weights down. The encodings are part of what a job computes, whatever carries them."""

    compress: kinds.Compress = "none"
    compress_down: Literal["none", "float32", "float16", "bfloat16", "int8"] = "none"
    encrypt: bool = True

    @property
    def up(self) -> tuple[str, Fraction]:
        """The encoding of gradients ("float32": none), and the share of the parameters that topk sends."""
        parsed = kinds.parse_compress(self.compress)
        assert parsed is not None
        return parsed

    @property
    def down(self) -> str:
        """The encoding of weights ("float32": none)."""
        return "float32" if self.compress_down == "none" else self.compress_down


class JobFile(Section, frozen=True):
    job: JobSection = JobSection()
    run: RunSection = RunSection()
    learners: LearnersSection = LearnersSection()
    sync: SyncSection = SyncSection()
    update: UpdateSection = UpdateSection()
    servers: ServersSection = ServersSection()
    wire: WireSection = WireSection()

    @property
    def kind(self) -> Literal["task", "script", "module"]:
        if self.job.task is not None:
            return "task"
        return "script" if self.run.script else "module"
