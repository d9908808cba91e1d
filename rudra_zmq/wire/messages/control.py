"""Messages of the control plane: CLI, learnerd and node (DEALER) to psd (ROUTER) and back.

Owns the fields and limits; docs/PROTOCOL.rst says the same in prose and a test holds them together. Every
message travels in an ``Envelope`` of its own frame: a request carries an id, its reply the same id; a
notice (id "") has no answer. What they tell of jobs and hosts are ``records``, importable from here.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from rudra_zmq.wire.bundle import MOST_BYTES
from rudra_zmq.wire.messages.data import Count, Message, Names, Rank, Seconds, Short, Text
from rudra_zmq.wire.messages.records import EpochRow as EpochRow
from rudra_zmq.wire.messages.records import EventRow as EventRow
from rudra_zmq.wire.messages.records import Fates as Fates
from rudra_zmq.wire.messages.records import HostRow as HostRow
from rudra_zmq.wire.messages.records import JobId as JobId
from rudra_zmq.wire.messages.records import JobRow as JobRow
from rudra_zmq.wire.messages.records import JobState as JobState
from rudra_zmq.wire.messages.records import Key as Key
from rudra_zmq.wire.messages.records import KeyRow as KeyRow
from rudra_zmq.wire.messages.records import LearnerRow as LearnerRow
from rudra_zmq.wire.messages.records import Lines as Lines
from rudra_zmq.wire.messages.records import PlanRow as PlanRow
from rudra_zmq.wire.messages.records import Progress as Progress
from rudra_zmq.wire.messages.records import Role as Role
from rudra_zmq.wire.messages.records import Standing as Standing
from rudra_zmq.wire.messages.records import Time as Time
from rudra_zmq.wire.messages.records import WaitRow as WaitRow
from rudra_zmq.wire.messages.records import Words as Words

Toml: TypeAlias = Annotated[str, Meta(max_length=262144)]
Blob: TypeAlias = Annotated[bytes, Meta(max_length=524288)]
Piece: TypeAlias = Annotated[bytes, Meta(max_length=262144)]
Origins: TypeAlias = Annotated[dict[Short, Short], Meta(max_length=4096)]  # key of the job file -> source
Ranks: TypeAlias = Annotated[list[Rank], Meta(max_length=65536)]
BundleName: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256 of a bundle of user code
NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]  # of a key
Places: TypeAlias = Annotated[list[Text], Meta(max_length=64)]  # addresses


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Frame 0 after the protocol prefix: request id (sender's, <= 64 characters; "" for a notice)."""

    id: Annotated[str, Meta(max_length=64)]
    reply: bool


# ------------------------------------------------------------------------------------------- replies


class Ok(Message, frozen=True, tag="ok"):
    """Done (also the answer to Stop, Rm, ...); ``text`` may say what was done."""

    text: Text = ""


class Error(Message, frozen=True, tag="error"):
    """Not done: an error of rudra_zmq.errors by its wire code."""

    code: Short
    message: Text
    where: Text = ""
    fix: Text = ""


# --------------------------------------------------------------------------------------- CLI to head


class Whoami(Message, frozen=True, tag="whoami"):
    """First on each control connection that is not a daemon's; carries the token of a 0600 file, or nothing where
    the connection itself proved a key."""

    token: Short = ""


class Submit(Message, frozen=True, tag="submit"):
    """A new job. ``request`` makes it idempotent; ``toml`` is the effective file; ``origins`` key -> source."""

    request: Short
    name: Short
    toml: Toml
    cwd: Text
    origins: Origins = {}
    code_hash: Short = ""
    again: Short = ""


class PutBundle(Message, frozen=True, tag="put_bundle"):
    """A piece of the user code of a job that is to be submitted; without ``data`` a question. What does not continue
    what the head has is not taken."""

    name: BundleName
    size: Annotated[int, Meta(ge=1, le=MOST_BYTES)]
    offset: Count = 0
    data: Piece = b""


class BundleHeld(Message, frozen=True, tag="bundle_held"):
    """Bytes that the head has of it, from its start; all of them: it is whole, and checked."""

    held: Count


class Submitted(Message, frozen=True, tag="submitted"):
    job: JobId


class ListJobs(Message, frozen=True, tag="list_jobs"):
    """All jobs, newest first."""


class Jobs(Message, frozen=True, tag="jobs"):
    rows: Annotated[list[JobRow], Meta(max_length=65536)]


class GetJob(Message, frozen=True, tag="get_job"):
    """One job by id, by name (the newest) or "" (the newest of all)."""

    job: Short


class JobReply(Message, frozen=True, tag="job_reply"):
    """``refused``: connections and messages that psd has refused since it began, by reason."""

    row: JobRow
    toml: Toml = ""
    origins: Origins = {}
    code_hash: Short = ""
    refused: Fates = {}


class GetEvents(Message, frozen=True, tag="get_events"):
    """Events after ``after``; the head holds the answer up to ``wait`` seconds (<= 20) for a new one or for a
    change of state away from ``state``."""

    job: JobId
    after: Count
    wait: Annotated[float, Meta(ge=0, le=20)]
    state: Short = ""


class Events(Message, frozen=True, tag="events"):
    rows: Annotated[list[EventRow], Meta(max_length=65536)]
    job: JobRow


class Why(Message, frozen=True, tag="why"):
    """What do the processes of this job wait for?"""

    job: JobId


class Waits(Message, frozen=True, tag="waits"):
    rows: Annotated[list[WaitRow], Meta(max_length=4096)]
    job: JobRow  # without its figures


class StopJob(Message, frozen=True, tag="stop_job"):
    """Drain and snapshot, or at once (the last snapshot stays)."""

    job: JobId
    now: bool = False


class ResumeJob(Message, frozen=True, tag="resume_job"):
    """Go on with a job that is STOPPED, FAILED or LOST, from its newest snapshot."""

    job: JobId


class RemoveJob(Message, frozen=True, tag="remove_job"):
    """Remove an ended job and its files."""

    job: JobId


class DiskUse(Message, frozen=True, tag="disk_use"):
    """Bytes per job folder."""


class DiskUsed(Message, frozen=True, tag="disk_used"):
    # job, what (snapshots, logs, weights, code, other), bytes
    rows: Annotated[list[tuple[JobId, Short, Count]], Meta(max_length=65536)]


class ListHosts(Message, frozen=True, tag="list_hosts"):
    pass


class Hosts(Message, frozen=True, tag="hosts"):
    """``now``: the head's clock; ``version``: of its rudra."""

    rows: Annotated[list[HostRow], Meta(max_length=65536)]
    now: Time = 0.0
    version: Short = ""


class SetHost(Message, frozen=True, tag="set_host"):
    """ready: takes learners. drained: takes no new ones, those that run go on. banned: those leave as well."""

    host: Short
    state: Standing


class PlanJob(Message, frozen=True, tag="plan_job"):
    """Where a job would run if it were submitted now, and what its hosts lack for it. Nothing is done."""

    name: Short
    toml: Toml
    cwd: Text


class Planned(Message, frozen=True, tag="planned"):
    """``reason``: why it would wait, then there are no rows."""

    rows: Annotated[list[PlanRow], Meta(max_length=4096)] = []
    reason: Text = ""


class ListFiles(Message, frozen=True, tag="list_files"):
    """Files of a job's folder (logs, weights, metrics, decisions): relative path and size."""

    job: JobId


class Files(Message, frozen=True, tag="files"):
    rows: Annotated[list[tuple[Text, Count]], Meta(max_length=65536)]


class ReadFile(Message, frozen=True, tag="read_file"):
    """Bytes of one of them; a log of a learner is fetched from its host."""

    job: JobId
    path: Text
    offset: Count
    limit: Annotated[int, Meta(ge=1, le=262144)]


class FileData(Message, frozen=True, tag="file_data"):
    """``inode`` tells a follower that the file was replaced; ``size`` is the file's at the time."""

    data: Blob
    inode: Count
    size: Count


class ReadLog(Message, frozen=True, tag="read_log"):
    """A daemon's own newest lines: those of the learnerd on ``host``, or ("") psd's own. ``offset`` counts from its
    start."""

    host: Short
    offset: Count
    limit: Annotated[int, Meta(ge=1, le=262144)]


class LogData(Message, frozen=True, tag="log_data"):
    """``offset`` is that of ``data``: what is older than that is gone. Another ``run``: another process wrote it."""

    data: Piece
    offset: Count
    run: Count


# -------------------------------------------------------------------------------------------- keys


class AuthorizeKey(Message, frozen=True, tag="authorize_key"):
    """Let a key in under a name; of one that is known, change name or role, or take back its revocation."""

    key: Key
    name: Name
    role: Role


class RevokeKey(Message, frozen=True, tag="revoke_key"):
    """By name, or by the beginning of the key. What it has open ends at once."""

    key: Short


class ListKeys(Message, frozen=True, tag="list_keys"):
    pass


class Keys(Message, frozen=True, tag="keys"):
    """``head``: psd's own public key ("" where it has none); ``addresses``: what it has bound; ``refused``: as in
    job_reply."""

    rows: Annotated[list[KeyRow], Meta(max_length=65536)]
    head: Short = ""
    addresses: Places = []
    refused: Fates = {}


INVITE_MOST_S = 604800.0


class Invite(Message, frozen=True, tag="invite"):
    """``key`` may join as the host ``name``, once, within ``seconds``. Answered by ``keys`` without rows."""

    key: Key
    name: Name
    seconds: Annotated[float, Meta(ge=1, le=INVITE_MOST_S)]


class Join(Message, frozen=True, tag="join"):
    """Under an invited key: let this one in as the host, in its place."""

    key: Key


class Joined(Message, frozen=True, tag="joined"):
    name: Short


class ForgetHost(Message, frozen=True, tag="forget_host"):
    """Drop a host from the list and revoke its key."""

    name: Short


# ------------------------------------------------------------------------------------ learnerd and head


class Register(Message, frozen=True, tag="register"):
    """A learnerd is here (also after each reconnect), with what already runs on it."""

    token: Short
    name: Short
    slots: Count
    pid: Count
    boot: Short  # same as the head's: one machine, ipc paths can be used, PIDs mean the same
    versions: Names = {}
    # job, rank, incarnation, pid
    running: Annotated[list[tuple[JobId, Rank, Count, Count]], Meta(max_length=4096)] = []
    labels: Words = []
    devices: Words = []  # declared, by index or UUID
    absent: Words = []  # those of them that are not there
    reached: Text = ""  # IP of the head that this host dialled; "" over ipc


class Registered(Message, frozen=True, tag="registered"):
    """The head knows it: orders follow."""


class HostPing(Message, frozen=True, tag="host_ping"):
    """Liveness of a learnerd, sent from its working loop; answered by Ok."""


class GetBundle(Message, frozen=True, tag="get_bundle"):
    """A piece of the user code of a job whose learners this host is to run; answered by FileData."""

    name: BundleName
    offset: Count


class CheckJob(Message, frozen=True, tag="check_job"):
    """Can this host run learners of the job? Answered by ``Checked``. ``cwd``: "" where its code goes with it."""

    name: Short
    toml: Toml
    cwd: Text


class Checked(Message, frozen=True, tag="checked"):
    """``problems``: what the job needs and the host lacks, a line each."""

    problems: Lines = []
    memory: Count = 0  # bytes that the host has to spare


class StartLearners(Message, frozen=True, tag="start_learners"):
    """Spawn these ranks (and the evaluator where ``evaluator``), each with ``incarnation`` or higher.

    The head raises ``incarnation`` by ``restarts`` + 1 each time, so that no gradient id ever comes twice,
    also when the learnerd that counted is a new process."""

    job: JobId
    generation: Count
    name: Short
    token: Short
    toml: Toml
    cwd: Text
    ranks: Ranks
    evaluator: bool
    addresses: Places  # of the node, best first
    threads: Count
    restarts: Count
    incarnation: Count = 1
    key: Short = ""  # of the node
    bundle: Short = ""  # name of the bundle of user code that they run, see get_bundle
    devices: Words = []  # of each of ``ranks``, where the host has declared any


class NodeMoved(Message, frozen=True, tag="node_moved"):
    """The job's node was restarted and listens here."""

    job: JobId
    generation: Count
    addresses: Places
    key: Short = ""  # of the node


class StopLearners(Message, frozen=True, tag="stop_learners"):
    """TERM, then KILL after ``grace`` seconds; empty ``ranks`` means all and the evaluator, the job is over.

    ``leave``: the job goes on, and the ranks are to run elsewhere."""

    job: JobId
    ranks: Ranks = []
    grace: Seconds = 5.0
    leave: bool = False


class KillLearner(Message, frozen=True, tag="kill_learner"):
    """Fence one incarnation: SIGKILL at once, then respawn if restarts are left."""

    job: JobId
    rank: Rank
    incarnation: Count
    reason: Text


class LearnerStarted(Message, frozen=True, tag="learner_started"):
    job: JobId
    rank: Rank
    incarnation: Count
    pid: Count
    evaluator: bool = False


class LearnerExit(Message, frozen=True, tag="learner_exit"):
    """A child ended. ``kind``: ok, error (non-zero: the job fails), signal or oom (a loss). ``tail`` is the end
    of its output."""

    job: JobId
    rank: Rank
    incarnation: Count
    evaluator: bool
    kind: Literal["ok", "error", "signal", "oom", "spawn"]
    status: Annotated[int, Meta(ge=-255, le=255)]  # negative: the signal
    respawn: bool
    text: Text = ""
    tail: Annotated[str, Meta(max_length=262144)] = ""


# ----------------------------------------------------------------------------------------- node and psd


class NodeHello(Message, frozen=True, tag="node_hello"):
    """The node is bound and serves; sent to the psd that spawned it."""

    job: JobId
    token: Short
    generation: Count
    pid: Count
    addresses: Places
    key: Short = ""  # public, of its CURVE pair; empty where nothing is encrypted


class NodeReport(Message, frozen=True, tag="node_report"):
    """Each second, and at each change of state."""

    job: JobId
    progress: Progress


class NodeEvent(Message, frozen=True, tag="node_event"):
    """A line for the job's story."""

    job: JobId
    level: Literal["I", "W", "E"]
    text: Text


class NodeFence(Message, frozen=True, tag="node_fence"):
    """Asks that this incarnation be killed; answered in time by LearnerGone."""

    job: JobId
    rank: Rank
    incarnation: Count
    reason: Text


class NodeDone(Message, frozen=True, tag="node_done"):
    """The job has ended and everything is on disk: DONE, STOPPED or FAILED; the node exits after Ok."""

    job: JobId
    state: JobState
    reason: Text
    progress: Progress


class LearnerGone(Message, frozen=True, tag="learner_gone"):
    """To the node: this incarnation's process is dead (kind lost or fenced) or left (bye). ``evaluator``: it is
    the evaluator's (its rank means nothing). Whatever of the rank is below ``lowest`` is over too."""

    rank: Rank
    incarnation: Count
    kind: Literal["bye", "lost", "fenced"]
    respawn: bool
    text: Text = ""
    evaluator: bool = False
    lowest: Count = 0  # incarnation that may come from now on


class NodeStop(Message, frozen=True, tag="node_stop"):
    """To the node: drain, snapshot, end as ``state``; with ``now`` end at once, the last snapshot stays."""

    now: bool
    state: Literal["STOPPED", "FAILED"]
    reason: Text


Control: TypeAlias = (
    Ok
    | Error
    | Whoami
    | Submit
    | PutBundle
    | BundleHeld
    | Submitted
    | ListJobs
    | Jobs
    | GetJob
    | JobReply
    | GetEvents
    | Events
    | Why
    | Waits
    | StopJob
    | ResumeJob
    | RemoveJob
    | DiskUse
    | DiskUsed
    | ListHosts
    | Hosts
    | SetHost
    | PlanJob
    | Planned
    | ListFiles
    | Files
    | ReadFile
    | FileData
    | ReadLog
    | LogData
    | AuthorizeKey
    | RevokeKey
    | ListKeys
    | Keys
    | Invite
    | Join
    | Joined
    | ForgetHost
    | Register
    | Registered
    | HostPing
    | GetBundle
    | CheckJob
    | Checked
    | StartLearners
    | NodeMoved
    | StopLearners
    | KillLearner
    | LearnerStarted
    | LearnerExit
    | NodeHello
    | NodeReport
    | NodeEvent
    | NodeFence
    | NodeDone
    | LearnerGone
    | NodeStop
)
