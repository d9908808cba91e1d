"""A process as a member of a job: joined at the start of the script's `with`, gone in good order at its end.

Owns: seeds, threads, logs and signals of a learner process, and what its exit status says. Must not know: training.

Exit status: 0 done or left as asked; 75 the servers are lost (a loss, the rank may be started again); that of the
error for what the library refuses; what Python makes of the script's own exceptions (of KeyboardInterrupt a death by
SIGINT: a loss, as every death by a signal is).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from rudra_zmq import log
from rudra_zmq.errors import RudraError
from rudra_zmq.learner.join import SPEC, Learner
from rudra_zmq.learner.line import NodeLost
from rudra_zmq.learner.remote import Leaving, RemoteExchange
from rudra_zmq.learner.seeds import seed_everything
from rudra_zmq.learner.spec import LearnerSpec, read_spec

EXIT_NODE_LOST = 75

_log = log.get()


@contextmanager
def joined(path: Path, ignored: Mapping[str, object]) -> Iterator[Learner]:
    """The `with` block of a script in a job. `ignored`: arguments of join() that the job file overrules."""
    os.environ.pop(SPEC, None)  # what this process starts is not this learner
    with ending():
        spec = read_spec(path)
        set_up(spec)
        if ignored:
            _log.info("the job file is used", instead_of=",".join(f"{k}={v}" for k, v in ignored.items()))
        exchange = RemoteExchange(spec)
        with drained_by(exchange):
            seed_everything(exchange.job.seed)
            learner = Learner(exchange, Path(spec.output))
            try:
                yield learner
            except Leaving:
                learner.leave(None)
                raise
            except (KeyboardInterrupt, NodeLost):
                raise  # a loss, as learnerd will tell by the signal or the exit status: no word of a failure
            except BaseException as error:
                learner.leave(error)
                raise
            else:
                learner.leave(None)
            finally:
                learner.close()


def set_up(spec: LearnerSpec) -> None:
    """Log and threads."""
    log.setup("evaluator" if spec.role == "evaluator" else f"learner[{spec.rank}]", file=Path(spec.log))
    torch.set_num_threads(spec.threads)
    _log.info("started", job=spec.job, incarnation=spec.incarnation, pid=os.getpid(), threads=spec.threads)


@contextmanager
def ending() -> Iterator[None]:
    """Errors of the library become one line on stderr and an exit status; those of the script pass through."""
    try:
        yield
    except Leaving:
        raise SystemExit(0) from None
    except RudraError as error:
        _log.error(str(error))
        print(f"rudra: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_NODE_LOST if isinstance(error, NodeLost) else error.exit_status) from None


@contextmanager
def drained_by(exchange: RemoteExchange) -> Iterator[None]:
    """SIGTERM asks to leave, the second one ends at once. Nothing is changed outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        exchange.ask_to_leave()

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that was not set from Python
            signal.signal(signal.SIGTERM, before)
