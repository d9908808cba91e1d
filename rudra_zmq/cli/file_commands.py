"""Commands about what jobs leave on disk: rm, prune, df, export."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from pathlib import Path

import click

from rudra_zmq.cli.base import Cli, command, complete_jobs, given_job, json_option
from rudra_zmq.cli.job_commands import duration
from rudra_zmq.cli.output import ago, emit_json, note, say, size, table
from rudra_zmq.cli.places import ENDED, DownCluster, Found
from rudra_zmq.errors import NotFound, Rejected, RudraError, UsageError

PIECE = 262144


@command("rm")
@click.argument("jobs", nargs=-1, required=True, callback=given_job, shell_complete=complete_jobs)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def rm(cli: Cli, jobs: tuple[str, ...], yes: bool) -> None:
    """Remove ended jobs and all their files: snapshots, logs, weights.

    \b
      rudra rm 7f3a01 8c22d0
    """
    with cli.places() as places:
        found = list({f.row.job: f for f in map(places.find, jobs)}.values())
        for f in found:
            if f.row.state not in ENDED:
                raise Rejected(f"job {f.row.job} is {f.row.state}", fix=f"`rudra stop {f.row.job}` first")
        _remove(found, yes)


@command("prune")
@click.option("--older", default="30d", metavar="TIME", help='Ended longer ago than this ("12h", "30d"); default 30d.')
@click.option("--keep", default=0, type=click.IntRange(0), metavar="N", help="Keep the newest N in any case.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.pass_obj
def prune(cli: Cli, older: str, keep: int, yes: bool, dry_run: bool) -> None:
    """Remove ended jobs that are old.

    \b
      rudra prune --older 7d --keep 5
    """
    age = _age(older)
    with cli.places() as places:
        ended = [f for f in places.jobs() if f.row.state in ENDED and not isinstance(f.place, DownCluster)]
        places.tell()
        old = [f for f in ended[keep:] if time.time() - (f.row.ended or f.row.created) > age]
        if not old:
            note("nothing to remove")
            return
        if dry_run:
            table(["job", "name", "state", "ended"], [_line(f) for f in old])
            return
        _remove(old, yes)


def _age(text: str) -> float:
    """ "30d" besides the durations of a job file."""
    if text.endswith("d") and text[:-1].replace(".", "", 1).isdigit():
        return float(text[:-1]) * 86400.0
    seconds = duration(click.get_current_context(), click.Argument(["older"]), text)
    assert seconds is not None
    return seconds


def _line(found: Found) -> list[str]:
    row = found.row
    return [row.job, row.name, row.state, ago(row.ended or row.created)]


def _remove(found: list[Found], yes: bool) -> None:
    if not yes:
        table(["job", "name", "state", "ended"], [_line(f) for f in found])
        what = "this job" if len(found) == 1 else f"these {len(found)} jobs"
        if not sys.stdin.isatty():
            raise Rejected(f"nobody can be asked whether to remove {what}", fix="--yes removes without asking")
        if not click.confirm(f"remove {what} and the files?", err=True):
            note("nothing is removed")
            return
    for f in found:
        stays = f.place.remove(f.row.job)
        say(f"removed {f.row.job} {f.row.name}" + (f"; {stays}" if stays else ""))


@command("df")
@json_option
@click.pass_obj
def df(cli: Cli, as_json: bool) -> None:
    """Show the room that jobs take, by kind.

    \b
      rudra df
    """
    kinds = ("snapshots", "logs", "weights", "code", "other")
    sums: dict[str, dict[str, int]] = {}
    with cli.places() as places:
        rows = {f.row.job: f.row for f in places.jobs()}
        for job, kind, count in _usage(places.jobs()):
            sums.setdefault(job, dict.fromkeys(kinds, 0))[kind] += count
        places.tell()
    if as_json:
        emit_json({"jobs": [{"job": job, **by_kind, "total": sum(by_kind.values())} for job, by_kind in sums.items()]})
        return
    ordered = sorted(sums.items(), key=lambda item: -sum(item[1].values()))
    table(
        ["job", "name", *kinds, "total"],
        [
            [j, rows[j].name if j in rows else "", *(size(k[x]) for x in kinds), size(sum(k.values()))]
            for j, k in ordered
        ],
    )
    say(f"total {size(sum(sum(k.values()) for k in sums.values()))}")


def _usage(jobs: list[Found]) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for place in {id(f.place): f.place for f in jobs}.values():
        try:
            found += place.usage()
        except RudraError as error:
            note(f"rudra: {error}")
    return found


@command("export")
@click.argument("job", callback=given_job, shell_complete=complete_jobs)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("-q", "--quiet", is_flag=True, help="Do not say what was written.")
@click.pass_obj
def export(cli: Cli, job: str, file: Path, force: bool, quiet: bool) -> None:
    """Copy a job's weights (every key of its state_dict, safetensors) to FILE.

    \b
      rudra export 7f3a01 weights.safetensors
    """
    if not file.name:
        raise UsageError("no file is named", fix="rudra export JOB weights.safetensors")
    if file.exists() and not file.is_file():
        raise Rejected(f"{file} is no regular file, and is not replaced", fix="choose another name")
    if file.exists() and not force:
        raise Rejected(f"{file} exists", fix="choose another name, or --force")
    if not file.absolute().parent.is_dir():
        raise NotFound(f"no folder {file.absolute().parent}", fix="make it first")
    with cli.places() as places:
        found = places.find(job)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            total = _copy(found, temporary)
            os.replace(temporary, file)
        except OSError as error:
            raise RudraError(
                f"cannot write {file}: {error.strerror}", fix="choose a folder that you can write to, with room"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    if not quiet:
        say(f"{file}: {size(total)}, weights of job {found.row.job} {found.row.name}")


def _copy(found: Found, target: Path) -> int:
    """All bytes of the weights; NotFound where the job has none."""
    job, offset, inode = found.row.job, 0, 0
    try:
        with open(target, "xb") as out:
            while True:
                piece = found.place.read(job, "weights.safetensors", offset, PIECE)
                if inode not in (0, piece.inode):  # replaced while we read: from the start
                    out.seek(0)
                    out.truncate()
                    offset, inode = 0, piece.inode
                    continue
                inode = piece.inode
                if not piece.data:
                    return offset
                out.write(piece.data)
                offset += len(piece.data)
    except NotFound:
        raise NotFound(
            f"job {job} has no weights: it is {found.row.state}",
            fix="they are written when a job is done or stopped",
        ) from None
