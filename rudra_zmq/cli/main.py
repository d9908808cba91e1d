"""The command ``rudra``: the group, and its entry."""

from __future__ import annotations

from collections.abc import Sequence

import click

from rudra_zmq import __version__
from rudra_zmq.cli.base import Cli, Group
from rudra_zmq.commands import CONTEXT, run


@click.group(cls=Group, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="rudra")
@click.option("--head", envvar="RUDRA_HEAD_ADDRESS", default="", metavar="ADDRESS", help="The head to talk to.")
@click.pass_context
def rudra(ctx: click.Context, head: str) -> None:
    """Train PyTorch models with a parameter server: hardsync, n-softsync and async.

    \b
      rudra run etc/rudra/jobs/fashion-softsync.toml    train here and now
      rudra run train.py --my-flag                      a script of one's own
      rudra status                                      the newest job

    JOB is an id, a name (the newest of it), or nothing (the newest of all).
    """
    ctx.obj = Cli(head)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    return run(rudra, argv, "rudra")
