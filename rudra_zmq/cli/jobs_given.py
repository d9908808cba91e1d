"""A job as the command line names it: JOB.toml, train.py or ``-m module``, with ``-s key=value``.

Owns the way from TARGET to a Submit message. Reads files, runs nothing of them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from rudra_zmq.cli.output import note
from rudra_zmq.commands import Command
from rudra_zmq.config import LoadedJob, job_for_script, job_to_toml, load_job
from rudra_zmq.errors import UsageError
from rudra_zmq.wire.messages.control import Submit


class TargetCommand(Command):
    """Stops reading options at a script's name (or after ``-m MODULE``): the rest is the script's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            name for p in self.params if isinstance(p, click.Option) and not (p.is_flag or p.count) for name in p.opts
        }
        k, module = 0, False
        while k < len(args) and not module and args[k].startswith("-") and args[k] not in ("-", "--"):
            name, attached = _first_with_value(args[k], valued)
            k += 2 if name and not attached else 1
            module = name == "-m"
        own, rest = args[:k], args[k:]
        if not module and rest and rest[0].endswith(".toml"):
            return super().parse_args(ctx, args)  # a job file has no arguments of its own
        if rest or module:  # "--" before a script's name is ours, after -m MODULE the module's
            own += ["--", *(rest[1:] if rest[:1] == ["--"] and not module else rest)]
        return super().parse_args(ctx, own if k <= len(args) else args)


def _first_with_value(arg: str, valued: set[str]) -> tuple[str, bool]:
    """The option in ``arg`` that takes a value, "" if none does, and whether the value is in it too (-sKEY=V)."""
    if arg.startswith("--"):
        name, equals, _ = arg.partition("=")
        return (name, bool(equals)) if name in valued else ("", False)
    for at, letter in enumerate(arg[1:], 2):
        if f"-{letter}" in valued:
            return f"-{letter}", at < len(arg)
    return "", False


def target_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of run and submit: everything after a script's name is the script's own."""
    function = click.argument("args", nargs=-1, metavar="TARGET [ARGS]...", type=click.Path(readable=False))(function)
    function = click.option("-m", "module", metavar="MODULE", help="Run a module as a script, as python -m does.")(
        function
    )
    return set_option(function)


def set_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``-s key=value``, wherever a job is given."""
    return click.option(
        "-s",
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set a key of the job file (repeatable).",
    )(function)


def load_target(args: Sequence[str], module: str | None, sets: Sequence[str]) -> LoadedJob:
    """The effective job; UsageError or ConfigError with one line."""
    if module is not None:
        return job_for_script(module=module, args=args, sets=sets)
    if not args:
        raise UsageError("no job is named", fix="give JOB.toml, train.py or -m MODULE")
    target, rest = args[0], list(args[1:])
    if target.endswith(".toml"):
        if rest:
            raise UsageError(
                f"{rest[0]!r} after the job file", fix="set keys with -s before it; arguments are for scripts"
            )
        return load_job(Path(target), sets)
    return job_for_script(target, args=rest, sets=sets)


def tell_notes(loaded: LoadedJob) -> None:
    """What the job's files and flags say without effect."""
    for line in loaded.notes:
        note(f"note: {line}")


def submission(loaded: LoadedJob, again: str = "", bundle: str = "") -> Submit:
    """The message; its request id makes a repeated send one job. ``bundle``: the name of the code that goes with it."""
    job = loaded.job
    cwd = job.run.code or job.run.cwd or os.getcwd()
    return Submit(
        request=secrets.token_hex(16),
        name=job.job.name,
        toml=job_to_toml(job),
        cwd=cwd,
        origins=dict(loaded.origins),
        code_hash=bundle or code_hash(job.run.script, cwd),
        again=again,
    )


def code_hash(script: str, cwd: str) -> str:
    """The first 12 hex digits of the script's SHA-256 (R2: an edited script is seen to be another)."""
    if not script:
        return ""
    return hashlib.sha256((Path(cwd or ".") / script).read_bytes()).hexdigest()[:12]
