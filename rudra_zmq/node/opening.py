"""The beginning of a job: signatures compared, version 0, the rule, the data, and when training starts.

Owns: what happens between a Hello and the first lease, also of a learner that comes later or comes back, and whom this
waits for, for what and how long. Must not know: gradients, updates.

    who is not here          learners.deadline, from the first Attach or the last loss; twice that while nobody came
    the upload of version 0  learners.deadline without another part of it; then the next rank is asked
    job.init                 step_timeout
    a script that is here and has not attached its model, or has not said its data: step_timeout, for it is the
    script's own code that runs, as in a step; then its process is ended as one whose step takes too long
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rudra_zmq.core.events import Clock, Event, Join, Start
from rudra_zmq.core.sync import Sync
from rudra_zmq.errors import Rejected, RudraError
from rudra_zmq.net.bulk import BulkReceiver
from rudra_zmq.node import export, spec
from rudra_zmq.node.budget import TooLarge
from rudra_zmq.node.evaluate import Mailbox
from rudra_zmq.node.figures import Figures
from rudra_zmq.node.model import Model
from rudra_zmq.node.residuals import Residuals
from rudra_zmq.node.sessions import Session
from rudra_zmq.node.snapshot import Writer
from rudra_zmq.node.vectors import Vector
from rudra_zmq.node.versions import Unsendable
from rudra_zmq.node.watch import Fence
from rudra_zmq.node.work import MEMORY, Work, new_key, told
from rudra_zmq.wire.layout import diff
from rudra_zmq.wire.messages.control import WaitRow
from rudra_zmq.wire.messages.data import Attach, Data, InitDone, Rule, RuleReply, SendInit

MOST_AHEAD = 64  # leases beyond the one that is computed; more would only tie samples to a slow learner


@dataclass
class _Upload:
    """Version 0 as it is awaited from one learner. ``moved``: when a part of it came last, or it was asked for."""

    session: Session
    key: int
    receiver: BulkReceiver
    moved: float
    received: int = 0


class Opening:
    """``turn`` gives an event to the core; ``fail`` ends the job, ``fence`` a process."""

    def __init__(
        self, work: Work, turn: Callable[[Event], None], fail: Callable[[str], None], fence: Fence, residuals: Residuals
    ) -> None:
        self._work = work
        self._residuals = residuals
        self._turn = turn
        self._fail = fail
        self._fence = fence
        self._upload: _Upload | None = None
        self._refused: dict[tuple[int, int], str] = {}  # whose upload was of no use, or never came: why
        self._reader = Writer(lambda error: work.off_loop(lambda: self._loaded(error)))
        self._reading: float | None = None  # since when job.init is read
        self._born = work.clock()
        self._first: float | None = None  # when somebody attached first, or was lost last

    # ------------------------------------------------------------------------------------------ attach

    def attach(self, session: Session, message: Attach) -> None:
        """A learner's model. Raises Rejected with the difference where it is not the job's."""
        model = self.model_for(message)
        if self._first is None:
            self._first = self._work.clock()
        model.slots.open(*session.who)
        model.versions.release(session.reader)  # by the connection before
        session.attached = True
        if self._upload is not None and session is self._upload.session:  # it lost its connection: once more
            self._upload = None
        if model.exists:
            self._ready(session, model)
        elif self._work.job.job.init and self._reading is None and not self._work.over:
            self._load_init(model)
        self.look()

    def model_for(self, message: Attach) -> Model:
        """The model of the job, made from the first signature. Raises Rejected for another one."""
        work = self._work
        if work.model is None:
            with self._fitting():
                work.model = Model(message, work.job, work.limit(), work.shares)
            if work.evaluated:
                work.mailbox = Mailbox(work.model.layout)
            if work.model.ruled_by_job:
                work.say_budget()
        else:
            lines = diff(message, work.model.attach)
            if lines:
                fix = "run the same code everywhere, or start a new job"
                raise Rejected("another model than the job's: " + "; ".join(lines), where="attach", fix=fix)
        return work.model

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """A job that does not fit into the memory fails: it would not fit later either."""
        try:
            yield
        except TooLarge as error:
            if not self._work.over:
                self._fail(str(error))
            raise

    # --------------------------------------------------------------------------------------- version 0

    def _load_init(self, model: Model) -> None:
        """In a thread: a large file on a slow disk would keep the loop from everybody's pings."""
        path = Path(self._work.job.job.init)
        target = self._room(model)
        if target is None:
            return
        self._reading = self._work.clock()

        def read() -> str:
            try:
                export.load(path, model.attach, model.layout, target)
            except RudraError as error:
                return str(error)
            except Exception as error:  # the loop must hear of it
                return f"{path} cannot be read: {error!r}"
            return ""

        self._reader.start(read)

    def _loaded(self, error: str) -> None:
        work = self._work
        if work.over or work.model is None:
            return
        if error:
            self._fail(error)
        else:
            self._version_0(work.model, f"from {work.job.job.init}")

    def _room(self, model: Model) -> Vector | None:
        """Where version 0 goes; None where there is no memory, and the job has failed."""
        try:
            return model.versions.begin()
        except MemoryError as error:
            self._fail(f"out of memory for version 0 of the weights{told(error)}. Fix: {MEMORY}")
            return None

    def _ask_upload(self, model: Model) -> None:
        """The lowest attached rank uploads; the next one if it dies, stalls, or its weights are of no use."""
        attached = [s for s in self._work.sessions.all if s.attached]
        fit = [s for s in attached if s.who not in self._refused]
        if attached and not fit:
            self._fail(f"version 0 cannot be made: {'; '.join(self._refused[s.who] for s in attached[:4])}")
        room = self._room(model) if fit else None
        for session in fit:
            if session.peer is not None and room is not None:
                key = new_key()
                courier = self._work.post.to(session.peer)
                receiver = courier.inbox.expect(key, room.data)
                self._upload = _Upload(session, key, receiver, self._work.clock())
                courier.message(SendInit(key=key))
                return

    def _watch_upload(self, upload: _Upload) -> None:
        now = self._work.clock()
        patience = self._work.job.learners.deadline_s
        if upload.receiver.received != upload.received:
            upload.received, upload.moved = upload.receiver.received, now
        elif now - upload.moved >= patience:
            text = f"rank {upload.session.rank} was asked for it and sent no part of it for {patience:.0f} s"
            self._work.event("W", f"version 0: {text}")
            self._refused[upload.session.who] = text
            self._upload = None
            if upload.session.peer is not None:  # what it sends now may not mix with the upload of another
                self._work.post.to(upload.session.peer).inbox.take(upload.key)

    def init_done(self, session: Session, message: InitDone) -> None:
        """An upload is complete. Raises Rejected where it holds a NaN, or is not what was asked for."""
        model, upload = self._work.model, self._upload
        if model is None or upload is None or session is not upload.session or message.key != upload.key:
            self._work.sessions.drop("foreign-init")
            return
        if session.peer is not None:
            self._work.post.to(session.peer).inbox.take(upload.key)
        self._upload = None
        complete = upload.receiver.complete and message.nbytes == upload.receiver.nbytes
        bad = export.first_bad(model.layout, model.versions.begin())
        if not complete or bad:
            text = f"{bad} of rank {session.rank} is NaN or infinite" if bad else "the upload is incomplete"
            self._refused[session.who] = text
            self.look()
            raise Rejected(f"version 0 cannot be made: {text}", fix="look at how the model is initialised")
        self._version_0(model, f"from rank {session.rank}")

    def _version_0(self, model: Model, text: str) -> None:
        try:
            model.versions.publish()
        except Unsendable as error:
            self._fail(f"version 0 {text} is {error}. Fix: give wire.compress_down another value")
            return
        model.exists = True
        self._work.event("I", f"version 0 {text}")
        for session in self._work.sessions.all:
            if session.attached and not session.ready:
                self._ready(session, model)
        self.look()

    def _ready(self, session: Session, model: Model) -> None:
        session.ready = True
        session.turn = self._work.clock()
        if not self._work.has_room(session):
            self._work.wait_for_room(session, lambda: self._ready(session, model))
            return
        self._work.send_ready(session, self.clock, self._residuals.due(session))

    @property
    def clock(self) -> Clock:
        """The version that a learner would be sent now."""
        sync = self._work.sync
        return sync.clock if sync is not None else Clock(self._work.spec.generation, 0)

    # ------------------------------------------------------------------------------------ rule and data

    def rule(self, session: Session, message: Rule) -> None:
        """A script's optimizer. Raises Rejected where it cannot rule or is another one."""
        model = self._work.model
        if model is None or not session.attached:
            raise Rejected("Rule before Attach", fix="attach the model first")
        ruled = model.applier is not None
        with self._fitting():
            accepted = model.offer(message)
        if not ruled:
            self._work.say_budget()
        assert model.applier is not None
        name = model.applier.spec.rule
        if not accepted and message.rule and message.rule != name:
            self._work.seldom("rule", "I", f"the job file's rule {name} wins over the script's optimizer")
        self._work.send(session, RuleReply(accepted=accepted, rule=name))

    def data(self, session: Session, message: Data) -> None:
        """What a learner trains on; it can begin. Raises Rejected where it does not fit the job."""
        work = self._work
        model = work.model
        if model is None or not session.ready:
            raise Rejected("Data before the weights", fix="wait for Ready")
        if model.applier is None:
            fix = "wrap the optimizer with learner.optimizer(...), or set update.rule in the job file"
            raise Rejected("there is no rule for the updates", where="[update]", fix=fix)
        mu = message.minibatch or work.job.learners.minibatch
        if message.samples < 1 or mu * message.accumulate > message.samples:
            text = f"a mini-batch of {mu * message.accumulate} samples is larger than the data ({message.samples})"
            raise Rejected(text, fix="lower learners.minibatch, or give more data")
        self._make_core(message.samples)
        assert work.sync is not None
        session.minibatch = mu * message.accumulate
        session.prefetch = min(message.prefetch, MOST_AHEAD)
        session.shared = message.shared and session.mapped
        session.joined = session.listens = True
        self._turn(Join(session.rank, session.incarnation, session.minibatch, session.prefetch))
        self.look()

    def _make_core(self, samples: int) -> None:
        """At the first Data; the others must have the same number of samples."""
        work = self._work
        if work.figures is not None and work.figures.samples != samples:
            text = f"{samples} samples here, {work.figures.samples} at the learners before"
            raise Rejected(text, where="data", fix="give every learner the same data")
        if work.sync is not None:
            return
        data = spec.data_params(work.job, samples)
        try:
            data.validate()
        except ValueError as error:
            raise Rejected(str(error), where="data", fix="give fewer samples, or lower job.epochs") from None
        try:
            work.sync = Sync(
                spec.sync_params(work.job),
                spec.learner_params(work.job),
                data,
                generation=work.spec.generation,
            )
        except ValueError as error:
            raise Rejected(str(error), where="job file", fix="change it") from None
        work.figures = Figures(samples)

    # ------------------------------------------------------------------------------------------- start

    def gone(self, session: Session) -> None:
        """A session ended: if it was uploading, the next one does. It has the time to come back."""
        if self._upload is not None and session is self._upload.session:
            self._upload = None
        now = self._work.clock()
        if not self._work.started and (session.attached or now >= self.deadline()):
            self._first = now
        self.look()

    def look(self) -> None:
        """Is it time for the upload, for the start, or to give up? To be called at each change and each second."""
        work = self._work
        if work.over:
            return
        self._watch_scripts()
        if work.started:
            return
        model = work.model
        attached = [s for s in work.sessions.all if s.attached]
        if self._is_late() and len(attached) < work.job.learners.min:
            came = f"{len(attached)} of at least {work.job.learners.min} learners came: {self.missing()}"
            self._fail(f"{came}. Fix: see the learners' logs, or raise learners.deadline or learners.step_timeout")
        elif model is not None and not model.exists:
            self._look_for_version_0(model)
        elif model is not None and self._is_complete() and all(s.joined for s in attached):
            work.started = True
            self._turn(Start())

    def _look_for_version_0(self, model: Model) -> None:
        limit = self._work.job.learners.step_timeout_s
        if self._reading is not None:
            if self._work.clock() - self._reading >= limit:
                fix = "give a path that answers, or raise learners.step_timeout"
                self._fail(f"job.init = {self._work.job.job.init} was not read within {limit:.0f} s. Fix: {fix}")
            return
        if self._upload is not None:
            self._watch_upload(self._upload)
        if self._upload is None and self._is_complete():
            self._ask_upload(model)

    def _watch_scripts(self) -> None:
        """Whose own code runs for too long before its first mini-batch is ended; nobody else would see it."""
        limit = self._work.job.learners.step_timeout_s
        for session in self._work.sessions.all:
            what = self._owes(session)
            if what and self._work.clock() - session.turn >= limit:
                self._fence(session, f"it has not {what} within step_timeout = {limit:g} s", hard=True)

    def _owes(self, session: Session) -> str:
        """What a learner's script has to do next, before its first mini-batch; "" if it is for others to act."""
        if session.joined or (session.attached and not session.ready):
            return ""
        return "said its data" if session.attached else "attached its model"

    @property
    def expected(self) -> set[int]:
        """Ranks that are waited for: those declared, after a restart those that were members; and may still come."""
        ranks = self._work.members or range(self._work.job.learners.count)
        return set(ranks) - self._work.ended

    def _here(self) -> set[int]:
        return {s.rank for s in self._work.sessions.all if s.attached}

    def _is_complete(self) -> bool:
        """All are here; or the time is up, and enough are."""
        here = self._here()
        return len(here) >= self._work.job.learners.min and (self.expected <= here or self._is_late())

    def _coming(self) -> list[Session]:
        """Those whose scripts are on their way to their models; ``_watch_scripts`` bounds that, not the deadline."""
        return [s for s in self._work.sessions.all if not s.attached and self._owes(s)]

    def _is_late(self) -> bool:
        return self._work.clock() >= self.deadline() and not self._coming()

    def deadline(self) -> float:
        """When the job starts with those who are here, or fails; twice as long while nobody has come."""
        patience = self._work.job.learners.deadline_s
        return self._born + 2 * patience if self._first is None else self._first + patience

    def missing(self) -> str:
        """ "rank 2 missing, 12 s of 60 s": who is not here or not ready, and for how long it is waited."""
        now, learners = self._work.clock(), self._work.job.learners
        slow = self._coming()
        coming = self.expected & {s.rank for s in slow}
        absent = self.expected - self._here() - coming
        patience = learners.deadline_s * (2 if self._first is None else 1)
        waited = min(patience, now - (self.deadline() - patience))
        if coming and (not absent or now >= self.deadline()):  # who is missing then is given up
            absent, waited, patience = set(), now - min(s.turn for s in slow), learners.step_timeout_s
        groups = ((absent, "missing"), (coming, "without a model yet"))
        return ", ".join([f"{_ranks(r)} {what}" for r, what in groups if r] + [f"{waited:.0f} s of {patience:.0f} s"])

    def reason(self) -> str:
        """Why training has not started, for people: who is waited for, for what, how long of how long."""
        work, now = self._work, self._work.clock()
        if not self._is_complete():
            return f"{len(self._here())}/{max(len(self.expected), work.job.learners.min)} learners ({self.missing()})"
        patience, limit = work.job.learners.deadline_s, work.job.learners.step_timeout_s
        if work.model is not None and not work.model.exists:
            if self._reading is not None:
                return f"{work.job.job.init} is read, {now - self._reading:.0f} s of {limit:.0f} s"
            if self._upload is not None:
                waited = f"{now - self._upload.moved:.0f} s of {patience:.0f} s without a part of it"
                return f"rank {self._upload.session.rank} uploads version 0, {waited}"
        sessions = work.sessions.all
        slow = [s for s in sessions if self._owes(s)]
        text = f"{sum(s.joined for s in sessions)}/{len(sessions)} learners have their data"
        if not slow:
            return text
        waited = f"{now - min(s.turn for s in slow):.0f} s of {limit:.0f} s"
        return f"{text} ({_ranks({s.rank for s in slow})} missing, {waited})"

    def waiting(self) -> list[WaitRow]:
        """The same for each process: who, for what, how long, how long at most, and what then."""
        work, now = self._work, self._work.clock()
        patience, limit = work.job.learners.deadline_s, work.job.learners.step_timeout_s
        rows = []
        if absent := self.expected - self._here() - {s.rank for s in self._coming()}:
            enough = len(self._here()) >= work.job.learners.min
            then = "it starts with those who are here" if enough else "the job fails"
            most = patience * (2 if self._first is None else 1)
            left = max(0.0, self.deadline() - now)
            rows.append(_wait("node", f"for {_ranks(absent)}, not here yet", most - left, most, then))
        if self._reading is not None:
            since = now - self._reading
            rows.append(_wait("node", f"reads {work.job.job.init}", since, limit, "the job fails"))
        if self._upload is not None:
            rank, since = self._upload.session.rank, now - self._upload.moved
            rows.append(_wait("node", f"for version 0 from rank {rank}", since, patience, "the next rank is asked"))
        for session in work.sessions.all:
            who, what = f"learner {session.rank}", self._owes(session)
            if what:
                words, since = f"its script has not {what} yet", now - session.turn
                rows.append(_wait(who, words, since, limit, "its process is killed and started again"))
            else:
                rows.append(WaitRow(who=who, what="for the others"))
        return rows


def _wait(who: str, what: str, since: float, most: float, then: str) -> WaitRow:
    return WaitRow(who=who, what=what, since=max(0.0, since), left=max(0.0, most - since), then=then)


def _ranks(ranks: set[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
