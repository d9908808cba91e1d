"""Keys that have no meaning beside others: every row of the table is refused, noted, or neutral, and never silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.config import check_job, job_from_toml, job_to_toml, load_job
from rudra_zmq.config.checks import IDLE
from rudra_zmq.config.job import JobFile
from rudra_zmq.config.schema import leaves
from rudra_zmq.config.write import toml_tables, toml_value

TASK = {"job.task": "a.b:c", "job.epochs": 4}
SCRIPT = {"run.module": "my.train"}
RULE = "remove it, or change update.rule"
KIND = "remove it, or change update.schedule.kind"
PROTOCOL = "remove it, or change sync.protocol"
BOUND = "add sync.max_staleness, such as 8, or remove sync.on_stale"
SCALING = 'add update.scaling = "linear" or "sqrt", or remove update.reference_batch'

HARD = {**TASK, "sync.protocol": "hardsync"}
ASYNC = {**TASK, "sync.protocol": "async"}

# what holds, the key, its values, why it has no meaning ({} is "key = value"), the fix
REFUSED: list[tuple[dict[str, Any], str, list[Any], str, str]] = [
    (HARD, "sync.n", [2, 4], "{} has no meaning with the protocol hardsync", PROTOCOL),
    (ASYNC, "sync.n", [2], "{} has no meaning with the protocol async", PROTOCOL),
    (
        HARD,
        "sync.modulation",
        ["n", "average", "staleness", "inverse-sqrt"],
        "{} has no meaning with the protocol hardsync",
        PROTOCOL,
    ),
    (HARD, "sync.max_staleness", [3], "{} has no meaning with the protocol hardsync", PROTOCOL),
    (HARD, "sync.on_stale", ["drop", "hold"], "{} has no meaning with the protocol hardsync", PROTOCOL),
    (TASK, "sync.on_stale", ["drop", "hold"], "{} has no meaning without sync.max_staleness", BOUND),
    (
        {**TASK, "sync.max_staleness": "none"},
        "sync.on_stale",
        ["hold"],
        "{} has no meaning without sync.max_staleness",
        BOUND,
    ),
    (TASK, "sync.backup", [1], "{} has no meaning with the protocol softsync", PROTOCOL),
    (ASYNC, "sync.backup", [1], "{} has no meaning with the protocol async", PROTOCOL),
    (HARD, "sync.warmup_epochs", [1], "{} has no meaning with the protocol hardsync", PROTOCOL),
    (TASK, "update.scaling", ["sqrt", "linear"], "{} has no meaning with the protocol softsync", PROTOCOL),
    (ASYNC, "update.reference_batch", [128], "{} has no meaning with the protocol async", PROTOCOL),
    (HARD, "update.reference_batch", [128], "{} has no meaning without update.scaling", SCALING),
    (
        {**TASK, "wire.compress_down": "int8"},
        "learners.weights",
        ["shared"],
        '{} cannot be with wire.compress_down = "int8": encoded weights are copied',
        "remove it, or change wire.compress_down",
    ),
    (
        {**TASK, "servers.snapshot": "none"},
        "servers.keep",
        [1, 2, 5],
        '{} has no meaning with servers.snapshot = "none"',
        "remove it, or change servers.snapshot",
    ),
    *(
        (TASK, f"update.schedule.{name}", [value], f'update.schedule.{name} has no meaning with the schedule "cosine"', KIND)
        for name, value in {"epochs": [1.0], "gamma": 0.5, "power": 0.5}.items()
    ),
    *(
        (
            {**TASK, "update.rule": rule},
            f"update.{name}",
            [0.5],
            f'update.{name} has no meaning with the rule "{rule}"',
            RULE,
        )
        for name, rule in {
            "momentum": "sgd",
            "beta1": "momentum",
            "beta2": "rmsprop",
            "eps": "nesterov",
            "rho": "adam",
        }.items()
    ),
    *(
        (
            SCRIPT,
            key,
            [value],
            f"{key} is given without update.rule, so the script's own optimizer decides",
            f"add update.rule, or remove {key}",
        )
        for key, value in {
            "update.lr": 0.1,
            "update.momentum": 0.9,
            "update.beta1": 0.9,
            "update.beta2": 0.9,
            "update.eps": 0.1,
            "update.rho": 0.9,
            "update.weight_decay": 0.0,
            "update.clip_norm": 1.0,
            "update.reference_batch": 1,
            "update.scaling": "none",
            "update.schedule.kind": "constant",
            "update.schedule.epochs": [1.0],
            "update.schedule.gamma": 0.5,
            "update.schedule.power": 0.5,
            "update.groups": [{"match": "*", "lr_scale": 2.0}],
        }.items()
    ),
]  # fmt: skip
ALONE = {**TASK, "learners.count": 1}
NOTED: list[tuple[dict[str, Any], str, list[Any]]] = [
    (ALONE, "sync.modulation", ["average"]),
    (ALONE, "sync.max_staleness", [3]),
    (ALONE, "sync.warmup_epochs", [1]),
]
NEUTRAL: list[tuple[dict[str, Any], str, list[Any]]] = [
    (HARD, "sync.n", [1]),
    (ASYNC, "sync.n", [1, 4]),
    (HARD, "sync.modulation", ["auto", "none"]),
    (HARD, "sync.max_staleness", ["none"]),
    (TASK, "sync.backup", [0]),
    (HARD, "sync.warmup_epochs", [0]),
    (TASK, "update.scaling", ["none"]),
    (TASK, "update.reference_batch", [0]),
    (HARD, "update.reference_batch", [0]),
    (ALONE, "sync.max_staleness", ["none"]),
    (ALONE, "sync.modulation", ["none"]),
    (ALONE, "sync.warmup_epochs", [0]),
    ({**TASK, "wire.compress_down": "int8"}, "learners.weights", ["auto", "copy"]),
]


def write(folder: Path, holds: dict[str, Any], key: str, value: Any) -> Path:
    file = folder / "j.toml"
    file.write_text(toml_tables({**holds, key: value}))
    return file


@pytest.mark.parametrize(
    ("holds", "key", "values", "why", "fix"), REFUSED, ids=lambda v: v if isinstance(v, str) else ""
)
def test_what_is_refused(
    holds: dict[str, Any], key: str, values: list[Any], why: str, fix: str, tmp_path: Path
) -> None:
    for value in values:
        (line,) = check_job(write(tmp_path, holds, key, value))
        assert line.startswith(why.replace("{}", f"{key} = {toml_value(value)}") + f" ({tmp_path}/j.toml:")
        assert line.endswith(f". Fix: {fix}")


@pytest.mark.parametrize(("holds", "key", "values"), NOTED)
def test_what_is_noted(holds: dict[str, Any], key: str, values: list[Any], tmp_path: Path) -> None:
    for value in values:
        file = write(tmp_path, holds, key, value)
        assert check_job(file) == []
        loaded = load_job(file)
        (note,) = loaded.notes
        assert note.startswith(f"{key} = {toml_value(value)} changes nothing with one learner")
        assert loaded.origins[key].startswith(str(file)[-200:])  # it is noted, and kept


@pytest.mark.parametrize(("holds", "key", "values"), NEUTRAL)
def test_what_says_no_more_than_what_holds(holds: dict[str, Any], key: str, values: list[Any], tmp_path: Path) -> None:
    for value in values:
        file = write(tmp_path, holds, key, value)
        assert check_job(file) == []
        assert load_job(file).notes == ()


def test_every_row_of_the_table_is_tested_above() -> None:
    told = {key for _, key, *_ in REFUSED} | {key for _, key, _ in NOTED}
    assert {row.key for row in IDLE} <= told
    assert {row.key for row in IDLE if row.neutral} <= {key for _, key, _ in NEUTRAL}
    assert {row.key for row in IDLE if not row.grave} == {key for _, key, _ in NOTED}
    assert {row.key for row in IDLE} | {row.because for row in IDLE} <= set(leaves(JobFile))


def test_flags_take_the_meaning_of_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "j.toml"
    values = {**TASK, "sync.max_staleness": 3, "sync.on_stale": "hold", "sync.modulation": "n", "sync.n": 2}
    file.write_text(toml_tables(values))
    loaded = load_job(file, ["sync.protocol=hardsync"])
    assert [note.split(" (")[0] for note in loaded.notes] == [
        "sync.n = 2",
        'sync.modulation = "n"',
        "sync.max_staleness = 3",
        'sync.on_stale = "hold"',
    ]
    assert all(note.endswith("is left out: -s sync.protocol=hardsync") for note in loaded.notes)
    assert loaded.job.sync == job_from_toml(toml_tables(HARD), name="j").job.sync
    (note,) = load_job(file, ["sync.max_staleness=none"]).notes
    assert note.startswith('sync.on_stale = "hold" (')
    assert len(load_job(file, ["learners.count=1", "sync.n=1"]).notes) == 2  # noted, not left out
    assert load_job(file, ["learners.count=1", "sync.n=1"]).job.sync.max_staleness == 3


def test_a_scaled_hardsync_file_runs_under_async(tmp_path: Path) -> None:
    file = tmp_path / "j.toml"
    file.write_text(toml_tables({**HARD, "update.scaling": "linear", "update.reference_batch": 128, "sync.backup": 1}))
    loaded = load_job(file, ["sync.protocol=async"])
    assert len(loaded.notes) == 3
    assert (loaded.job.update.scaling, loaded.job.update.reference_batch, loaded.job.sync.backup) == ("none", 0, 0)
    (note,) = load_job(file, ["update.scaling=none"]).notes
    assert note.startswith("update.reference_batch = 128 (")


def test_the_effective_file_has_no_key_that_would_be_refused() -> None:
    job = job_from_toml(toml_tables({**HARD, "servers.snapshot": "none", "update.rule": "sgd"}), name="j").job
    text = job_to_toml(job)
    assert not {"on_stale", "keep", "momentum", "gamma"} & {line.partition(" ")[0] for line in text.splitlines()}


def test_an_effective_file_of_before_may_say_the_defaults() -> None:
    """It was checked when it was made; what it says of a key without a meaning is what holds anyway."""
    text = toml_tables({**HARD, "sync.on_stale": "drop", "servers.snapshot": "none", "servers.keep": 2})
    loaded = job_from_toml(text, name="j")
    assert loaded.notes == ()
    assert (loaded.job.sync.on_stale, loaded.job.servers.keep) == ("drop", 2)


NOTICES = [
    (
        {"learners.count": 2, "learners.max": 8},
        "learners.max = 8 lets that many take part, but nothing starts more than learners.count = 2 yet",
    ),
    (
        {"update.schedule.kind": "step", "update.schedule.epochs": [2.0, 4.0, 120.0], "update.schedule.gamma": 0.1},
        "update.schedule.epochs: 4, 120 is not reached with job.epochs = 4",
    ),
]


@pytest.mark.parametrize(("values", "line"), NOTICES)
def test_what_this_version_or_these_values_never_reach(values: dict[str, Any], line: str) -> None:
    assert job_from_toml(toml_tables({**TASK, **values}), name="j").notes == (line,)
