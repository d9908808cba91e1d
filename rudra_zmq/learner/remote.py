"""The exchange with a node: the conversation of a learner, kept up over lost connections and restarted nodes.

Owns: what is said in which order, what is repeated on a new connection, and when to give up. Must not know: torch,
training loops, why weights change.

    Hello -> Welcome      Attach -> [SendInit -> chunks, InitDone] -> Ready, chunks      Rule -> RuleReply
    Data -> Grant, chunks      chunks, Push -> Grant, chunks      Want -> Grant      Bye

A new connection says again what was said on the one before, up to Data. The Grant that answers Data then shows whether
the push that was under way arrived (its ack), must be repeated, or is void because the node went back to a snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from rudra_zmq import log
from rudra_zmq.config.job import JobFile
from rudra_zmq.config.load import job_from_toml
from rudra_zmq.core.events import Clock, Lease, Span
from rudra_zmq.errors import Rejected, UsageError
from rudra_zmq.learner.exchange import Answer, Gradient, Job, RuleVerdict
from rudra_zmq.learner.feedback import Feedback
from rudra_zmq.learner.guard import guard
from rudra_zmq.learner.keys import Keys
from rudra_zmq.learner.line import ANSWER_S, GIVE_UP_S, Line, NodeLost, hello_of
from rudra_zmq.learner.link import LinkLost
from rudra_zmq.learner.packing import Packing
from rudra_zmq.learner.pulse import Pulse
from rudra_zmq.learner.shared import NotShared, SharedMemory, Shown, share
from rudra_zmq.learner.spec import LearnerSpec
from rudra_zmq.net.sockets import make_context
from rudra_zmq.node.vectors import Packed, Vector, carrier
from rudra_zmq.wire.codec import WireError, clip, encode_data
from rudra_zmq.wire.compress import forms
from rudra_zmq.wire.layout import Layout
from rudra_zmq.wire.messages.data import (
    Attach,
    Bye,
    Data,
    Grant,
    Group,
    InitDone,
    Log,
    Message,
    Push,
    Ready,
    Rule,
    RuleReply,
    SendInit,
    SendResidual,
    Want,
    Welcome,
)

LAST_WORDS_S = 1.0

_log = log.get()


class Leaving(BaseException):
    """This learner was asked to leave while it waited. No matter of the script's, so no Exception of Python's."""


class RemoteExchange:
    """An `Exchange` over a node of the data plane. Used by one thread."""

    def __init__(self, spec: LearnerSpec, *, give_up_s: float = GIVE_UP_S) -> None:
        """Connects and is welcomed. Raises RudraError as the node refuses, NodeLost after `give_up_s` seconds."""
        self.rank = spec.rank
        self.incarnation = spec.incarnation
        self.chief = False
        self.lam = 0
        self._pulse: Pulse | None = None
        self._leaving = False
        self._may_leave = True  # nothing of ours is half said
        self._gone = False
        self._expects_grant = False  # a new connection said Data, and was not answered yet
        self._fresh = False  # weights came since the last answer
        self._seq = 0
        self._key = 0
        self._shared: SharedMemory | None = None  # of the present connection
        self._slot: Vector | Packed | None = None  # in it, for the next gradient
        self._shown: Shown | None = None  # the weights, where they are not copied
        self._clock = Clock(0, 0)
        self._feedback: Feedback | None = None  # of topk
        keys = Keys(spec)
        self._context = make_context("data")
        self._line = Line(self._context, spec, keys, "learner", self._look, self._opened, give_up_s)
        try:
            self._line.keep_on(lambda: None)
        except BaseException:
            self.close()
            raise
        welcome = self._welcome
        file = job_from_toml(welcome.job, name=spec.job).job
        self.job, self._job_rule, self._asked = _job(file), file.update.rule, file.learners.weights
        self._wire = file.wire
        # A script may write to its weights, and what is encoded is no weights yet.
        auto = file.kind == "task" and self._wire.down == "float32"
        self._in_place = self._asked == "shared" or (self._asked == "auto" and auto)
        pulse_hello = hello_of(spec, "pulse")
        node_file = Path(spec.node_file)
        self._pulse = Pulse(self._context, keys, pulse_hello, node_file, welcome.ping_s, welcome.liveness_s)
        self._pulse.start()

    # ---- the interface

    @property
    def weights(self) -> Vector:
        """A version of the node's, where its memory is shared and they are not copied."""
        return self._weights if self._shown is None else self._shown.vector

    @property
    def gradient(self) -> Vector:
        """A slot of the node's, where its memory is shared and nothing is encoded."""
        return self._slot if isinstance(self._slot, Vector) else self._gradient

    @property
    def leaving(self) -> bool:
        """SIGTERM, or the node on behalf of this host, asked for the end."""
        return self._leaving or (self._pulse is not None and self._pulse.stop_asked)

    def ask_to_leave(self) -> None:
        """Finish the step, push, leave. May be called from a signal handler."""
        self._leaving = True

    def attach(self, message: Attach, layout: Layout, weights: Vector, gradient: Vector) -> None:
        """Waits until version 0 exists, so for all learners; uploads it if asked. Raises Rejected, RudraError."""
        try:
            encode_data(message)
        except WireError as error:
            fix = "give the model fewer tensors, or shorter names"
            raise Rejected(f"the model is too large to be described: {error}", where="attach", fix=fix) from None
        self._attach, self._layout, self._weights, self._gradient = message, layout, weights, gradient
        self._packing = Packing(*forms(self._wire, layout), weights)
        self._feedback = self._packing.feedback
        self._line.keep_on(self._say_attach)
        self._line.greeting.append(self._say_attach)

    def rule(self, rule: Rule | None) -> RuleVerdict:
        """Without an optimizer of the script the job file must have a rule."""
        if rule is None:
            if not self._job_rule:
                fix = "learner.optimizer(...) before learner.batches(), or set update.rule in the job file"
                raise UsageError("there is no rule for the updates", fix=fix)
            return RuleVerdict(False, self._job_rule)

        def say() -> RuleReply:
            self._line.now.send(rule)
            return self._line.receive(RuleReply)

        reply = self._line.keep_on(say)
        self._line.greeting.append(say)
        return RuleVerdict(reply.accepted, reply.rule)

    def begin(self, samples: int, minibatch: int, accumulate: int, prefetch: int) -> Answer:
        """Waits until the job starts."""

        def say() -> None:
            shared = self._shared is not None
            data = Data(samples=samples, minibatch=minibatch, accumulate=accumulate, prefetch=prefetch, shared=shared)
            self._line.now.send(data)
            self._expects_grant = True

        def first() -> Grant:
            if not self._expects_grant:
                say()
            return self._receive_grant()

        answer = self._answer(first)
        self._line.greeting.append(say)
        self._seq = answer.ack
        return answer

    def push(self, gradient: Gradient) -> Answer:
        """Waits for the verdict, and with it for the round (hardsync) or for the next samples."""
        self._seq += 1
        seq = self._seq
        source = self.gradient
        said = False

        def exchange() -> Grant:
            nonlocal said
            if not said and not self._expects_grant:
                said = True
                self._send_push(gradient, source)
            while True:
                grant = self._receive_grant()
                if grant.ack >= seq or grant.done or grant.generation != gradient.clock.generation:
                    return grant
                said = True
                self._send_push(gradient, source)

        answer = self._answer(exchange, gradient.clock.generation)
        if self._feedback is not None:
            self._feedback.answered(seq, answer.verdict == "accepted" and answer.ack == seq)
        return answer

    def want(self) -> Answer:
        """Answered at once by the node."""

        def ask() -> Grant:
            if not self._expects_grant:
                self._line.now.send(Want())
            return self._receive_grant()

        return self._answer(ask)

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Nobody waits for it; it is lost with the connection."""
        if self._line.connected and not self._gone:
            self._line.now.post(Log(metrics=dict(metrics), epoch=epoch))

    def keep(self) -> None:
        """Copy what is shown. The node may have answered meanwhile, and let it be overwritten: then that one counts."""
        while (shown := self._shown) is not None:
            self._weights.copy_from(shown.vector)
            if shown.intact:
                self._shown = None
                return
            self._may_leave = False
            try:
                if not self._line.connected:
                    raise LinkLost("the connection ended")
                self._take(self._line.now.receive(Grant, seconds=ANSWER_S))
            except LinkLost as lost:
                raise NodeLost(f"given up by the node ({lost})", fix="none is needed: the rank starts again") from None
            finally:
                self._may_leave = True

    def leave(self, reason: str, text: str = "") -> None:
        """Good-bye, if anybody is there to hear it."""
        if self._gone:
            return
        self._gone = True
        self._may_leave = False
        if self._line.connected:
            with contextlib.suppress(LinkLost):
                if self._feedback is not None and reason != "failed":
                    self._feedback.say(self._line.now)
                self._line.now.send(_bye(reason, text))

    def close(self) -> None:
        """End the pulse and the connection; last words have a second."""
        guard.close()
        if self._pulse is not None:
            self._pulse.close()
        self._line.hang_up(LAST_WORDS_S)
        self._context.close()

    # ---- what is said

    def _say_attach(self) -> None:
        self._line.now.announced = self._announced
        self._line.now.send(self._attach)
        while True:
            answer = self._line.receive(SendInit, Ready)
            if isinstance(answer, Ready):
                break
            assert isinstance(answer, SendInit)
            self._line.now.send_vector(answer.key, self._weights)
            self._line.now.send(InitDone(key=answer.key, nbytes=len(self._weights.data)))
        self._receive_weights(answer.key, answer.nbytes)
        if self._feedback is not None:
            self._feedback.hear(self._line.now, answer, self._clock.generation)
        self._clock = Clock(answer.generation, answer.timestamp)
        if self._welcome.shm:
            self._share(self._welcome.shm)
        if self._shared is None and self._asked == "shared":
            _log.warning("the weights are copied, not shared", reason="the node's memory is not to be had here")

    def _share(self, path: str) -> None:
        try:
            self._shared = share(path, self._line.hello, self._packing.up, self._packing.down)
            if self._in_place:
                guard.watch([v for v in self._shared.versions if isinstance(v, Vector)], self._layout)
            _log.info("the node's memory is shared", weights="shared" if self._in_place else "copy")
        except NotShared as error:
            _log.warning("the node's memory is not shared, chunks are used", reason=str(error))

    def _send_push(self, gradient: Gradient, source: Vector) -> None:
        """The gradient lies in ``source``, where it stays until it is answered."""
        self._may_leave = False
        try:
            nbytes, finite = 0, True
            if gradient.count:
                packed, finite = self._packing.pack(source, self._slot, self._seq, gradient.finite)
                nbytes = len(packed.data)
                if self._slot is None:
                    self._line.now.send_vector(self._key, packed)
            self._line.now.send(
                Push(
                    rank=self.rank,
                    incarnation=self.incarnation,
                    seq=self._seq,
                    generation=gradient.clock.generation,
                    key=self._key,
                    groups=[_group(gradient)],
                    nbytes=nbytes,
                    finite=finite,
                    loss=gradient.loss,
                    rates=None if gradient.rates is None else list(gradient.rates),
                    compute_s=gradient.compute_s,
                    wait_s=gradient.wait_s,
                )
            )
        finally:
            self._may_leave = True

    # ---- what is heard

    def _receive_grant(self) -> Grant:
        while not isinstance(grant := self._line.receive(Grant, SendResidual), Grant):
            assert isinstance(grant, SendResidual)
            if self._feedback is not None:
                self._may_leave = False
                try:
                    self._feedback.say(self._line.now, grant.seq)
                finally:
                    self._may_leave = True
        self._expects_grant = False
        self._take(grant)
        if grant.done:
            self.keep()  # good-bye lets go of them
        return grant

    def _announced(self, message: Message) -> None:
        """A grant came while a residual was said, and its weights come before the credit for the rest."""
        if isinstance(message, Grant) and message.nbytes and not message.shared:
            into = carrier(self._packing.down) if self._gone else self._packing.incoming
            if message.nbytes == len(into.data):
                self._line.now.expect(message.weights_key, into)

    def _take(self, grant: Grant) -> None:
        if grant.shared:
            self._read_shared(grant)
        elif grant.nbytes:
            self._receive_weights(grant.weights_key, grant.nbytes)
        self._key = grant.key
        self._clock = Clock(grant.generation, grant.timestamp)
        self.lam, self.chief = grant.lam or self.lam, grant.chief

    def _read_shared(self, grant: Grant) -> None:
        shared = self._shared
        if shared is None or grant.slot >= len(shared.slots) or grant.version >= len(shared.versions):
            raise LinkLost("the node grants memory that it did not share")
        self._slot = shared.slots[grant.slot]
        if not grant.nbytes:
            return
        if self._in_place:
            self._shown = shared.show(grant.version)
        else:
            self._packing.take(shared.versions[grant.version])
        self._fresh = True

    def _receive_weights(self, key: int, nbytes: int) -> None:
        into = self._packing.incoming
        if nbytes != len(into.data):
            raise LinkLost(f"the node sends {nbytes} bytes of weights, the model has {len(into.data)}")
        self._fresh = True
        self._may_leave = False  # with half of them the script would be left with no version at all
        try:
            self._line.now.finish(self._line.now.expect(key, into))
            self._packing.take(into)
            self._shown = None
        finally:
            self._may_leave = True

    def _answer(self, call: Callable[[], Grant], generation: int | None = None) -> Answer:
        try:
            grant = self._line.keep_on(call)
        except Leaving:
            self.keep()
            self.leave("drain")
            return Answer(self._seq, "", self._clock, (), self.lam, self.chief, fresh=self._fresh, done=True)
        fresh, self._fresh = self._fresh, False
        void = generation is not None and grant.generation != generation
        return Answer(
            ack=grant.ack,
            verdict="void" if void else grant.verdict,
            clock=self._clock,
            leases=tuple(Lease(tuple(Span(*span) for span in spans)) for spans in grant.leases),
            lam=self.lam,
            chief=self.chief,
            fresh=fresh,
            done=grant.done,
        )

    # ---- the connection

    @property
    def _welcome(self) -> Welcome:
        assert self._line.welcome is not None
        return self._line.welcome

    def _opened(self, welcome: Welcome) -> None:
        self._expects_grant = False
        self._shared = self._slot = None
        self.lam, self.chief = welcome.lam, welcome.chief
        if self._pulse is not None:
            self._pulse.alive()

    def _look(self) -> None:
        """While something waits: is there still a point in it?"""
        if self.leaving and self._may_leave and not (self._feedback is not None and self._feedback.stays()):
            raise Leaving
        if self._pulse is not None and self._line.stands:
            link = self._line.now
            self._pulse.look(link.heard, link.address, self._welcome.generation)


def _group(gradient: Gradient) -> Group:
    spans = [(span.epoch, span.start, span.stop) for span in gradient.spans]
    return Group(gradient.clock.timestamp, 1, gradient.count, spans)


def _bye(reason: str, text: str) -> Message:
    return Bye(reason=reason, text=clip(text))  # type: ignore[arg-type]


def _job(job: JobFile) -> Job:
    """What a learner needs of the job file."""
    return Job(
        seed=job.job.seed,
        epochs=job.job.epochs,
        minibatch=job.learners.minibatch,
        global_batch=job.learners.global_batch,
        count=job.learners.count,
        protocol=job.sync.protocol,
    )
