"""``rudra simulate``: a job's protocol in virtual time, times only.

Owns the flags and the size of the data that so many rounds need. Must not know how the engine works.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from rudra_zmq.commands import CONTEXT, Command, run
from rudra_zmq.config import JobFile, job_from_toml, load_job, parse_size
from rudra_zmq.core.events import Failed
from rudra_zmq.core.params import DataParams
from rudra_zmq.errors import EXIT_JOB_FAILED, EXIT_OK, UsageError
from rudra_zmq.node.spec import data_params, learner_params, sync_params
from rudra_zmq.sim.compute import EXAMPLES, parse_compute, parse_link, parse_straggler, slowness
from rudra_zmq.sim.engine import Engine
from rudra_zmq.sim.report import Setting, as_lines, as_object, histogram_rows

NO_FILE = '[job]\nname = "simulation"\ntask = "rudra_zmq.tasks.fashion_mnist:cnn"\n'
HISTOGRAM_ROWS = 32


@click.command("simulate", cls=Command, context_settings=CONTEXT)
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("-s", "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A setting over the job file's.")
@click.option("--learners", type=click.IntRange(1, 65535), help="lambda, over learners.count.")
@click.option("--compute", default="constant:20ms", show_default=True, metavar="KIND:TIME", help=f"{EXAMPLES}.")
@click.option("--straggler", "stragglers", multiple=True, metavar="COUNTxFACTOR", help='"1x3": one learner 3x slower.')
@click.option("--link", default="", metavar="RATE,LATENCY", help='The server\'s line, "1gbit,0.1ms"; needs --size.')
@click.option("--size", default="", metavar="SIZE", help='Bytes of the model on that line, "400kB".')
@click.option("--rounds", type=click.IntRange(1), default=1000, show_default=True, help="Rounds of lambda gradients.")
@click.option("--discard", type=click.IntRange(0), default=30, show_default=True, help="Rounds left out of staleness.")
@click.option("--seed", type=click.IntRange(0), help="Draws the times, over job.seed.")
@click.option("--time-only", is_flag=True, help="Times and staleness alone (said in a note where it is not given).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
def simulate(
    job: Path | None,
    sets: tuple[str, ...],
    learners: int | None,
    compute: str,
    stragglers: tuple[str, ...],
    link: str,
    size: str,
    rounds: int,
    discard: int,
    seed: int | None,
    time_only: bool,
    as_json: bool,
) -> int:
    """Run a job's protocol in virtual time: how stale gradients get, and how fast it goes.

    \b
      rudra simulate etc/rudra/jobs/fashion-softsync.toml --learners 30 -s sync.n=15 \\
          --compute exponential:20ms --straggler 1x3 --rounds 1000 --discard 30 --time-only

    Without JOB the defaults of a job file hold.
    """
    if discard >= rounds:
        raise UsageError(
            f"{discard} of {rounds} rounds are left out", where="--discard", fix="leave out fewer, or run more --rounds"
        )
    if bool(link) != bool(size):
        raise UsageError("a link needs a size of the model, and a size a link", where="--link", fix="give both or none")
    overrides = [*sets, *([f"learners.count={learners}"] if learners else [])]
    loaded = load_job(job, overrides) if job else job_from_toml(NO_FILE, name="simulation", sets=overrides)
    for line in loaded.notes:
        click.echo(f"note: {line}", err=True)
    file = loaded.job
    lam = file.learners.count
    data = enough_data(file, rounds)
    engine = Engine(
        sync_params(file),
        learner_params(file),
        data,
        parse_compute(compute),
        slowness=slowness(lam, [parse_straggler(text) for text in stragglers]),
        link=parse_link(link) if link else None,
        size=parse_size(size) if size else 0,
        seed=file.job.seed if seed is None else seed,
    )
    result = engine.run(gradients=rounds * lam, discard=discard * lam)
    setting = Setting(file.job.name, data.samples, compute, stragglers, link, rounds, discard)
    if not time_only:
        click.echo("note: times alone; nothing is trained", err=True)
    if as_json:
        click.echo(json.dumps(as_object(setting, engine.sync.force, result)))
    else:
        for what, value in as_lines(setting, engine.sync.force, result):
            click.echo(f"{what:<14}{value}")
        rows = histogram_rows(result)
        if len(rows) <= HISTOGRAM_ROWS:
            for sigma, share, bar in rows:
                click.echo(f"{sigma:>6}  {share:>8}  {bar}")
    return EXIT_JOB_FAILED if isinstance(result.ended, Failed) else EXIT_OK


def enough_data(file: JobFile, rounds: int) -> DataParams:
    """As many samples an epoch as ``rounds`` rounds need in all epochs, and two rounds more.

    So nobody runs out of samples before the last round, where the end of the data would show in the staleness.
    """
    per_epoch = math.ceil(rounds / file.job.epochs) + 2
    return data_params(file, per_epoch * file.learners.global_batch_of(file.learners.count))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run(simulate, argv, "rudra simulate")


if __name__ == "__main__":
    sys.exit(main())
