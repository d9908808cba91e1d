"""The turn of a learner: which batch is next, when a step becomes a push, and what a batch without a step means.

Owns: the leases held and begun, the gradients accumulated, the numbers of a push. Must not know: how data is loaded,
what a torch optimizer is, who the servers are.

A lease is computed in batches (several with accumulate(k)); a *step* takes the gradients that are in the parameters;
the last batch of a lease makes the push. A batch is *open* until a step took it. When the next one is asked for and
it is still open, then
  - no gradient was computed since, or one that is not finite (GradScaler skips such a step): it was skipped;
  - else gradients are accumulating by hand, and the next push carries the samples of all open batches.
Gradients that the script dropped (zero_grad) take their batches with them: skipped too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rudra_zmq import log
from rudra_zmq.core.events import Clock, Lease, Span
from rudra_zmq.errors import UsageError
from rudra_zmq.learner.attach import AttachedModel, Mark
from rudra_zmq.learner.exchange import Answer, Exchange, Gradient

REPORT_S = 10.0

_log = log.get()


@dataclass(eq=False, slots=True)
class Begun:
    """A lease under way, and the clock of its weights; ``contributed`` once a step took gradients of its samples."""

    lease: Lease
    clock: Clock
    contributed: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """What is computed at one go: ``spans`` of one lease."""

    spans: tuple[Span, ...]
    begun: Begun

    @property
    def epoch(self) -> int:
        """The epoch of its samples."""
        return self.spans[0].epoch

    @property
    def count(self) -> int:
        """Samples."""
        return sum(span.count for span in self.spans)


@dataclass(slots=True)
class _Sum:
    """What was accumulated since the last push."""

    samples: int = 0
    losses: list[tuple[float, int]] = field(default_factory=list)

    def loss(self) -> float | None:
        """The mean over the samples whose loss is known and finite."""
        known = [(loss, count) for loss, count in self.losses if math.isfinite(loss)]
        return sum(loss * count for loss, count in known) / sum(c for _, c in known) if known else None


class Session:
    """One learner at work. ``done``: no more leases will come. ``seq``: of the gradient in the making."""

    def __init__(self, exchange: Exchange, model: AttachedModel) -> None:
        self.exchange = exchange
        self.model = model
        self.done = False
        self.frozen = False
        self.seq = 0
        self.rates: tuple[float, ...] | None = None  # the script's, where its optimizer rules
        self._refusals = log.RateLimiter(10.0)
        self.pushed = 0  # gradients and skips, of this incarnation
        self._clock = Clock(0, 0)
        self._held: deque[Lease] = deque()
        self._batches: deque[Batch] = deque()  # the rest of the lease under way
        self._begun: list[Begun] = []
        self._open: list[Batch] = []
        self._sum = _Sum()
        self._mark = Mark([])
        self._before = Mark([])  # the gradients when the newest batch was begun
        self._size = 0
        self._accumulate = 1
        self._resumed = time.perf_counter()
        self._waited = 0.0
        self._said: set[str] = set()
        self._since = time.monotonic()
        self._since_samples = 0

    # ---- leases

    def begin(self, samples: int, minibatch: int, accumulate: int, prefetch: int) -> None:
        """Announce the data; returns with the first leases (or `done`)."""
        self._size = minibatch or self.exchange.job.minibatch
        self._accumulate = accumulate
        answer = self._call(lambda: self.exchange.begin(samples, minibatch, accumulate, prefetch))
        self.pushed = answer.ack
        self._clock = answer.clock
        self._take(answer)

    @property
    def ahead(self) -> list[tuple[Span, ...]]:
        """The batches that will be computed next if nothing changes."""
        rest = [batch.spans for batch in self._batches]
        return rest + [spans for lease in self._held for spans in self._cut(lease)]

    def next(self, epoch: int) -> Batch | None:
        """The next batch of the loop over ``epoch``, begun; None where the loop ends.

        Samples of earlier epochs that came back are served too; what is accumulated at the end is pushed (R7).
        """
        if not self.done:
            self._settle_open()
        while not self._batches:
            if not self._held and not self.done and self._begun:
                self._take(self._call(self.exchange.want))
            if self.done or not self._held or self._held[0].epoch > epoch:
                if self.done or not self._begun:
                    return None
                self._push_rest()
                continue
            begun = Begun(self._held.popleft(), self._clock)
            self._begun.append(begun)
            self._batches.extend(Batch(spans, begun) for spans in self._cut(begun.lease))
        batch = self._batches.popleft()
        self._open.append(batch)
        self._before = Mark(self.model.grads())
        self.seq = self.pushed + 1
        return batch

    def _cut(self, lease: Lease) -> list[tuple[Span, ...]]:
        """A lease in batches of the script's size, or in ``accumulate`` equal ones where the servers divide."""
        if self._accumulate == 1:
            return [lease.spans]
        size = self._size or -(-lease.count // self._accumulate)
        return [tuple(part) for part in _chunks(lease.spans, size)]

    # ---- steps

    def step(self, loss: float | None = None) -> None:
        """Take the gradients for the open batches; the last one of a lease pushes, and loads new weights.

        Raises UsageError where there is no batch or no gradient, and Rejected for weights changed by the script.
        """
        if self.frozen:
            raise UsageError("a step inside learner.frozen()", fix="leave the block before opt.step()")
        if not self._open:
            fix = "one step for each batch of learner.batches(...); accumulate several losses before it"
            raise UsageError("a step without a batch of its own: a push carries the samples of its batch", fix=fix)
        grads = self.model.grads()
        if not grads:
            raise UsageError("a step, and no parameter has a gradient", fix="call loss.backward() before it")
        self.model.check()
        if len(self._open) > 1 and self._before.replaced(grads):
            self.dropped()
        self._collect(loss)
        self._mark = Mark(grads)
        if not self._batches:
            self._push()

    def dropped(self) -> None:
        """The script dropped its gradients: batches before the newest contribute nothing."""
        self._open = self._open[-1:]

    def _collect(self, loss: float | None) -> None:
        count = sum(batch.count for batch in self._open)
        whole = not self._sum.samples and not self._batches
        self.model.gather(None if whole else float(count), first=not self._sum.samples)
        self._sum.samples += count
        if loss is not None:
            self._sum.losses.append((loss, count))
        for batch in self._open:
            batch.begun.contributed = True
        if len({id(batch.begun) for batch in self._open}) > 1:
            self._warn_by_hand()
        self._open = []
        if not whole and not self._batches:
            self.model.divide(float(self._sum.samples))
        self._name_unused()

    def _settle_open(self) -> None:
        """The batch before had no step: was it skipped, or is something accumulating?"""
        if not self._open:
            return
        grads = self.model.grads()
        nothing = self._mark.same_as(grads) or not any(bool(g.any()) for g in grads)
        if not nothing and all(bool(torch.isfinite(g).all()) for g in grads):
            return
        self._open = []
        if self._batches:
            return
        if self._sum.samples:
            self.model.divide(float(self._sum.samples))
        self._push()

    def _push_rest(self) -> None:
        """The loop ends with leases begun and not pushed."""
        if self._open:
            self._collect(None)
            self._drop_grads()
        self._push()

    # ---- exchanges

    def _push(self) -> None:
        """Push what was collected (else a skip of everything begun), then what the script dropped."""
        given = [b for b in self._begun if b.contributed]
        left = [b for b in self._begun if not b.contributed]
        self._begun = []
        if not given:
            self._skip(left)
            return
        self.model.read_buffers(self.model.gradient)
        now = time.perf_counter()
        spans = tuple(span for b in given for span in b.lease.spans)
        gradient = Gradient(
            clock=min(b.clock for b in given),
            spans=spans,
            count=sum(span.count for span in spans),
            loss=self._sum.loss(),
            rates=self.rates if self.exchange.chief else None,
            compute_s=now - self._resumed,
            wait_s=self._waited,
            finite=self.model.finite(),
        )
        self._exchange(gradient)
        # Under hardsync they went back to the pool with the push, and may be held by another now.
        self._skip([b for b in left if b.lease in self._held])

    def _skip(self, left: Sequence[Begun]) -> None:
        if left and not self.done:
            spans = tuple(span for b in left for span in b.lease.spans)
            self._exchange(Gradient(min(b.clock for b in left), spans, 0))

    def _exchange(self, gradient: Gradient) -> None:
        self._sum = _Sum()
        self.pushed += 1
        answer = self._call(lambda: self.exchange.push(gradient))
        self._report(gradient, answer)
        if answer.verdict not in ("", "accepted", "skipped"):
            _log.limited(self._refusals, "warning", "gradient not applied", seq=self.pushed, verdict=answer.verdict)
        self._take(answer)
        if self.exchange.leaving and not self.done:
            self.keep()
            self.exchange.leave("drain")
            self.done = True
            self._held.clear()

    def _call(self, call: Callable[[], Answer]) -> Answer:
        start = time.perf_counter()
        answer = call()
        self._resumed = time.perf_counter()
        self._waited = self._resumed - start
        return answer

    def _take(self, answer: Answer) -> None:
        if answer.clock.generation != self._clock.generation:
            self._forget()
        self.model.write_into(self.exchange.gradient, keep=self._sum.samples > 0)
        self._clock = answer.clock
        begun = [b.lease for b in self._begun]
        self._held = deque(lease for lease in answer.leases if lease not in begun)
        self.done = self.done or answer.done
        if answer.fresh or self.exchange.weights is not self.model.weights:
            self.model.load(self.exchange.weights)

    def keep(self) -> None:
        """The weights stay, whatever the servers do from here on."""
        self.exchange.keep()
        if self.exchange.weights is not self.model.weights:
            self.model.load(self.exchange.weights)

    def _forget(self) -> None:
        """The servers went back to a snapshot: what is under way belongs to weights that are no more."""
        self._batches.clear()
        self._begun, self._open, self._sum = [], [], _Sum()
        self._drop_grads()

    def _drop_grads(self) -> None:
        for parameter in self.model.model.parameters():
            parameter.grad = None

    # ---- what is said

    def _report(self, gradient: Gradient, answer: Answer) -> None:
        """A line per 10 s."""
        self._since_samples += gradient.count
        seconds = time.monotonic() - self._since
        if seconds < REPORT_S:
            return
        pairs = {} if gradient.loss is None else {"loss": f"{gradient.loss:.4f}"}
        speed = round(self._since_samples / seconds)
        epoch, version = gradient.spans[0].epoch, answer.clock.timestamp
        _log.info("progress", epoch=epoch, step=self.pushed, version=version, samples_per_s=speed, **pairs)
        self._since, self._since_samples = time.monotonic(), 0

    def _once(self, sentence: str, **pairs: object) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            _log.warning(sentence, **pairs)

    def _name_unused(self) -> None:
        if self.model.unused:
            names = ",".join(self.model.unused[:5]) + (",..." if len(self.model.unused) > 5 else "")
            self._once("parameters without a gradient, zeros are used", count=len(self.model.unused), names=names)

    def _warn_by_hand(self) -> None:
        if self.exchange.lam > 1 and self.exchange.job.protocol != "hardsync":
            self._once("a step after several batches weighs as many: learner.accumulate(k) makes it weigh one")


def _chunks(spans: Iterable[Span], size: int) -> list[list[Span]]:
    """``spans`` in order, in lists of ``size`` samples; the last has what is left."""
    chunks: list[list[Span]] = [[]]
    room = size
    for span in spans:
        start = span.start
        while start < span.stop:
            if not room:
                chunks.append([])
                room = size
            stop = min(span.stop, start + room)
            chunks[-1].append(Span(span.epoch, start, stop))
            room -= stop - start
            start = stop
    return chunks
