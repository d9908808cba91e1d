"""CURVE: key pairs, how keys are written, and the handler that libzmq asks before it lets anybody in.

Owns the making of keys, their written form and ZAP. Must not know who may do what: ``admit`` says which keys come in,
and what is said to the others. Without the handler a socket that enforces its domain takes nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import zmq
import zmq.utils.z85

from rudra_zmq.net.loop import Loop

DOMAIN = b"rudra"
KEY_CHARACTERS = 40
_ENDPOINT = "inproc://zeromq.zap.01"

Verdict: TypeAlias = Literal[200, 400, 500]
"""200: come in. Of the others libzmq tells the client the number alone: 400 unknown, 500 no longer welcome."""
Admit: TypeAlias = Callable[[str], Verdict]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Of CURVE, each 40 characters of Z85."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> KeyPair:
        """Random."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode("ascii"), secret.decode("ascii"))

    @classmethod
    def of(cls, secret: str) -> KeyPair:
        """The pair of a secret. Raises ValueError."""
        try:
            return cls(zmq.curve_public(secret.encode("ascii")).decode("ascii"), secret)
        except (zmq.ZMQError, ValueError, KeyError) as error:
            raise ValueError(f"no secret key: {error}") from None

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


def to_hex(key: str) -> str:
    """A key as files, messages and people have it: 64 hex digits, which no shell takes for anything else."""
    return zmq.utils.z85.decode(key.encode("ascii")).hex()


def to_z85(key: str) -> str:
    """The same key as ZeroMQ has it. Raises ValueError."""
    raw = bytes.fromhex(key)
    if len(raw) != 32:
        raise ValueError(f"a key has 32 bytes, not {len(raw)}")
    return zmq.utils.z85.encode(raw).decode("ascii")


def _anybody(key: str) -> Verdict:
    """A node's door: who comes in then proves with the job's token that it belongs here."""
    return 200


class Doorman:
    """Answers ZAP requests of one context, in a loop. To be made before the first socket under CURVE is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], loop: Loop, admit: Admit = _anybody) -> None:
        """``admit`` gets a public key (Z85), which becomes the user of its messages (``Router.user``)."""
        self.raw = context.socket(zmq.REP)
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.bind(_ENDPOINT)
        self._loop = loop
        self._admit = admit
        loop.on_readable(self, self._readable)

    def _readable(self) -> None:
        try:
            frames = self.raw.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        self.raw.send_multipart(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """version, request, domain, address, identity, mechanism, key -> version, request, status, text, user, {}."""
        request = frames[1] if len(frames) > 1 else b""
        curve = len(frames) == 7 and frames[2] == DOMAIN and frames[5] == b"CURVE" and len(frames[6]) == 32
        if not curve:
            return [b"1.0", request, b"400", b"CURVE is spoken here", b"", b""]
        key = zmq.utils.z85.encode(frames[6])
        verdict = self._admit(key.decode("ascii"))
        if verdict != 200:
            return [b"1.0", request, b"%d" % verdict, b"refused", b"", b""]
        return [b"1.0", request, b"200", b"OK", key, b""]

    def close(self) -> None:
        """Nobody is let in any more; harmless twice."""
        if not self.raw.closed:
            self._loop.forget(self)
            self.raw.close()
