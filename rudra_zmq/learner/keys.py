"""The keys of this incarnation, and whether a node may be spoken to without them.

Owns: the secret that learnerd left in an inherited descriptor, read once. Must not know: what is said, to whom.
"""

from __future__ import annotations

import os

import msgspec

from rudra_zmq.config.load import job_from_toml
from rudra_zmq.errors import ConfigError, RefusedBySecurity
from rudra_zmq.learner.spec import LearnerSpec, NodeFile
from rudra_zmq.net.addresses import parse
from rudra_zmq.net.auth import KEY_CHARACTERS, KeyPair
from rudra_zmq.wire.messages.data import Hello


class Keys:
    """Of one process; there may be none."""

    def __init__(self, spec: LearnerSpec) -> None:
        """Takes the descriptor: what this process starts later does not have it. Raises ConfigError."""
        self._pair = None if spec.key_fd < 0 else _take(spec.key_fd)
        self._required = job_from_toml(spec.toml, name=spec.job).job.wire.encrypt

    def curve(self, known: NodeFile, address: str) -> tuple[KeyPair, str] | None:
        """What a connection to one of the node's addresses is encrypted with; None for what stays on this host.

        Raises RefusedBySecurity where a job that is to be encrypted would not be.
        """
        if parse(address).kind != "tcp":
            return None
        if known.key and self._pair is not None:
            return self._pair, known.key
        if self._required or known.key:
            missing = "the node's key" if not known.key else "a key of this learner's"
            fix = "let psd and learnerd start it; wire.encrypt = false does without, on a network of your own"
            raise RefusedBySecurity(f"wire.encrypt is true, and {missing} is missing", where=address, fix=fix)
        return None

    def sign(self, hello: Hello, curve: tuple[KeyPair, str] | None) -> Hello:
        """The Hello of a connection: with the public key, where it is one under `curve`."""
        return hello if curve is None else msgspec.structs.replace(hello, key=curve[0].public)


def _take(fd: int) -> KeyPair:
    try:
        secret = os.pread(fd, KEY_CHARACTERS + 1, 0).decode("ascii")
        os.close(fd)
        return KeyPair.of(secret)
    except (OSError, ValueError) as error:
        fix = "start the script directly, by no program that closes descriptors"
        raise ConfigError(f"the learner's key cannot be read: {error}", where=f"descriptor {fd}", fix=fix) from None
