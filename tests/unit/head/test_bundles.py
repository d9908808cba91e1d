"""The head's bundles: taken in pieces, checked, given to the hosts that need them, kept as long as a job does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rudra_zmq.errors import ConfigError, Rejected, RudraError
from rudra_zmq.head import bundles
from rudra_zmq.paths import JobFolder
from rudra_zmq.wire import bundle
from rudra_zmq.wire.messages import control as c
from tests.unit.head.world import World

CODE = bundle.make([bundle.Entry("train.py", b"#" * 5000, False)])
TOML = '[run]\nscript = "train.py"\ncode = "/home/me/src"\n[learners]\ncount = {count}\n'


def put(world: World, code: bundle.Bundle = CODE, piece: int = 1000, upto: int | None = None) -> None:
    for at in range(0, len(code.data) if upto is None else upto, piece):
        reply = world.cli(c.PutBundle(name=code.name, size=len(code.data), offset=at, data=code.data[at : at + piece]))
        assert reply == c.BundleHeld(held=min(at + piece, len(code.data))), reply


def submit(world: World, code: bundle.Bundle = CODE, name: str = "demo") -> str:
    message = c.Submit(request=os.urandom(4).hex(), name=name, toml=TOML.format(count=2), cwd="/", code_hash=code.name)
    reply = world.cli(message)
    assert isinstance(reply, c.Submitted), reply
    return reply.job


def there(world: World) -> list[str]:
    return sorted(p.name for p in (world.state / "bundles").iterdir())


def test_a_job_without_its_code_is_refused_and_with_it_runs_it(world: World) -> None:
    world.register()
    refused = world.cli(c.Submit(request="r", name="x", toml=TOML.format(count=2), cwd="/", code_hash=CODE.name))
    assert isinstance(refused, c.Error) and refused.code == "not-found"
    assert isinstance(world.cli(c.ListJobs()), c.Jobs) and world.cli(c.ListJobs()).rows == []  # type: ignore[union-attr]
    for bad in ("", "../../x", "0" * 63, "Z" * 64):
        refused = world.cli(c.Submit(request="r", name="x", toml=TOML.format(count=2), cwd="/", code_hash=bad))
        assert isinstance(refused, c.Error) and refused.code == "config"
    put(world)
    job = submit(world)
    world.hello(job)
    (order,) = world.sent(c.StartLearners)
    assert order.bundle == CODE.name
    got = b""
    while len(got) < len(CODE.data):
        reply = world.send(b"a", c.GetBundle(name=CODE.name, offset=len(got)))
        assert isinstance(reply, c.FileData) and reply.size == len(CODE.data)
        got += reply.data
    assert got == CODE.data


def test_code_goes_to_hosts_that_need_it_alone(world: World) -> None:
    world.register("a", slots=4)
    world.register("b", slots=1, pid=501)
    put(world)
    submit(world)
    assert isinstance(world.send(b"a", c.GetBundle(name=CODE.name, offset=0)), c.FileData)
    refused = world.send(b"b", c.GetBundle(name=CODE.name, offset=0))
    assert isinstance(refused, c.Error) and refused.code == "not-found"
    for message in (c.GetBundle(name=CODE.name, offset=0),):
        refused = world.cli(message)
        assert isinstance(refused, c.Error) and refused.code == "security"
    refused = world.send(b"a", c.PutBundle(name=CODE.name, size=1))
    assert isinstance(refused, c.Error) and refused.code == "security"


def test_pieces_out_of_order_repeated_or_after_a_restart(world: World) -> None:
    size = len(CODE.data)
    ask = c.PutBundle(name=CODE.name, size=size)
    assert world.cli(ask) == c.BundleHeld(held=0)
    late = c.PutBundle(name=CODE.name, size=size, offset=2000, data=CODE.data[2000:3000])
    assert world.cli(late) == c.BundleHeld(held=0)
    put(world, upto=2000)
    first = c.PutBundle(name=CODE.name, size=size, offset=0, data=CODE.data[:1000])
    assert world.cli(first) == c.BundleHeld(held=2000)
    world.restart_head()
    assert world.cli(ask) == c.BundleHeld(held=0)
    put(world)
    assert world.cli(ask) == c.BundleHeld(held=size) and there(world).count(CODE.name) == 1
    world.wait(61.0)


def test_what_is_not_what_its_name_says_is_not_kept(world: World) -> None:
    wrong = bundle.Bundle(CODE.name, CODE.data[:-1] + b"x")
    refused = world.cli(c.PutBundle(name=wrong.name, size=len(wrong.data), data=wrong.data))
    assert isinstance(refused, c.Error) and refused.code == Rejected.code
    more = world.cli(c.PutBundle(name=CODE.name, size=10, data=CODE.data[:11]))
    assert isinstance(more, c.Error) and more.code == Rejected.code
    assert there(world) == []
    put(world)


def test_a_cut_off_upload_goes_and_few_come_at_once(world: World) -> None:
    put(world, upto=1000)
    assert len(there(world)) == 1
    for i in range(bundles.Uploads.MOST - 1):
        assert world.cli(c.PutBundle(name=f"{i:064}", size=5)) == c.BundleHeld(held=0)
    full = world.cli(c.PutBundle(name="f" * 64, size=5))
    assert isinstance(full, c.Error) and "on their way" in full.message
    world.wait(62.0)
    assert there(world) == []
    put(world)


def test_removed_with_the_last_job_that_needs_it(world: World) -> None:
    put(world)
    first, second = submit(world), submit(world, name="again")
    used = world.cli(c.DiskUse())
    assert isinstance(used, c.DiskUsed)
    assert sorted(size for _, what, size in used.rows if what == "code") == [0, len(CODE.data)]
    for job in (first, second):
        assert there(world) == [CODE.name]
        assert isinstance(world.cli(c.StopJob(job=job)), c.Ok)
        assert isinstance(world.cli(c.RemoveJob(job=job)), c.Ok)
    assert there(world) == []


def test_what_nobody_needs_goes_after_an_hour(tmp_path: Path) -> None:
    (tmp_path / "bundles").mkdir()
    for name in ("a" * 64, "b" * 64, f".{'c' * 64}.part"):
        (tmp_path / "bundles" / name).write_bytes(b"x")
    bundles.need(JobFolder(tmp_path / "jobs" / "abc123").make(), "a" * 64)
    now = (tmp_path / "bundles" / ("b" * 64)).stat().st_mtime
    bundles.collect(tmp_path, now=now + bundles.FORGET_S - 1)
    assert len(list((tmp_path / "bundles").iterdir())) == 3
    bundles.collect(tmp_path, now=now + bundles.FORGET_S + 1)
    assert [p.name for p in (tmp_path / "bundles").iterdir()] == ["a" * 64]


def test_where_it_cannot_be_read_what_a_job_needs_nothing_goes(tmp_path: Path) -> None:
    (tmp_path / "bundles").mkdir()
    (tmp_path / "bundles" / CODE.name).write_bytes(b"x")
    JobFolder(tmp_path / "jobs" / "abc123").make().bundle.mkdir()
    bundles.collect(tmp_path, CODE.name)
    assert [p.name for p in (tmp_path / "bundles").iterdir()] == [CODE.name]


def test_an_unfinished_job_keeps_its_code_though_the_mark_of_it_was_lost(world: World) -> None:
    put(world)
    job = submit(world)
    mark = JobFolder(world.state / "jobs" / job).bundle
    mark.write_bytes(b"")  # as a power cut leaves it
    os.utime(world.state / "bundles" / CODE.name, (1.0, 1.0))
    world.restart_head()
    assert there(world) == [CODE.name] and mark.read_text() == CODE.name


def test_a_job_whose_folder_cannot_be_written_leaves_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    put(world)

    def full(path: Path, *args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        refused = world.cli(c.Submit(request="r", name="x", toml=TOML.format(count=2), cwd="/", code_hash=CODE.name))
    assert isinstance(refused, c.Error) and "No space left" in refused.message
    assert list((world.state / "jobs").iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coming = bundles.Incoming(tmp_path, CODE.name, len(CODE.data))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, coming._fd)
    os.close(full)
    with pytest.raises(RudraError, match="not stored"):
        coming.write(CODE.data)
    assert list((tmp_path / "bundles").iterdir()) == []
    with pytest.raises(ConfigError):
        bundles.Incoming(tmp_path, "../x", 1)
