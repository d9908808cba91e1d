"""-s key=value: how values are read, and what gives way to them."""

from __future__ import annotations

from typing import Any

import pytest

from rudra_zmq.config import LoadedJob, job_from_toml
from rudra_zmq.config.schema import flat
from rudra_zmq.errors import ConfigError

TASK = '[job]\ntask = "my.tasks:cnn"\n'


def loaded(*sets: str, text: str = TASK) -> LoadedJob:
    return job_from_toml(text, name="demo", sets=sets)


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("sync.protocol=async", "sync.protocol", "async"),
        ('sync.protocol="async"', "sync.protocol", "async"),
        (" sync.n = 2 ", "sync.n", 2),
        ("job.task_args.limit=2000", "job.task_args.limit", 2000),
        ("job.task_args.kind=small", "job.task_args.kind", "small"),
        ("job.task_args.flag=true", "job.task_args.flag", True),
        ("job.task_args.sizes=[1, 2]", "job.task_args.sizes", [1, 2]),
        ("job.stop.updates=10", "job.stop.updates", 10),
        ("job.stop.time=1h", "job.stop.time", "1h"),
        ("job.name=7", "job.name", "7"),
        ("job.name=2024-01-01", "job.name", "2024-01-01"),
        ("job.name=true", "job.name", "true"),
        ("learners.deadline=90s", "learners.deadline", "90s"),
        ("sync.max_staleness=none", "sync.max_staleness", "none"),
        ("sync.max_staleness=4", "sync.max_staleness", 4),
        ("update.lr=1e-3", "update.lr", 0.001),
        ("update.lr=1", "update.lr", 1.0),
        ("update.clip_norm=0.5", "update.clip_norm", 0.5),
        ("run.env.A=1", "run.env.A", "1"),
        ("run.env.A=x=y", "run.env.A", "x=y"),
        ("run.env.A=", "run.env.A", ""),
        ('run.env={A = "1"}', "run.env.A", "1"),
        ("job.stop={updates = 3}", "job.stop.updates", 3),
        ("job.init=", "job.init", ""),
    ],
)
def test_values(setting: str, key: str, value: Any) -> None:
    found = loaded(setting)
    assert flat(found.job)[key] == value
    assert type(flat(found.job)[key]) is type(value)
    assert found.origins[key] == f"-s {setting}"


def test_groups_and_schedules() -> None:
    job = loaded(
        'update.groups=[{match = "*.bias", lr_scale = 2, weight_decay = 0}]',
        "update.schedule.kind=step",
        "update.schedule.epochs=[120, 130]",
        "update.schedule.gamma=0.1",
    ).job
    assert [(g.match, g.lr_scale, g.weight_decay) for g in job.update.groups] == [("*.bias", 2.0, 0.0)]
    assert (job.update.schedule.epochs, job.update.schedule.gamma) == ((120.0, 130.0), 0.1)


def test_the_last_of_two_wins_and_both_beat_the_file() -> None:
    found = loaded("job.seed=5", "job.seed=6", text=TASK + "seed = 4\nepochs = 2\n")
    assert (found.job.job.seed, found.job.job.epochs) == (6, 2)
    assert (found.origins["job.seed"], found.origins["job.epochs"]) == ("-s job.seed=6", "job.toml:4")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("sync.n", '"sync.n" is no setting (-s). Fix: write -s table.key=value'),
        ("=3", '"=3" is no setting (-s). Fix: write -s table.key=value'),
        ("..=3", '"..=3" is no setting (-s). Fix: write -s table.key=value'),
        ("sync.=3", '"sync.=3" is no setting (-s). Fix: write -s table.key=value'),
        ("sync.m=3", "unknown key sync.m, did you mean sync.n? (-s sync.m=3). Fix: write sync.n"),
        ("n=3", "unknown key n, did you mean sync.n? (-s n=3). Fix: write sync.n"),
        ("sync=3", "sync cannot be 3 (-s sync=3). Fix: give a table"),
        (
            "sync.n=many",
            'sync.n cannot be "many" (-s sync.n=many). Fix: give a whole number from 1 to 100000',
        ),
        (
            "sync.n=",
            'sync.n cannot be "" (-s sync.n=). Fix: give a whole number from 1 to 100000',
        ),
        (
            "sync.n.x=1",
            "sync.n cannot be {x = 1} (-s sync.n.x=1). Fix: give a whole number from 1 to 100000",
        ),
        (
            'job.name="x',
            'the value of job.name is not valid TOML (-s job.name="x). Fix: close its quotes and brackets',
        ),
        (
            "job.task_args.a=[1,",
            "the value of job.task_args.a is not valid TOML (-s job.task_args.a=[1,)."
            " Fix: close its quotes and brackets",
        ),
        (
            "sync.n=1\nprotocol = 'async'",
            "sync.n cannot be \"1\\nprotocol = 'async'\" (-s sync.n=1 protocol = 'async')."
            " Fix: give a whole number from 1 to 100000",
        ),
        (
            "sync.n=9",
            "sync.n = 9 is outside 1 to 4 (learners.count) (-s sync.n=9)."
            " Fix: give sync.n from 1 to 4, or more learners",
        ),
        (
            "job.name=" + "x" * 200,
            f'job.name cannot be "{"x" * 56}... (-s job.name={"x" * 88}...).'
            " Fix: give 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit",
        ),
    ],
)
def test_settings_that_cannot_be(setting: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(setting)
    assert str(caught.value) == line


GIVES_WAY = [
    ("[learners]\nminibatch = 16", "learners.global_batch=64", "learners.minibatch = 16", "learners.minibatch", 0),
    ("[learners]\nglobal_batch = 64", "learners.minibatch=8", "learners.global_batch = 64", "learners.global_batch", 0),
    ("[sync]\nn = 2", "sync.protocol=async", "sync.n = 2", "sync.n", 1),
    ("[sync]\nn = 2", "sync.protocol=hardsync", "sync.n = 2", "sync.n", 1),
    ("[sync]\nprotocol = 'hardsync'\nbackup = 1", "sync.protocol=async", "sync.backup = 1", "sync.backup", 0),
    ("[update]\nmomentum = 0.8", "update.rule=adam", "update.momentum = 0.8", "update.momentum", 0.9),
    (
        "[update.schedule]\nkind = 'exponential'\ngamma = 0.5",
        "update.schedule.kind=constant",
        "update.schedule.gamma = 0.5",
        "update.schedule.gamma",
        None,
    ),
]


@pytest.mark.parametrize(("text", "setting", "said", "key", "value"), GIVES_WAY)
def test_a_key_of_the_file_gives_way_to_a_flag_that_takes_its_meaning(
    text: str, setting: str, said: str, key: str, value: Any
) -> None:
    found = loaded(setting, text=TASK + text)
    (note,) = found.notes
    assert note.startswith(f"{said} (job.toml:")
    assert note.endswith(f" is left out: -s {setting}")
    assert flat(found.job)[key] == value
    assert found.origins[key] == "default"


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            ("sync.protocol=async", "sync.n=2"),
            "sync.n = 2 has no meaning with the protocol async (-s sync.n=2). Fix: remove it, or change sync.protocol",
        ),
        (
            ("update.beta1=0.5",),
            'update.beta1 has no meaning with the rule "momentum" (-s update.beta1=0.5).'
            " Fix: remove it, or change update.rule",
        ),
        (
            ("learners.minibatch=8", "learners.global_batch=64"),
            "learners.minibatch and learners.global_batch are both given (-s learners.minibatch=8)."
            " Fix: remove one of them",
        ),
    ],
)
def test_flags_do_not_give_way_to_flags(sets: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(*sets)
    assert str(caught.value) == line


def test_a_flag_that_wins_is_still_checked() -> None:
    with pytest.raises(ConfigError, match=r"^learners.global_batch = 2 is less than a sample per learner \(-s "):
        loaded("learners.global_batch=2", text=TASK + "[learners]\nminibatch = 16")
