"""Commands about jobs: submit, follow, wait, jobs, status, show, stop, again."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace

import click

from rudra_zmq.cli.base import Cli, command, complete_jobs, given_job, job_argument, json_option, quiet_option
from rudra_zmq.cli.follow import Follower, event_line, story
from rudra_zmq.cli.jobs_given import (
    TargetCommand,
    load_target,
    set_option,
    submission,
    target_arguments,
    tell_notes,
)
from rudra_zmq.cli.output import ago, emit_json, note, percent, say, screen, size, table, utc
from rudra_zmq.cli.places import ENDED, DownCluster, FinishedRun, Found, Head, down, ended_run
from rudra_zmq.cli.report import failure, job_object, print_status, print_summary
from rudra_zmq.commands import fail
from rudra_zmq.config import job_from_toml, parse_duration
from rudra_zmq.errors import EXIT_INTERRUPTED, EXIT_JOB_FAILED, TimedOut, Unreachable, UsageError
from rudra_zmq.wire.messages.control import JobRow


def duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A click callback: "30s" as seconds."""
    if value is None:
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


BEAT_S = 2.0
PATIENCE_S = 60.0

timeout_option = click.option("--timeout", callback=duration, metavar="TIME", help='Give up after this long ("10m").')


@command("submit", cls=TargetCommand)
@click.option("--follow", is_flag=True, help="Watch it to its end; Ctrl-C detaches.")
@click.option("--dry-run", is_flag=True, help="Print the job file, where it would run and the memory it needs; stop.")
@json_option
@quiet_option
@target_arguments
@click.pass_obj
def submit(
    cli: Cli,
    args: tuple[str, ...],
    module: str | None,
    sets: tuple[str, ...],
    follow: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Hand a job to the cluster that `rudra up` (or a psd service) runs.

    \b
      rudra submit --follow job.toml
      rudra submit -s sync.n=2 train.py --my-own-flag
    """
    from rudra_zmq.cli.pack import pack_job

    loaded = load_target(args, module, sets)
    tell_notes(loaded)
    code = pack_job(loaded.job)
    if dry_run:
        from rudra_zmq.cli.plan import dry_run as show_plan

        return show_plan(cli, loaded, code, as_json)
    with cli.places() as places:
        head = places.head()
        job = head.submit(submission(loaded, bundle=code.name if code else ""), code)
        if follow:
            note(f"job {job} {loaded.job.job.name}")
            return watch(head, job, as_json, quiet, None)
    return submitted(job, loaded.job.job.name, as_json, quiet)


def submitted(job: str, name: str, as_json: bool, quiet: bool) -> int:
    """What is said of a job that nobody follows yet."""
    if as_json:
        emit_json({"job": job, "name": name, "state": "PENDING"})
    else:
        say(job if quiet else f"job {job} {name}: `rudra follow {job}` watches it")
    return 0


def watch(head: Head, job: str, as_json: bool, quiet: bool, timeout: float | None) -> int:
    """Follow; Ctrl-C detaches and says how to come back."""
    follower = Follower(head, job, quiet=quiet)
    try:
        row = follower.wait(None if timeout is None else time.monotonic() + timeout)
    except KeyboardInterrupt:
        note(f"\ndetached; the job goes on. `rudra follow {job}` comes back, `rudra stop {job}` stops it")
        return EXIT_INTERRUPTED
    return report(row, as_json, quiet)


def report(row: JobRow, as_json: bool, quiet: bool, told: bool = True) -> int:
    """How a job ended, as the command was asked to say it; the exit status. ``told``: its story was shown."""
    if as_json:
        emit_json(job_object(row))
    elif quiet:
        say(row.job)
    else:
        print_summary(row)
    if line := failure(row, told=told and not quiet):
        fail(line)
        return EXIT_JOB_FAILED
    return 0


@command("follow")
@job_argument
@json_option
@quiet_option
@timeout_option
@click.pass_obj
def follow(cli: Cli, job: str, as_json: bool, quiet: bool, timeout: float | None) -> int:
    """Watch a job to its end. Ctrl-C detaches, the job goes on.

    \b
      rudra follow 7f3a01
    """
    with cli.places() as places:
        found = places.find(job)
        if isinstance(found.place, Head):
            return watch(found.place, found.row.job, as_json, quiet, timeout)
        if found.row.state not in ENDED:
            raise down(found.row)
        return report(found.place.get(found.row.job).row, as_json, quiet)


@command("wait")
@click.argument("jobs", nargs=-1, callback=given_job, shell_complete=complete_jobs)
@json_option
@timeout_option
@click.pass_obj
def wait(cli: Cli, jobs: tuple[str, ...], as_json: bool, timeout: float | None) -> int:
    """Wait until the jobs have ended; exit status 8 if one of them failed, 6 at the time-out.

    \b
      rudra wait 7f3a01 --timeout 10m && rudra export 7f3a01 weights.safetensors
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    rows = []
    with cli.places() as places:
        for found in [places.find(job) for job in jobs or ("",)]:
            row = found.row
            if row.state not in ENDED:
                if not isinstance(found.place, Head):
                    raise down(row)
                row = Follower(found.place, row.job, quiet=True).wait(deadline)
            rows.append(row)
    if as_json:
        emit_json({"jobs": [_brief(row) for row in rows]})
    failures = [line for row in rows if (line := failure(row))]
    for line in failures:
        fail(line)
    return EXIT_JOB_FAILED if failures else 0


@command("jobs")
@json_option
@quiet_option
@click.pass_obj
def jobs(cli: Cli, as_json: bool, quiet: bool) -> None:
    """List jobs, newest first: those of the cluster and those of `rudra run`.

    \b
      rudra jobs --json
    """
    with cli.places() as places:
        found = places.jobs()
        places.check()
        places.tell()
    if as_json:
        emit_json({"jobs": [_brief(f.row) for f in found]})
    elif quiet:
        for f in found:
            say(f.row.job)
    else:
        table(
            ["job", "name", "state", "protocol", "lambda", "epoch", "accuracy", "created"],
            [_line(f.row) for f in found],
        )


def _brief(row: JobRow) -> dict[str, object]:
    full = job_object(row)
    keys = ("job", "name", "state", "reason", "protocol", "n", "lambda", "updates", "accuracy", "seconds", "folder",
            "created", "started", "ended")  # fmt: skip
    return {key: full[key] for key in keys}


def _line(row: JobRow) -> list[str]:
    p = row.progress
    if p is None or not p.protocol:
        return [row.job, row.name, row.state, "-", "-", "-", "-", ago(row.created)]
    protocol = f"{p.n}-softsync" if p.protocol == "softsync" else p.protocol
    epoch = f"{min(p.epoch + 1, p.epochs)}/{p.epochs}"
    figures = [protocol, str(p.lam), epoch, percent(p.accuracy)]
    return [row.job, row.name, row.state, *figures, ago(row.created)]


@command("status")
@job_argument
@click.option("-w", "--watch", "beat", is_flag=True, help="Draw it anew every two seconds until the job has ended.")
@json_option
@click.pass_obj
def status(cli: Cli, job: str, beat: bool, as_json: bool) -> None:
    """Show one job on one screen.

    \b
      rudra status            the newest job
      rudra status 7f3a01 -w
    """
    lost = 0.0
    with cli.places() as places:
        found = places.find(job)
        while True:
            try:
                row = _show_status(found, as_json, clear=beat and sys.stdout.isatty())
            except (Unreachable, TimedOut) as error:
                over = ended_run(found.place) if isinstance(found.place, Head) else None
                if not beat or lost > PATIENCE_S:
                    raise
                if over is not None:
                    found.place = over
                    continue
                note(f"waiting for psd: {error.message}")
                lost += BEAT_S
            else:
                lost = 0.0
                if not beat or row.state in ENDED or isinstance(found.place, DownCluster):
                    return
            time.sleep(BEAT_S)


def _show_status(found: Found, as_json: bool, clear: bool) -> JobRow:
    reply = found.place.get(found.row.job)
    row = reply.row
    if as_json:
        emit_json(job_object(row) | {"refused": reply.refused})
        return row
    events = story(found.place, row.job)[-3:]
    with screen() if clear else contextlib.nullcontext():
        print_status(row, [event_line(e) for e in events], reply.refused)
    return row


@command("show")
@job_argument
@json_option
@click.pass_obj
def show(cli: Cli, job: str, as_json: bool) -> None:
    """Show a job's effective file, where each key came from, its code's hash, what it ran under and its files.

    \b
      rudra show 7f3a01
    """
    with cli.places() as places:
        found = places.find(job)
        reply = found.place.get(found.row.job)
        files = found.place.files(found.row.job)
    versions = reply.row.progress.versions if reply.row.progress is not None else {}
    if as_json:
        row = reply.row
        emit_json(
            {
                "job": row.job,
                "name": row.name,
                "state": row.state,
                "created": utc(row.created),
                "toml": reply.toml,
                "origins": reply.origins,
                "code_hash": reply.code_hash,
                "versions": versions,
                "folder": row.folder,
                "files": [{"path": path, "bytes": count} for path, count in files],
            }
        )
        return
    say(
        f"# job {reply.row.job} {reply.row.name}: {reply.row.state}"
        + (f", code {reply.code_hash[:12]}" * bool(reply.code_hash))
    )
    if versions:
        say("# under " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    from rudra_zmq.config import job_to_toml

    loaded = job_from_toml(reply.toml, name=reply.row.name)
    say(job_to_toml(loaded.job, {k: v for k, v in reply.origins.items() if v != "default"}).rstrip())
    say()
    table(["file", "size"], [[path, size(count)] for path, count in files])
    say(f"in {reply.row.folder}")


@command("stop")
@job_argument
@click.option("--now", is_flag=True, help="Do not drain; the last snapshot stays.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the end.")
@json_option
@timeout_option
@click.pass_obj
def stop(cli: Cli, job: str, now: bool, no_wait: bool, as_json: bool, timeout: float | None) -> int:
    """Stop a job: running mini-batches are finished and a snapshot is made, so that `rudra resume` goes on.

    \b
      rudra stop 7f3a01
    """
    with cli.places() as places:
        head, row = places.find_live(job)
        head.stop(row.job, now)
        if not no_wait:
            row = Follower(head, row.job, quiet=True).wait(time.monotonic() + (60.0 if timeout is None else timeout))
    if as_json:
        emit_json(job_object(row))
    else:
        say(f"job {row.job} is {row.state}" if not no_wait else f"job {row.job} is told to stop")
    if line := failure(row):
        fail(line)
        return EXIT_JOB_FAILED
    return 0


@command("again")
@job_argument
@click.option("--follow", is_flag=True, help="Watch it to its end; Ctrl-C detaches.")
@set_option
@json_option
@quiet_option
@click.pass_obj
def again(cli: Cli, job: str, follow: bool, sets: tuple[str, ...], as_json: bool, quiet: bool) -> int:
    """Run a job anew with the same file, and -s for what is to differ.

    \b
      rudra again 7f3a01 -s job.seed=2

    A job of `rudra run` runs in a private cluster again. One that brought its code (run.code) runs that code, whatever
    became of the folder since.
    """
    from pathlib import Path

    code = None
    with cli.places() as places:
        found = places.find(job)
        reply = found.place.get(found.row.job)
        before = job_from_toml(reply.toml, name=found.row.name).job.run
        if any(text.partition("=")[0].strip() == "run.code" for text in sets):
            raise UsageError("run.code cannot be set: the job is to run again as it is", fix="`rudra submit` it anew")
        folder = Path(os.path.abspath(before.cwd)) if before.cwd and not before.code else Path.cwd()
        loaded = job_from_toml(reply.toml, name=found.row.name, sets=sets, folder=folder, packed=bool(before.code))
        tell_notes(loaded)
        origins = {k: o if o.startswith("-s ") else reply.origins.get(k, o) for k, o in loaded.origins.items()}
        loaded = replace(loaded, origins=origins)  # of the first job, not of the file that it became
        message = submission(loaded, again=found.row.job, bundle=reply.code_hash if before.code else "")
        if not found.place.of_run:
            head = found.place if isinstance(found.place, Head) else places.head()
            new = head.submit(message)
            if follow:
                note(f"job {new} {loaded.job.job.name}")
                return watch(head, new, as_json, quiet, None)
            return submitted(new, loaded.job.job.name, as_json, quiet)
        if before.code:
            run = found.place.run if isinstance(found.place, Head) else found.place.folder
            code = FinishedRun(run or Path()).bundle(reply.code_hash)
    from rudra_zmq.cli.run import run_private

    return run_private(cli, loaded, message, code, as_json, quiet)
