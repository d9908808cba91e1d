"""The registry: ids, idempotent submits, the story's order, readers beside the writer, restarts."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rudra_zmq.errors import NotFound, RudraError
from rudra_zmq.head.ranks import Seat
from rudra_zmq.head.registry import FORGET_HOST_S, SCHEMA_VERSION, Registry
from rudra_zmq.wire.messages.control import HostRow, Progress


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = Registry.open(tmp_path / "registry.sqlite")
    yield opened
    opened.close()


def submit(registry: Registry, request: str = "r1", name: str = "demo", now: float = 100.0) -> tuple[str, bool]:
    return registry.submit(
        request=request, name=name, toml="[job]", cwd="/tmp", origins={"job.name": "x"}, code_hash="ab",
        again="", state="PENDING", now=now,
    )  # fmt: skip


def test_a_request_makes_one_job_however_often_it_comes(registry: Registry) -> None:
    first, new = submit(registry)
    again, new_again = submit(registry, name="other")
    assert (new, new_again) == (True, False)
    assert first == again
    assert len(registry.jobs()) == 1
    assert len(first) == 6 and int(first, 16) >= 0


def test_newest_of_a_name_and_newest_of_all(registry: Registry) -> None:
    a, _ = submit(registry, "1", "demo")
    b, _ = submit(registry, "2", "demo")
    c, _ = submit(registry, "3", "other")
    assert [row.job for row in registry.jobs()] == [c, b, a]
    assert registry.find("demo") == b
    assert registry.find("") == c
    assert registry.find(a) == a
    assert registry.get("demo").row.job == b
    with pytest.raises(NotFound):
        registry.find("nope")


def test_an_id_wins_over_a_name_that_looks_like_it(registry: Registry) -> None:
    first, _ = submit(registry, "1", "demo")
    submit(registry, "2", first)
    assert registry.find(first) == first


def test_everything_a_restart_needs_survives(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    registry = Registry.open(path)
    job, _ = submit(registry)
    token = registry.stored(job).token
    registry.update(
        job, state="RUNNING", generation=2, incarnation=5, hosts={0: Seat("a"), 1: Seat("b", "GPU-1")}, started=101.0
    )
    registry.save_progress(job, Progress(state="RUNNING", updates=7, histogram={"0": 3}))
    registry.close()
    registry = Registry.open(path)
    (stored,) = registry.unfinished(["DONE", "FAILED"])
    assert (stored.generation, stored.incarnation, stored.token) == (2, 5, token)
    assert stored.hosts == {0: Seat("a"), 1: Seat("b", "GPU-1")}
    assert (stored.toml, stored.cwd, stored.state) == ("[job]", "/tmp", "RUNNING")
    reply = registry.get(job)
    assert reply.row.progress is not None and reply.row.progress.updates == 7
    assert reply.origins == {"job.name": "x"} and reply.code_hash == "ab"
    assert reply.row.folder == str(tmp_path / "jobs" / job)
    registry.update(job, state="DONE", ended=110.0)
    assert registry.unfinished(["DONE", "FAILED"]) == []
    registry.close()


def test_the_story_is_numbered_per_job_from_one(registry: Registry) -> None:
    a, _ = submit(registry, "1")
    b, _ = submit(registry, "2")
    for n in range(3):
        registry.add_event(a, "I", f"a{n}", 1.0 + n)
    registry.add_event(b, "W", "b0", 9.0)
    assert [(e.seq, e.text) for e in registry.events(a, 0)] == [(1, "a0"), (2, "a1"), (3, "a2")]
    assert [(e.seq, e.level, e.time) for e in registry.events(b, 0)] == [(1, "W", 9.0)]
    assert [e.seq for e in registry.events(a, 2)] == [3]
    assert [e.seq for e in registry.events(a, 0, limit=2)] == [1, 2]


def test_remove_takes_the_story_along(registry: Registry) -> None:
    job, _ = submit(registry)
    registry.add_event(job, "I", "x", 1.0)
    registry.remove(job)
    assert registry.jobs() == [] and registry.events(job, 0) == []
    with pytest.raises(NotFound):
        registry.stored(job)


def test_only_columns_of_a_jobs_course_can_be_set(registry: Registry) -> None:
    job, _ = submit(registry)
    with pytest.raises(ValueError, match="token"):
        registry.update(job, token="x")


def test_a_reader_sees_what_a_living_writer_wrote(tmp_path: Path, registry: Registry) -> None:
    job, _ = submit(registry)
    registry.add_event(job, "I", "x", 1.0)
    reader = Registry.open_readonly(tmp_path / "registry.sqlite")
    assert reader.get("").row.job == job
    assert len(reader.events(job, 0)) == 1
    with pytest.raises(RudraError):
        reader.add_event(job, "I", "y", 2.0)
    reader.close()


def test_no_registry_is_not_found_and_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        Registry.open_readonly(tmp_path / "registry.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_a_newer_schema_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    newer = tmp_path / "newer.sqlite"
    with sqlite3.connect(newer) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    for door in (Registry.open, Registry.open_readonly):
        with pytest.raises(RudraError, match="newer version") as caught:
            door(newer)
        assert caught.value.fix.startswith("use the newer rudra")
    noise = tmp_path / "noise.sqlite"
    noise.write_bytes(b"no database " * 400)
    with pytest.raises(RudraError, match="cannot be opened"):
        Registry.open(noise)
    with pytest.raises(RudraError, match="cannot be read"):
        Registry.open_readonly(noise)


@pytest.mark.parametrize("alone", [False, True])
def test_a_torn_registry_is_one_line_for_whoever_reads(tmp_path: Path, alone: bool) -> None:
    path = tmp_path / "registry.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE jobs (id TEXT)")
        db.execute("INSERT INTO jobs VALUES ('abc123')")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.close()
    readers = (Registry.open_readonly(path, "mend it", alone=alone), Registry.open(path))
    for torn, fix in zip(readers, ("mend it", "check the folder's owner"), strict=True):
        for read in (
            torn.jobs,
            torn.hosts,
            lambda torn=torn: torn.get("abc123"),
            lambda torn=torn: torn.stored("abc123"),
            lambda torn=torn: torn.unfinished(["DONE"]),
            lambda torn=torn: torn.events("abc123", 0),
        ):
            with pytest.raises(RudraError, match="the registry cannot be read: no such") as caught:
                read()
            assert caught.value.fix.startswith(fix) and caught.value.where == str(path)
        torn.close()


def test_a_column_that_is_no_table_is_one_line(tmp_path: Path, registry: Registry) -> None:
    job, _ = submit(registry)
    with sqlite3.connect(tmp_path / "registry.sqlite") as db:
        db.execute("UPDATE jobs SET origins = '{', hosts = '[1]'")
    db.close()
    for read in (registry.get, registry.stored):
        with pytest.raises(RudraError, match="the registry cannot be read"):
            read(job)


def test_figures_of_another_version_are_left_out(tmp_path: Path, registry: Registry) -> None:
    job, _ = submit(registry)
    with sqlite3.connect(tmp_path / "registry.sqlite") as db:
        db.execute("UPDATE jobs SET progress = ?", (b"\xc1",))
    db.close()
    assert registry.get(job).row.progress is None


def test_the_file_is_its_owners_alone(tmp_path: Path, registry: Registry) -> None:
    assert stat.S_IMODE((tmp_path / "registry.sqlite").stat().st_mode) == 0o600


def test_hosts_are_forgotten_after_a_week(registry: Registry) -> None:
    def host(name: str, seen: float) -> HostRow:
        return HostRow(name=name, slots=4, free=4, pid=1, last_seen=seen, versions={"rudra": "1"})

    registry.see_host(host("a", 100.0))
    registry.see_host(host("b", 200.0))
    registry.see_host(host("b", 300.0))
    assert [(h.name, h.last_seen) for h in registry.hosts(301.0)] == [("a", 100.0), ("b", 300.0)]
    registry.see_host(host("c", 150.0 + FORGET_HOST_S))
    assert [h.name for h in registry.hosts(150.0 + FORGET_HOST_S)] == ["b", "c"]
