"""Which keys the head takes, and what each may do.

Owns the keys of the registry, their roles and names, invitations, and the table of what a message needs. Must not
know: sockets, jobs. Time is an argument (UTC seconds).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

from rudra_zmq.errors import NotFound, Rejected
from rudra_zmq.head.registry import Registry
from rudra_zmq.wire.messages import control as c

Grade: TypeAlias = Literal["read", "submit", "admin", "host", "invite"]

_RANK = {"read": 1, "submit": 2, "admin": 3}
NEEDS: dict[type, Grade] = {
    c.ListJobs: "read",
    c.GetJob: "read",
    c.GetEvents: "read",
    c.Why: "read",
    c.DiskUse: "read",
    c.ListHosts: "read",
    c.ListFiles: "read",
    c.ReadFile: "read",
    c.ReadLog: "read",
    c.PlanJob: "read",
    c.PutBundle: "submit",
    c.Submit: "submit",
    c.StopJob: "submit",
    c.ResumeJob: "submit",
    c.RemoveJob: "submit",
    c.ListKeys: "read",
}
"""What the command line's messages need. One that is not here needs admin."""


class Origin(NamedTuple):
    """Where a message came from: the public key that its connection proved ("": none, it is this machine's), and the
    user id of its process where the kernel says it (-1: loopback)."""

    key: str = ""
    uid: int = -1


HERE = Origin()


def allows(grade: Grade, message: type) -> bool:
    """Whether a peer of the command line of this grade may send a message."""
    return _RANK.get(grade, 0) >= _RANK[NEEDS.get(message, "admin")]


class Keyring:
    """Held in memory, for each connection asks; written through to the registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._keys = {row.key: row for row in registry.key_rows()}

    def verdict(self, key: str, now: float) -> Literal[200, 400, 500]:
        """As ZAP has it: come in, unknown, no longer welcome."""
        row = self._keys.get(key)
        if row is None:
            return 400
        return 200 if self._lives(row, now) else 500

    def live(self, key: str, now: float) -> c.KeyRow | None:
        """The key, where it may be used."""
        row = self._keys.get(key)
        return row if row is not None and self._lives(row, now) else None

    @staticmethod
    def _lives(row: c.KeyRow, now: float) -> bool:
        return not row.revoked and (not row.expires or now < row.expires)

    def rows(self) -> list[c.KeyRow]:
        """All, in the order in which they came."""
        return sorted(self._keys.values(), key=lambda row: (row.added, row.key))

    def authorize(self, key: str, name: str, role: c.Role, now: float) -> c.KeyRow:
        """Rejected where another living key has the name; where this one is let in already, and is a host's or an
        invitation (or is to become one), or would lose name and role at once."""
        self._free(name, key, now)
        known = self._keys.get(key)
        if known is not None and self._lives(known, now):
            persons = known.role in _RANK and role in _RANK
            if known.role != role and not (persons and known.name == name):
                fix = f"revoke it first: rudra keys revoke {known.name}"
                raise Rejected(f"the key {key[:8]} is let in already: {known.name}, as {known.role}", fix=fix)
        row = c.KeyRow(key=key, name=name, role=role, added=known.added if known is not None else now)
        self._save(row)
        return row

    def invite(self, key: str, name: str, seconds: float, now: float) -> None:
        """Rejected where a living key has the name, unless it is an earlier invitation, which ends."""
        for row in self._keys.values():
            if row.name == name and row.role == "invite" and self._lives(row, now):
                self._save(msgspec.structs.replace(row, revoked=now))
        self._free(name, key, now)
        self._save(c.KeyRow(key=key, name=name, role="invite", added=now, expires=now + seconds))

    def join(self, invite: str, key: str, now: float) -> c.KeyRow:
        """The invitation becomes a host's key, in one step: it is of no use a second time."""
        old = self._keys[invite]
        if key == invite or self.live(key, now) is not None:
            raise Rejected("this key is known already", fix="make a new one for each host")
        row = c.KeyRow(key=key, name=old.name, role="host", added=now)
        used = msgspec.structs.replace(old, revoked=now)
        self._registry.save_keys([used, row])
        self._keys[invite], self._keys[key] = used, row
        return row

    def revoke(self, word: str, now: float) -> list[c.KeyRow]:
        """By name, or by at least 8 digits of the key. NotFound; Rejected where several begin like that."""
        live = [row for row in self._keys.values() if not row.revoked]
        found = [row for row in live if row.name == word]
        if not found and len(word) >= 8:
            found = [row for row in live if row.key.startswith(word)]
        if not found:
            raise NotFound(f"no key {word} is authorised", fix="`rudra keys list` shows them")
        if len(found) > 1 and any(row.name != word for row in found):
            raise Rejected(f"{len(found)} keys begin with {word}", fix="give more of it, or the name")
        for row in found:
            self._save(msgspec.structs.replace(row, revoked=now))
        return found

    def _free(self, name: str, key: str, now: float) -> None:
        for row in self._keys.values():
            if row.name == name and row.key != key and self._lives(row, now):
                fix = f"give it another name, or revoke that one first: rudra keys revoke {name}"
                raise Rejected(f"there is a key named {name}, {row.key[:8]}", fix=fix)

    def _save(self, row: c.KeyRow) -> None:
        self._registry.save_keys([row])
        self._keys[row.key] = row


def local_grade(uid: int, own: int) -> Grade:
    """Of a peer of this machine that has the token: psd's own user and root may do all; -1 is loopback."""
    return "admin" if uid in (-1, 0, own) else "submit"
