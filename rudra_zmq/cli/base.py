"""What every command of the CLI has: its line in the table below, common options, settings.

A command returns an int (None is 0) and raises RudraError for what a user can mend.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from rudra_zmq import commands

if TYPE_CHECKING:
    from rudra_zmq.cli.places import Places
    from rudra_zmq.config import RudraToml

# name -> (module, one line): the group knows its commands without importing them, so --help is quick.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Train on this machine: start a private cluster, follow, report, tear down."),
    "up": ("cluster_commands", "Start psd and learnerd on this machine without systemd."),
    "down": ("cluster_commands", "Stop what `up` started."),
    "reload": ("cluster_commands", "Have the daemons here read their settings again, and open their logs anew."),
    "hosts": ("host_commands", "Show the hosts that offer learners."),
    "host": ("host_commands", "Drain, ban, unban or forget hosts."),
    "invite": ("join_commands", "On the head: print the line that makes a machine a host."),
    "host-join": ("join_commands", "On a new host: carry out an invitation."),
    "keys": ("key_commands", "Make keys, and say which ones the head takes."),
    "submit": ("job_commands", "Hand a job to the cluster."),
    "follow": ("job_commands", "Watch a job to its end."),
    "wait": ("job_commands", "Wait until jobs have ended."),
    "jobs": ("job_commands", "List jobs, newest first."),
    "status": ("job_commands", "Show one job on one screen."),
    "why": ("why", "Say what a job's processes wait for, since when and until when."),
    "show": ("job_commands", "Show a job's effective file with origins, its code's hash, versions and files."),
    "logs": ("logs", "Show or follow what a job's learners wrote."),
    "stop": ("job_commands", "Stop a job: drain and snapshot, or at once."),
    "resume": ("run", "Go on with a job from its newest snapshot."),
    "again": ("job_commands", "Run a job anew with the same file."),
    "rm": ("file_commands", "Remove ended jobs and their files."),
    "prune": ("file_commands", "Remove old ended jobs."),
    "df": ("file_commands", "Show the room that jobs take."),
    "export": ("file_commands", "Copy a job's weights to a file."),
    "doctor": ("doctor", "Say what is wrong here, on the way to the head, with hosts; and what mends it."),
    "simulate": ("other_commands", "Run a job's protocol in virtual time."),
    "bench": ("other_commands", "Time the code that jobs run against what this machine allows."),
    "init": ("other_commands", "Write a training script to start from."),
    "config": ("other_commands", "Check files, show settings and where they come from."),
    "completion": ("other_commands", "Print the shell completion."),
}


class Cli:
    """What the group hands to its commands."""

    def __init__(self, head: str) -> None:
        self.head = head

    @cached_property
    def settings(self) -> RudraToml:
        """The effective rudra.toml."""
        from rudra_zmq.config import load_rudra

        return load_rudra().config

    def places(self) -> Places:
        """Where jobs are found; a context manager."""
        from rudra_zmq.cli.places import Places

        return Places(self.settings, self.head)


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with its line of the table."""
    attributes.setdefault("cls", commands.Command)
    return click.command(name, short_help=COMMANDS[name][1], **attributes)


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print the job's id alone.")


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Ids and names of jobs for the shell; nothing where they cannot be had."""
    from rudra_zmq.errors import RudraError

    try:
        with Cli("").places() as places:
            rows = [found.row for found in places.jobs()]
    except (RudraError, OSError):
        return []
    return [text for text in dict.fromkeys(t for r in rows for t in (r.job, r.name)) if text.startswith(incomplete)]


def given_job(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """A click callback: "" means the newest job, but only where nothing was written; an unset variable is no job."""
    if value == "" or (isinstance(value, tuple) and "" in value):
        raise click.BadParameter("a job was given and is empty: an unset variable?")
    return "" if value is None else value


job_argument = click.argument("job", required=False, callback=given_job, shell_complete=complete_jobs)


def key_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """A click callback: the name of a key, or of a host that is invited."""
    from rudra_zmq.wire.messages.control import NAME_PATTERN

    if not re.fullmatch(NAME_PATTERN, value) or value.endswith("\n"):
        raise click.BadParameter(f"{value!r:.80} is not 1 to 64 of A-Z a-z 0-9 . _ - with a letter or digit first")
    return value


class Group(commands.Group):
    """Finds a command's module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        import importlib

        module = importlib.import_module(f"rudra_zmq.cli.{COMMANDS[cmd_name][0]}")
        found: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"no command {args[0]!r}{hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])
