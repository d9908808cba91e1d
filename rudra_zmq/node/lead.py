"""The lead of a job: which part of the node hears which message, what is done every second.

Owns: the parts, the ways in (data plane, psd, time). Must not know: sockets, how a part does its work, what the core
decides (turns.py carries that out). Nothing here waits for a peer.
"""

from __future__ import annotations

from rudra_zmq.core.events import Failed, Leave, Tick
from rudra_zmq.errors import Rejected, RudraError
from rudra_zmq.net.bulk import BulkError
from rudra_zmq.net.sockets import WINDOW
from rudra_zmq.node.ending import Ending
from rudra_zmq.node.exchange import Exchange
from rudra_zmq.node.figures import share_of
from rudra_zmq.node.opening import Opening
from rudra_zmq.node.report import Report
from rudra_zmq.node.residuals import Residuals
from rudra_zmq.node.saving import Saving
from rudra_zmq.node.sessions import Connection, Session, Turned
from rudra_zmq.node.sharing import Sharing
from rudra_zmq.node.testing import Testing
from rudra_zmq.node.turns import Turns
from rudra_zmq.node.watch import Watch
from rudra_zmq.node.work import MEMORY, NodeEnds, Work, told
from rudra_zmq.wire.codec import CHUNK, Frame
from rudra_zmq.wire.messages import control
from rudra_zmq.wire.messages import data as wire


class Lead:
    """One job. All methods are called in the loop's thread."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.residuals = Residuals(work)
        self.saving = Saving(work, self._written, self.residuals)
        self.turns = Turns(work, self.saving)
        self.watch = Watch(work, self._give_up)
        self.opening = Opening(work, self.turns.turn, self.fail, self.watch.fence, self.residuals)
        self.sharing = Sharing(work)
        self.exchange = Exchange(work, self.turns.turn, self.residuals)
        self.testing = Testing(work, self._accuracy)
        self.ending = Ending(work, self.saving, self.turns.turn, self._progress, self.testing)
        self.report = Report(work, self.opening, self.saving, self.ending)
        self.turns.connect(self)
        self._last_tick = work.clock()
        self._was = ""
        self._failed: dict[tuple[int, int], str] = {}  # (rank, incarnation) that said why it fails, and may still run

    def _written(self, _: object) -> None:
        self.ending.advance()

    def _progress(self) -> control.Progress:
        return self.report.progress()

    def restore(self) -> None:
        """Before anything is received: go on from a snapshot, if there is one. Raises RudraError."""
        reason = self.saving.restore()
        self.testing.restored()
        if reason:
            self.ending.restored(reason)
            self.ending.advance()

    # ---------------------------------------------------------------------------------------- data plane

    def receive(self, peer: bytes, message: wire.ToNode, payload: Frame | None) -> None:
        """One message of a learner, a pulse or an evaluator."""
        work = self.work
        if isinstance(message, wire.Hello):
            self._hello(peer, message)
            return
        connection = work.sessions.connection(peer)
        if connection is None:
            work.sessions.drop("unknown-peer")
            return
        session = work.sessions.heard(connection, work.clock())
        try:
            if connection.evaluates:
                self.testing.heard()
            if connection.role.endswith("pulse"):
                self._pulse(peer, message)
            elif connection.role == "evaluator":
                self._evaluator(connection, message)
            elif session is None:
                work.sessions.drop("unknown-peer")
            else:
                self._learner(session, peer, message, payload)
            work.give_room()
        except NodeEnds:
            raise
        except RudraError as error:
            self._refuse(peer, session, error)
        except MemoryError as error:  # outside a turn: what was asked for is not there, and nothing else changed
            where = str(type(message).__struct_config__.tag)
            self._refuse(peer, session, Rejected(f"the node is out of memory{told(error)}", where=where, fix=MEMORY))

    def _refuse(self, peer: bytes, session: Session | None, error: RudraError) -> None:
        work = self.work
        work.sessions.drop("refused")
        work.refuse(peer, error)
        who = "the evaluator" if session is None else f"rank {session.rank}"
        work.seldom(f"refused {who}", "W", f"{who} is refused: {error}")

    def _learner(self, session: Session, peer: bytes, message: wire.ToNode, payload: Frame | None) -> None:
        courier = self.work.post.to(peer)
        match message:
            case wire.Chunk():
                assert payload is not None
                self.exchange.chunk(session, courier, message, payload)
            case wire.Push():
                self.exchange.push(session, courier, message)
            case wire.Credit():
                self._credit(peer, message)
            case wire.Attach() if not session.attached:
                self.opening.attach(session, message)
            case wire.Rule():
                self.opening.rule(session, message)
            case wire.Data():
                self.opening.data(session, message)
            case wire.Residual():
                self.residuals.announced(session, courier, message)
            case wire.InitDone():
                self.opening.init_done(session, message)
            case wire.Want():
                self.exchange.want(session)
            case wire.Log():
                self._log(session, message)
            case wire.Ping():
                courier.message(wire.Pong(stop=self.work.stopping))
            case wire.Bye():
                self._bye(session, message)
            case _:
                self.work.sessions.drop("out-of-place")

    def _pulse(self, peer: bytes, message: wire.ToNode) -> None:
        if isinstance(message, wire.Ping):
            self.work.post.to(peer).message(wire.Pong(stop=self.work.stopping))
        elif isinstance(message, wire.Bye):
            self.gone(peer)
        else:
            self.work.sessions.drop("out-of-place")

    def _evaluator(self, connection: Connection, message: wire.ToNode) -> None:
        match message:
            case wire.Attach():
                self.opening.model_for(message)
                self.testing.attached()
            case wire.TestResult():
                self.testing.result(message)
                self.ending.advance()
            case wire.Credit():
                self._credit(connection.peer, message)
            case wire.Ping():
                self.work.post.to(connection.peer).message(wire.Pong(stop=False))
            case wire.Bye():
                self.gone(connection.peer)
            case _:
                self.work.sessions.drop("out-of-place")

    def _credit(self, peer: bytes, message: wire.Credit) -> None:
        try:
            self.work.post.to(peer).sender.credit(message.chunks)
        except BulkError:
            self.work.sessions.drop("credit")

    def _hello(self, peer: bytes, hello: wire.Hello) -> None:
        work = self.work
        try:
            work.sessions.check(hello)
        except Turned as turned:
            work.sessions.drop(turned.reason)
            work.refuse(peer, turned.error)
            work.post.drop(peer)
            if (hello.role, turned.reason) != ("pulse", "old-incarnation"):  # it may come up after the good-bye
                work.seldom(f"hello {turned.reason}", "W", f"a {hello.role} is turned away: {turned.error}")
            return
        if old := work.sessions.replaces(hello):
            self.end(old, "lost", f"incarnation {hello.incarnation} takes its place")
        for stale in work.sessions.displaces(peer, hello):
            work.post.drop(stale)
            if hello.role == "evaluator":
                self.testing.gone(for_good=False)
        connection, session = work.sessions.hello(peer, hello, work.clock())
        if session is not None:
            work.ended.discard(session.rank)
        elif hello.role == "evaluator":
            self.testing.met(hello)
        clock = self.opening.clock
        welcome = wire.Welcome(
            generation=clock.generation,
            job=work.spec.toml,
            lam=work.job.learners.count if work.sync is None else work.sync.lam,
            chunk=CHUNK,
            credit=WINDOW,
            ping_s=work.spec.ping_s,
            liveness_s=work.spec.liveness_s,
            chief=session is not None and session.rank == (work.sessions.chief or 0),
            shm=work.spec.bind.shm or "",
            bulk=None if hello.role.endswith("pulse") else work.channel(peer),
        )
        work.post.to(connection.peer).message(welcome)

    def _log(self, session: Session, message: wire.Log) -> None:
        """The chief's own test counts where there is no evaluator."""
        work = self.work
        if work.figures is None or work.evaluated or session.rank != work.sessions.chief:
            return
        for name in ("accuracy", "test_error"):
            value = message.metrics.get(name)
            if value is not None and share_of(value) is None:
                text = f"rank {session.rank} logs {name}={value:g}: left out, a share between 0 and 1 is meant"
                work.seldom(f"share {name}", "W", text)
        accuracy = work.figures.tested(message.epoch, message.metrics)
        if accuracy is not None:
            if any(row.epoch == message.epoch for row in work.figures.rows):
                work.metrics.settle(message.epoch, work.figures.rows)
            self._accuracy(accuracy)

    def _bye(self, session: Session, message: wire.Bye) -> None:
        if message.reason == "failed":  # told once its process has ended: by the head where it ended badly
            self._failed[session.rank, session.incarnation] = message.text
        self.end(session, "lost" if message.reason == "failed" else "bye", "")

    # --------------------------------------------------------------------------------------- membership

    def gone(self, peer: bytes) -> None:
        """A socket cannot be reached any more. A death of its process is learned from psd, or by silence."""
        connection = self.work.sessions.gone(peer)
        self.work.post.drop(peer)
        if connection is not None and connection.role == "evaluator":
            self.testing.gone(for_good=False)

    def end(self, session: Session, kind: str, why: str) -> None:
        """A session is over: bye, lost or fenced."""
        work = self.work
        for peer in work.sessions.peers(session):
            work.post.drop(peer)
        work.sessions.end(session)
        self.residuals.ended(session)
        if work.model is not None:
            work.model.versions.release(session.reader)
        if why and not self.ending.over:
            work.event("I" if kind == "bye" else "W", f"rank {session.rank} (incarnation {session.incarnation}): {why}")
        if session.joined:
            self.turns.turn(Leave(session.rank, session.incarnation, kind))
        elif work.model is not None:
            work.model.slots.release(*session.who)
        self.opening.gone(session)

    def _give_up(self, session: Session, why: str) -> None:
        self.end(session, "lost", why)

    def command(self, message: control.Control) -> wire.Message:
        """A request of psd; its answer."""
        match message:
            case control.LearnerGone():
                self._learner_gone(message)
            case control.NodeStop():
                self.ending.stop(message)
                self.ending.advance()
            case control.Ok() | control.Error():
                pass
            case _:
                return control.Error(code="failed", message=f"a node does not know {type(message).__name__}")
        return control.Ok()

    def _learner_gone(self, message: control.LearnerGone) -> None:
        last = max(message.incarnation, message.lowest - 1)
        if message.lowest:
            self.work.sessions.bar(None if message.evaluator else message.rank, message.lowest)
        if message.evaluator:
            here = self.work.sessions.evaluators
            if any(connection.incarnation > last for connection in here):
                return  # its successor was faster than the word of its death
            for connection in here:
                self.work.sessions.gone(connection.peer)
                self.work.post.drop(connection.peer)
            self.testing.gone(for_good=not message.respawn and message.kind != "bye")
            return
        session = self.work.sessions.at(message.rank)
        if session is not None and not message.incarnation <= session.incarnation <= last:
            session = None
        failed = self._failed.pop((message.rank, message.incarnation), None)
        if failed is not None and message.kind == "bye" and not self.ending.over:
            self.work.event("E", f"learner {message.rank} failed, and its process ended well: {failed}")
        if session is not None:
            self.end(session, message.kind, _farewell(message))
        if not message.respawn:
            self._ended_for_good(message)

    def _ended_for_good(self, message: control.LearnerGone) -> None:
        """Whom nobody will start again is not waited for."""
        work = self.work
        work.ended.add(message.rank)
        if self.ending.over or self.ending.draining:
            return
        if message.kind == "bye" and not work.started and not work.spec.resume:
            fix = "iterate learner.batches(...) inside `with rudra.join() as learner:`"
            self.fail(f"the script of rank {message.rank} ended before training began. Fix: {fix}")
        elif len(work.ended) >= work.job.learners.count and not work.sessions.all:
            fix = "iterate learner.epochs() and learner.batches(...) to their end, and see the learners' logs"
            self.fail(f"every learner has ended before the job did, and none will be started again. Fix: {fix}")

    # -------------------------------------------------------------------------------------------- time

    def _accuracy(self, accuracy: float) -> None:
        wanted = self.work.job.job.stop.accuracy
        if wanted is not None and accuracy >= wanted:
            self.ending.condition(f"accuracy {accuracy:.4f} reached {wanted:g}")

    def fail(self, reason: str) -> None:
        self.work.event("E", reason)
        self.ending.failed(Failed(reason))
        self.ending.advance()

    def tick(self) -> None:
        """Once a second, and when the core's next deadline is due."""
        work = self.work
        now = work.clock()
        elapsed, self._last_tick = now - self._last_tick, now
        work.post.pump()
        self.watch.look()
        work.give_room()
        self.opening.look()
        self.residuals.look()
        if work.sync is not None and work.started:
            due = work.sync.next_deadline()
            if due is not None and due <= now:
                self.turns.turn(Tick())
        running = work.account()
        if work.figures is not None:
            work.figures.tick(now)
            self._rate_learners(elapsed)
            limit = work.job.job.stop.time_s
            if running and limit is not None and work.figures.seconds >= limit:
                self.ending.condition(f"time is up ({work.job.job.stop.time})")
        if work.started and not self.ending.over:
            self.saving.consider(epoch_done=False)
        self.testing.look()
        self.testing.next()
        self.ending.advance()
        state, reason = self.report.state
        if state != self._was:
            self._was = state
            if state == "WAITING" and not work.started:  # later waits are the core's, and said in its turn
                work.event("I", f"waits: {reason}")
            work.head.report()

    def _rate_learners(self, elapsed: float) -> None:
        if elapsed <= 0:
            return
        weight = min(1.0, elapsed / 5.0)
        for session in self.work.sessions.all:
            rate = (session.samples - session.rated) / elapsed
            session.rate += weight * (rate - session.rate)
            session.rated = session.samples


def _farewell(message: control.LearnerGone) -> str:
    """What the story says of a process that is gone; "" where the head has said it (a kill on purpose)."""
    if message.kind == "fenced" and message.respawn:
        return ""
    what = message.text or f"its process is gone ({message.kind})"
    if message.respawn:
        return f"{what}, is started again"
    return what if message.kind == "bye" else f"{what}, is not started again"
