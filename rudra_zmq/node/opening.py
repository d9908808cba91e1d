"""The beginning of a job: signatures compared, version 0, the rule, the data, and when training starts.

Owns: what happens between a Hello and the first lease, also of a learner that comes later or comes back. Must not
know: gradients, updates.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rudra_zmq.core.events import Clock, Event, Join, Start
from rudra_zmq.core.sync import Sync
from rudra_zmq.errors import Rejected, RudraError
from rudra_zmq.node import export, spec
from rudra_zmq.node.evaluate import Mailbox
from rudra_zmq.node.figures import Figures
from rudra_zmq.node.model import Model
from rudra_zmq.node.sessions import Session
from rudra_zmq.node.vectors import Vector
from rudra_zmq.node.work import MEMORY, Work, new_key, told
from rudra_zmq.wire.layout import diff
from rudra_zmq.wire.messages.data import Attach, Data, InitDone, Ready, Rule, RuleReply, SendInit

MOST_AHEAD = 64  # leases beyond the one that is computed; more would only tie samples to a slow learner


class Opening:
    """``turn`` gives an event to the core; ``fail`` ends the job."""

    def __init__(self, work: Work, turn: Callable[[Event], None], fail: Callable[[str], None]) -> None:
        self._work = work
        self._turn = turn
        self._fail = fail
        self._uploader: Session | None = None
        self._key = 0  # of the upload that is awaited
        self._refused: set[int] = set()  # ranks whose upload was of no use
        self._born = work.clock()
        self._first: float | None = None  # when somebody attached first

    # ------------------------------------------------------------------------------------------ attach

    def attach(self, session: Session, message: Attach) -> None:
        """A learner's model. Raises Rejected with the difference where it is not the job's."""
        model = self.model_for(message)
        if self._first is None:
            self._first = self._work.clock()
        model.slots.open(*session.who)
        session.attached = True
        if session is self._uploader:  # it lost its connection in the middle: once more
            self._uploader = None
        if model.exists:
            self._ready(session)
        elif self._work.job.job.init and not self._work.over:
            self._load_init(model)
        self.look()

    def model_for(self, message: Attach) -> Model:
        """The model of the job, made from the first signature. Raises Rejected for another one."""
        work = self._work
        if work.model is None:
            work.model = Model(message, work.job, work.shares)
            if work.evaluated:
                work.mailbox = Mailbox(work.model.layout)
            self._say_memory(work.model)
        else:
            lines = diff(message, work.model.attach)
            if lines:
                fix = "run the same code everywhere, or start a new job"
                raise Rejected("another model than the job's: " + "; ".join(lines), where="attach", fix=fix)
        return work.model

    def _say_memory(self, model: Model) -> None:
        work = self._work
        plan = model.memory(work.job.servers.snapshot != "none", work.evaluated)
        parts = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in plan.items())
        total = _size(sum(plan.values()))
        work.event("I", f"model of {model.layout.P:,} parameters; the node takes up to {total} for it ({parts})")

    # --------------------------------------------------------------------------------------- version 0

    def _load_init(self, model: Model) -> None:
        path = Path(self._work.job.job.init)
        target = self._room(model)
        if target is None:
            return
        try:
            export.load(path, model.attach, model.layout, target)
        except RudraError as error:
            self._fail(str(error))
            return
        self._version_0(model, f"from {path}")

    def _room(self, model: Model) -> Vector | None:
        """Where version 0 goes; None where there is no memory, and the job has failed."""
        try:
            return model.versions.begin()
        except MemoryError as error:
            self._fail(f"out of memory for version 0 of the weights{told(error)}. Fix: {MEMORY}")
            return None

    def _ask_upload(self, model: Model) -> None:
        """The lowest attached rank uploads; the next one if it dies or its weights are of no use."""
        fit = [s for s in self._work.sessions.all if s.attached and s.peer is not None]
        fit = [s for s in fit if s.rank not in self._refused]
        room = self._room(model) if fit else None
        if room is None:
            return
        self._uploader, self._key = fit[0], new_key()
        peer = fit[0].peer
        assert peer is not None
        courier = self._work.post.to(peer)
        courier.inbox.expect(self._key, room.data)
        courier.message(SendInit(key=self._key))

    def init_done(self, session: Session, message: InitDone) -> None:
        """An upload is complete. Raises Rejected where it holds a NaN, or is not what was asked for."""
        model = self._work.model
        if model is None or session is not self._uploader or message.key != self._key or session.peer is None:
            self._work.sessions.drop("foreign-init")
            return
        self._uploader = None
        receiver = self._work.post.to(session.peer).inbox.take(self._key)
        complete = receiver is not None and receiver.complete and message.nbytes == receiver.nbytes
        bad = export.first_bad(model.layout, model.versions.begin())
        if not complete or bad:
            self._refused.add(session.rank)
            text = f"{bad} of rank {session.rank} is NaN or infinite" if bad else "the upload is incomplete"
            self.look()
            raise Rejected(f"version 0 cannot be made: {text}", fix="look at how the model is initialised")
        self._version_0(model, f"from rank {session.rank}")

    def _version_0(self, model: Model, text: str) -> None:
        model.versions.publish()
        model.exists = True
        self._work.event("I", f"version 0 {text}")
        for session in self._work.sessions.all:
            if session.attached and not session.ready:
                self._ready(session)
        self.look()

    def _ready(self, session: Session) -> None:
        session.ready = True
        clock = self.clock
        key = new_key()
        self._work.send(
            session, Ready(generation=clock.generation, timestamp=clock.timestamp, key=key, nbytes=self._nbytes)
        )
        self._work.send_weights(session, key, clock)

    @property
    def _nbytes(self) -> int:
        assert self._work.model is not None
        return self._work.model.layout.nbytes

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
        accepted = model.offer(message)
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
        """A session ended: if it was uploading, the next one does."""
        if session is self._uploader:
            self._uploader = None
        self.look()

    def look(self) -> None:
        """Is it time for the upload, for the start, or to give up? To be called at each change and each second."""
        work = self._work
        if work.started or work.over:
            return
        everyone = self._is_complete()
        model = work.model
        if model is not None and not model.exists and self._uploader is None and everyone:
            self._ask_upload(model)
        attached = [s for s in work.sessions.all if s.attached]
        if model is not None and model.exists and everyone and all(s.joined for s in attached):
            work.started = True
            self._turn(Start())
            return
        now = work.clock()
        if now >= self.deadline() and self._present() < work.job.learners.min:
            self._fail(f"{self._present()} of at least {work.job.learners.min} learners came: {self.missing()}")

    def _present(self) -> int:
        return sum(s.attached for s in self._work.sessions.all)

    def _is_complete(self) -> bool:
        """All are here; or the time is up, and enough are."""
        learners = self._work.job.learners
        present = self._present()
        return present >= learners.count or (
            present >= learners.min and self._work.clock() >= self.deadline() and present > 0
        )

    def deadline(self) -> float:
        """When the job starts with those who are here, or fails; twice as long while nobody has come."""
        patience = self._work.job.learners.deadline_s
        return self._born + 2 * patience if self._first is None else self._first + patience

    def missing(self) -> str:
        """ "rank 2 missing, 12 s of 60 s": who is not here, and for how long it is waited."""
        here = {s.rank for s in self._work.sessions.all if s.attached}
        absent = [str(rank) for rank in range(self._work.job.learners.count) if rank not in here]
        patience = self._work.job.learners.deadline_s * (2 if self._first is None else 1)
        waited = min(patience, self._work.clock() - (self.deadline() - patience))
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent[:8])}{', ...' if len(absent) > 8 else ''}"
        return f"{who} missing, {waited:.0f} s of {patience:.0f} s"

    def reason(self) -> str:
        """Why training has not started, for people; with more than one state to say."""
        count = self._work.job.learners.count
        present = self._present()
        if present < count:
            return f"{present}/{count} learners ({self.missing()})"
        joined = sum(s.joined for s in self._work.sessions.all)
        return f"{joined}/{count} learners have their data"


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
