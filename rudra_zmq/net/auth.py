"""CURVE: key pairs, and the handler that libzmq asks before it lets anybody in.

Owns the making of keys and ZAP. Must not know who may do what: every key is let in and becomes the user of its
messages (``Router.user``), who says so then proves with the job's token that it belongs here. Without the handler a
socket that enforces its domain takes nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq
import zmq.utils.z85

from rudra_zmq.net.loop import Loop

DOMAIN = b"rudra"
KEY_CHARACTERS = 40
_ENDPOINT = "inproc://zeromq.zap.01"


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


class Doorman:
    """Answers ZAP requests of one context, in a loop. To be made before the first socket under CURVE is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], loop: Loop) -> None:
        self.raw = context.socket(zmq.REP)
        self.raw.setsockopt(zmq.LINGER, 0)
        self.raw.bind(_ENDPOINT)
        self._loop = loop
        loop.on_readable(self, self._readable)

    def _readable(self) -> None:
        try:
            frames = self.raw.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        self.raw.send_multipart(self._answer(frames))

    @staticmethod
    def _answer(frames: list[bytes]) -> list[bytes]:
        """version, request, domain, address, identity, mechanism, key -> version, request, status, text, user, {}."""
        request = frames[1] if len(frames) > 1 else b""
        curve = len(frames) == 7 and frames[2] == DOMAIN and frames[5] == b"CURVE" and len(frames[6]) == 32
        if not curve:
            return [b"1.0", request, b"400", b"CURVE is spoken here", b"", b""]
        return [b"1.0", request, b"200", b"OK", zmq.utils.z85.encode(frames[6]), b""]

    def close(self) -> None:
        """Nobody is let in any more; harmless twice."""
        if not self.raw.closed:
            self._loop.forget(self)
            self.raw.close()
