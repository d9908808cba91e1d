"""What the keys of a job file ask of each other.

Owns: which key has a meaning beside which other one, and the bounds between keys. Must not know: where values
come from.

A key without a meaning is never passed over in silence (`IDLE` has all such states). Within one file it is an error,
or a note where it does no harm; where a flag has taken its meaning away (-s sync.protocol=async over a file with
backup = 1), the loader leaves it out and says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rudra_zmq.config.job import Group, JobFile
from rudra_zmq.config.kinds import VARIABLE
from rudra_zmq.config.places import misnamed
from rudra_zmq.config.schema import leaves
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

_CONSTANTS = sorted(frozenset().union(*RULE_KEYS.values()))
_SCHEDULE_KEYS = ("epochs", "gamma", "power")


class Conflict(NamedTuple):
    """`key` has no meaning because of what `because` says. `grave`: surely a mistake, else worth a note."""

    key: str
    because: str
    message: str
    fix: str
    grave: bool = True


class Problem(NamedTuple):
    key: str
    message: str
    fix: str


class At:
    """What holds where these values are given: a key's value or its default, and the rule and schedule in force."""

    def __init__(self, values: Mapping[str, Any], rule: str, kind: str) -> None:
        self._values = {**values, "update.rule": rule, "update.schedule.kind": kind}

    def __getitem__(self, key: str) -> Any:
        return self._values[key] if key in self._values else leaves(JobFile)[key].default

    @property
    def hardsync(self) -> bool:
        """In every epoch."""
        return bool(self["sync.protocol"] == "hardsync")

    @property
    def never_hardsync(self) -> bool:
        """Not even in a warm-up."""
        return not self.hardsync and not self["sync.warmup_epochs"]

    @property
    def alone(self) -> bool:
        """One learner, whose gradients are never stale."""
        return not self.hardsync and max(self["learners.count"], self["learners.max"]) == 1


class Idle(NamedTuple):
    """A state in which a key has no meaning, and the key that makes it so.

    `neutral`: values that say what holds there anyway, and need no word. `why` and `fix` may name {key}, {value} and
    any key's value ({sync.protocol}).
    """

    key: str
    because: str
    when: Callable[[At], bool]
    neutral: tuple[Any, ...] = ()
    why: str = "{key} = {value} has no meaning with the protocol {sync.protocol}"
    fix: str = "remove it, or change {because}"
    grave: bool = True


def _unread(name: str) -> Callable[[At], bool]:
    return lambda at: bool(at["update.rule"]) and name not in RULE_KEYS[at["update.rule"]]


def _unscheduled(name: str) -> Callable[[At], bool]:
    return lambda at: name not in _SCHEDULE_READS[at["update.schedule.kind"]]


def _left_to_script(at: At) -> bool:
    return not at["update.rule"] and bool(at["run.script"] or at["run.module"])


_NO_RULE = "{key} is given without update.rule, so the script's own optimizer decides"
_OTHER_RULE = '{key} has no meaning with the rule "{update.rule}"'
_OTHER_KIND = '{key} has no meaning with the schedule "{update.schedule.kind}"'
_ALONE = "{key} = {value} changes nothing with one learner, whose gradients are never stale"

IDLE: tuple[Idle, ...] = (
    *(
        Idle(key, "update.rule", _left_to_script, (), _NO_RULE, "add update.rule, or remove {key}")
        for key in leaves(JobFile)
        if key.startswith("update.") and key != "update.rule"
    ),
    *(Idle(f"update.{name}", "update.rule", _unread(name), (), _OTHER_RULE) for name in _CONSTANTS),
    *(
        Idle(f"update.schedule.{name}", "update.schedule.kind", _unscheduled(name), (), _OTHER_KIND)
        for name in _SCHEDULE_KEYS
    ),
    Idle("sync.n", "sync.protocol", lambda at: at.hardsync, (1,)),
    Idle("sync.n", "sync.protocol", lambda at: bool(at["sync.protocol"] == "async"), (1, "learners.count")),
    Idle("sync.modulation", "sync.protocol", lambda at: at.hardsync, ("auto", "none")),
    Idle("sync.max_staleness", "sync.protocol", lambda at: at.hardsync, ("none",)),
    Idle("sync.on_stale", "sync.protocol", lambda at: at.hardsync),
    Idle(
        "sync.on_stale",
        "sync.max_staleness",
        lambda at: bool(at["sync.max_staleness"] == "none"),
        why="{key} = {value} has no meaning without sync.max_staleness",
        fix="add sync.max_staleness, such as 8, or remove {key}",
    ),
    Idle("sync.backup", "sync.protocol", lambda at: at.never_hardsync, (0,)),
    Idle("sync.warmup_epochs", "sync.protocol", lambda at: at.hardsync, (0,)),
    Idle("update.scaling", "sync.protocol", lambda at: at.never_hardsync, ("none",)),
    Idle("update.reference_batch", "sync.protocol", lambda at: at.never_hardsync, (0,)),
    Idle(
        "update.reference_batch",
        "update.scaling",
        lambda at: bool(at["update.scaling"] == "none"),
        (0,),
        "{key} = {value} has no meaning without update.scaling",
        'add update.scaling = "linear" or "sqrt", or remove {key}',
    ),
    Idle(
        "servers.keep",
        "servers.snapshot",
        lambda at: bool(at["servers.snapshot"] == "none"),
        why='{key} = {value} has no meaning with servers.snapshot = "none"',
    ),
    Idle(
        "learners.weights",
        "wire.compress_down",
        lambda at: at["wire.compress_down"] not in ("none", "float32"),
        ("auto", "copy"),
        '{key} = {value} cannot be with wire.compress_down = "{wire.compress_down}": encoded weights are copied',
    ),
    Idle("sync.modulation", "learners.count", lambda at: at.alone, ("auto", "none"), _ALONE, grave=False),
    Idle("sync.max_staleness", "learners.count", lambda at: at.alone, ("none",), _ALONE, grave=False),
    Idle("sync.warmup_epochs", "learners.count", lambda at: at.alone, (0,), _ALONE, grave=False),
)
"""Every state in which a key has no meaning; of two rows that hold for a key the first one counts."""


def unsaid(values: Mapping[str, Any], rule: str, kind: str) -> set[str]:
    """The keys that a file for these values cannot name: any value of theirs would be an error."""
    at = At(values, rule, kind)
    return {row.key for row in IDLE if not row.neutral and row.when(at)}


def conflicts(values: Mapping[str, Any], rule: str, kind: str) -> Iterator[Conflict]:
    """Keys that were given and have no meaning. `values` are those given, converted; the rest is what holds."""
    at = At(values, rule, kind)
    found: set[str] = set()
    for row in IDLE:
        if row.key in values and row.key not in found and row.when(at):
            found.add(row.key)
            if not _is_neutral(row, values[row.key], at):
                yield _conflict(row, values[row.key], at)
    if values.get("learners.global_batch") and values.get("learners.minibatch"):
        message = "learners.minibatch and learners.global_batch are both given"
        for one, other in (("minibatch", "global_batch"), ("global_batch", "minibatch")):
            yield Conflict(f"learners.{one}", f"learners.{other}", message, "remove one of them")


def _is_neutral(row: Idle, value: Any, at: At) -> bool:
    """A neutral value may be another key's. What is out of bounds is told as such, and is not to be told twice."""
    values = [at[v] if v in leaves(JobFile) else v for v in row.neutral]
    return value in values or (row.key == "sync.n" and value > at["learners.count"])


def _conflict(row: Idle, value: Any, at: At) -> Conflict:
    def filled(text: str) -> str:
        own = {"key": row.key, "because": row.because, "value": toml_value(value)}
        return re.sub(r"\{([a-z_.]+)\}", lambda m: str(own[m[1]] if m[1] in own else at[m[1]]), text)

    return Conflict(row.key, row.because, filled(row.why), filled(row.fix), row.grave)


def notices_of(job: JobFile) -> Iterator[str]:
    """What a file says that this version does not do, or that these values never reach; worth a line, no error."""
    learners, schedule = job.learners, job.update.schedule
    if learners.max > learners.count:
        yield (
            f"learners.max = {learners.max} lets that many take part, but nothing starts more than"
            f" learners.count = {learners.count} yet"
        )
    if schedule.kind == "step" and (late := [e for e in schedule.epochs or () if e >= job.job.epochs]):
        steps = ", ".join(f"{e:g}" for e in late)
        yield f"update.schedule.epochs: {steps} is not reached with job.epochs = {job.job.epochs}"


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
    for name in misnamed(job):
        fix = "write {path:NAME} with a name that [host] paths of the hosts has"
        yield Problem("run.args" if job.run.args else "job.task_args", f"{{path:{name}}} names no path", fix)
    for name in job.job.task_args:
        if not VARIABLE.fullmatch(name):
            yield Problem(
                f"job.task_args.{name}", f'"{name}" is no name of an argument', "use up to 100 letters, digits and '_'"
            )
    for name in job.run.env:
        if not VARIABLE.fullmatch(name):
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
        elif group == Group(match=group.match) and i == len(update.groups) - 1:  # before others it keeps them off
            message = f"update.groups[{i}] changes nothing"
            yield Problem(f"update.groups[{i}]", message, "add lr_scale or weight_decay, or remove it")
