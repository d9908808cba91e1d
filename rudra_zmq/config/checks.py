"""What the keys of a job file ask of each other.

Owns: which key has a meaning beside which other one, and the bounds between keys. Must not know: where values
come from.

A key without a meaning is never passed over in silence. Within one file it is an error; where a flag has
taken its meaning away (-s sync.protocol=async over a file with backup = 1), the loader leaves it out and says
so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rudra_zmq.config.job import JobFile
from rudra_zmq.config.write import toml_value

_MOMENTUM = frozenset({"momentum"})
_ADAM = frozenset({"beta1", "beta2", "eps"})
RULE_KEYS: Mapping[str, frozenset[str]] = {
    "sgd": frozenset(),
    "momentum": _MOMENTUM,
    "nesterov": _MOMENTUM,
    "adagrad": frozenset({"eps"}),
    "rudra-adagrad": _MOMENTUM,
    "rmsprop": frozenset({"rho", "eps"}),
    "adam": _ADAM,
    "adamw": _ADAM,
}
"""The constants of [update] that each rule reads."""

SCHEDULE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "step": ("epochs", "gamma"),
    "exponential": ("gamma",),
    "power": ("power",),
    "cosine": (),
}
"""The keys of [update.schedule] that each kind must have."""

_SCHEDULE_READS = {**SCHEDULE_NEEDS, "power": ("power", "gamma")}
_EXAMPLES = {"epochs": "[120, 130]", "gamma": "0.1", "power": "0.5"}

_CONSTANTS = frozenset().union(*RULE_KEYS.values())
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


class Conflict(NamedTuple):
    """`key` has no meaning because of what `because` says."""

    key: str
    because: str
    message: str
    fix: str


class Problem(NamedTuple):
    key: str
    message: str
    fix: str


def is_read(key: str, rule: str, kind: str) -> bool:
    """Whether a key of [update] has a meaning under this rule and this kind of schedule."""
    if not key.startswith("update."):
        return True
    if not rule:
        return False
    name = key.rpartition(".")[2]
    if key.startswith("update.schedule."):
        return name == "kind" or name in _SCHEDULE_READS[kind]
    return name not in _CONSTANTS or name in RULE_KEYS[rule]


def conflicts(values: Mapping[str, Any], rule: str, kind: str, count: int) -> Iterator[Conflict]:
    """Keys that were given and have no meaning. `values` are those given, converted; the rest is what holds."""
    yield from _update_conflicts(values, rule, kind)
    yield from _sync_conflicts(values, count)
    if values.get("learners.global_batch") and values.get("learners.minibatch"):
        message = "learners.minibatch and learners.global_batch are both given"
        for one, other in (("minibatch", "global_batch"), ("global_batch", "minibatch")):
            yield Conflict(f"learners.{one}", f"learners.{other}", message, "remove one of them")


def _update_conflicts(values: Mapping[str, Any], rule: str, kind: str) -> Iterator[Conflict]:
    for key in values:
        if key == "update.rule" or is_read(key, rule, kind):
            continue
        if not rule:
            if values.get("run.script") or values.get("run.module"):
                message = f"{key} is given without update.rule, so the script's own optimizer decides"
                yield Conflict(key, "update.rule", message, f"add update.rule, or remove {key}")
        elif key.startswith("update.schedule."):
            message = f'{key} has no meaning with the schedule "{kind}"'
            yield Conflict(key, "update.schedule.kind", message, "remove it, or change update.schedule.kind")
        else:
            message = f'{key} has no meaning with the rule "{rule}"'
            yield Conflict(key, "update.rule", message, "remove it, or change update.rule")


def _sync_conflicts(values: Mapping[str, Any], count: int) -> Iterator[Conflict]:
    protocol = values.get("sync.protocol", "softsync")
    hardsync = protocol == "hardsync"
    n = values.get("sync.n", 1)
    idle = {
        "sync.n": n <= count and n not in {"hardsync": (1,), "async": (1, count)}.get(protocol, (n,)),
        "sync.backup": not hardsync and values.get("sync.backup"),
        "sync.warmup_epochs": hardsync and values.get("sync.warmup_epochs"),
        "update.scaling": not hardsync and values.get("update.scaling", "none") != "none",
    }
    for key, given in idle.items():
        if given:
            message = f"{key} = {toml_value(values[key])} has no meaning with the protocol {protocol}"
            yield Conflict(key, "sync.protocol", message, "remove it, or change sync.protocol")


def problems_of(job: JobFile) -> Iterator[Problem]:
    """The bounds between keys, for a job whose keys all have a meaning."""
    yield from _target_problems(job)
    yield from _learner_problems(job)
    yield from _update_problems(job)


def _target_problems(job: JobFile) -> Iterator[Problem]:
    targets = {"job.task": job.job.task, "run.script": job.run.script, "run.module": job.run.module}
    given = [key for key, value in targets.items() if value]
    if not given:
        message = "there is nothing to train: none of job.task, run.script, run.module is given"
        yield Problem("job", message, 'give one, such as job.task = "my.module:task"')
    elif len(given) > 1:
        yield Problem(given[1], f"{' and '.join(given)} are both given", "keep one of them")
    elif job.run.args and job.job.task:
        yield Problem("run.args", "run.args is given, and a task takes none", "use job.task_args, or run.script")
    elif job.job.task_args and not job.job.task:
        yield Problem(
            "job.task_args",
            "job.task_args is given without job.task",
            "use run.args for a script's arguments",
        )
    for name in job.job.task_args:
        if not _PLAIN_NAME.fullmatch(name):
            yield Problem(
                f"job.task_args.{name}", f'"{name}" is no name of an argument', "use up to 100 letters, digits and '_'"
            )
    for name in job.run.env:
        if not _PLAIN_NAME.fullmatch(name):
            yield Problem(
                f"run.env.{name}", f'"{name}" is no name of a variable', "use up to 100 letters, digits and '_'"
            )
        elif name.startswith("RUDRA_"):
            yield Problem(f"run.env.{name}", f"{name} would hide what rudra itself sets", "take a name without RUDRA_")


def _learner_problems(job: JobFile) -> Iterator[Problem]:
    learners, sync = job.learners, job.sync
    count = learners.count
    if learners.min > count:
        message = f"learners.min = {learners.min} is above learners.count = {count}"
        yield Problem("learners.min", message, f"give 1 to {count}")
    if learners.most < count:
        message = f"learners.max = {learners.max} is below learners.count = {count}"
        yield Problem("learners.max", message, f"give at least {count}, or 0 for the count")
    if 0 < learners.global_batch < learners.most:
        message = f"learners.global_batch = {learners.global_batch} is less than a sample per learner"
        yield Problem("learners.global_batch", message, f"give at least {learners.most}, the most learners")
    if sync.n > count:
        message = f"sync.n = {sync.n} is outside 1 to {count} (learners.count)"
        yield Problem("sync.n", message, f"give sync.n from 1 to {count}, or more learners")
    if sync.backup >= count:
        message = f"sync.backup = {sync.backup} leaves nobody of {count} learners to wait for"
        yield Problem("sync.backup", message, f"give at most {count - 1}")
    if sync.warmup_epochs and sync.warmup_epochs >= job.job.epochs:
        message = f"sync.warmup_epochs = {sync.warmup_epochs} leaves none of job.epochs = {job.job.epochs}"
        yield Problem("sync.warmup_epochs", message, "give fewer than job.epochs")


def _update_problems(job: JobFile) -> Iterator[Problem]:
    update = job.update
    if update.scaling != "none" and not update.reference_batch:
        message = f'update.scaling = "{update.scaling}" needs update.reference_batch'
        yield Problem("update.scaling", message, "add update.reference_batch, the batch that update.lr was tuned for")
    for name in SCHEDULE_NEEDS[update.schedule.kind]:
        if getattr(update.schedule, name) is None:
            message = f'the schedule "{update.schedule.kind}" needs {name}'
            fix = f"add update.schedule.{name}, such as {_EXAMPLES[name]}"
            yield Problem("update.schedule.kind", message, fix)
    for i, group in enumerate(update.groups):
        if not group.match:
            message = f"update.groups[{i}] has no match"
            yield Problem(f"update.groups[{i}]", message, 'add match, such as match = "*.bias"')
