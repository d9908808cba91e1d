"""What learnerd tells a learner process, in a file of mode 0600 that RUDRA_LEARNER names.

Owns: the fields of that file and of the node's address file. Must not know: torch, sockets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rudra_zmq.errors import ConfigError

Rank = Annotated[int, Meta(ge=0, le=65535)]


class LearnerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`log`: file of our own lines; `output`: folder for the script's files; `toml`: the effective job file.

    `node_file` has the node's addresses and is replaced when it moves. `ppid`: learnerd, without which this process
    has no business. `code`: where the job's own code is unpacked, or "". `key_fd`: the descriptor to read this
    incarnation's secret key from, or -1.
    """

    job: str
    rank: Rank
    incarnation: int
    role: Literal["learner", "evaluator"]
    token: str
    node_file: str
    log: str
    output: str
    toml: str
    cwd: str
    threads: Annotated[int, Meta(ge=1)]
    host: str
    ppid: int
    key_fd: int = -1
    code: str = ""


class NodeFile(msgspec.Struct, frozen=True):
    """Where the job's node listens, best address first; ``key``: its public one, where it is to be had encrypted."""

    addresses: list[str]
    generation: int = 0
    key: str = ""


def read_spec(path: Path) -> LearnerSpec:
    """ConfigError (one line) where the file is not there or is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LearnerSpec)
    except (OSError, msgspec.MsgspecError) as error:
        fix = "learners are started by learnerd; alone, unset RUDRA_LEARNER and run the script itself"
        raise ConfigError(f"no description of a learner: {error}", where=str(path), fix=fix) from None


def read_node_file(path: Path) -> NodeFile | None:
    """None where it is not there (yet), or is being written."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeFile)
    except (OSError, msgspec.MsgspecError):
        return None
