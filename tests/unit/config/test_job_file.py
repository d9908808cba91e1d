"""The job file: defaults, what is refused and with which line, the file written back."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra_zmq.config import JobFile, check_job, job_for_script, job_from_toml, job_to_toml, load_job
from rudra_zmq.config.job import LearnersSection
from rudra_zmq.config.schema import flat
from rudra_zmq.errors import ConfigError

TASK = '[job]\ntask = "my.tasks:cnn"\n'


def load(text: str, *sets: str) -> JobFile:
    return job_from_toml(text, name="demo", sets=sets).job


def problem(text: str, *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *sets)
    return str(caught.value)


def test_defaults_of_a_task() -> None:
    assert flat(load(TASK)) == {
        "job.name": "demo",
        "job.task": "my.tasks:cnn",
        "job.epochs": 1,
        "job.seed": 1,
        "job.init": "",
        "job.task_args": {},
        "job.stop.accuracy": None,
        "job.stop.time": None,
        "job.stop.updates": None,
        "run.script": "",
        "run.module": "",
        "run.args": (),
        "run.python": "",
        "run.env": {},
        "run.cwd": "",
        "run.code": "",
        "learners.count": 4,
        "learners.min": 1,
        "learners.max": 0,
        "learners.minibatch": 32,
        "learners.global_batch": 0,
        "learners.hosts": "auto",
        "learners.device": "auto",
        "learners.weights": "auto",
        "learners.threads": 0,
        "learners.on_lost": "shrink",
        "learners.deadline": "60s",
        "learners.restarts": 3,
        "learners.step_timeout": "10m",
        "sync.protocol": "softsync",
        "sync.n": 1,
        "sync.modulation": "auto",
        "sync.max_staleness": "none",
        "sync.on_stale": "drop",
        "sync.backup": 0,
        "sync.warmup_epochs": 0,
        "update.rule": "momentum",
        "update.lr": 0.03,
        "update.momentum": 0.9,
        "update.beta1": 0.9,
        "update.beta2": 0.999,
        "update.eps": 1e-8,
        "update.rho": 0.99,
        "update.weight_decay": 0.0,
        "update.clip_norm": None,
        "update.reference_batch": 0,
        "update.scaling": "none",
        "update.schedule.kind": "cosine",
        "update.schedule.epochs": None,
        "update.schedule.gamma": None,
        "update.schedule.power": None,
        "update.groups": (),
        "servers.architecture": "base",
        "servers.shards": 1,
        "servers.device": "auto",
        "servers.snapshot": "auto",
        "servers.keep": 2,
        "servers.memory": "auto",
        "wire.compress": "none",
        "wire.compress_down": "none",
        "wire.encrypt": True,
    }


def test_a_script_without_a_rule_keeps_its_optimizer_at_a_constant_rate() -> None:
    job = load('[run]\nscript = "train.py"\n')
    assert (job.kind, job.update.rule, job.update.schedule.kind) == ("script", "", "constant")
    assert "[update]" not in job_to_toml(job)


def test_a_script_with_a_rule_has_the_defaults_of_a_task() -> None:
    job = load('[run]\nmodule = "my.train"\n[update]\nrule = "sgd"\n')
    assert (job.kind, job.update.rule, job.update.schedule.kind) == ("module", "sgd", "cosine")


UNKNOWN = [
    ("[jb]\nx = 1", "unknown key jb, did you mean job? (job.toml:1). Fix: write job"),
    ("[job]\n\ntsk = 1", "unknown key job.tsk, did you mean job.task? (job.toml:3). Fix: write job.task"),
    ("job.epoch = 1", "unknown key job.epoch, did you mean job.epochs? (job.toml:1). Fix: write job.epochs"),
    ("epochs = 3", "unknown key epochs, did you mean job.epochs? (job.toml:1). Fix: write job.epochs"),
    (
        '[learners]\nprotocol = "async"',
        "unknown key learners.protocol, did you mean sync.protocol? (job.toml:2). Fix: write sync.protocol",
    ),
    (
        "[update.schedule]\nkinds = 1",
        "unknown key update.schedule.kinds, did you mean update.schedule.kind? (job.toml:2)."
        " Fix: write update.schedule.kind",
    ),
    (
        "[[update.groups]]\nmatch = '*'\nlr_scal = 1",
        "unknown key update.groups[0].lr_scal, did you mean lr_scale? (job.toml:1). Fix: write lr_scale",
    ),
    (
        "[update]\ngroups = [{zzzz = 1}]",
        "unknown key update.groups[0].zzzz (job.toml:2). Fix: remove it; it takes match, lr_scale, weight_decay",
    ),
    (
        "[wire]\nzzzz = 1",
        "unknown key wire.zzzz (job.toml:2). Fix: remove it; [wire] has compress, compress_down, encrypt",
    ),
    (
        "zzzz = 1",
        "unknown key zzzz (job.toml:1). Fix: remove it; the tables are"
        " [job], [learners], [run], [servers], [sync], [update], [wire]",
    ),
]


@pytest.mark.parametrize(("text", "line"), UNKNOWN)
def test_unknown_keys(text: str, line: str) -> None:
    assert problem(text) == line


VALUES = [
    ("learners.count = 0", "learners.count cannot be 0", "give a whole number from 1 to 100000"),
    ("learners.count = true", "learners.count cannot be true", "give a whole number from 1 to 100000"),
    ('learners.count = "4"', 'learners.count cannot be "4"', "give a whole number from 1 to 100000"),
    ("learners.count = 2.5", "learners.count cannot be 2.5", "give a whole number from 1 to 100000"),
    ("learners.max = -1", "learners.max cannot be -1", "give a whole number from 0 to 100000"),
    ("learners.minibatch = 0", "learners.minibatch cannot be 0", "give a whole number from 1 to 100000"),
    ("learners.threads = 2000", "learners.threads cannot be 2000", "give a whole number from 0 to 1024"),
    ("job.epochs = 0", "job.epochs cannot be 0", "give a whole number from 1 to 100000"),
    ("job.seed = 4294967296", "job.seed cannot be 4294967296", "give a whole number from 0 to 4294967295"),
    ("job.stop.accuracy = 90", "job.stop.accuracy cannot be 90", "give a number above 0, at most 1"),
    ("job.stop.updates = 0", "job.stop.updates cannot be 0", "give a whole number of at least 1"),
    ("job.stop = 3", "job.stop cannot be 3", "give a table"),
    ("run.env = ['A']", 'run.env cannot be ["A"]', "give a table"),
    ("run.env.A = 1", "run.env.A cannot be 1", "give a text in quotes"),
    ("run.args = 'x'", 'run.args cannot be "x"', 'give a list of texts, such as ["--lr", "0.1"]'),
    ("run.args = [1]", "run.args cannot be [1]", 'give a list of texts, such as ["--lr", "0.1"]'),
    ("run.python = 'a b'", 'run.python cannot be "a b"', 'give an absolute path, or a name that [host] python of the hosts has, such as "ml"'),
    ("run.module = 'a b'", 'run.module cannot be "a b"', 'give a module such as "my.train"'),
    (
        "job.task_args.a = {b = 1}",
        "job.task_args.a cannot be {b = 1}",
        "give a text, a number, true, false, or a list of these",
    ),
    (
        "job.task_args.a = [1, inf]",
        "job.task_args.a cannot be [1, inf]",
        "give a text, a number, true, false, or a list of these",
    ),
    (
        "job.task_args.a = 2024-01-01",
        'job.task_args.a cannot be "2024-01-01"',
        "give a text, a number, true, false, or a list of these",
    ),
    ("learners.deadline = 60", "learners.deadline cannot be 60", 'give a duration such as "250ms", "60s" or "10m"'),
    ("learners.deadline = '0s'", 'learners.deadline cannot be "0s"', 'give a duration such as "250ms", "60s" or "10m"'),
    ("job.stop.time = 'long'", 'job.stop.time cannot be "long"', 'give a duration such as "250ms", "60s" or "10m"'),
    (
        "servers.snapshot = 'often'",
        'servers.snapshot cannot be "often"',
        'give "auto", "none" or a duration such as "250ms", "60s" or "10m"',
    ),
    ("servers.memory = '8 gigs'", 'servers.memory cannot be "8 gigs"', 'give "auto" or a size such as "8GB" or "512MiB"'),
    ("servers.memory = '0B'", 'servers.memory cannot be "0B"', 'give "auto" or a size such as "8GB" or "512MiB"'),
    ("servers.keep = 0", "servers.keep cannot be 0", "give a whole number from 1 to 1000"),
    ("sync.max_staleness = 0", "sync.max_staleness cannot be 0", 'give "none" or a whole number of at least 1'),
    ("sync.max_staleness = 'no'", 'sync.max_staleness cannot be "no"', 'give "none" or a whole number of at least 1'),
    ("update.lr = 0", "update.lr cannot be 0", "give a number above 0"),
    ("update.lr = nan", "update.lr cannot be nan", "give a number above 0"),
    ("update.lr = inf", "update.lr cannot be inf", "give a number above 0"),
    ("update.momentum = 1", "update.momentum cannot be 1", "give a number from 0 to below 1"),
    ("update.weight_decay = -1", "update.weight_decay cannot be -1", "give a number of at least 0"),
    ("update.clip_norm = 0", "update.clip_norm cannot be 0", "give a number above 0"),
    ("update.reference_batch = -1", "update.reference_batch cannot be -1", "give a whole number from 0 to 2147483647"),
    ("update.schedule = 'cosine'", 'update.schedule cannot be "cosine"', "give a table"),
    (
        "update.schedule.epochs = [2, 1]",
        "update.schedule.epochs cannot be [2, 1]",
        "give a list of epochs, rising and above 0, such as [120, 130]",
    ),
    (
        "update.schedule.epochs = []",
        "update.schedule.epochs cannot be []",
        "give a list of epochs, rising and above 0, such as [120, 130]",
    ),
    ("update.groups = 1", "update.groups cannot be 1", "give a list of tables: match, lr_scale, weight_decay"),
    (
        "update.groups = [{match = 'a', lr_scale = -1}]",
        "update.groups[0].lr_scale cannot be -1",
        "give a number of at least 0",
    ),
    ("job.task = 'cnn'", 'job.task cannot be "cnn"', 'give a module and a name in it, such as "my.module:task"'),
    (
        "job.name = '../x'",
        'job.name cannot be "../x"',
        "give 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "what", "fix"), VALUES)
def test_values_that_do_not_fit(text: str, what: str, fix: str) -> None:
    assert problem(text) == f"{what} (job.toml:1). Fix: {fix}"


def test_a_text_with_a_nul_is_refused() -> None:
    assert problem('run.script = "a\\u0000"') == (
        'run.script cannot be "a\\u0000" (job.toml:1). Fix: give a text in quotes'
    )


CHOICES = [
    ('servers.architecture = "adv"', 'servers.architecture cannot be "adv"', 'only "base"'),
    ("servers.shards = 2", "servers.shards cannot be 2", "only 1"),
    ("servers.shards = true", "servers.shards cannot be true", "only 1"),
    (
        'wire.compress_down = "topk:0.1"',
        'wire.compress_down cannot be "topk:0.1"',
        '"none", "float32", "float16", "bfloat16", "int8"',
    ),
    ('learners.device = "cuda"', 'learners.device cannot be "cuda"', '"auto", "cpu"'),
    ('learners.weights = "slot"', 'learners.weights cannot be "slot"', '"auto", "shared", "copy"'),
    (
        'learners.on_lost = "shrnk"',
        'learners.on_lost cannot be "shrnk", did you mean "shrink"?',
        '"shrink", "wait", "fail"',
    ),
    (
        'sync.protocol = "softsink"',
        'sync.protocol cannot be "softsink", did you mean "softsync"?',
        '"hardsync", "softsync", "async"',
    ),
    (
        'update.rule = "lamb"',
        'update.rule cannot be "lamb"',
        '"sgd", "momentum", "nesterov", "adagrad", "rudra-adagrad", "rmsprop", "adam", "adamw"',
    ),
    (
        'update.schedule.kind = "cosin"',
        'update.schedule.kind cannot be "cosin", did you mean "cosine"?',
        '"constant", "step", "exponential", "power", "cosine"',
    ),
]


@pytest.mark.parametrize(("text", "what", "supported"), CHOICES)
def test_a_value_outside_the_list_names_what_this_version_supports(text: str, what: str, supported: str) -> None:
    assert problem(text) == f"{what} (job.toml:1). Fix: this version supports {supported}"


SCRIPT = '[run]\nscript = "train.py"\n'
HARD = TASK + '[sync]\nprotocol = "hardsync"\n'
BOUNDS = [
    (
        "",
        "there is nothing to train: none of job.task, run.script, run.module is given (job.toml)."
        ' Fix: give one, such as job.task = "my.module:task"',
    ),
    (
        TASK + '[run]\nscript = "a.py"',
        "job.task and run.script are both given (job.toml:4). Fix: keep one of them",
    ),
    (
        TASK + '[run]\nargs = ["a"]',
        "run.args is given, and a task takes none (job.toml:4). Fix: use job.task_args, or run.script",
    ),
    (
        SCRIPT + "[job.task_args]\na = 1",
        "job.task_args is given without job.task (job.toml:4). Fix: use run.args for a script's arguments",
    ),
    (
        TASK + 'task_args = {"a b" = 1}',
        """"a b" is no name of an argument (job.toml:3). Fix: use up to 100 letters, digits and '_'""",
    ),
    (
        TASK + '[run.env]\n"A.B" = "1"',
        """"A.B" is no name of a variable (job.toml:4). Fix: use up to 100 letters, digits and '_'""",
    ),
    (
        TASK + '[run.env]\nRUDRA_X = "1"',
        "RUDRA_X would hide what rudra itself sets (job.toml:4). Fix: take a name without RUDRA_",
    ),
    (
        TASK + "[learners]\nmin = 5",
        "learners.min = 5 is above learners.count = 4 (job.toml:4). Fix: give 1 to 4",
    ),
    (
        TASK + "[learners]\nmax = 3",
        "learners.max = 3 is below learners.count = 4 (job.toml:4). Fix: give at least 4, or 0 for the count",
    ),
    (
        TASK + "[learners]\nmax = 9\nglobal_batch = 8",
        "learners.global_batch = 8 is less than a sample per learner (job.toml:5)."
        " Fix: give at least 9, the most learners",
    ),
    (
        TASK + "[learners]\nminibatch = 32\nglobal_batch = 128",
        "learners.minibatch and learners.global_batch are both given (job.toml:4). Fix: remove one of them",
    ),
    (
        TASK + "[sync]\nn = 5",
        "sync.n = 5 is outside 1 to 4 (learners.count) (job.toml:4). Fix: give sync.n from 1 to 4, or more learners",
    ),
    (
        TASK + '[sync]\nprotocol = "async"\nn = 9',
        "sync.n = 9 is outside 1 to 4 (learners.count) (job.toml:5). Fix: give sync.n from 1 to 4, or more learners",
    ),
    (
        HARD + "backup = 4",
        "sync.backup = 4 leaves nobody of 4 learners to wait for (job.toml:5). Fix: give at most 3",
    ),
    (
        TASK + "epochs = 2\n[sync]\nwarmup_epochs = 2",
        "sync.warmup_epochs = 2 leaves none of job.epochs = 2 (job.toml:5). Fix: give fewer than job.epochs",
    ),
    (
        HARD + '[update]\nscaling = "linear"',
        'update.scaling = "linear" needs update.reference_batch (job.toml:6).'
        " Fix: add update.reference_batch, the batch that update.lr was tuned for",
    ),
    (
        TASK + '[update.schedule]\nkind = "step"\ngamma = 0.1',
        'the schedule "step" needs epochs (job.toml:4). Fix: add update.schedule.epochs, such as [120, 130]',
    ),
    (
        TASK + '[update]\nschedule = {kind = "exponential"}',
        'the schedule "exponential" needs gamma (job.toml:4). Fix: add update.schedule.gamma, such as 0.1',
    ),
    (
        TASK + '[update]\nschedule = {kind = "power"}',
        'the schedule "power" needs power (job.toml:4). Fix: add update.schedule.power, such as 0.5',
    ),
    (
        TASK + "[[update.groups]]\nlr_scale = 2",
        'update.groups[0] has no match (job.toml:3). Fix: add match, such as match = "*.bias"',
    ),
    (
        TASK + '[[update.groups]]\nmatch = "a.*"\nlr_scale = 2\n[[update.groups]]\nmatch = "*"\nlr_scale = 1',
        "update.groups[1] changes nothing (job.toml:3). Fix: add lr_scale or weight_decay, or remove it",
    ),
]


@pytest.mark.parametrize(("text", "line"), BOUNDS)
def test_what_keys_ask_of_each_other(text: str, line: str) -> None:
    assert problem(text) == line


@pytest.mark.parametrize(
    "text",
    [
        TASK + "[learners]\ncount = 1\n[sync]\nn = 1",
        TASK + "[sync]\nn = 4",
        TASK + '[sync]\nprotocol = "async"\nn = 4',
        TASK + '[sync]\nprotocol = "async"\nmax_staleness = 3\non_stale = "hold"',
        HARD + "backup = 3\nn = 1",
        HARD + '[update]\nscaling = "sqrt"\nreference_batch = 128',
        TASK + "[learners]\nmin = 4\nmax = 8\nglobal_batch = 8",
        TASK + '[update.schedule]\nkind = "power"\npower = 0.5\ngamma = 2',
        TASK + '[update]\nrule = "rmsprop"\nrho = 0.5\neps = 1e-3\nclip_norm = 1',
        TASK + '[servers]\nsnapshot = "none"',
        TASK + 'epochs = 2\n[sync]\nwarmup_epochs = 1\nbackup = 1\n[update]\nscaling = "sqrt"\nreference_batch = 8',
        TASK + '[[update.groups]]\nmatch = "a.*"\n[[update.groups]]\nmatch = "*"\nlr_scale = 2',
    ],
)
def test_what_is_allowed(text: str) -> None:
    load(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[job", "not valid TOML: "),
        ("a = [[[", "not valid TOML: "),
        ("a = " + "[" * 5000, "not valid TOML: "),
        ("a = " + "9" * 5000, "not valid TOML: "),
        ("[job]\nname = fashion", "not valid TOML: Invalid value (job.toml:2)"),
        ("[job]\n[job]", "not valid TOML: Cannot declare ('job',) twice (job.toml:2)"),
    ],
)
def test_what_is_no_toml(text: str, line: str) -> None:
    found = problem(text)
    assert found.startswith(line)
    assert found.endswith('. Fix: write it as key = value, texts in "quotes"')
    assert "\n" not in found


def test_several_problems_are_counted_and_listed(tmp_path: Path) -> None:
    file = tmp_path / "j.toml"
    file.write_text('[job]\ntask = "a:b"\nepochs = 0\n[sync]\nprotcol = "async"\nn = "x"\n')
    with pytest.raises(ConfigError) as caught:
        load_job(file)
    assert str(caught.value) == (
        f"unknown key sync.protcol, did you mean sync.protocol? ({file}:5)."
        f" Fix: write sync.protocol; 2 more: rudra config check {file}"
    )
    assert check_job(file) == [
        f"unknown key sync.protcol, did you mean sync.protocol? ({file}:5). Fix: write sync.protocol",
        f"job.epochs cannot be 0 ({file}:3). Fix: give a whole number from 1 to 100000",
        f'sync.n cannot be "x" ({file}:6). Fix: give a whole number from 1 to 100000',
    ]


# ---- files and paths


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, folder, binary, big = (tmp_path / name for name in ("no.toml", "dir.toml", "bin.toml", "big.toml"))
    folder.mkdir()
    binary.write_bytes(b"\xff\xfe")
    big.write_bytes(b"#" * 300_000)
    assert check_job(missing) == [f"there is no such file ({missing}). Fix: check the path"]
    assert check_job(folder) == [f"cannot read the file: Is a directory ({folder}). Fix: make it readable"]
    assert check_job(binary) == [f"the file is not UTF-8 text ({binary}:1). Fix: mend that line: TOML is text in UTF-8"]
    assert check_job(big) == [f"the file has more than 256 KiB ({big}). Fix: it has to be a TOML file"]


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/null")):
        assert check_job(path) == [f"it is no plain file ({path}). Fix: it has to be a TOML file"]


def test_a_mark_at_the_begin_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "bom.toml"
    file.write_bytes(b"\xef\xbb\xbf" + TASK.encode())
    assert load_job(file).job.job.task == "my.tasks:cnn"


def test_paths_of_a_file_start_at_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "train.py").touch()
    (folder / "w.safetensors").touch()
    (elsewhere / "other.py").touch()
    file = folder / "My job!.toml"
    file.write_text('job.init = "w.safetensors"\n[run]\nscript = "train.py"\n')
    monkeypatch.chdir(elsewhere)
    loaded = load_job(file)
    assert loaded.job.run.script == str(folder / "train.py")
    assert loaded.job.job.init == str(folder / "w.safetensors")
    assert loaded.job.run.cwd == str(folder)
    assert loaded.job.job.name == "My-job"
    assert (loaded.origins["run.script"], loaded.origins["run.cwd"]) == (f"{file}:3"[-200:], "default")
    flagged = load_job(file, ["run.script=other.py", "run.cwd=."])
    assert flagged.job.run.script == str(elsewhere / "other.py")
    assert flagged.job.run.cwd == str(elsewhere)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    file = tmp_path / "j.toml"
    file.write_text('[run]\nscript = "no.py"\ncwd = "no"\n[job]\ninit = "no.safetensors"\n')
    assert check_job(file) == [
        f"run.script: there is no file {tmp_path}/no.py ({file}:2). Fix: check the path",
        f"job.init: there is no file {tmp_path}/no.safetensors ({file}:5). Fix: check the path",
        f"run.cwd: there is no folder {tmp_path}/no ({file}:3). Fix: check the path",
    ]


def test_a_path_of_another_kind_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "j.toml"
    file.write_text('[run]\nscript = "."\ncwd = "j.toml"\n')
    assert check_job(file) == [
        f"run.script: {tmp_path} is no file ({file}:2). Fix: check the path",
        f"run.cwd: {file} is no folder ({file}:3). Fix: check the path",
    ]


def test_text_from_another_host_is_not_looked_up() -> None:
    job = load('[run]\nscript = "/no/such/train.py"\ncwd = "/no/such"\n')
    assert (job.run.script, job.run.cwd) == ("/no/such/train.py", "/no/such")


def test_the_job_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    args = ["--log", "-s", "a b", "", "--", "ü"]
    loaded = job_for_script("train.py", args=args, sets=["learners.count=2"], cwd=tmp_path)
    job = loaded.job
    assert job.run.args == tuple(args)
    assert (job.run.script, job.run.cwd) == (str(tmp_path / "train.py"), str(tmp_path))
    assert (job.job.name, job.learners.count, job.update.rule) == ("train", 2, "")
    assert loaded.origins["run.args"] == "command line"
    assert load(job_to_toml(job)) == job


def test_the_job_of_a_module(tmp_path: Path) -> None:
    job = job_for_script(module="pkg.train", args=["-v"], cwd=tmp_path).job
    assert (job.kind, job.run.module, job.job.name, job.run.args) == ("module", "pkg.train", "train", ("-v",))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"script": "no.py"},
            "run.script: there is no file {0}/no.py (command line). Fix: check the path",
        ),
        (
            {"module": "a/b"},
            'run.module cannot be "a/b" (command line). Fix: give a module such as "my.train"',
        ),
        (
            {"module": "m", "args": ["\udc80"]},
            'run.args cannot be ["\\udc80"] (command line). Fix: give a list of texts, such as ["--lr", "0.1"]',
        ),
    ],
)
def test_scripts_that_cannot_be(given: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        job_for_script(cwd=tmp_path, **given)
    assert str(caught.value) == line.format(tmp_path)


# ---- what follows from sections


def test_the_global_batch_is_given_or_follows_from_the_learners() -> None:
    assert LearnersSection(global_batch=10).global_batch_of(4) == 10
    assert LearnersSection(minibatch=8).global_batch_of(3) == 24


def test_values_in_the_units_of_the_core() -> None:
    text = 'stop = {time = "1h30m"}\n[sync]\nmax_staleness = 3\n[servers]\nsnapshot = "90s"\n'
    job = load(TASK + text + "[learners]\nglobal_batch = 64\n")
    assert (job.job.stop.time_s, job.sync.staleness_bound, job.servers.snapshot_s) == (5400.0, 3, 90.0)
    assert (job.learners.deadline_s, job.learners.step_timeout_s) == (60.0, 600.0)
    assert (job.learners.minibatch, job.learners.most) == (0, 4)
    assert load(TASK).servers.memory_bytes is None
    assert load(TASK + '[servers]\nmemory = "1.5GiB"').servers.memory_bytes == 3 << 29
    assert (load(TASK).sync.staleness_bound, load(TASK).servers.snapshot_s) == (None, None)


# ---- the file written back

_floats = st.floats(min_value=1e-12, max_value=1e6, exclude_min=True)
_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
_scalar = st.one_of(
    st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False), _text
)
_names = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a job that is right: what each protocol, rule and schedule reads."""
    count = draw(st.integers(1, 50))
    protocol = draw(st.sampled_from(["hardsync", "softsync", "async"]))
    values: dict[str, Any] = {
        "job.epochs": draw(st.integers(2, 100)),
        "job.seed": draw(st.integers(0, 2**32 - 1)),
        "learners.count": count,
        "learners.min": draw(st.integers(1, count)),
        "learners.deadline": draw(st.sampled_from(["1s", "250ms", "1h30m"])),
        "sync.protocol": protocol,
        "update.lr": draw(_floats),
        "update.weight_decay": draw(st.floats(0, 1)),
    }
    values[draw(st.sampled_from(["learners.minibatch", "learners.global_batch"]))] = draw(st.integers(count, 9999))
    if protocol == "hardsync":
        values["sync.backup"] = draw(st.integers(0, count - 1))
    else:
        values["sync.warmup_epochs"] = 1
        values["sync.max_staleness"] = draw(st.one_of(st.just("none"), st.integers(1, 99)))
    if protocol == "softsync":
        values["sync.n"] = draw(st.integers(1, count))
    constants = {"sgd": [], "nesterov": ["momentum"], "adam": ["beta1", "beta2"], "rmsprop": ["rho", "eps"]}
    rule = values["update.rule"] = draw(st.sampled_from(sorted(constants)))
    for name in constants[rule]:
        values[f"update.{name}"] = draw(st.floats(1e-9, 0.999))
    schedule = draw(
        st.sampled_from([{"kind": "cosine"}, {"kind": "step", "epochs": [1, 2.5], "gamma": 0.1}, {"kind": "constant"}])
    )
    values |= {f"update.schedule.{name}": value for name, value in schedule.items()}
    if draw(st.booleans()):
        values["update.clip_norm"] = draw(_floats)
    groups = st.fixed_dictionaries({"match": _text.filter(bool), "lr_scale": st.floats(0, 0.5)})
    values["update.groups"] = draw(st.lists(groups, max_size=3))
    if draw(st.booleans()):
        values["job.task"] = "a.b:c"
        args = st.dictionaries(_names, st.one_of(_scalar, st.lists(_scalar, max_size=3)), max_size=3)
        values |= {f"job.task_args.{name}": value for name, value in draw(args).items()}
    else:
        values["run.script"] = "/x/" + draw(_text.filter(bool))
        values["run.args"] = draw(st.lists(_text, max_size=3))
    values |= {f"run.env.{name}": value for name, value in draw(st.dictionaries(_names, _text, max_size=2)).items()}
    return values


@given(files())
def test_a_written_file_loads_as_the_same_job(values: dict[str, Any]) -> None:
    from rudra_zmq.config.write import toml_tables

    job = load(toml_tables(values))
    given_back = flat(job)
    for key, value in values.items():
        expected = msgspec.convert(value, type(given_back[key])) if isinstance(value, (int, float)) else value
        if key == "update.groups":
            assert [group.match for group in job.update.groups] == [group["match"] for group in value]
        elif isinstance(given_back[key], tuple):
            assert list(given_back[key]) == value
        else:
            assert given_back[key] == expected
    once = job_to_toml(job)
    assert load(once) == job
    assert job_to_toml(load(once)) == once


def test_notes_become_comments_that_do_not_change_the_file() -> None:
    loaded = job_from_toml(TASK, name="demo", sets=["job.seed=7"])
    text = job_to_toml(loaded.job, {**loaded.origins, "job.epochs": "two\nlines = 1"})
    assert "seed = 7  # -s job.seed=7\n" in text
    assert "epochs = 1  # two lines = 1\n" in text
    assert load(text) == loaded.job


def test_rows_show_value_and_origin() -> None:
    rows = {key: (value, origin) for key, value, origin in job_from_toml(TASK, name="demo").rows()}
    assert rows["job.task"] == ('"my.tasks:cnn"', "job.toml:2")
    assert rows["update.lr"] == ("0.03", "default")
    assert rows["update.clip_norm"] == ('""', "default")


# ---- what other packages know of the same things


def test_rules_and_schedules_are_those_of_the_update_package() -> None:
    rules = pytest.importorskip("rudra_zmq.update.rules")
    schedule = pytest.importorskip("rudra_zmq.update.schedule")
    from rudra_zmq.config.checks import RULE_KEYS, SCHEDULE_NEEDS

    assert {name: frozenset(rule.parameters) for name, rule in rules.RULES.items()} == RULE_KEYS
    good = {"epochs": (1.0, 2.0), "gamma": 0.5, "power": 0.5}
    for kind, needs in SCHEDULE_NEEDS.items():
        spec = schedule.ScheduleSpec(kind, **{name: good[name] for name in needs})
        assert math.isfinite(schedule.rate(spec, 0.1, 1.5, 3.0))


@pytest.mark.parametrize(
    "text", ["zip", "topk", "topk:", "topk:0", "topk:1.5", "topk:-0.1", "topk:nan", "topk:1e-100", "topk:."]
)
def test_an_encoding_that_is_none(text: str) -> None:
    line = problem(f'wire.compress = "{text}"')
    assert line.startswith(f'wire.compress cannot be "{text}" (job.toml:1). Fix: give "none", "float16"')


@pytest.mark.parametrize(
    ("text", "up"),
    [
        ("none", ("float32", 1)), ("int8", ("int8", 1)), ("topk:0.01", ("topk", Fraction(1, 100))),
        ("topk:1", ("topk", 1)), ("topk:.5", ("topk", Fraction(1, 2))), ("topk:1e-4", ("topk", Fraction(1, 10000))),
    ],
)  # fmt: skip
def test_encodings(text: str, up: tuple[str, Any]) -> None:
    job = job_from_toml(f'job.task = "a:b"\nwire.compress = "{text}"', name="x").job
    assert job.wire.up == up
    assert job.wire.down == "float32"


@pytest.mark.parametrize(("text", "down"), [("none", "float32"), ("float32", "float32"), ("int8", "int8")])
def test_encodings_of_weights(text: str, down: str) -> None:
    job = job_from_toml(f'job.task = "a:b"\nwire.compress_down = "{text}"', name="x").job
    assert job.wire.down == down
