"""The loop of a task: a model, data and a loss from the task, everything else from the job file.

Owns: the training loop of jobs without a script. Must not know: how anything in it is done.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset

from rudra_zmq.config.job import JobFile
from rudra_zmq.learner.join import join
from rudra_zmq.tasks import load_task


def train(job: JobFile) -> None:
    """Train job.task to its end in this process."""
    with join() as learner:
        assert job.job.task is not None
        task = load_task(job.job.task, job.job.task_args)
        data = indexable(task.dataset("train"))
        model = learner.attach(task.model())
        model.train()
        for _ in learner.epochs():
            for batch in learner.batches(data):
                learner.step(task.loss(model, batch))


def indexable(dataset: Any) -> Any:
    """The dataset's `tensors` as a TensorDataset, where it has them: whole batches are indexed at once."""
    tensors = getattr(dataset, "tensors", None)
    return TensorDataset(*tensors) if tensors is not None else dataset
