"""The command ``rudra``: the group, and the one place where errors become lines and exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from rudra_zmq import __version__
from rudra_zmq.cli.base import Cli, Group, fail
from rudra_zmq.cli.output import note
from rudra_zmq.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, RudraError


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
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
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  closed by whoever called: it wants no output
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        status = rudra.main(args=list(argv) if argv is not None else None, prog_name="rudra", standalone_mode=False)
        return int(status or EXIT_OK)
    except RudraError as error:
        fail(str(error))
        return error.exit_status
    except click.UsageError as error:
        text, path = error.format_message(), error.ctx.command_path if error.ctx else "rudra"
        if text.startswith("Usage: "):  # a group without a command: what there is to choose from
            note(text)
        else:
            fail(f"{text.removesuffix('.')}{'' if text.endswith('?') else '.'} Fix: `{path} --help` shows how")
        return EXIT_USAGE
    except click.ClickException as error:
        fail(error.format_message())
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted")
        return EXIT_INTERRUPTED
    except OSError as error:  # a full disk, a terminal that is gone; a reader that left (head) ends in click
        where = f" ({error.filename})" if error.filename else ""
        fail(f"{error.strerror or error}{where}. Fix: check the path, its permissions and the room on its disk")
        return EXIT_FAILED
