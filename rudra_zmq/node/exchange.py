"""The exchange with a learner: chunks and a Push come in, a Grant and weights go out, in one turn.

Owns: the key of each gradient's chunks, whether a push is whole and finite, which weights a learner needs. Must not
know: the verdict (core's), membership, epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rudra_zmq.core.events import Action, Clock, Event, GradientId, Grant, Push, Refuse, Span, Want
from rudra_zmq.errors import Rejected
from rudra_zmq.net.bulk import BulkError
from rudra_zmq.node.post import Courier
from rudra_zmq.node.residuals import Residuals
from rudra_zmq.node.sessions import Session
from rudra_zmq.node.slots import Slot
from rudra_zmq.node.work import Work, new_key
from rudra_zmq.wire.codec import Frame
from rudra_zmq.wire.messages import data as wire

MOST_WANTED = 512


class Turn(Protocol):
    """Gives an event to the core; ``seen`` is called with what it decided before any of it is carried out."""

    def __call__(self, event: Event, seen: Callable[[list[Action]], None] | None = None) -> None: ...


class Exchange:
    """All learners' exchanges."""

    def __init__(self, work: Work, turn: Turn, residuals: Residuals) -> None:
        self._work = work
        self._turn = turn
        self._residuals = residuals
        self._wanting: Session | None = None  # whose Want is being answered

    # ---------------------------------------------------------------------------------------- coming in

    def chunk(self, session: Session | None, courier: Courier, message: wire.Chunk, payload: Frame) -> None:
        """Part of a gradient, or of an upload; whatever else is dropped and counted."""
        try:
            receiver = courier.inbox.chunk(message, payload)
        except BulkError as error:
            self._work.sessions.drop("foreign-chunk" if error.reason == "key" else f"chunk-{error.reason}")
            return
        if session is None:
            return
        if message.key != session.key:
            self._residuals.chunk(session, courier, receiver)
            return
        # In the cache still. An element that is cut by the end of a chunk is looked at with the next one.
        if session.finite:
            start = receiver.received - len(payload)
            session.finite = self._slot(session).vector.finite_between(start, receiver.received)

    def _slot(self, session: Session) -> Slot:
        assert self._work.model is not None
        return self._work.model.slots.slot(*session.who, session.slot)

    def push(self, session: Session, courier: Courier, message: wire.Push) -> None:
        """A gradient is said to be complete. What no honest learner sends is dropped and counted.

        Groups are taken apart here: the core knows single gradients, and a learner has no others to give. Raises
        Rejected for a push of more than one.
        """
        work = self._work
        reason = self._fault(session, courier, message)
        if reason:
            work.sessions.drop(reason)
            return
        assert work.sync is not None
        (group,) = message.groups
        clock = Clock(message.generation, group.timestamp)
        if clock.generation == work.sync.clock.generation:
            session.held = clock
        event = Push(
            GradientId(*session.who, message.seq),
            clock,
            tuple(Span(*span) for span in group.spans),
            group.samples,
            session.finite and message.finite,
            self._rates(message),
        )
        accepted = work.sync.counters.accepted
        if work.model is not None and not session.transfer and work.brief(session):
            work.model.versions.release(session.reader)  # until it is answered

        def seen(actions: list[Action]) -> None:
            assert work.sync is not None
            if not any(isinstance(action, Refuse) for action in actions):
                session.pushed = message.seq
                session.expecting = False
                self._count(session, message, event, work.sync.counters.accepted > accepted)

        self._turn(event, seen)

    def _fault(self, session: Session, courier: Courier, message: wire.Push) -> str:
        """Why a push is not even shown to the core; "" if it is."""
        work = self._work
        if work.sync is None or work.model is None or not session.joined:
            return "early-push"
        if (message.rank, message.incarnation) != session.who:
            return "wrong-rank"
        group = message.groups[0]
        if len(message.groups) != 1 or group.count != 1:
            gradients = sum(group.count for group in message.groups)
            text = f"{gradients} gradients in {len(message.groups)} groups: a learner pushes one at a time"
            raise Rejected(text, where="push", fix="send each gradient as a push of its own")
        if message.seq == session.answered or (message.seq < session.pushed):
            return "replay"
        if message.seq == session.pushed or message.generation != work.sync.clock.generation:
            return ""
        if group.timestamp > work.sync.clock.timestamp:
            return "future-timestamp"
        if group.samples == 0:
            return ""
        if session.shared:
            reason = self._fault_in_place(session, message)
        else:
            reason = self._fault_of_chunks(session, courier, message)
        slot = self._slot(session)
        if not reason and session.finite and message.finite and not slot.vector.sound():
            reason = "unsound-push"
        if not reason:
            slot.count = group.samples
        return reason

    def _fault_in_place(self, session: Session, message: wire.Push) -> str:
        # Between a push and the next grant the slot belongs to the update.
        if message.key != session.key or not session.expecting:
            return "foreign-push"
        assert self._work.model is not None
        return "" if message.nbytes == self._work.model.up.nbytes else "incomplete-push"

    def _fault_of_chunks(self, session: Session, courier: Courier, message: wire.Push) -> str:
        receiver = courier.inbox.take(message.key) if message.key == session.key else None
        if receiver is None:
            return "foreign-push"
        return "" if receiver.complete and message.nbytes == receiver.nbytes else "incomplete-push"

    def _rates(self, message: wire.Push) -> tuple[float, ...] | None:
        model = self._work.model
        if message.rates is None or model is None or model.applier is None or model.ruled_by_job:
            return None
        good = all(math.isfinite(rate) and rate >= 0 for rate in message.rates)
        if not good or len(message.rates) != len(model.applier.spec.groups):
            self._work.sessions.drop("bad-rates")
            return None
        return tuple(message.rates)

    def _count(self, session: Session, message: wire.Push, event: Push, accepted: bool) -> None:
        work = self._work
        if accepted and work.figures is not None:
            session.accepted = message.seq
            session.gradients += 1
            session.samples += event.count
            if math.isfinite(message.compute_s):
                weight = 0.1 if session.gradients > 1 else 1.0
                session.compute += weight * (message.compute_s - session.compute)
            epoch = event.spans[0].epoch
            work.figures.pushed(epoch, event.count, message.loss, message.compute_s, message.wait_s)
        elif not event.finite and event.count and not work.over:
            work.check_weights()
            session.refused += 1
            times = f" ({session.refused} so far)" if session.refused > 1 else ""
            text = f"a gradient of rank {session.rank} is NaN or infinite and is refused{times}"
            work.seldom(f"nan {session.rank}", "W", text)

    def want(self, session: Session) -> None:
        """A learner accumulates, and asks for one more lease: answered at once, without weights."""
        if self._work.sync is None or not session.joined:
            self._work.sessions.drop("early-want")
            return
        if session.leases >= MOST_WANTED:
            fix = "push more often: learner.accumulate(k) adds k batches up before each step"
            raise Rejected(f"{session.leases} mini-batches were begun without a push", fix=fix)
        self._wanting = session
        try:
            self._turn(Want(*session.who))
        finally:
            self._wanting = None

    # ----------------------------------------------------------------------------------------- going out

    def _grant_again(self, grant: Grant) -> None:
        """There is room for the weights of a grant: those of now."""
        assert self._work.sync is not None
        self.grant(replace(grant, clock=self._work.sync.clock))

    def grant(self, grant: Grant) -> None:
        """The core's answer, with the weights of its clock where the learner has others."""
        work = self._work
        session = work.sessions.session(grant.rank, grant.incarnation)
        if session is None or session.peer is None or work.sync is None or work.model is None:
            return  # it comes back and asks again, or is lost
        if not session.listens:
            return  # it would take this for the answer to its Data, and that one for the answer to its next push
        if session.held != grant.clock and session is not self._wanting and not work.has_room(session):
            work.wait_for_room(session, lambda: self._grant_again(grant))
            return
        inbox = work.post.to(session.peer).inbox
        if (grant.ack, grant.slot) != (session.ack, session.slot):
            inbox.take(session.key)  # of a batch that was skipped, or of a slot that it is not to fill any more
            session.ack, session.key, session.slot = grant.ack, new_key(), grant.slot
            session.expecting = False
        if not session.expecting and not grant.done:
            if not session.shared:
                inbox.expect(session.key, self._slot(session).vector.data)
            session.expecting = session.finite = True
        clock = grant.clock
        if session is self._wanting and session.held is not None:
            clock = session.held
        fresh = session.held != clock
        in_place = fresh and session.shared
        if session.shared and not fresh and work.brief(session):
            work.show_weights(session, clock)  # what it has, which it let go when it pushed
        key = new_key() if fresh and not in_place else 0
        session.answered = grant.ack
        session.leases = len(grant.leases)
        work.send(
            session,
            wire.Grant(
                ack=grant.ack,
                verdict=grant.verdict,
                generation=clock.generation,
                timestamp=clock.timestamp,
                leases=[[(s.epoch, s.start, s.stop) for s in lease.spans] for lease in grant.leases],
                slot=session.slot,
                key=session.key,
                weights_key=key,
                nbytes=work.model.down.nbytes if fresh else 0,
                lam=work.sync.lam,
                done=grant.done,
                chief=session.rank == work.sessions.chief,
                shared=session.shared,
                version=work.show_weights(session, clock) if in_place else 0,
            ),
        )
        if fresh and not in_place:
            work.send_weights(session, key, clock)
