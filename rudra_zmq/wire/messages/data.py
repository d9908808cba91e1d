"""Messages of the data plane: learner, pulse and evaluator (DEALER) to node (ROUTER) and back.

Owns the fields and limits; docs/PROTOCOL.rst says the same in prose and a test holds them together. A
message is frame 0; ``Chunk`` alone has a second frame, the raw payload.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
Short: TypeAlias = Annotated[str, Meta(max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Factor: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]  # a rate, a decay, a coefficient: finite, not negative
Names: TypeAlias = Annotated[dict[Short, Short], Meta(max_length=256)]
SpanList: TypeAlias = Annotated[list[tuple[Count, Count, Count]], Meta(max_length=4096)]  # epoch, start, stop
Metrics: TypeAlias = Annotated[dict[Short, float], Meta(max_length=64)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="m"):
    """Base of all; the tag is the class name in lower case."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One parameter or buffer: its name (stripped), shape and dtype name as torch prints it."""

    name: Short
    shape: Annotated[list[Count], Meta(max_length=16)]
    dtype: Short


TensorList: TypeAlias = Annotated[list[TensorSpec], Meta(max_length=65536)]

# ------------------------------------------------------------------------------------ learner to node


class Hello(Message, frozen=True, tag="hello"):
    """First on every connection. ``key`` is this incarnation's public one (empty where nothing is encrypted)."""

    role: Literal["learner", "pulse", "evaluator", "evaluator-pulse"]
    job: Short
    token: Short
    rank: Rank
    incarnation: Count
    key: Short = ""
    host: Short = ""
    pid: Count = 0
    space: Count = 0  # PID namespace that `pid` is of; 0: unknown
    versions: Names = {}


class Attach(Message, frozen=True, tag="attach"):
    """The model's signature: parameters in flat order, buffers, pairs of tied names.

    ``frozen`` names the parameters that no update may move (rate 0, no weight decay), whatever the rule."""

    params: TensorList
    float_buffers: TensorList = []
    int_buffers: TensorList = []
    tied: Annotated[list[tuple[Short, Short]], Meta(max_length=65536)] = []
    frozen: Annotated[list[Short], Meta(max_length=65536)] = []


class GroupRates(msgspec.Struct, frozen=True, array_like=True):
    """A span of the flat vector with its own rate and weight decay (from an optimizer's groups)."""

    start: Count
    stop: Count
    lr: Factor
    weight_decay: Factor


class Rule(Message, frozen=True, tag="rule"):
    """A script's optimizer as a rule of the server; used where the job file names none."""

    rule: Short
    momentum: Factor = 0.0
    beta1: Factor = 0.9
    beta2: Factor = 0.999
    eps: Factor = 1e-8
    rho: Factor = 0.99
    groups: Annotated[list[GroupRates], Meta(max_length=65536)] = []


class Data(Message, frozen=True, tag="data"):
    """N samples, mu of this learner (0: the job's), accumulation and leases wanted ahead: it can begin.

    ``shared``: it has mapped the node's memory, and reads and writes there from here on."""

    samples: Count
    minibatch: Count
    accumulate: Annotated[int, Meta(ge=1, le=65536)] = 1
    prefetch: Annotated[int, Meta(ge=0, le=1024)] = 1
    shared: bool = False


class Chunk(Message, frozen=True, tag="chunk"):
    """Part of a vector; the payload frame is its bytes at ``offset``. ``key`` is the random id of the
    grant (gradient), of the upload (init), or of the transfer announced by Grant, Ready or Evaluate."""

    key: Count
    offset: Count


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Gradients from weights of one timestamp, as one vector: the mean over all their samples.

    This is what scaling it needs, since staleness is one for all. ``samples`` 0: a batch that was skipped."""

    timestamp: Count
    count: Annotated[int, Meta(ge=1, le=65536)]  # gradients
    samples: Count
    spans: SpanList


class Push(Message, frozen=True, tag="push"):
    """Closes a gradient: all its chunks came before it, or it lies in its slot (where the grant was shared).

    ``nbytes`` 0: no tensor (a skipped batch). ``finite`` false: the sender found a NaN or an infinity. A learner has
    one group of one gradient. Of several, the vectors follow one another in the order of the groups."""

    rank: Rank
    incarnation: Count
    seq: Count
    generation: Count
    key: Count
    groups: Annotated[list[Group], Meta(min_length=1, max_length=1024)]
    nbytes: Count
    finite: bool = True
    loss: float | None = None
    rates: Annotated[list[Factor], Meta(max_length=65536)] | None = None
    compute_s: Seconds = 0.0
    wait_s: Seconds = 0.0


class Want(Message, frozen=True, tag="want"):
    """Every lease was begun and no push is due: asks for one more."""


class InitDone(Message, frozen=True, tag="init_done"):
    """Closes the upload of version 0."""

    key: Count
    nbytes: Count


class Residual(Message, frozen=True, tag="residual"):
    """What topk holds back at this learner follows in chunks under ``key``: as it is after gradient ``seq``.

    Answers SendResidual; also said before a Bye in peace."""

    key: Count
    seq: Count


class Credit(Message, frozen=True, tag="credit"):
    """The receiver of chunks has room for ``chunks`` more (both directions)."""

    chunks: Annotated[int, Meta(ge=1, le=65536)]


class Mapped(Message, frozen=True, tag="mapped"):
    """On the socket of the shared memory, both ways: ``nonce`` was written into it, and read there."""

    nonce: Count


class Ping(Message, frozen=True, tag="ping"):
    """Liveness, from the pulse connection; any traffic counts as life."""


class Log(Message, frozen=True, tag="log"):
    """Figures that a script reports (learner.log)."""

    metrics: Metrics
    epoch: Count = 0


class TestResult(Message, frozen=True, tag="test_result"):
    """The evaluator's verdict on the weights of one epoch."""

    __test__ = False  # not a test class, whatever pytest thinks

    epoch: Count
    generation: Count
    timestamp: Count
    metrics: Metrics
    seconds: Seconds


class Bye(Message, frozen=True, tag="bye"):
    """Leaves: ``done`` after Grant.done, ``drain`` on request of its host, ``failed`` with a text."""

    reason: Literal["done", "drain", "failed"]
    text: Text = ""


# ------------------------------------------------------------------------------------ node to learner


Sixteen: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Bulk(msgspec.Struct, frozen=True, array_like=True):
    """The channel that the rest of this conversation goes through: a port of the same host, and two AES-128 keys.

    ``identity`` is the one of the socket that connects to it."""

    port: Annotated[int, Meta(ge=1, le=65535)]
    connection: Annotated[int, Meta(ge=1, le=2147483647)]
    identity: Sixteen
    up: Sixteen
    down: Sixteen

    def __repr__(self) -> str:
        return f"Bulk(port={self.port}, connection={self.connection})"


class Welcome(Message, frozen=True, tag="welcome"):
    """The session stands. ``job`` is the effective job file as TOML; sizes in bytes, times in seconds.

    ``chief``: this learner has the lowest present rank (also in Grant: it moves when that one leaves).
    ``shm``: path of the Unix socket that hands out the node's memory; empty where none is shared.
    ``bulk``: where tcp is encrypted, and for all but the pulse, which stays where it is."""

    generation: Count
    job: Annotated[str, Meta(max_length=262144)]
    lam: Count
    chunk: Annotated[int, Meta(ge=1, le=1048576)]
    credit: Annotated[int, Meta(ge=1, le=65536)]
    ping_s: Seconds
    liveness_s: Seconds
    chief: bool = False
    shm: Text = ""
    bulk: Bulk | None = None


class Refused(Message, frozen=True, tag="refused"):
    """No: one line, where, and the fix. The connection is of no more use."""

    code: Short
    message: Text
    where: Text = ""
    fix: Text = ""


class SendInit(Message, frozen=True, tag="send_init"):
    """Upload your weights as version 0, in chunks under ``key``."""

    key: Count


class Ready(Message, frozen=True, tag="ready"):
    """A version exists: its chunks follow under ``key``. Then, where ``residual`` is not 0, under that key the float32
    of what topk is to hold back at first; else that is what the learner has of this generation, or zeros."""

    generation: Count
    timestamp: Count
    key: Count
    nbytes: Count
    residual: Count = 0


class SendResidual(Message, frozen=True, tag="send_residual"):
    """A snapshot is made: upload what topk holds back, as it is after gradient ``seq``."""

    seq: Count


class RuleReply(Message, frozen=True, tag="rule_reply"):
    """Whether the script's optimizer rules (else ``rule`` of the job file does)."""

    accepted: bool
    rule: Short


class Segments(Message, frozen=True, tag="segments"):
    """On the socket of the shared memory, with two descriptors: of this learner's slots, and of the versions.

    Each begins with numbers in whole pages, the first one a nonce; then slots, or versions, each in whole pages."""

    slot_nbytes: Count
    slots: Annotated[int, Meta(ge=1, le=16)]
    version_nbytes: Count
    versions: Annotated[int, Meta(ge=1, le=131072)]
    slots_nonce: Count
    versions_nonce: Count


class Grant(Message, frozen=True, tag="grant"):
    """The answer of the exchange. ``nbytes`` 0: the learner already has these weights; else the chunks
    follow under ``weights_key``. ``key`` is the random id for the chunks of the next gradient.

    ``shared``: no chunks either way. The weights are in ``version``, which stays as it is until the next grant, and
    the gradient is to be written into ``slot``."""

    ack: Count
    verdict: Short
    generation: Count
    timestamp: Count
    leases: Annotated[list[SpanList], Meta(max_length=1024)]
    slot: Count
    key: Count
    weights_key: Count = 0
    nbytes: Count = 0
    lam: Count = 0
    chief: bool = False
    done: bool = False
    shared: bool = False
    version: Count = 0


class Pong(Message, frozen=True, tag="pong"):
    """Answer to Ping; ``stop`` asks the learner to drain at its next exchange."""

    stop: bool = False


class Evaluate(Message, frozen=True, tag="evaluate"):
    """Test the weights of this epoch; chunks follow."""

    epoch: Count
    generation: Count
    timestamp: Count
    key: Count
    nbytes: Count


class Finish(Message, frozen=True, tag="finish"):
    """To the evaluator: nothing more will come."""


ToNode: TypeAlias = (
    Hello
    | Attach
    | Rule
    | Data
    | Chunk
    | Push
    | Want
    | InitDone
    | Residual
    | Credit
    | Mapped
    | Ping
    | Log
    | TestResult
    | Bye
)
FromNode: TypeAlias = (
    Welcome
    | Refused
    | SendInit
    | Segments
    | Ready
    | SendResidual
    | RuleReply
    | Grant
    | Chunk
    | Credit
    | Mapped
    | Pong
    | Evaluate
    | Finish
)
