"""``rudra submit --dry-run``: where a job would run now, what its hosts lack, and the memory that it needs.

Owns how a plan is asked for and shown. What is printed stays a job file: all that is no key is a comment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from rudra_zmq.cli.base import Cli
from rudra_zmq.cli.jobs_given import submission
from rudra_zmq.cli.output import emit_json, say, size, table
from rudra_zmq.cli.run import job_as_object, print_job
from rudra_zmq.commands import fail
from rudra_zmq.config import LoadedJob, job_to_toml
from rudra_zmq.errors import EXIT_OK, EXIT_USAGE, Unreachable
from rudra_zmq.wire.bundle import Bundle
from rudra_zmq.wire.messages.control import Planned

ESTIMATE_S = 120.0


@dataclass(frozen=True)
class Memory:
    """Bytes of the servers and of each learner, at least; ``unknown``: why nothing is known."""

    servers: int = 0
    learner: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    unknown: str = ""
    wrong: bool = False  # the model cannot be made, here at least


def dry_run(cli: Cli, loaded: LoadedJob, code: Bundle | None, as_json: bool) -> int:
    """The effective file, the placement and the memory; 2 where the job could not run."""
    memory = needed(loaded)
    try:
        with cli.places() as places:
            plan = places.head().plan(submission(loaded))
    except Unreachable as error:
        plan = Planned(reason=f"no psd answers: {error.message}")
    lacks = {row.host: [*row.problems, *_short(memory, len(row.ranks), row.memory)] for row in plan.rows}
    if as_json:
        emit_json(job_as_object(loaded, code) | _object(plan, memory, lacks))
    else:
        print_job(loaded, code, as_json)
        say("\n" + "\n".join(f"# {line}".rstrip() for line in _lines(plan, memory, lacks)))
    if memory.wrong:
        fail(f"its model cannot be made: {memory.unknown}")
    return EXIT_USAGE if memory.wrong or any(lacks.values()) else EXIT_OK


def needed(loaded: LoadedJob) -> Memory:
    """What a task's job needs; a process of its own makes the model. A script's is known once it has made its own."""
    if loaded.job.kind != "task":
        return Memory(unknown="known once the script has made its model")
    run = loaded.job.run
    cwd = os.path.join(run.code, run.cwd) if run.code else run.cwd or os.getcwd()
    asked = {"toml": job_to_toml(loaded.job), "cwd": cwd, "code": run.code}
    command = [sys.executable, "-m", "rudra_zmq.learner.estimate"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=ESTIMATE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Memory(unknown=f"its model was not made within {ESTIMATE_S:g} s")
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no model could be made"])[-1].removeprefix("rudra: ")
        return Memory(unknown=said, wrong=importlib.util.find_spec("torch") is not None)
    found = json.loads(done.stdout.splitlines()[-1])
    return Memory(found["servers"], found["learner"], tuple((name, count) for name, count in found["parts"]))


def _short(memory: Memory, ranks: int, spare: int) -> list[str]:
    need = memory.learner * ranks
    if not spare or need <= spare:
        return []
    return [f"its learners need at least {size(need)}, it has {size(spare)} to spare. Fix: fewer learners there"]


def _lines(plan: Planned, memory: Memory, lacks: dict[str, list[str]]) -> list[str]:
    lines = [f"it would wait: {plan.reason}"] if plan.reason else _table(plan, memory)
    lines += [f"host {host}: {line}" for host, problems in lacks.items() for line in problems]
    if memory.unknown:
        return [*lines, f"memory: {memory.unknown}"]
    parts = ", ".join(f"{name} {size(count)}" for name, count in memory.parts)
    return [*lines, f"memory of its servers, on psd's host: {size(memory.servers)} ({parts})"]


def _table(plan: Planned, memory: Memory) -> list[str]:
    rows = [
        [
            row.host,
            ",".join(map(str, row.ranks)),
            " ".join(row.devices) or "cpu",
            size(memory.learner * len(row.ranks)) if memory.learner else "-",
            size(row.memory) if row.memory else "-",
        ]
        for row in plan.rows
    ]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        table(["host", "ranks", "devices", "needs", "to spare"], rows)
    return text.getvalue().splitlines()


def _object(plan: Planned, memory: Memory, lacks: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "waits": plan.reason,
        "placement": [
            {"host": row.host, "ranks": row.ranks, "devices": row.devices, "problems": lacks[row.host],
             "memory": memory.learner * len(row.ranks), "memory_free": row.memory}
            for row in plan.rows
        ],
        "memory": {"servers": memory.servers, "learner": memory.learner, "parts": dict(memory.parts),
                   "unknown": memory.unknown},
    }  # fmt: skip
