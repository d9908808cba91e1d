"""The Python interface: `with rudra.join() as learner`, in a job or alone.

Owns: the object that a script talks to, the order in which its calls make sense, and what a learner process owes its
job at both ends of the `with` block. Must not know: sockets, leases, how anything is done.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from rudra_zmq import log
from rudra_zmq.errors import RudraError, UsageError
from rudra_zmq.learner import workers
from rudra_zmq.learner.attach import AttachedModel
from rudra_zmq.learner.batches import Batches, LeaseSampler, Options
from rudra_zmq.learner.exchange import Exchange, Job
from rudra_zmq.learner.local import LocalExchange
from rudra_zmq.learner.optimizer import RudraOptimizer
from rudra_zmq.learner.save import write_weights
from rudra_zmq.learner.seeds import RANK, mix, seed_everything
from rudra_zmq.learner.session import Session

Model = TypeVar("Model", bound=nn.Module)
SPEC = "RUDRA_LEARNER"

_log = log.get()
_has_joined = False


class Learner:
    """One learner of a job. Made by `join`; its methods are called from one thread."""

    def __init__(self, exchange: Exchange, output: Path) -> None:
        self.output = output
        """A folder for the script's own files."""
        self._exchange = exchange
        self._session: Session | None = None
        self._batches: Batches | None = None
        self._optimizer: RudraOptimizer | None = None
        self._ruled = False
        self._accumulate = 1
        self._epoch = 0
        self._next_epoch = 0
        self._steps = 0

    # ---- who

    @property
    def rank(self) -> int:
        """0 to lambda - 1; stays with this learner when another one leaves."""
        return self._exchange.rank

    @property
    def incarnation(self) -> int:
        """Grows with each process that takes the rank over."""
        return self._exchange.incarnation

    @property
    def seq(self) -> int:
        """The number of the gradient that the current batch belongs to: (rank, incarnation, seq) names it."""
        return self._session.seq if self._session is not None else 0

    @property
    def size(self) -> int:
        """lambda: the learners of the job, as of the last exchange."""
        return self._exchange.lam

    @property
    def epoch(self) -> int:
        """The epoch of the loop under way, from 0."""
        return self._epoch

    @property
    def is_chief(self) -> bool:
        """Whether this is the lowest rank present, as of the last exchange: the one that writes. It moves on death."""
        return self._exchange.chief

    # ---- set up

    def attach(self, model: Model) -> Model:
        """Agree with the job on the model; returns it with the job's weights. Seeds by rank afterwards.

        Raises Rejected, with the tensor's name and the fix, for what cannot be trained or differs from the others'.
        """
        if self._session is not None:
            fix = "attach one nn.Module that holds all networks"
            raise UsageError("a model is attached already", where="learner.attach()", fix=fix)
        attached = AttachedModel(model)
        self._exchange.attach(attached.message, attached.layout, attached.weights, attached.gradient)
        attached.load(self._exchange.weights)
        self._session = Session(self._exchange, attached)
        seed_everything(mix(RANK, self._exchange.job.seed, self.rank))
        return model

    def optimizer(self, optimizer: torch.optim.Optimizer) -> RudraOptimizer:
        """The optimizer whose step() exchanges; the given one's class and settings become the job's rule.

        A rule in the job file wins, said once. Raises Rejected for a class or an option that no rule has.
        """
        session = self._attached("optimizer")
        if self._optimizer is not None:
            fix = "one optimizer with a group of parameters for each network (lr and weight_decay may differ)"
            raise UsageError("there is an optimizer already", where="learner.optimizer()", fix=fix)
        mine = RudraOptimizer(optimizer, session)
        verdict = self._exchange.rule(mine.rule())
        if not verdict.accepted:
            mine.rules = False
            _log.info("the job file's rule is used", rule=verdict.rule, instead_of=type(optimizer).__name__)
        self._optimizer = mine
        self._ruled = True
        return mine

    def accumulate(self, k: int) -> None:
        """Make each gradient of k batches: every step() adds, the last of a lease exchanges. Before batches()."""
        if k < 1:
            raise UsageError(f"accumulate({k})", fix="give a whole number of at least 1")
        if self._batches is not None and self._batches.announced:
            raise UsageError("accumulate() after the first batch", fix="call it before learner.batches()")
        self._accumulate = k
        self._batches = None

    # ---- data

    def epochs(self) -> Iterator[int]:
        """0, 1, ... up to the job's epochs; ends early where the job ends, or this learner is asked to leave.

        After a restart it counts from 0 again, with empty loops for what is done: schedulers come back to their state.
        """
        for epoch in range(self._exchange.job.epochs):
            if self._session is not None and self._session.done:
                return
            self._epoch = self._next_epoch = epoch
            yield epoch

    def batches(self, dataset: Any, **options: Any) -> Iterator[Any]:
        """The batches of the next epoch, as DataLoader makes them with these options: leased, each sample once.

        `dataset` may also be a DataLoader built on `sampler(dataset)`. Options: batch_size, num_workers, collate_fn,
        worker_init_fn, prefetch_factor, persistent_workers (default True), pin_memory, timeout,
        multiprocessing_context. A learner that gets no samples of the epoch gets an empty loop.
        """
        session = self._attached("batches")
        if not self._ruled:
            self._exchange.rule(None)
            self._ruled = True
        if self._batches is None:
            self._batches = Batches(session, self._accumulate)
        checked = Options.of(dataset, options)
        self._epoch = self._next_epoch
        self._next_epoch += 1
        return self._batches.loop(checked, self._epoch)

    def sampler(self, dataset: Any) -> LeaseSampler:
        """For a DataLoader of one's own, as sampler= or batch_sampler=; iterate learner.batches(loader)."""
        return LeaseSampler(dataset)

    # ---- steps

    def step(self, loss: torch.Tensor) -> None:
        """loss.backward(), opt.step(), opt.zero_grad(). `loss` is the mean over the batch, a scalar."""
        session = self._attached("step")
        loss.backward()  # type: ignore[no-untyped-call]
        self._steps += 1
        value = float(loss.detach())
        if self._optimizer is None:
            session.step(value)
            session.model.model.zero_grad(set_to_none=True)
            return
        self._optimizer.loss = value
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    # ---- the rest

    def log(self, **metrics: float) -> None:
        """Report figures of one's own, up to 64 by name; tensors of one element will do."""
        values = {name: float(value) for name, value in metrics.items()}
        if len(values) > 64:
            raise UsageError(f"{len(values)} figures in one log()", fix="give at most 64")
        _log.info("metrics", **(values | {"epoch": self.epoch, "step": self._steps}))
        self._exchange.log(values, self.epoch)

    def save(self, path: str | os.PathLike[str]) -> Path | None:
        """On the chief, write the weights as this learner has them to `path` (safetensors, in `output` if relative).

        All names of state_dict, tied ones too; the file appears whole or not at all. Elsewhere nothing, and None.
        """
        session = self._attached("save")
        if not self.is_chief:
            return None
        target = self.output / path
        write_weights(target, session.model.state_dict())
        return target

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, the weights stay one version; steps are refused, and changes by the script are undone at the end."""
        session = self._attached("frozen")
        session.frozen = True
        try:
            with session.model.kept():
                yield
        finally:
            session.frozen = False

    # ---- inside

    def _attached(self, method: str) -> Session:
        if self._session is None:
            fix = "model = learner.attach(model) first"
            raise UsageError("no model is attached", where=f"learner.{method}()", fix=fix)
        return self._session

    def leave(self, error: BaseException | None) -> None:
        """The end of the `with` block: good-bye to the job, by what became of it."""
        done = self._session is not None and self._session.done
        reason, text = "done" if done and not self._exchange.leaving else "drain", ""
        if isinstance(error, RudraError):
            reason, text = "failed", str(error)
        elif error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            reason, text = "failed", traceback.format_exception_only(type(error), error)[-1].strip()
        elif not done:
            _log.info("the script ended before the job did", epoch=self.epoch)
        try:
            if self._session is not None:
                self._session.keep()
        finally:
            self._exchange.leave(reason, text)
        _log.info("ended", reason=reason, gradients=self._session.pushed if self._session is not None else 0)

    def close(self) -> None:
        """End workers, threads and sockets."""
        if self._batches is not None:
            self._batches.close()
        self._exchange.close()


@contextlib.contextmanager
def join(*, epochs: int | None = None, minibatch: int | None = None, seed: int | None = None) -> Iterator[Learner]:
    """Become a learner of the job that started this process, or of none: the same rules, alone, in this process.

    Seeds Python, NumPy and torch, so that models made inside are equal in all learners. The arguments (default 1, 32
    and 1) are for alone; in a job the job file has them. Raises UsageError in a worker process and the second time.
    """
    workers.stop_here()
    if workers.in_worker():
        fix = 'put what only the learner does under if __name__ == "__main__":'
        raise UsageError("join() in a process that multiprocessing started", fix=fix)
    global _has_joined
    if _has_joined:
        raise UsageError("this process has joined its job already", where="rudra.join()", fix="join once, and keep it")
    given = {"epochs": epochs, "minibatch": minibatch, "seed": seed}
    spec = os.environ.get(SPEC)
    if spec is not None:
        _has_joined = True
        from rudra_zmq.learner.member import joined

        with joined(Path(spec), {name: value for name, value in given.items() if value is not None}) as learner:
            yield learner
        return
    job = Job(
        seed=1 if seed is None else seed,
        epochs=1 if epochs is None else epochs,
        minibatch=32 if minibatch is None else minibatch,
        global_batch=0,
        count=1,
        protocol="softsync",
    )
    seed_everything(job.seed)
    learner = Learner(LocalExchange(job), Path.cwd())
    try:
        yield learner
    finally:
        learner.close()
