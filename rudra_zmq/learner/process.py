"""The program of a learner: `python -m rudra_zmq.learner.process`, started by learnerd with RUDRA_LEARNER.

Owns: what happens before user code: dying with learnerd, the working folder, which of task, script, module or
evaluator this process is. Must not know: training. A script takes this process over by exec, as if started by hand.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from rudra_zmq.config.job import JobFile
from rudra_zmq.config.load import job_from_toml
from rudra_zmq.config.places import with_places
from rudra_zmq.errors import EXIT_USAGE, ConfigError, RudraError
from rudra_zmq.learner.places import known
from rudra_zmq.learner.spec import read_spec

SPEC = "RUDRA_LEARNER"
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """The exit status; does not return for a script."""
    path = os.environ.get(SPEC)
    if path is None:
        print("rudra: this is the program of a learner. Fix: rudra run JOB.toml", file=sys.stderr)
        return EXIT_USAGE
    try:
        spec = read_spec(Path(path))
        die_with(spec.ppid)
        job = with_places(job_from_toml(spec.toml, name=spec.job).job, known())
        enter(spec.cwd)
        if spec.role == "learner" and job.kind != "task":
            take_over(job, spec.code)
    except RudraError as error:
        print(f"rudra: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    sys.path.insert(0, spec.cwd)  # a task may lie beside the job file, as a script's own modules do
    # An evaluator needs a model and data to test on: a task has them.
    if spec.role == "evaluator":
        from rudra_zmq.learner.evaluate import evaluate

        evaluate(spec, job)
    else:
        from rudra_zmq.learner.task import train

        train(job)
    return 0


def die_with(ppid: int) -> None:
    """Be killed when learnerd ends, however it ends; also if it has ended already. Holds over exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise RudraError(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != ppid:
        raise RudraError(f"learnerd, PID {ppid}, has ended", fix="none is needed: the job goes on without this process")


def enter(folder: str) -> None:
    """The job's working folder."""
    try:
        os.chdir(folder)
    except OSError as error:
        fix = "make it on this host, or submit from a folder that is there"
        raise ConfigError(f"the job's folder: {error.strerror}", where=folder, fix=fix) from None


def take_over(job: JobFile, code: str) -> NoReturn:
    """Become the script (a path inside ``code``, where there is one) or module, with its own arguments and nothing of
    ours."""
    run = job.run
    script = os.path.join(code, run.script)
    target = [script] if run.script else ["-m", run.module]
    if run.script and not os.path.isfile(script):
        raise ConfigError("the script is not there", where=script, fix="correct run.script, or put it on this host")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *target, *run.args])


if __name__ == "__main__":
    raise SystemExit(main())
