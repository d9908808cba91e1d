"""Write the man pages rudra(1), psd(8), learnerd(8) and rudra.toml(5) into a folder.

    python bin/manpages.py FOLDER

Every text is one that people read elsewhere too: what --help prints, the comments of etc/rudra/rudra.toml, the table of
exit statuses.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import click

from rudra_zmq import __version__, errors
from rudra_zmq.cli.main import rudra
from rudra_zmq.daemons import learnerd, psd

ROOT = Path(__file__).resolve().parent.parent
TOML = ROOT / "etc/rudra/rudra.toml"
NAMES = {
    "rudra": "train PyTorch models with a parameter server",
    "psd": "head of a rudra cluster: jobs and their parameter servers",
    "learnerd": "runs learners of rudra on a host",
    "rudra.toml": "settings of rudra's daemons and command line",
}
SECTIONS = {"rudra": 1, "psd": 8, "learnerd": 8, "rudra.toml": 5}
SIGNALS = (
    ("TERM, INT", "End well: jobs and learners finish their step. A second one ends at once."),
    ("HUP", "Read the settings again, and open the file of --log again: see `rudra reload`."),
)
FILES = (
    ("/etc/rudra/rudra.toml, ~/.config/rudra/rudra.toml", "Settings: rudra.toml(5)."),
    ("/var/lib/rudra, ~/.local/state/rudra", "Jobs, snapshots and the registry: the system's, and a person's."),
    ("/run/rudra, $XDG_RUNTIME_DIR/rudra", "Sockets."),
)


def words(text: str) -> str:
    """Running text: what roff would take for itself is escaped."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    text = text.replace("'", "\\(aq").replace("`", "\\(ga")
    return re.sub(r"(?m)^\.", "\\\\&.", text)


def running(*lines: str) -> Iterator[str]:
    """Running text, which roff fills by itself, in short lines."""
    for line in textwrap.wrap(" ".join(lines), 68, break_on_hyphens=False, break_long_words=False):
        yield words(line)


def tidy(lines: Iterator[str]) -> Iterator[str]:
    """Without paragraphs that begin right behind a heading, which is one by itself."""
    before = ""
    for line in lines:
        if line != ".PP" or not before.startswith((".SH", ".SS")):
            yield line.rstrip()
        before = line


def head(name: str) -> Iterator[str]:
    stamp = int(os.environ.get("SOURCE_DATE_EPOCH") or (ROOT / "pyproject.toml").stat().st_mtime)
    date = time.strftime("%Y-%m-%d", time.gmtime(stamp))
    yield f'.TH {name.upper()} {SECTIONS[name]} {date} "rudra {__version__}" rudra'
    yield ".SH NAME"
    yield f"{words(name)} \\- {words(NAMES[name])}"


def pair(term: str, *text: str) -> Iterator[str]:
    yield ".TP"
    yield f"\\fB{words(term)}\\fR"
    yield from running(*text)


def literal(lines: list[str]) -> Iterator[str]:
    """An example, line by line, without the indentation that all of it has."""
    depth = min(len(line) - len(line.lstrip()) for line in lines)
    yield from (".PP", ".RS 4", ".nf")
    yield from (words(line[depth:]) for line in lines)
    yield from (".fi", ".RE")


def prose(text: str) -> Iterator[str]:
    """Help as click has it: paragraphs, and behind \\b lines that stay as they are."""
    for part in re.split(r"\n\s*\n", text.strip()):
        lines = [line for line in part.splitlines() if line.strip() and line.strip() != "\b"]
        if lines and "\b" in part:
            yield from literal(lines)
        elif lines:
            yield ".PP"
            yield from running(*lines)


def see_also(name: str) -> Iterator[str]:
    yield ".SH SEE ALSO"
    others = sorted((section, other) for other, section in SECTIONS.items() if other != name)
    yield from (f".BR {other} ({section})" for section, other in others)


# --- the command line ---


def of_command(path: str, command: click.Command) -> Iterator[str]:
    ctx = click.Context(command, info_name=path)
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield f".SS {words(f'{path} {usage}')}"
    yield from prose(command.help or "")
    for parameter in command.params:
        record = parameter.get_help_record(ctx)  # an argument has none of its own, and is in the usage
        if record is not None and isinstance(parameter, click.Option) and "--help" not in parameter.opts:
            yield from pair(record[0], record[1])
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            assert found is not None
            yield from of_command(f"{path} {name}", found)


def of_rudra() -> Iterator[str]:
    ctx = click.Context(rudra, info_name="rudra")
    yield from head("rudra")
    yield ".SH SYNOPSIS"
    yield ".B rudra"
    yield words(" ".join(rudra.collect_usage_pieces(ctx)))
    yield ".SH DESCRIPTION"
    yield from prose(rudra.help or "")
    for parameter in rudra.params:
        record = parameter.get_help_record(ctx)
        if record is not None:
            yield from pair(record[0], record[1])
    yield ".SH COMMANDS"
    for name in rudra.list_commands(ctx):
        command = rudra.get_command(ctx, name)
        assert command is not None
        yield from of_command(f"rudra {name}", command)
    yield from statuses(daemon=False)
    yield from files()
    yield from see_also("rudra")


# --- the daemons ---


def of_daemon(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    example, _, description = (parser.description or "").partition("\n\n")
    yield from head(name)
    yield ".SH SYNOPSIS"
    yield f".B {name}"
    yield "[OPTION]..."
    yield ".SH DESCRIPTION"
    yield from prose(description)
    yield from literal([example.removeprefix("example: ")])
    yield ".SH OPTIONS"
    for action in parser._actions:
        if action.help is not None and "--help" not in action.option_strings:
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            yield from pair(", ".join(action.option_strings) + value, action.help)
    yield ".SH SIGNALS"
    for term, text in SIGNALS:
        yield from pair(term, text)
    yield from statuses(daemon=True)
    yield from files()
    yield from see_also(name)


def statuses(*, daemon: bool) -> Iterator[str]:
    """The table of errors.py, by status."""
    yield ".SH EXIT STATUS"
    meanings: dict[int, list[str]] = {0: ["success"], errors.EXIT_FORCED: ["the end had to be forced"]}
    for line in (errors.__doc__ or "").splitlines():
        if row := re.match(r"[ |`-]*[A-Z]\w+ +[a-z-]+ +(\d+) +(.+)", line):
            status, text = int(row[1]), re.sub(r" \(a daemon: \d+\)", "", row[2])
            if daemon and "(a daemon" in row[2]:
                status = errors.EXIT_CONFIG_DAEMON
            meanings.setdefault(status, []).append(text)
    for status in sorted(meanings):
        yield from pair(str(status), "; ".join(meanings[status]))


def files() -> Iterator[str]:
    yield ".SH FILES"
    for path, text in FILES:
        yield from pair(path, text)


# --- rudra.toml ---


def of_toml() -> Iterator[str]:
    yield from head("rudra.toml")
    yield ".SH SYNOPSIS"
    yield words(FILES[0][0])
    yield ".SH DESCRIPTION"
    comment: list[str] = []
    first = True
    for line in TOML.read_text("utf-8").splitlines():
        if line.startswith("#"):
            comment.append(line.removeprefix("#").strip())
        elif first and not line:
            yield from running(*comment)
            comment, first = [], False
        elif line.startswith("["):
            yield f".SH {words(line)}"
        elif line:
            yield from pair(line, *comment)
            comment = []
    yield from see_also("rudra.toml")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "rudra": of_rudra(),
        "psd": of_daemon("psd", psd.options()),
        "learnerd": of_daemon("learnerd", learnerd.options()),
        "rudra.toml": of_toml(),
    }
    for name, lines in pages.items():
        text = "\n".join(tidy(lines)) + "\n"
        (folder / f"{name}.{SECTIONS[name]}").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
