"""The registry of jobs: SQLite, one writer, what must survive the head.

Owns the schema, the ids of jobs and the order of their story. Must not know: what a state means or which one
follows another (core.job), sockets, processes. No row is written per gradient, and the figures of a running
job are stored seldom.

The writer is the thread that opened it. Readers (the command line, for a cluster that is gone) use
``open_readonly``. Times are UTC seconds since 1970.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from rudra_zmq.errors import NotFound, RudraError
from rudra_zmq.head.ranks import Seat
from rudra_zmq.wire.messages.control import EventRow, HostRow, JobReply, JobRow, KeyRow, Progress

SCHEMA_VERSION = 3
EVENTS_PER_READ = 500
BYTES_PER_READ = 1 << 18
T = TypeVar("T")

FORGET_HOST_S = 7 * 86400.0

_SCHEMA = """
CREATE TABLE jobs (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    request TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    toml TEXT NOT NULL,
    cwd TEXT NOT NULL,
    origins TEXT NOT NULL,
    code_hash TEXT NOT NULL,
    again TEXT NOT NULL,
    token TEXT NOT NULL,
    created REAL NOT NULL,
    started REAL NOT NULL DEFAULT 0,
    ended REAL NOT NULL DEFAULT 0,
    generation INTEGER NOT NULL DEFAULT 0,
    incarnation INTEGER NOT NULL DEFAULT 1,
    hosts TEXT NOT NULL DEFAULT '{}',
    progress BLOB,
    owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX jobs_name ON jobs (name, n);
CREATE TABLE events (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    time REAL NOT NULL,
    level TEXT NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (job, seq)
) WITHOUT ROWID;
"""

_HOSTS = """
CREATE TABLE hosts (
    name TEXT PRIMARY KEY,
    last_seen REAL NOT NULL,
    row BLOB NOT NULL
);
"""
_KEYS = """
CREATE TABLE keys (
    public TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    added REAL NOT NULL,
    expires REAL NOT NULL DEFAULT 0,
    revoked REAL NOT NULL DEFAULT 0
);
"""
_OWNER = "ALTER TABLE jobs ADD COLUMN owner TEXT NOT NULL DEFAULT '';"
_STEPS = (
    (2, "DROP TABLE hosts;" + _HOSTS),
    (3, _OWNER + _KEYS),
)  # what an older file lacks, by the version that brought it

_MEND = "check the folder's owner and space; a torn file: stop psd and move it away (the jobs' folders stay)"
_SET = frozenset({"state", "reason", "started", "ended", "generation", "incarnation"})


@dataclass(frozen=True)
class StoredJob:
    """All that the head needs to take a job up again. ``hosts`` is rank -> its seat."""

    id: str
    name: str
    state: str
    reason: str
    toml: str
    cwd: str
    token: str
    generation: int
    incarnation: int
    code_hash: str
    hosts: dict[int, Seat]


class Registry:
    """Open with ``open`` (the head) or ``open_readonly``; close it.

    Reading raises RudraError, one line with ``fix``, where the file is torn or foreign.
    """

    def __init__(self, path: Path, db: sqlite3.Connection, fix: str) -> None:
        self.path = path
        self._db = db
        self._fix = fix
        self._schema = _schema_of(path, db)

    @classmethod
    def open(cls, path: Path) -> Registry:
        """The writer's. Makes the file (0600) where there is none. RudraError where it cannot be used."""
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA cache_size = -512")
            cls._migrate(path, db)
        except (OSError, sqlite3.Error) as error:
            raise RudraError(
                f"the registry cannot be opened: {error}",
                where=str(path),
                fix=_MEND,
            ) from None
        return cls(path, db, _MEND)

    @staticmethod
    def _migrate(path: Path, db: sqlite3.Connection) -> None:
        known = _schema_of(path, db)
        script = (
            _SCHEMA + _HOSTS + _KEYS if known == 0 else "".join(step for version, step in _STEPS if version > known)
        )
        if script:
            db.executescript(f"BEGIN; {script} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")

    @classmethod
    def open_readonly(cls, path: Path, fix: str = _MEND, *, alone: bool = False) -> Registry:
        """A reader's, beside a writer or (``alone``: the folder need not be writable) without one.

        NotFound where there is no registry, RudraError where it is newer, torn or none.
        """
        if not path.is_file():
            raise NotFound(f"there is no registry {path}", fix="`rudra jobs` lists what there is")
        mode = "mode=ro&immutable=1" if alone else "mode=ro"
        db = None
        try:
            db = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, isolation_level=None, timeout=5.0)
            _schema_of(path, db)
            db.execute("SELECT 1 FROM jobs LIMIT 1")
        except (sqlite3.Error, RudraError) as error:
            if db is not None:
                db.close()
            if isinstance(error, RudraError):
                raise
            raise RudraError(f"the registry cannot be read: {error}", where=str(path), fix=fix) from None
        return cls(path, db, fix)

    def close(self) -> None:
        self._db.close()

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._unreadable(error) from None

    def _table(self, text: str) -> dict[str, Any]:
        """A JSON object that a column holds."""
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> RudraError:
        return RudraError(f"the registry cannot be read: {error}", where=str(self.path), fix=self._fix)

    # ---------------------------------------------------------------------------------------- writing

    @contextmanager
    def _durable(self) -> Iterator[None]:
        """What was answered or decided about a job outlives a power cut; events and figures may not."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise RudraError(
                f"the registry cannot be written: {error}", where=str(self.path), fix="make room on the disk"
            ) from None
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._db.execute("PRAGMA synchronous = NORMAL")

    def submit(
        self,
        *,
        request: str,
        name: str,
        toml: str,
        cwd: str,
        origins: Mapping[str, str],
        code_hash: str,
        again: str,
        state: str,
        now: float,
        owner: str = "",
    ) -> tuple[str, bool]:
        """The id of the job of this request, and whether it is new (else it was answered before)."""
        if known := self._rows("SELECT id FROM jobs WHERE request = ?", (request,)):
            return str(known[0][0]), False
        with self._durable():
            job = self._fresh_id()
            self._db.execute(
                "INSERT INTO jobs"
                " (id, request, name, state, toml, cwd, origins, code_hash, again, token, created, owner)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    job, request, name, state, toml, cwd, json.dumps(dict(origins)), code_hash, again,
                    secrets.token_hex(16), now, owner,
                ),
            )  # fmt: skip
        return job, True

    def _fresh_id(self) -> str:
        while True:
            job = secrets.token_hex(3)
            if self._db.execute("SELECT 1 FROM jobs WHERE id = ?", (job,)).fetchone() is None:
                return job

    def update(self, job: str, **values: Any) -> None:
        """Set columns among state, reason, started, ended, generation, incarnation; and ``hosts``."""
        hosts = values.pop("hosts", None)
        if not set(values) <= _SET:
            raise ValueError(f"not columns to set: {sorted(set(values) - _SET)}")
        if hosts is not None:
            values["hosts"] = json.dumps({str(rank): list(seat) for rank, seat in hosts.items()})
        columns = ", ".join(f"{name} = ?" for name in values)
        with self._durable():
            self._db.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), job))  # noqa: S608

    def save_progress(self, job: str, progress: Progress) -> None:
        """The last figures of a job. A full disk loses them, nothing else: RudraError."""
        self._loose("UPDATE jobs SET progress = ? WHERE id = ?", (msgspec.msgpack.encode(progress), job))

    def add_event(self, job: str, level: str, text: str, now: float) -> None:
        """The next line of a job's story. RudraError on a full disk."""
        self._loose(
            "INSERT INTO events (job, seq, time, level, text)"
            " SELECT ?1, coalesce(max(seq), 0) + 1, ?2, ?3, ?4 FROM events WHERE job = ?1",
            (job, now, level, text),
        )

    def _loose(self, sql: str, values: Sequence[Any]) -> None:
        try:
            self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise RudraError(f"the registry cannot be written: {error}", where=str(self.path)) from None

    def remove(self, job: str) -> None:
        """Forget a job and its story."""
        with self._durable():
            self._db.execute("DELETE FROM jobs WHERE id = ?", (job,))

    def see_host(self, row: HostRow) -> None:
        """Remember a learnerd; those not seen for seven days are forgotten, unless somebody
        has drained or banned them."""
        self._loose(
            "INSERT OR REPLACE INTO hosts (name, last_seen, row) VALUES (?, ?, ?)",
            (row.name, row.last_seen, msgspec.msgpack.encode(row)),
        )
        kept = {other.name for other in self.hosts(row.last_seen)}
        for (name,) in self._rows("SELECT name FROM hosts"):
            if name not in kept:
                self._loose("DELETE FROM hosts WHERE name = ?", (name,))

    def save_keys(self, rows: Sequence[KeyRow]) -> None:
        """Keys, new or changed, in one step."""
        with self._durable():
            self._db.executemany(
                "INSERT OR REPLACE INTO keys (public, name, role, added, expires, revoked) VALUES (?, ?, ?, ?, ?, ?)",
                [(row.key, row.name, row.role, row.added, row.expires, row.revoked) for row in rows],
            )

    def forget_host(self, name: str) -> None:
        """As if it had never been seen."""
        with self._durable():
            self._db.execute("DELETE FROM hosts WHERE name = ?", (name,))

    # ---------------------------------------------------------------------------------------- reading

    def key_rows(self) -> list[KeyRow]:
        """All keys, in the order in which they were added."""
        rows = self._rows("SELECT public, name, role, added, expires, revoked FROM keys ORDER BY added, public")
        names = ("key", "name", "role", "added", "expires", "revoked")
        try:
            return [msgspec.convert(dict(zip(names, row, strict=True)), KeyRow) for row in rows]
        except msgspec.ValidationError as error:
            raise self._unreadable(error) from None

    _ROW = "id, name, state, created, started, ended, reason, generation, progress"

    @property
    def _columns(self) -> str:
        """A job's row, with the owner that older registries do not have."""
        return f"{self._ROW}, {'owner' if self._schema >= 3 else repr('')}"

    def _row(self, values: Sequence[Any]) -> JobRow:
        job, name, state, created, started, ended, reason, generation, blob, owner = values
        return JobRow(
            job=job,
            name=name,
            state=state,
            created=created,
            started=started,
            ended=ended,
            reason=reason,
            generation=generation,
            folder=str(self.path.parent / "jobs" / job),
            progress=_decoded(blob, Progress),
            owner=owner,
        )

    def jobs(self) -> list[JobRow]:
        """All jobs, newest first."""
        return [self._row(row) for row in self._rows(f"SELECT {self._columns} FROM jobs ORDER BY n DESC")]  # noqa: S608

    def counts(self) -> dict[str, int]:
        """How many jobs there are of each state."""
        return dict(self._rows("SELECT state, count(*) FROM jobs GROUP BY state"))

    def find(self, job: str) -> str:
        """The id of: an id, the newest job of a name, or ("") the newest of all. NotFound."""
        if not job:
            found = self._rows("SELECT id FROM jobs ORDER BY n DESC LIMIT 1")
        else:
            found = self._rows(
                "SELECT id FROM jobs WHERE id = ?1 OR name = ?1 ORDER BY id = ?1 DESC, n DESC LIMIT 1", (job,)
            )
        if not found:
            raise NotFound(f"there is no job {job}" if job else "there are no jobs", fix="`rudra jobs` lists them")
        return str(found[0][0])

    def get(self, job: str) -> JobReply:
        """A job as ``find`` finds it, with its file. NotFound."""
        ((*head, toml, origins, code_hash),) = self._rows(
            f"SELECT {self._columns}, toml, origins, code_hash FROM jobs WHERE id = ?",  # noqa: S608
            (self.find(job),),
        )
        return JobReply(row=self._row(head), toml=toml, origins=self._table(origins), code_hash=code_hash)

    def stored(self, job: str) -> StoredJob:
        """What starts the job (again), by id. NotFound."""
        rows = self._rows(
            "SELECT id, name, state, reason, toml, cwd, token, generation, incarnation, code_hash, hosts FROM jobs"
            " WHERE id = ?",
            (job,),
        )
        if not rows:
            raise NotFound(f"there is no job {job}", fix="`rudra jobs` lists them")
        row = rows[0]
        names = ("id", "name", "state", "reason", "toml", "cwd", "token", "generation", "incarnation", "code_hash")
        hosts = {
            int(rank): Seat(seat) if isinstance(seat, str) else Seat(*seat)  # schema 1 had the host alone
            for rank, seat in self._table(row[-1]).items()
        }
        return StoredJob(**dict(zip(names, row, strict=False)), hosts=hosts)

    def unfinished(self, ended: Sequence[str]) -> list[StoredJob]:
        """Jobs whose state is none of ``ended``, oldest first."""
        marks = ", ".join("?" * len(ended))
        ids = self._rows(f"SELECT id FROM jobs WHERE state NOT IN ({marks}) ORDER BY n", tuple(ended))  # noqa: S608
        return [self.stored(row[0]) for row in ids]

    def events(self, job: str, after: int, limit: int = EVENTS_PER_READ) -> list[EventRow]:
        """Lines of the story of a job (by id) after ``after``, at most ``limit`` and what fits a message."""
        rows = self._rows(
            "SELECT seq, time, level, text FROM events WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?",
            (job, after, limit),
        )
        found: list[EventRow] = []
        room = BYTES_PER_READ
        for row in rows:
            found.append(EventRow(*row))
            room -= 64 + 4 * len(row[3])
            if room <= 0:
                break
        return found

    def hosts(self, now: float | None = None) -> list[HostRow]:
        """Learnerds seen in the last seven days, drained and banned ones for ever; ``free`` is 0, the coordinator knows
        better."""
        since = (time.time() if now is None else now) - FORGET_HOST_S
        found = (_decoded(row[0], HostRow) for row in self._rows("SELECT row FROM hosts ORDER BY name"))
        return [
            msgspec.structs.replace(row, free=0, free_devices=0, silent=True)
            for row in found
            if row is not None and (row.last_seen >= since or row.state != "ready")
        ]


def _schema_of(path: Path, db: sqlite3.Connection) -> int:
    """The version that wrote the file, 0 where nobody did. RudraError for one that comes after ours."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise RudraError(
            f"the registry was written by a newer version (schema {version}, not {SCHEMA_VERSION})",
            where=str(path),
            fix="use the newer rudra, or another state folder (RUDRA_PATHS_STATE)",
        )
    return version


def _decoded(blob: bytes | None, kind: type[T]) -> T | None:
    if blob is None:
        return None
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except msgspec.DecodeError:
        return None  # written by another version: the rest stays readable
