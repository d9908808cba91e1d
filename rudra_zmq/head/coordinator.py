"""The head: messages in, effects out. Who may say what, and the answer to every request.

Owns authentication and the requests of the command line. Must not know: sockets and processes; time is an argument
(monotonic seconds). The course of a job is course's, learners are crew's, hosts are fleet's, keys are keydesk's.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pwd
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from rudra_zmq import __version__, log
from rudra_zmq.config import job_from_toml
from rudra_zmq.core import job as life
from rudra_zmq.errors import ConfigError, NotFound, NotRunning, RefusedBySecurity, Rejected, RudraError
from rudra_zmq.head import bundles, files
from rudra_zmq.head.course import HUNG_S, Course
from rudra_zmq.head.crew import MOVE_S
from rudra_zmq.head.effects import Effect, Send
from rudra_zmq.head.figures import Figure, figures
from rudra_zmq.head.fleet import Fleet, Host
from rudra_zmq.head.jobs import MOST_LISTED, Book, Job, wanted_of
from rudra_zmq.head.keydesk import KeyDesk
from rudra_zmq.head.keyring import HERE, Grade, Keyring, Origin, allows, local_grade
from rudra_zmq.head.placement import admit
from rudra_zmq.head.reasons import Limits, Reasons
from rudra_zmq.head.registry import Registry
from rudra_zmq.head.roster import Roster
from rudra_zmq.head.shelf import Shelf
from rudra_zmq.wire.codec import error_message
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

logger = log.get()

MOST_PEERS = 4096
IDLE_S = 3600.0
MOST_NAMED = 3


@dataclass
class _Peer:
    """A connection that said who it is: ``role`` cli, learnerd or node (then ``name`` is its host or job).

    ``key``: the one that it proved, "" on this machine; ``grade`` and ``owner``: of a cli, what it may do and whose
    the jobs are that it submits.
    """

    role: str
    name: str
    heard: float
    key: str = ""
    grade: Grade = "read"
    owner: str = ""


Handler: TypeAlias = Callable[[bytes, str, Any, float], Message | None]


class Coordinator:
    """Every public method returns the effects to carry out, in order."""

    def __init__(
        self,
        registry: Registry,
        state: Path,
        *,
        token: str,
        address: str,
        boot: str,
        lives: Callable[[int], bool],
        log_piece: Callable[[c.ReadLog], c.LogData],
        wall: Callable[[], float] = time.time,
        public: str = "",
        bound: Callable[[], list[str]] = list,
        suspend_as: c.JobState = "PENDING",
    ) -> None:
        """``public``: psd's own key, "" where it has none; ``bound``: the addresses that take keys."""
        self._registry, self._state, self._token = registry, state, token
        self._out: list[Effect] = []
        self._peers: dict[bytes, _Peer] = {}
        self.refused: dict[str, int] = {}
        self.keyring = Keyring(registry)
        self._limit = log.RateLimiter(10.0)
        self._different = log.RateLimiter(600.0)
        self._fleet = Fleet(self._out, boot=boot, lives=lives, shared=suspend_as == "STOPPED")
        self._book = Book(registry, state, self._out, address, wall)
        self._course = Course(self._book, self._fleet, self._out, suspend_as=suspend_as)
        desk = self._desk = KeyDesk(
            self.keyring, registry, self._fleet, public=public, bound=bound, refused=lambda: self.refused,
            evict=self._evict, wall=wall,
        )  # fmt: skip
        self._uploads = bundles.Uploads(state)
        self._reasons = Reasons(self._book, self._fleet, Limits(hung=HUNG_S, move=MOVE_S))
        self._shelf = Shelf(self._book, self._fleet, self._out, log_piece)
        self._roster = Roster(self._book, self._fleet, self._course, self._out)
        self._handlers: dict[type, tuple[str, Handler]] = {
            c.PutBundle: ("cli", self._put_bundle),
            c.Submit: ("cli", self._submit),
            c.ListJobs: ("cli", self._list_jobs),
            c.GetJob: ("cli", self._get_job),
            c.GetEvents: ("cli", self._get_events),
            c.Why: ("cli", self._reasons.why),
            c.StopJob: ("cli", self._stop_job),
            c.ResumeJob: ("cli", self._resume_job),
            c.RemoveJob: ("cli", self._remove_job),
            c.DiskUse: ("cli", self._shelf.usage),
            c.ListHosts: ("cli", self._roster.listed),
            c.SetHost: ("cli", self._roster.decided),
            c.PlanJob: ("cli", self._roster.planned),
            c.ListFiles: ("cli", self._shelf.list_files),
            c.ReadFile: ("cli", self._shelf.read_file),
            c.ReadLog: ("cli", self._shelf.read_log),
            c.AuthorizeKey: ("cli", desk.authorize),
            c.RevokeKey: ("cli", desk.revoke),
            c.ListKeys: ("cli", desk.show),
            c.Invite: ("cli", desk.invite),
            c.ForgetHost: ("cli", desk.forget),
            c.HostPing: ("learnerd", self._host_ping),
            c.GetBundle: ("learnerd", self._get_bundle),
            c.LearnerStarted: ("learnerd", self._learner_started),
            c.LearnerExit: ("learnerd", self._learner_exit),
            c.NodeReport: ("node", self._node_report),
            c.NodeEvent: ("node", self._node_event),
            c.NodeFence: ("node", self._node_fence),
            c.NodeDone: ("node", self._node_done),
        }

    # ---------------------------------------------------------------------------------------- entries

    def _effects(self) -> list[Effect]:
        done = list(self._out)
        self._out.clear()
        return done

    def begin(self, now: float) -> list[Effect]:
        """Take up what a predecessor left: nothing stays "running" that nobody runs."""
        self._fleet.born = now
        self._fleet.recall(self._registry.hosts(self._book.wall()))
        for stored in self._registry.unfinished(sorted(life.ENDED)):
            try:
                job = self._book.load(stored)
                folder = self._book.folder(stored.id).make()
                if job.bundle and bundles.needed(folder) != job.bundle:  # a power cut: the registry outlives more
                    bundles.need(folder, job.bundle)
            except (OSError, RudraError) as error:
                reason = f"it cannot be taken up again: {error.message if isinstance(error, RudraError) else error}"
                self._book.live.pop(stored.id, None)
                self._registry.update(stored.id, state="LOST", reason=reason, ended=self._book.wall())
                self._book.event(stored.id, "E", f"LOST: {reason}")
                continue
            self._course.take_up(job, now)
        bundles.collect(self._state)
        return self._effects()

    def handle(self, peer: bytes, request: str, message: Message, now: float, origin: Origin = HERE) -> list[Effect]:
        """A request or a notice of a peer. What is refused is counted, and answered where an answer is due."""
        try:
            reply = self._dispatch(peer, request, message, now, origin)
        except RudraError as error:
            reply = error_message(error)
        except Exception as error:  # a bug must not take the head down: the peer is told, the log has it
            logger.exception("a request failed", error, kind=type(message).__name__)  # noqa: PLE1205
            reply = c.Error(code="failed", message=f"psd has a bug: {type(error).__name__}: {error}"[:4000])
        if reply is not None:
            self._answer(peer, request, reply)
        return self._effects()

    def _answer(self, peer: bytes, request: str, message: Message) -> None:
        if request:
            self._out.append(Send(peer, message, request, reply=True))

    def answered(self, peer: bytes, key: str, message: Message, now: float, origin: Origin = HERE) -> list[Effect]:
        """A reply to a request of ours."""
        known = self._peers.get(peer)
        if self._fleet.of(peer) is None or known is None or known.key != origin.key:
            self._refuse("a reply of a stranger")
        else:
            self._fleet.heard(peer, now)
            self._fleet.answered(peer, key, message)
        return self._effects()

    def gone(self, peer: bytes, now: float) -> list[Effect]:
        """The connection is no more."""
        self._lose(peer, now)
        return self._effects()

    def _lose(self, peer: bytes, now: float) -> None:
        self._peers.pop(peer, None)
        self._book.forget(peer)
        host = self._fleet.of(peer)
        if host is not None:
            self._fleet.drop(host)
            self._course.crew.host_lost(host, now)
        for job in self._book.live.values():
            if job.peer == peer:
                job.peer = None

    def node_exited(self, job_id: str, status: int, words: str, now: float) -> list[Effect]:
        """A node's process ended; ``words`` is the last thing it wrote."""
        job = self._book.live.get(job_id)
        if job is not None:
            self._course.node_exited(job, status, words, now)
            self._course.schedule(now)
        return self._effects()

    def tick(self, now: float) -> list[Effect]:
        """What time brings; to be called a few times a second."""
        self._course.tick(now)
        self._fleet.expire(now)
        self._uploads.expire(now)
        self._reasons.look(now)
        self._fleet.forget_old(now, keep=lambda name: name in self._course.crew.used())
        self._book.expire(now)
        if len(self._peers) > MOST_PEERS // 2:
            self._forget_idle(now)
        return self._effects()

    def suspend(self, now: float) -> list[Effect]:
        """psd is to end: stop all jobs cleanly. Over when ``busy`` is false."""
        self._course.suspend(now)
        return self._effects()

    @property
    def busy(self) -> bool:
        """Whether something of a job may still run."""
        return self._course.busy

    @property
    def live(self) -> int:
        """Jobs that have not ended."""
        return len(self._book.live)

    @property
    def status_line(self) -> str:
        """Jobs and hosts, on one line."""
        jobs = [
            f"job {job.id} {job.state}" + (f" update {job.progress.updates}" if job.progress is not None else "")
            for job in self._book.live.values()
        ]
        shown = jobs[:MOST_NAMED] + ([f"and {len(jobs) - MOST_NAMED} more"] if len(jobs) > MOST_NAMED else [])
        here = sum(host.peer is not None for host in self._fleet.hosts.values())
        return f"{', '.join(shown) or 'no jobs'}; {here} host{'' if here == 1 else 's'}"

    def figures(self, dropped: Mapping[str, int], now: float) -> list[Figure]:
        """What is measured, for other threads to read; ``dropped``: messages that were none, by reason."""
        return figures(
            jobs=self._registry.counts(),
            live=list(self._book.live.values()),
            hosts=self._roster.rows(now),
            refused=sum(self.refused.values()),
            dropped=dropped,
        )

    # ---------------------------------------------------------------------------------------- who is it

    def _dispatch(self, peer: bytes, request: str, message: Message, now: float, origin: Origin) -> Message | None:
        key = self._key_of(origin)
        if isinstance(message, c.Whoami):
            return self._whoami(peer, message, now, origin, key)
        if isinstance(message, c.Register):
            self._register(peer, request, message, now, key)
            return None
        if isinstance(message, c.NodeHello):
            self._node_hello(peer, request, message, now, key)
            return None
        if isinstance(message, c.Join) and key is not None:
            return self._desk.join(key.key, message, now)
        known = self._peers.get(peer)
        if known is None or known.key != origin.key:
            raise self._refuse("this connection has not said who it is")
        role, handler = self._handlers.get(type(message), ("", None))
        if handler is None or role != known.role:
            raise self._refuse(f"a {known.role} may not send {type(message).__name__}")
        if role == "cli" and not allows(known.grade, type(message)):
            fix = "ask for another role: rudra keys authorize KEY NAME --role ROLE, on the head"
            raise self._refuse(f"a key with the role {known.grade} may not do this", "role", fix)
        known.heard = now
        if role == "learnerd":
            self._fleet.heard(peer, now)
        elif role == "node":
            self._course.heard(known.name, now)
        return handler(peer, request, message, now)

    def _key_of(self, origin: Origin) -> c.KeyRow | None:
        """The key that a message came under, None where it came from this machine."""
        if not origin.key:
            return None
        row = self.keyring.live(origin.key, self._book.wall())
        if row is None:
            fix = "have it authorised again: rudra keys authorize KEY NAME, on the head"
            raise self._refuse(f"the key {origin.key[:8]} was revoked", "revoked-key", fix)
        return row

    def refusal(self, reason: str, why: str) -> None:
        """Count what was not let in. ``reason``: one of few words of ours."""
        self.refused[reason] = self.refused.get(reason, 0) + 1
        logger.limited(self._limit, "warning", "refused", why=why, refused=sum(self.refused.values()))

    def _refuse(
        self, why: str, reason: str = "stranger", fix: str = "give the token of psd's own token file (--token-file)"
    ) -> RefusedBySecurity:
        self.refusal(reason, why)
        return RefusedBySecurity(why, fix=fix)

    def _evict(self, key: str, why: str, now: float) -> int:
        """End all that a key has open; how many connections that were."""
        peers = [peer for peer, known in self._peers.items() if known.key == key]
        shut = [host for host in self._fleet.hosts.values() if host.key == key]
        silent = [host for host in shut if host.peer is None]
        for host in shut:
            host.dead = True  # what it runs is no longer ours
        for peer in peers:
            error = error_message(RefusedBySecurity(why, fix="ask who runs the head"))
            for request in self._book.waiting(peer):
                self._answer(peer, request, error)
            self._lose(peer, now)
        for host in silent:
            self._course.crew.host_lost(host, now)
        return len(peers)

    def _know(
        self, peer: bytes, role: str, name: str, now: float, key: str = "", grade: Grade = "read", owner: str = ""
    ) -> None:
        if len(self._peers) >= MOST_PEERS:
            self._peers.pop(min(self._peers, key=lambda p: self._peers[p].heard))
        self._peers[peer] = _Peer(role, name, now, key, grade, owner)

    def _forget_idle(self, now: float) -> None:
        for peer in [p for p, known in self._peers.items() if now - known.heard > IDLE_S]:
            del self._peers[peer]

    def _check_token(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise self._refuse("the token is not this psd's")

    def _whoami(self, peer: bytes, message: c.Whoami, now: float, origin: Origin, key: c.KeyRow | None) -> Message:
        if key is None:
            self._check_token(message.token)
            self._know(peer, "cli", "", now, "", local_grade(origin.uid, os.getuid()), _local_name(origin.uid))
        elif key.role in ("host", "invite"):
            raise self._refuse(f"the key of {key.name} is {key.role}'s, not a person's", "role", "use your own key")
        else:
            self._know(peer, "cli", "", now, key.key, key.role, key.name)
        return c.Ok(text=__version__)

    def _register(self, peer: bytes, request: str, message: c.Register, now: float, key: c.KeyRow | None) -> None:
        if key is None:
            self._check_token(message.token)
        elif key.role != "host":
            fix = "on the head: rudra keys authorize KEY NAME --role host"
            raise self._refuse(f"the key of {key.name} has the role {key.role}, not host", "role", fix)
        else:  # a host is its key, whatever it calls itself
            message = msgspec.structs.replace(message, name=key.name)
        host = self._fleet.register(peer, message, now)
        host.key = "" if key is None else key.key
        self._know(peer, "learnerd", message.name, now, host.key)
        self._book.see_host(self._fleet.row(host, {}, self._book.wall(), now))
        logger.info("learnerd registered", host=host.name, pid=host.pid, slots=host.slots, reached=host.reached)
        if different := self._fleet.differences(name for name, other in self._fleet.hosts.items() if other.peer):
            logger.limited(self._different, "warning", "hosts differ", what=different)
        # The answer goes out first: what follows are orders to a learnerd that knows that it is registered.
        self._answer(peer, request, c.Registered())
        self._course.crew.registered(host, message.running, now)
        self._course.schedule(now)

    def _node_hello(self, peer: bytes, request: str, message: c.NodeHello, now: float, key: c.KeyRow | None) -> None:
        if key is not None and key.role != "host":
            raise self._refuse(f"the key of {key.name} has the role {key.role}, not host", "role", "use a host's key")
        job = self._book.live.get(message.job)
        if job is None or not hmac.compare_digest(message.token.encode(), job.token.encode()):
            raise self._refuse("no node of that job and token is awaited")
        if message.generation != job.generation or not job.node_runs:
            raise self._refuse(f"a node of generation {message.generation} is not awaited")
        self._know(peer, "node", job.id, now, "" if key is None else key.key)
        self._answer(peer, request, c.Ok())
        self._course.hello(job, peer, message, now)

    # ---------------------------------------------------------------------------------------- learnerd

    def _host(self, peer: bytes) -> Host:
        host = self._fleet.of(peer)
        if host is None:
            raise NotFound("this connection is no longer registered", fix="register again")
        return host

    def _host_ping(self, peer: bytes, request: str, message: c.HostPing, now: float) -> Message:
        self._host(peer)
        return c.Ok()

    def _get_bundle(self, peer: bytes, request: str, message: c.GetBundle, now: float) -> Message:
        """Code goes to the hosts that are to run it, and to no other."""
        host = self._host(peer)
        if not any(job.bundle == message.name and job.on(host.name) for job in self._book.live.values()):
            raise NotFound(f"no job on {host.name} needs the code {message.name[:12]}", fix="submit the job again")
        data, size = bundles.read(self._state, message.name, message.offset, files.MAX_READ)
        return c.FileData(data=data, inode=0, size=size)

    def _learner_started(self, peer: bytes, request: str, message: c.LearnerStarted, now: float) -> Message:
        self._course.crew.started(message, self._host(peer))
        return c.Ok()

    def _learner_exit(self, peer: bytes, request: str, message: c.LearnerExit, now: float) -> Message:
        self._course.crew.exited(message, self._host(peer), now)
        self._course.schedule(now)
        return c.Ok()

    # ---------------------------------------------------------------------------------------- node

    def _of_node(self, peer: bytes, job_id: str) -> Job:
        job = self._book.live.get(job_id)
        if job is None or job.peer != peer:
            raise self._refuse("this is not the job's node")
        return job

    def _node_report(self, peer: bytes, request: str, message: c.NodeReport, now: float) -> Message:
        self._course.report(self._of_node(peer, message.job), message, now)
        return c.Ok()

    def _node_event(self, peer: bytes, request: str, message: c.NodeEvent, now: float) -> Message:
        self._book.event(self._of_node(peer, message.job).id, message.level, message.text)
        return c.Ok()

    def _node_fence(self, peer: bytes, request: str, message: c.NodeFence, now: float) -> Message:
        self._course.crew.fence(self._of_node(peer, message.job), message)
        return c.Ok()

    def _node_done(self, peer: bytes, request: str, message: c.NodeDone, now: float) -> Message:
        self._course.done(self._of_node(peer, message.job), message, now)
        return c.Ok()

    # ---------------------------------------------------------------------------------------- jobs

    def _put_bundle(self, peer: bytes, request: str, message: c.PutBundle, now: float) -> Message:
        held = self._uploads.put(message.name, message.size, message.offset, message.data, now)
        return c.BundleHeld(held=held)

    def _submit(self, peer: bytes, request: str, message: c.Submit, now: float) -> Message:
        file = job_from_toml(message.toml, name=message.name).job
        admit(wanted_of("", file), self._fleet.rooms(self._course.crew.used()))
        if not os.path.isabs(message.cwd):
            raise ConfigError(f"the job's folder {message.cwd!r} is no absolute path")
        if file.run.code and not bundles.have(self._state, message.code_hash):
            raise NotFound(f"the code {message.code_hash[:12]} is not here", fix="submit the job again")
        job_id, new = self._registry.submit(
            request=message.request,
            name=message.name,
            toml=message.toml,
            cwd=message.cwd,
            origins=message.origins,
            code_hash=message.code_hash,
            again=message.again,
            state="PENDING",
            now=self._book.wall(),
            owner=self._peers[peer].owner,
        )
        if new:
            self._make(job_id, message.toml, message.code_hash if file.run.code else "")
            job = self._book.load(self._registry.stored(job_id))
            of = f", again of {message.again}" if message.again else ""
            self._book.event(job.id, "I", f"submitted as {message.name}{of}")
            self._course.schedule(now)
        return c.Submitted(job=job_id)

    def _make(self, job: str, toml: str, bundle: str) -> None:
        """The job's folder and file; without them there is no job."""
        try:
            folder = self._book.folder(job).make()
            if bundle:
                bundles.need(folder, bundle)
            folder.job_toml.write_text(toml, "utf-8")
        except (OSError, RudraError) as error:
            self._registry.remove(job)
            with contextlib.suppress(OSError):
                files.remove_folder(self._book.folder(job).root)
            if isinstance(error, RudraError):
                raise
            reason = error.strerror or "it cannot be made"
            raise RudraError(f"the job's folder cannot be written: {reason}", where=str(self._state)) from None

    def _list_jobs(self, peer: bytes, request: str, message: c.ListJobs, now: float) -> Message:
        rows = self._registry.jobs()[:MOST_LISTED]
        return c.Jobs(rows=[_brief(self._book.current(row)) for row in rows])

    def _get_job(self, peer: bytes, request: str, message: c.GetJob, now: float) -> Message:
        reply = self._registry.get(message.job)
        return msgspec.structs.replace(reply, row=self._book.current(reply.row), refused=dict(self.refused))

    def _get_events(self, peer: bytes, request: str, message: c.GetEvents, now: float) -> None:
        self._book.ask(peer, request, message, now)

    def _check_owner(self, peer: bytes, job: str) -> None:
        """A job is told what to do by its owner, or by who may do all."""
        known, row = self._peers[peer], self._book.row(job)
        if known.grade != "admin" and known.owner != row.owner:
            text = f"job {row.job} belongs to {row.owner or 'nobody'}, not to {known.owner}"
            raise self._refuse(text, "owner", f"ask {row.owner or 'an admin'}, or use an admin's key")

    def _stop_job(self, peer: bytes, request: str, message: c.StopJob, now: float) -> Message:
        self._check_owner(peer, message.job)
        job = self._book.live.get(message.job)
        if job is None:
            row = self._book.row(message.job)
            raise NotRunning(f"job {row.job} cannot be stopped: {life.refusal(row.state, 'stop')}")
        text = self._course.stop(job, message.now, now)
        self._course.schedule(now)
        return c.Ok(text=text)

    def _resume_job(self, peer: bytes, request: str, message: c.ResumeJob, now: float) -> Message:
        self._check_owner(peer, message.job)
        row = self._book.row(message.job)
        if row.job in self._book.live:
            return c.Ok(text=f"job {row.job} is {row.state} already")
        if life.step(row.state, "resume") is None:
            fix = f"`rudra again {row.job}` runs it anew"
            raise NotRunning(f"job {row.job} cannot be resumed: {life.refusal(row.state, 'resume')}", fix=fix)
        self._book.folder(row.job).make()
        self._course.resume(self._book.load(self._registry.stored(row.job)), now)
        return c.Ok(text=f"job {row.job} goes on from its newest snapshot")

    def _remove_job(self, peer: bytes, request: str, message: c.RemoveJob, now: float) -> Message:
        self._check_owner(peer, message.job)
        row = self._book.row(message.job)
        if row.job in self._book.live or life.step(row.state, "remove") is None:
            fix = f"`rudra stop {row.job}` first"
            raise Rejected(f"job {row.job} cannot be removed: {life.refusal(row.state, 'remove')}", fix=fix)
        bundle = bundles.needed(self._book.folder(row.job))
        try:
            files.remove_folder(self._book.folder(row.job).root)
            bundles.collect(self._state, bundle)
        except OSError as error:
            reason = error.strerror or "it cannot be removed"
            raise RudraError(f"the job's folder stays: {reason}", where=row.folder) from None
        names = {seat.host for seat in self._registry.stored(row.job).hosts.values()}
        self._book.remove(row.job)
        hosts = {name: self._fleet.registered(name) for name in sorted(names)}
        for host in filter(None, hosts.values()):  # a learnerd may keep its learners' logs in a folder of its own
            self._fleet.tell(host, c.RemoveJob(job=row.job))
        away = ", ".join(name for name, host in hosts.items() if host is None)
        return c.Ok(text=f"what {away} keeps of it stays, its learnerd is away" if away else "")


def _local_name(uid: int) -> str:
    """The owner of what a process of this machine submits; no name of a key looks like it."""
    if uid < 0:
        uid = os.getuid()
    try:
        return f"local:{pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"local:{uid}"


def _brief(row: c.JobRow) -> c.JobRow:
    """A row of a list: without what only one job's screen shows."""
    if row.progress is None:
        return row
    brief = msgspec.structs.replace(row.progress, rows=row.progress.rows[-1:], learners=[], histogram={})
    return msgspec.structs.replace(row, progress=brief)
