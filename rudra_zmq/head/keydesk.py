"""Requests about keys: authorize, revoke, list, invite, join, forget a host.

Owns their answers. Must not know: connections; ``evict`` ends those of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rudra_zmq import log
from rudra_zmq.errors import NotFound, RefusedBySecurity, Rejected, RudraError
from rudra_zmq.head.fleet import Fleet
from rudra_zmq.head.keyring import Keyring
from rudra_zmq.head.registry import Registry
from rudra_zmq.wire.messages import control as c
from rudra_zmq.wire.messages.data import Message

logger = log.get()


class KeyDesk:
    """``public``: psd's own key, "" where it has none; ``bound``: the addresses that take keys."""

    def __init__(
        self,
        keyring: Keyring,
        registry: Registry,
        fleet: Fleet,
        *,
        public: str,
        bound: Callable[[], list[str]],
        refused: Callable[[], Mapping[str, int]],
        evict: Callable[[str, str, float], int],
        wall: Callable[[], float],
    ) -> None:
        self._keyring, self._registry, self._fleet = keyring, registry, fleet
        self._public, self._bound, self._refused = public, bound, refused
        self._evict, self._wall = evict, wall

    def authorize(self, peer: bytes, request: str, message: c.AuthorizeKey, now: float) -> Message:
        before = self._keyring.live(message.key, self._wall())
        row = self._keyring.authorize(message.key, message.name, message.role, self._wall())
        # What it has open goes by its old name and role.
        self._evict(row.key, f"the key {row.key[:8]} has another role or name now", now)
        logger.info("key authorised", key=row.key[:8], name=row.name, role=row.role)
        was = f" (before: {before.name}, {before.role})" if before is not None else ""
        return c.Ok(text=f"{row.name} may connect with the key {row.key[:8]}, as {row.role}{was}")

    def revoke(self, peer: bytes, request: str, message: c.RevokeKey, now: float) -> Message:
        rows = self._keyring.revoke(message.key, self._wall())
        ended = sum(self._revoked(row.key, now) for row in rows)
        for row in rows:
            logger.warning("key revoked", key=row.key[:8], name=row.name, ended=ended)
        what = ", ".join(f"{row.name} ({row.key[:8]})" for row in rows)
        return c.Ok(text=f"revoked: {what}; connections ended: {ended}")

    def _revoked(self, key: str, now: float) -> int:
        return self._evict(key, f"the key {key[:8]} was revoked", now)

    def show(self, peer: bytes, request: str, message: c.ListKeys, now: float) -> Message:
        return self._keys(self._keyring.rows())

    def _keys(self, rows: list[c.KeyRow]) -> c.Keys:
        return c.Keys(rows=rows, head=self._public, addresses=self._bound(), refused=dict(self._refused()))

    def invite(self, peer: bytes, request: str, message: c.Invite, now: float) -> Message:
        if not self._public:
            fix = "`rudra keys new psd`, set psd.listen to a tcp address, and start psd again"
            raise Rejected("this psd has no key: other hosts cannot reach it", fix=fix)
        self._keyring.invite(message.key, message.name, message.seconds, self._wall())
        logger.info("host invited", name=message.name, seconds=message.seconds)
        return self._keys([])

    def join(self, invite: str, message: c.Join, now: float) -> Message:
        """Of a connection that proved the key of an invitation."""
        row = self._keyring.live(invite, self._wall())
        if row is None or row.role != "invite":
            raise RefusedBySecurity("this is no invitation", fix="`rudra invite` on the head makes one")
        joined = self._keyring.join(invite, message.key, self._wall())
        logger.info("host joined", name=joined.name, key=joined.key[:8])
        return c.Joined(name=joined.name)

    def forget(self, peer: bytes, request: str, message: c.ForgetHost, now: float) -> Message:
        rows = [row for row in self._keyring.rows() if row.name == message.name and not row.revoked]
        rows = [row for row in rows if row.role in ("host", "invite")]
        host = self._fleet.hosts.get(message.name)
        if not rows and host is not None and host.peer is not None:
            what = f"a learnerd of this name runs, without a key: PID {host.pid}"
            raise RudraError(what, fix="stop it first")
        known = {row.name for row in self._registry.hosts(self._wall())}
        if not rows and host is None and message.name not in known:
            raise NotFound(f"there is no host {message.name}", fix="`rudra hosts` lists them")
        for row in rows:
            self._keyring.revoke(row.key, self._wall())
            self._revoked(row.key, now)
        self._fleet.forget(message.name)
        self._registry.forget_host(message.name)
        return c.Ok(
            text=f"{message.name} is forgotten" + "".join(f"; its key {row.key[:8]} is revoked" for row in rows)
        )
