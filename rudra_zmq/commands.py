"""What all commands have in common: help that begins with an example, errors as one line, the exit status.

Owns the end of a command. Must not know: what any command does. Used by the command line, and by the packages that it
runs as processes of their own (simulate, bench).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from rudra_zmq.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, RudraError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def example_first(text: str | None) -> str:
    """The help of a command: its docstring has the example after what it does."""
    parts = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(sorted(parts, key=lambda part: not part.startswith("\b")))


class Command(click.Command):
    """A command whose help begins with its example."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = example_first(self.help)


class Group(click.Group):
    """A group whose help, and that of its commands, begins with an example."""

    command_class = Command

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help = example_first(self.help)


def fail(text: str) -> None:
    """The one line of an error."""
    with contextlib.suppress(OSError):  # nobody is left who could read it
        sys.stderr.write(f"rudra: {' '.join(text.split())}\n")


def run(command: click.Command, argv: Sequence[str] | None, name: str) -> int:
    """Run a command to its end: every error is a line with its fix. Returns the exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  closed by whoever called: it wants no output
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    return _flushed(_run(command, argv, name))


def _run(command: click.Command, argv: Sequence[str] | None, name: str) -> int:
    try:
        status = command.main(args=list(argv) if argv is not None else None, prog_name=name, standalone_mode=False)
        return int(status or EXIT_OK)
    except RudraError as error:
        fail(str(error))
        return error.exit_status
    except click.UsageError as error:
        text, path = error.format_message(), error.ctx.command_path if error.ctx else name
        if text.startswith("Usage: "):  # a group without a command: what there is to choose from
            with contextlib.suppress(OSError):
                sys.stderr.write(text + "\n")
        else:
            fail(f"{text.removesuffix('.')}{'' if text.endswith('?') else '.'} Fix: `{path} --help` shows how")
        return EXIT_USAGE
    except click.ClickException as error:
        fail(error.format_message())
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        fail("interrupted")
        return EXIT_INTERRUPTED
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not error.filename and _nowhere():
            fail("the folder that this command was called in is gone. Fix: cd to one that is there")
            return EXIT_USAGE
        # A full disk, a terminal that is gone; a reader that left (head) ends in click.
        where = f" ({error.filename})" if error.filename else ""
        fail(f"{error.strerror or error}{where}. Fix: check the path, its permissions and the room on its disk")
        return EXIT_FAILED


def _flushed(status: int) -> int:
    """Write what is still held back. Where that fails Python would do it once more at its end, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if status == EXIT_OK:
                fail(f"output could not be written: {error.strerror or error}. Fix: make room, or write it elsewhere")
                status = EXIT_FAILED
    return status


def _nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
