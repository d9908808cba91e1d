"""`python -m rudra_zmq.learner.estimate`: how much memory a task's job needs, before it is submitted.

Owns: making the model once, in a process of its own, and the answer as JSON. The job (`Asked`) comes on stdin.
Must not know: how much any host has.
"""

from __future__ import annotations

import sys

import msgspec

from rudra_zmq.config import JobFile, job_from_toml
from rudra_zmq.config.places import with_places
from rudra_zmq.errors import EXIT_OK, RudraError
from rudra_zmq.learner.places import known
from rudra_zmq.learner.signature import Signature
from rudra_zmq.node import budget, rule
from rudra_zmq.node.model import demand
from rudra_zmq.tasks import load_task
from rudra_zmq.wire.layout import Layout


class Asked(msgspec.Struct, frozen=True):
    """A job; ``cwd`` and ``code``: where its task may lie."""

    toml: str
    cwd: str
    code: str = ""


class Estimate(msgspec.Struct, frozen=True):
    """Bytes. ``learner``: weights and gradient of one; its activations and its data come on top of that."""

    parameters: int
    servers: int
    parts: list[tuple[str, int]]
    learner: int


def estimate(job: JobFile) -> Estimate:
    """Of a task's job. What the task itself raises passes through."""
    assert job.job.task is not None
    signature = Signature.of(load_task(job.job.task, job.job.task_args).model())
    layout = Layout.of(signature.message())
    spec = rule.job_spec(job.update, layout, signature.frozen)
    plan = budget.budget(demand(job, layout, spec), job.servers.memory_bytes or sys.maxsize)
    return Estimate(layout.P, plan.nbytes, [(part.name, part.nbytes) for part in plan.parts], 2 * layout.nbytes)


def main() -> int:
    """The exit status."""
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
        sys.path[:0] = [asked.cwd, *filter(None, [asked.code])]
        job = with_places(job_from_toml(asked.toml, name="job").job, known())
        sys.stdout.buffer.write(msgspec.json.encode(estimate(job)) + b"\n")
    except (RudraError, msgspec.MsgspecError) as error:
        print(f"rudra: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, RudraError) else 1
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
