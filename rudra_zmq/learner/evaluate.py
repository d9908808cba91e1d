"""The evaluator: the paper's statistics server, which tests the weights of an epoch on its own time.

Owns: the conversation of an evaluator with the node, and the test of one set of weights. Must not know: training.

    Hello -> Welcome      Attach      Evaluate, chunks -> TestResult      Finish

A pulse tells the node that it lives, however long a test takes. Which weights it gets is the node's choice: the
newest epoch's, and the last one's always.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from rudra_zmq import log
from rudra_zmq.config.job import JobFile
from rudra_zmq.errors import RudraError
from rudra_zmq.learner.attach import AttachedModel
from rudra_zmq.learner.data import length
from rudra_zmq.learner.keys import Keys
from rudra_zmq.learner.line import GIVE_UP_S, Line, hello_of
from rudra_zmq.learner.link import LinkLost
from rudra_zmq.learner.member import ending, set_up
from rudra_zmq.learner.pulse import Pulse
from rudra_zmq.learner.remote import LAST_WORDS_S, Leaving
from rudra_zmq.learner.seeds import seed_everything
from rudra_zmq.learner.spec import LearnerSpec
from rudra_zmq.learner.task import indexable
from rudra_zmq.net.sockets import make_context
from rudra_zmq.tasks import Task, load_task
from rudra_zmq.wire.messages.data import Evaluate, Finish, TestResult

BATCH = 200
NICENESS = 5
"""Learners on the same cores come first: nobody waits for a test but the end of the job."""

_log = log.get()


class Examiner:
    """A task's model and test data, and the figures of a set of weights."""

    def __init__(self, task: Task, seed: int) -> None:
        """Raises RudraError where the task has no data to test on."""
        seed_everything(seed)
        self.attached = AttachedModel(task.model())
        self._task = task
        self._data = indexable(task.dataset("test"))
        self._samples = length(self._data)

    def test(self) -> dict[str, float]:
        """accuracy and test_error (0..1) and the mean loss over the test split, of the weights that are loaded."""
        self.attached.load()
        model = self.attached.model
        model.eval()
        sums = {"correct": 0.0, "count": 0.0, "loss_sum": 0.0}
        with torch.no_grad():
            for batch in self._batches():
                for name, value in self._task.metrics(model, batch).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
        fix = 'metrics() has to return at least {"correct", "count", "loss_sum"}'
        if not 0 < sums["count"] < math.inf:
            raise RudraError("the task's metrics counted no samples", where="job.task", fix=fix)
        if not 0 <= sums["correct"] <= sums["count"]:
            text = f"the task's metrics say that {sums['correct']:g} of {sums['count']:g} samples are correct"
            raise RudraError(text, where="job.task", fix=fix)
        accuracy = sums["correct"] / sums["count"]
        return {"accuracy": accuracy, "test_error": 1.0 - accuracy, "loss": sums["loss_sum"] / sums["count"]}

    def _batches(self) -> Any:
        if isinstance(self._data, TensorDataset):
            tensors = self._data.tensors
            return ([t[at : at + BATCH] for t in tensors] for at in range(0, self._samples, BATCH))
        return DataLoader(self._data, batch_size=BATCH)


class Evaluator:
    """The conversation. SIGTERM ends it at the next message."""

    def __init__(self, spec: LearnerSpec, examiner: Callable[[], Examiner], *, give_up_s: float = GIVE_UP_S) -> None:
        """``examiner`` makes one, which takes its time: the node knows by then that this process lives."""
        self._make = examiner
        self._spec = spec
        self._leaving = threading.Event()
        self._keys = keys = Keys(spec)
        self._context = make_context("data")
        self._line = Line(self._context, spec, keys, "evaluator", self._look, lambda _: None, give_up_s)

    def run(self) -> None:
        """Test what comes until the node says that nothing more will. Raises RudraError, NodeLost, Leaving."""
        pulse: Pulse | None = None
        try:
            self._line.keep_on(lambda: None)
            welcome = self._line.welcome
            assert welcome is not None
            hello, file = hello_of(self._spec, "evaluator-pulse"), Path(self._spec.node_file)
            pulse = Pulse(self._context, self._keys, hello, file, welcome.ping_s, welcome.liveness_s)
            pulse.start()
            self._examiner = self._make()
            self._line.keep_on(self._attach)
            self._line.greeting.append(self._attach)
            while self._line.keep_on(self._serve):
                pass
        finally:
            if pulse is not None:
                pulse.close()
            self._line.hang_up(LAST_WORDS_S)
            self._context.close()

    def ask_to_leave(self) -> None:
        """May be called from a signal handler."""
        self._leaving.set()

    def _attach(self) -> None:
        self._line.now.send(self._examiner.attached.message)

    def _serve(self) -> bool:
        message = self._line.receive(Evaluate, Finish)
        if not isinstance(message, Evaluate):
            return False
        weights = self._examiner.attached.weights
        if message.nbytes != len(weights.data):
            raise LinkLost(f"the node sends {message.nbytes} bytes of weights, the model has {len(weights.data)}")
        self._line.now.finish(self._line.now.expect(message.key, weights))
        start = time.perf_counter()
        metrics = self._examiner.test()
        seconds = time.perf_counter() - start
        _log.info("tested", epoch=message.epoch, seconds=f"{seconds:.2f}", accuracy=f"{metrics['accuracy']:.4f}")
        self._line.now.send(
            TestResult(
                epoch=message.epoch,
                generation=message.generation,
                timestamp=message.timestamp,
                metrics=metrics,
                seconds=seconds,
            )
        )
        return True

    def _look(self) -> None:
        if self._leaving.is_set():
            raise Leaving


def evaluate(spec: LearnerSpec, job: JobFile) -> None:
    """The whole life of an evaluator process."""
    with ending():
        set_up(spec)
        os.nice(NICENESS)
        assert job.job.task is not None
        task, args, seed = job.job.task, job.job.task_args, job.job.seed

        def examiner() -> Examiner:
            made = Examiner(load_task(task, args), seed)
            signal.signal(signal.SIGTERM, lambda number, frame: evaluator.ask_to_leave())  # it ended at once before
            return made

        evaluator = Evaluator(spec, examiner)
        evaluator.run()
