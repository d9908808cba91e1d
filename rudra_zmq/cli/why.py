"""``rudra why``: what each process of a job waits for, since when, and until when.

Owns the words around the head's rows. Knows nothing of what they mean.
"""

from __future__ import annotations

import click
import msgspec

from rudra_zmq.cli.base import Cli, command, job_argument, json_option
from rudra_zmq.cli.output import emit_json, say, span, table
from rudra_zmq.cli.places import ENDED, Head, down
from rudra_zmq.cli.report import failure
from rudra_zmq.wire.messages.control import WaitRow


@command("why")
@job_argument
@json_option
@click.pass_obj
def why(cli: Cli, job: str, as_json: bool) -> None:
    """Say what a job's processes wait for: who, for what, since when, for how long at most, and what happens then.

    \b
      rudra why
      rudra why 7f3a01 --json
    """
    with cli.places() as places:
        found = places.find(job)
        if isinstance(found.place, Head):
            answer = found.place.why(found.row.job)
            rows, row = answer.rows, answer.job
        elif found.row.state in ENDED:
            rows, row = [], found.place.get(found.row.job).row
        else:
            raise down(found.row)
    if as_json:
        head = {"job": row.job, "name": row.name, "state": row.state, "reason": row.reason}
        emit_json({**head, "waits": [msgspec.to_builtins(each) for each in rows]})
        return
    say(f"job {row.job} {row.name} is {row.state}" + (f": {row.reason}" if row.reason else ""))
    if rows:
        table(["who", "waits or works", "since", "at most", "then"], [_line(each) for each in rows])
    elif row.state in ENDED:
        say(failure(row, told=True) or "nobody waits for anything")
    else:
        say("nobody waits for anything that is known here")


def _line(row: WaitRow) -> list[str]:
    since = "" if row.since is None else span(row.since)
    return [row.who, row.what, since, "-" if row.left is None else f"{span(row.left)} more", row.then]
