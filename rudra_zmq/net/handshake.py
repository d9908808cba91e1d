"""Why a connection did not come about, as far as it can be known from either side.

Owns the monitor of a socket's handshakes, the greeting that tells what an address wants, and the one line for each
case. Must not know what is said once a connection stands.

ZeroMQ tells a client that was refused next to nothing, and tries for ever. What there is:

    a number from the server's ZAP     400: it does not know the key; 500: the key is no longer welcome
    nothing, under CURVE on both sides the server could not open what was sealed: it has another key
    another mechanism in its greeting  one side speaks with keys and the other without
    no greeting of ZeroMQ              another program, or one that is stopped
"""

from __future__ import annotations

import socket
from typing import Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from rudra_zmq.errors import RefusedBySecurity, RudraError, Unreachable
from rudra_zmq.net.addresses import Address, probe, resolve
from rudra_zmq.net.auth import KeyPair, to_hex

Failure: TypeAlias = Literal["unknown-key", "revoked-key", "no-key", "wrong-server-key", "malformed", "cut"]
"""cut: the connection ended in mid-handshake, as that of somebody who only looks whether anybody listens."""
Curve: TypeAlias = tuple[KeyPair, str] | None
"""Its own keys, and the server's public one."""

_AUTH = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_PROTOCOL = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_NO_DETAIL = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_GREETING = 64
_OURS = b"\xff" + bytes(7) + b"\x01\x7f\x03"  # no mechanism yet: a server breaks off at one that is not its own
_NULL = b"\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


class KeyRevoked(RefusedBySecurity):
    """The key of this side was let in once."""


class Watch:
    """Handshakes of one socket that failed. To be made before it binds or connects, closed before it is closed."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self.raw = watched.get_monitor_socket(int(_AUTH | _PROTOCOL | _NO_DETAIL))

    def next(self) -> Failure | None:
        """The next one, None where there is none."""
        if self.raw.closed:
            return None
        try:
            said = parse_monitor_message(self.raw.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return None
        event, value = said["event"], said["value"]
        if event == _AUTH:
            return "revoked-key" if value == 500 else "unknown-key"
        if event == _PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "no-key"
        if event == _PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "wrong-server-key"
        return "malformed" if event == _PROTOCOL else "cut"

    def close(self) -> None:
        """Harmless twice."""
        if not self.raw.closed:
            if not self._watched.closed:
                self._watched.disable_monitor()
            self.raw.close(0)


def mechanism(address: Address, timeout: float = 1.0, *, keyless: bool = False) -> str:
    """What an address greets with: CURVE, NULL, "" where it is no ZeroMQ (or says nothing). Waits ``timeout`` s.

    ``keyless``: one that wants a key hears that there is none, and can count it.
    """
    heard = b""
    try:
        target = resolve(address)
        family = socket.AF_UNIX if target.kind == "ipc" else socket.AF_INET6 if ":" in target.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as plain:
            plain.settimeout(timeout)
            plain.connect(target.path if target.kind == "ipc" else (target.host, target.port))
            plain.sendall(_OURS)
            while len(heard) < _GREETING and (more := plain.recv(_GREETING)):
                heard += more
            if keyless and heard[12:17] == b"CURVE":
                plain.sendall(_NULL)
                plain.recv(1)
    except (OSError, RudraError):
        pass
    if len(heard) < _GREETING or heard[0] != 0xFF or not heard[9] & 1:
        return ""
    return heard[12:32].rstrip(b"\0").decode("ascii", "replace")


def explain(address: Address, failure: Failure | None, curve: Curve) -> RudraError | None:
    """The one line for a connection that did not come about; None where another attempt may well succeed."""
    where = str(address)
    mine = "" if curve is None else to_hex(curve[0].public)
    if failure == "unknown-key":
        fix = f"on the head: rudra keys authorize {mine} NAME --role ROLE"
        return RefusedBySecurity(f"psd does not know the key {mine[:8]} of this side", where=where, fix=fix)
    if failure == "revoked-key":
        fix = f"ask who runs the head; it takes the key again after: rudra keys authorize {mine} NAME --role ROLE"
        return KeyRevoked(f"the key {mine[:8]} of this side was revoked", where=where, fix=fix)
    if address.kind != "tcp" or probe(address, 1.0):
        return None  # no keys there; or nobody listens (any more), which has its own words
    wanted = mechanism(address, keyless=curve is None)
    if not wanted:
        fix = "see its log: it is stopped, or another program; psd's own port is 7733"
        return Unreachable("it accepts connections, and does not answer as psd does", where=where, fix=fix)
    if wanted == "CURVE" and curve is None:
        fix = "set head.key to what `rudra keys list` on the head prints first"
        return RefusedBySecurity("psd takes nobody without a key there, and head.key is not set", where=where, fix=fix)
    if wanted == "CURVE" and failure is not None:
        fix = "compare it with what `rudra keys list` on the head prints first; never take a new one on its word"
        pinned = "" if curve is None else to_hex(curve[1])[:8]
        text = f"who answers there does not have the key {pinned} that head.key names"
        return RefusedBySecurity(text, where=where, fix=fix)
    if wanted != "CURVE" and curve is not None:
        fix = "have `rudra keys new psd` run on the head and psd started again, or see who listens there"
        return RefusedBySecurity("who answers there speaks without keys, and head.key is set", where=where, fix=fix)
    return None
