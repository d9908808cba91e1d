"""Commands that need no cluster: simulate, bench, init, config, completion."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from rudra_zmq.cli.base import COMMANDS, Cli, command, json_option
from rudra_zmq.cli.jobs_given import tell_notes
from rudra_zmq.cli.output import emit_json, say, table
from rudra_zmq.commands import Group
from rudra_zmq.config import check_job, check_rudra, job_for_script, load_job, load_rudra
from rudra_zmq.errors import EXIT_USAGE, Rejected, UsageError


@command(
    "simulate",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def simulate(args: tuple[str, ...]) -> None:
    """Run a job's protocol in virtual time (see --help)."""
    os.execv(sys.executable, [sys.executable, "-m", "rudra_zmq.sim", *args])


@command(
    "bench",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def bench(args: tuple[str, ...]) -> None:
    """Time the code that jobs run against what this machine allows (see --help)."""
    os.execv(sys.executable, [sys.executable, "-m", "rudra_zmq.bench", *args])


_SCRIPT = '''\
"""Train with `rudra run {name}`, or alone with `python {name}`."""

import torch
import torch.nn.functional as F

import rudra_zmq as rudra

# Your data: any torch.utils.data.Dataset. Here: is the sum of eight numbers positive?
x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
train_set = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

with rudra.join() as learner:
    model = learner.attach(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)))
    opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9))
    for epoch in learner.epochs():
        for xb, yb in learner.batches(train_set):  # leased: each sample once per epoch over all learners
            learner.step(F.cross_entropy(model(xb), yb))  # backward, step, zero_grad
        if learner.is_chief:
            with learner.frozen(), torch.no_grad():
                right = (model(x).argmax(1) == train_set.tensors[1]).float().mean().item()
            print(f"epoch {{epoch}}: accuracy {{right:.3f}}", flush=True)
            learner.log(accuracy=right)
'''


@command("init")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def init(file: Path) -> None:
    """Write a training script to start from; it never replaces a file.

    \b
      rudra init train.py && rudra run -s job.epochs=3 train.py
    """
    if not file.name:
        raise UsageError("no file is named", fix="rudra init train.py")
    try:
        with open(file, "x", encoding="utf-8") as out:
            out.write(_SCRIPT.format(name=file.name))
    except FileExistsError:
        raise Rejected(f"{file} exists", fix="choose another name") from None
    except OSError as error:
        raise UsageError(
            f"cannot write {file}: {error.strerror}", fix="choose a folder that you can write to"
        ) from None
    say(f"{file}: run it with `rudra run -s job.epochs=3 {file}`")


@click.group("config", cls=Group, short_help=COMMANDS["config"][1])
def config() -> None:
    """Check files, show settings and where they come from.

    \b
      rudra config check job.toml
      rudra config show --origin
    """


@config.command("check", short_help="Check job files and rudra.toml files.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@json_option
def check(files: tuple[Path, ...], as_json: bool) -> int:
    """Check job files and rudra.toml files; without FILES all the settings that hold here.

    \b
      rudra config check job.toml /etc/rudra/rudra.toml
    """
    problems: list[str] = [] if files else check_rudra()
    notes: list[str] = []
    for file in files:
        if file.name == "rudra.toml" or file.parent.name == "conf.d":
            problems += check_rudra(file)
        elif found := check_job(file):
            problems += found
        else:
            notes += load_job(file).notes
    if as_json:
        emit_json({"ok": not problems, "problems": problems, "notes": notes})
    else:
        for line in (*problems, *(f"note: {line}" for line in notes)):
            say(line)
        if not problems:
            say("ok")
    return EXIT_USAGE if problems else 0


@config.command("show", short_help="Show the settings in force, or those of a job.")
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@json_option
@click.pass_obj
def show(cli: Cli, job: Path | None, origin: bool, as_json: bool) -> None:
    """Show the settings in force, or with a job file (or script) its effective values.

    \b
      rudra config show --origin
      rudra config show job.toml
    """
    if job is None:
        rows = load_rudra().rows()
    else:
        loaded = load_job(job) if job.suffix == ".toml" else job_for_script(str(job))
        tell_notes(loaded)
        rows = loaded.rows()
    if as_json:
        emit_json({"settings": [{"key": k, "value": v, "origin": o} for k, v, o in rows]})
        return
    columns = ["key", "value", "origin"] if origin else ["key", "value"]
    table(columns, [list(row) if origin else list(row[:2]) for row in rows])


@command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the shell's completion.

    \b
      rudra completion bash > ~/.local/share/bash-completion/completions/rudra
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None and ctx.parent is not None
    say(found(ctx.parent.command, {}, "rudra", "_RUDRA_COMPLETE").source())
