"""``rudra run`` and what shares its private cluster: ``resume`` of such a run."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from rudra_zmq.cli.base import Cli, command, job_argument, json_option, quiet_option
from rudra_zmq.cli.cluster import PrivateCluster
from rudra_zmq.cli.follow import Follower, story
from rudra_zmq.cli.job_commands import report
from rudra_zmq.cli.jobs_given import TargetCommand, load_target, submission, target_arguments, tell_notes
from rudra_zmq.cli.output import drop_terminal, emit_json, note, say, size
from rudra_zmq.cli.places import FinishedRun, Found, Head, down
from rudra_zmq.config import LoadedJob
from rudra_zmq.errors import EXIT_INTERRUPTED, NotRunning
from rudra_zmq.wire.bundle import Bundle
from rudra_zmq.wire.messages.control import JobRow, Submit

DRAIN_S = 60.0


@command("run", cls=TargetCommand)
@click.option("--dry-run", is_flag=True, help="Print the effective job file and stop.")
@json_option
@quiet_option
@target_arguments
@click.pass_obj
def run(
    cli: Cli,
    args: tuple[str, ...],
    module: str | None,
    sets: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train on this machine alone: a private cluster is started, the job followed, reported, torn down.

    \b
      rudra run etc/rudra/jobs/fashion-softsync.toml
      rudra run -s sync.protocol=async -s learners.count=2 train.py --my-own-flag
      rudra run -m my.package.train

    TARGET is JOB.toml, a script or -m MODULE; what follows a script's name is the script's own. Ctrl-C stops the
    job cleanly (drain, snapshot) and a second one at once; `rudra resume` goes on with it.
    """
    from rudra_zmq.cli.pack import pack_job

    loaded = load_target(args, module, sets)
    tell_notes(loaded)
    code = pack_job(loaded.job)
    if dry_run:
        return print_job(loaded, code, as_json)
    return run_private(cli, loaded, submission(loaded, bundle=code.name if code else ""), code, as_json, quiet)


def run_private(cli: Cli, loaded: LoadedJob, message: Submit, code: Bundle | None, as_json: bool, quiet: bool) -> int:
    """Submit to a private cluster of its own and follow to the end."""
    learners = loaded.job.learners
    with _signals(), PrivateCluster(cli.settings, slots=max(learners.count, learners.most)) as cluster:
        job = cluster.head.submit(message, code)
        cluster.submitted = True
        if not quiet:
            note(f"job {job} {loaded.job.job.name}: {learners.count} learners on this machine, in {cluster.folder}")
        return follow_private(cluster, job, as_json, quiet)


def job_as_object(loaded: LoadedJob, code: Bundle | None) -> dict[str, Any]:
    """The effective job file, and what would go with it, for --json."""
    from rudra_zmq.config import job_to_toml

    goes = None if code is None else {"sha256": code.name, "bytes": len(code.data)}
    return {"toml": job_to_toml(loaded.job), "origins": dict(loaded.origins), "code": goes}


def print_job(loaded: LoadedJob, code: Bundle | None, as_json: bool) -> int:
    """The effective job file, and what would go with it."""
    from rudra_zmq.config import job_to_toml

    if as_json:
        emit_json(job_as_object(loaded, code))
    else:
        if code is not None:
            note(f"code {code.name[:12]}: {size(len(code.data))}")
        say(job_to_toml(loaded.job).rstrip())
    return 0


def follow_private(cluster: PrivateCluster, job: str, as_json: bool, quiet: bool, since: int = 0) -> int:
    """Follow to the end, stop on Ctrl-C, report; the exit status of the command."""
    follower = Follower(cluster.head, job, quiet=quiet, check=cluster.check, since=since)
    interrupted = False
    try:
        row = follower.wait()
    except KeyboardInterrupt:
        interrupted = True
        row = _stop(cluster, follower, job)
    status = report(row, as_json, quiet)
    if interrupted and not status:
        note(f"`rudra resume {job}` goes on with it" if row.state != "DONE" else "it was done before it was stopped")
        return EXIT_INTERRUPTED
    return status


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """TERM (a scheduler) and HUP (a closed terminal) mean the same as the first Ctrl-C; what nohup ignores stays so."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, before in handlers.items():
            if before is not signal.SIG_IGN:
                signal.signal(number, _interrupt)
        yield
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)


def _interrupt(number: int, frame: Any) -> None:
    if number == signal.SIGHUP:
        drop_terminal()
    raise KeyboardInterrupt


def _stop(cluster: PrivateCluster, follower: Follower, job: str) -> JobRow:
    """Drain; a second interrupt kills the cluster. Returns the job as it was seen last."""
    try:
        note("\nstopping: running mini-batches are finished and a snapshot is made (Ctrl-C again: at once)")
        with contextlib.suppress(NotRunning):  # it ended in this very moment
            cluster.head.stop(job, now=False)
        return follower.wait(time.monotonic() + DRAIN_S)
    except KeyboardInterrupt:
        cluster.kill()
        note(f"stopped at once; `rudra resume {job}` goes on from the newest snapshot")
        sys.exit(EXIT_INTERRUPTED)


@command("resume")
@job_argument
@json_option
@quiet_option
@click.pass_obj
def resume(cli: Cli, job: str, as_json: bool, quiet: bool) -> int:
    """Go on with a job that was stopped, failed or lost, from its newest snapshot.

    \b
      rudra resume            the newest job
      rudra resume 7f3a01

    A job of `rudra run` gets its private cluster again and is followed to its end.
    """
    with cli.places() as places:
        found = places.find(job)
        if found.row.state == "DONE":
            raise NotRunning(f"job {found.row.job} is DONE", fix=f"`rudra again {found.row.job}` runs it anew")
        if isinstance(found.place, Head):
            text = found.place.resume(found.row.job)
            if as_json:
                emit_json({"job": found.row.job, "text": text})
            else:
                say(found.row.job if quiet else text)
            return 0
        if not found.place.of_run:
            raise down(found.row)
        return _resume_run(cli, found, found.place, as_json, quiet)


def _resume_run(cli: Cli, found: Found, place: FinishedRun, as_json: bool, quiet: bool) -> int:
    from rudra_zmq.config import job_from_toml

    job = found.row.job
    learners = job_from_toml(place.get(job).toml, name=found.row.name).job.learners
    told = story(place, job)
    slots = max(learners.count, learners.most)
    with _signals(), PrivateCluster(cli.settings, place.folder, slots=slots) as cluster:
        row = cluster.head.get(job).row
        if row.state in ("STOPPED", "FAILED", "LOST"):
            cluster.head.resume(job)
        return follow_private(cluster, job, as_json, quiet, told[-1].seq if told else 0)
