"""Frames of the bulk port: sealed by AES-128-GCM, opened again, and never twice.

Owns nonces and counters, and what is said about a frame that does not open. Must not know sockets, sessions, nor
where keys come from (net.entrance makes them, Welcome carries them).

    frame 0   [connection 4 | counter 8 | message, encrypted | tag 16]
    frame 1   [payload, encrypted | tag 16]                               of a Chunk; frame 0 is its associated data

The first twelve bytes are the nonce, numbers big-endian; the highest bit of the connection is the direction. Frame 1
has the counter after that of its frame 0. A key is of one connection and one direction, so no nonce comes twice.

    >>> up = bytes(16)
    >>> sealer, opener = Sealer(up, 1, UP), Opener(up, 1, UP)
    >>> sealed = sealer.seal([b"message", b"payload"], bytearray(100))
    >>> message, payload = opener.open(sealed)
    >>> into = bytearray(len(payload))
    >>> payload.open_into(into)
    >>> message, into
    (b'message', bytearray(b'payload'))
    >>> try:
    ...     opener.open(sealed)
    ... except SealError as error:
    ...     print(error.reason)
    bulk-replay
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Buffer: TypeAlias = bytes | bytearray | memoryview

KEY, TAG = 16, 16
UP, DOWN = 0, 1  # to the node, from it
MOST_CONNECTIONS = 1 << 31
OVERHEAD = 12 + TAG  # bytes that frame 0 gets longer
WORN = 1 << 46  # bytes under one key: with 2**42 blocks AES-128-GCM still gives nothing away (2**-45)

REASONS = ("bulk-unknown", "bulk-cut", "bulk-foreign", "bulk-replay", "bulk-forged")

_NONCE = struct.Struct(">IQ")


class SealError(ValueError):
    """A frame that does not open; ``reason`` is one of REASONS, so that it can be counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def _cipher(key: bytes) -> AESGCM:
    # Here, so that who never encrypts need not load it.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _forgery() -> type[Exception]:
    """What the cipher raises for what it did not seal."""
    from cryptography.exceptions import InvalidTag

    return InvalidTag


def _number(connection: int, direction: int) -> int:
    if not 0 < connection < MOST_CONNECTIONS or direction not in (UP, DOWN):
        raise ValueError(f"connection {connection}, direction {direction}")
    return connection | direction << 31


class Sealer:
    """The sender's end of one direction of one connection."""

    def __init__(self, key: bytes, connection: int, direction: int) -> None:
        """``key``: 16 bytes, used by nobody else to seal."""
        self._cipher = _cipher(key)
        self._number = _number(connection, direction)
        self._counter = 0
        self._bytes = 0

    @property
    def worn(self) -> bool:
        """So much was sealed that a new connection, with new keys, is due."""
        return self._bytes > WORN

    def seal(self, frames: Sequence[Buffer], buffer: Buffer | None = None) -> list[Buffer]:
        """The frames of one message, sealed; a payload's lies in ``buffer``, which has 16 bytes more at least.

        What was sealed and then not sent is sealed anew: its counters are gone.
        """
        nonce = self._next()
        head = nonce + self._cipher.encrypt(nonce, bytes(frames[0]), None)
        self._bytes += len(head)
        if len(frames) == 1:
            return [head]
        payload = memoryview(frames[1]).cast("B")
        assert buffer is not None
        sealed = memoryview(buffer)[: payload.nbytes + TAG]
        self._cipher.encrypt_into(self._next(), payload, head, sealed)
        self._bytes += sealed.nbytes
        return [head, sealed]

    def _next(self) -> bytes:
        self._counter += 1  # before it is used: whatever happens then, it is not used again
        return _NONCE.pack(self._number, self._counter)


class SealedPayload:
    """The payload of a chunk, still sealed, in the socket's memory: ``open_into`` puts it where it belongs."""

    __slots__ = ("_cipher", "_forgery", "_head", "_nonce", "_sealed")

    def __init__(
        self, cipher: AESGCM, forgery: type[Exception], nonce: bytes, sealed: memoryview, head: Buffer
    ) -> None:
        self._cipher, self._forgery, self._nonce, self._sealed, self._head = cipher, forgery, nonce, sealed, head

    def __len__(self) -> int:
        return self._sealed.nbytes - TAG

    def open_into(self, into: bytearray | memoryview) -> None:
        """Into exactly ``len`` bytes, which hold anything at all after SealError."""
        try:
            self._cipher.decrypt_into(self._nonce, self._sealed, self._head, into)
        except self._forgery:
            raise SealError("bulk-forged", "a payload that was not sealed under this key") from None


class Opener:
    """The receiver's end: what was not sealed for it, or came before, is refused and changes nothing."""

    def __init__(self, key: bytes, connection: int, direction: int) -> None:
        self._cipher = _cipher(key)
        self._number = _number(connection, direction)
        self._forgery = _forgery()
        self._counter = 0  # the highest that was opened
        self._bytes = 0

    @property
    def worn(self) -> bool:
        """As Sealer.worn."""
        return self._bytes > WORN

    def open(self, frames: Sequence[Buffer]) -> list[Buffer | SealedPayload]:
        """The frames of one message, the payload still sealed. Raises SealError."""
        if not 1 <= len(frames) <= 2:
            raise SealError("bulk-cut", f"{len(frames)} frames, not 1 or 2")
        head = memoryview(frames[0])
        if head.nbytes <= OVERHEAD or (len(frames) == 2 and len(frames[1]) <= TAG):
            raise SealError("bulk-cut", "a frame that is too short")
        number, counter = _NONCE.unpack_from(head)
        if number != self._number:
            raise SealError("bulk-foreign", "of another connection, or its other direction")
        if counter <= self._counter:
            raise SealError("bulk-replay", f"counter {counter} after {self._counter}")
        nonce = bytes(head[:12])
        try:
            message = self._cipher.decrypt(nonce, head[12:], None)
        except self._forgery:
            raise SealError("bulk-forged", "a message that was not sealed under this key") from None
        self._counter = counter + len(frames) - 1
        self._bytes += head.nbytes
        if len(frames) == 1:
            return [message]
        sealed = memoryview(frames[1]).cast("B")
        self._bytes += sealed.nbytes
        return [message, SealedPayload(self._cipher, self._forgery, _NONCE.pack(number, counter + 1), sealed, head)]
