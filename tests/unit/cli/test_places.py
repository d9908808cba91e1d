"""Where jobs are found: old runs, clusters that are down, folders that cannot be read."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest

from rudra_zmq import paths
from rudra_zmq.cli.main import main
from rudra_zmq.cli.places import ENDED, DownCluster, FinishedRun, Places, ended_run, live_endpoint
from rudra_zmq.config import load_rudra
from rudra_zmq.core import job as life
from rudra_zmq.errors import NotFound, NotRunning, Unreachable
from rudra_zmq.head.registry import Registry
from rudra_zmq.wire.messages.control import Progress

MADE = iter(range(1000, 9999))


def make(folder: Path, name: str = "x", state: str = "DONE") -> str:
    """A registry with one more job in it, as a psd leaves it; the job's id."""
    paths.own_folder(folder)
    registry = Registry.open(paths.registry_file(folder))
    number = next(MADE)
    job, _ = registry.submit(
        request=str(number), name=name, toml="", cwd="/", origins={}, code_hash="", again="", state=state,
        now=float(number),
    )  # fmt: skip
    registry.add_event(job, "I", f"submitted as {name}", 1.0)
    registry.close()
    (folder / "jobs" / job).mkdir(parents=True)
    (folder / "jobs" / job / "metrics.csv").write_text("epoch\n")
    return job


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of our own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUDRA_PATHS_STATE", str(tmp_path / "s"))
    for name in ("RUDRA_HEAD_ADDRESS", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return paths.own_folder(tmp_path / "s")


def places(head: str = "") -> Places:
    return Places(load_rudra().config, head)


def test_the_ended_states_are_those_of_the_rules() -> None:
    assert ENDED == life.ENDED


def test_jobs_of_runs_and_of_a_cluster_that_is_down(state: Path) -> None:
    first, second = make(state / "runs" / "aaaaa1"), make(state / "runs" / "aaaaa2", state="RUNNING")
    third = make(state, "y", state="PENDING")
    with places() as found:
        rows = {f.row.job: f for f in found.jobs()}
        assert list(rows) == [third, second, first]
        assert rows[first].row.state == "DONE"
        assert rows[second].row.state == "LOST" and "rudra resume" in rows[second].row.reason
        assert rows[third].row.state == "PENDING" and "rudra up" in rows[third].row.reason
        assert isinstance(rows[third].place, DownCluster) and not rows[third].place.of_run
        with pytest.raises(Unreachable, match="down"):
            rows[third].place.remove(third)
        with pytest.raises(Unreachable, match="its cluster is down"):
            found.find_live(third)
        with pytest.raises(NotRunning, match="LOST") as caught:
            found.find_live(second)
        assert "rudra resume" in caught.value.fix
        place = rows[first].place
        assert place.get(first).row.state == "DONE"
        assert [e.text for e in place.events(first, 0, 0.0, "").rows] == ["submitted as x"]
        assert place.files(first) == [("metrics.csv", 6)]
        place.remove(first)
    assert not (state / "runs" / "aaaaa1").exists()


@pytest.mark.parametrize("torn", ["head", "middle", "empty", "newer", "text"])
def test_one_bad_run_hides_no_other(state: Path, torn: str, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = make(state / "runs" / "aaaaa1"), make(state / "runs" / "aaaaa2")
    file = paths.registry_file(state / "runs" / "aaaaa2")
    if torn == "newer":
        db = sqlite3.connect(file)
        db.executescript("PRAGMA user_version = 99; ALTER TABLE jobs RENAME COLUMN state TO phase;")
        db.close()
    elif torn == "text":
        db = sqlite3.connect(file)
        db.execute("UPDATE jobs SET created = 'yesterday', origins = '{'")
        db.commit()
        db.close()
    else:
        data = bytearray(file.read_bytes())
        start, stop = {"head": (0, 100), "middle": (4096, len(data)), "empty": (0, 0)}[torn]
        data[start:stop] = b"\xa5" * (stop - start)
        file.write_bytes(data if torn != "empty" else b"")
    with places() as found:
        assert found.find(good).row.job == good  # by its id: nothing else is of interest
        assert capsys.readouterr().err == ""
        assert [f.row.job for f in found.jobs()] == [good]
        with pytest.raises(NotFound):
            found.find(bad)
    (line,) = capsys.readouterr().err.splitlines()
    what = "was written by a newer version (schema 99" if torn == "newer" else "cannot be read"
    assert line.startswith(f"rudra: the registry {what}") and "Fix:" in line and "aaaaa2" in line


def test_many_bad_runs_are_few_lines(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in range(9):
        folder = state / "runs" / f"aaaaa{k}"
        folder.mkdir(parents=True)
        paths.registry_file(folder).write_bytes(b"x" * 8192)
    (state / "runs" / "file").write_text("")
    with places() as found:
        assert found.jobs() == []
        found.tell()
        found.tell()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and "and 6 more" in lines[-1]


def test_a_folder_that_cannot_be_written_is_read(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(state / "runs" / "aaaaa1")
    run = state / "runs" / "aaaaa1"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # this test may run as root
    with places() as found:
        assert found.find(job).row.job == job
    assert not list(run.glob("registry.sqlite-*"))  # nothing was put beside it


def test_no_run_is_kept_open(state: Path) -> None:
    for k in range(50):
        make(state / "runs" / f"aaaa{k:02}")
    before = len(os.listdir("/proc/self/fd"))
    with places() as found:
        assert len(found.jobs()) == 50
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_choice_among_jobs_is_said(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [make(state / "runs" / f"aaaaa{k}", name) for k, name in enumerate(["a", "b", "a"])]
    with places() as found:
        assert found.find("b").row.job == jobs[1]
        assert capsys.readouterr().err == ""
        assert found.find("a").row.job == jobs[2]
        assert "the newest of 2 of this name" in capsys.readouterr().err
        assert found.find("").row.job == jobs[2]
        assert "(the newest)" in capsys.readouterr().err
        assert found.find(jobs[0]).row.job == jobs[0]
        with pytest.raises(NotFound, match="no job 'c'"):
            found.find("c")


def test_a_job_that_is_named_twice_is_removed_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make(state / "runs" / "aaaaa1")
    assert main(["rm", "-y", job, "x", job]) == 0
    assert capsys.readouterr().out == f"removed {job} x\n"


def test_what_a_job_ran_under_is_shown(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make(state / "runs" / "aaaaa1")
    registry = Registry.open(paths.registry_file(state / "runs" / "aaaaa1"))
    registry.save_progress(job, Progress(state="DONE", versions={"python": "3.11.2", "torch": "2.13.0"}))
    with sqlite3.connect(registry.path) as db:
        db.execute("UPDATE jobs SET toml = ?", ('[job]\ntask = "a.b:c"',))
    registry.close()
    assert main(["show", job]) == 0
    assert "# under python 3.11.2, torch 2.13.0" in capsys.readouterr().out.splitlines()
    assert main(["show", "--json", job]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == {"python": "3.11.2", "torch": "2.13.0"}


def test_a_named_head_without_its_token(state: Path) -> None:
    with places("tcp://127.0.0.1:1") as found, pytest.raises(NotFound, match="there is no token") as caught:
        found.jobs()
    assert caught.value.fix == "name the token file of the psd at tcp://127.0.0.1:1 with RUDRA_TOKEN_FILE"


def test_an_id_goes_before_a_name(state: Path) -> None:
    first = make(state / "runs" / "aaaaa1")
    make(state / "runs" / "aaaaa2", name=first)
    with places() as found:
        assert found.find(first).row.name == "x"


def test_a_head_that_is_named_must_answer(state: Path) -> None:
    make(state / "runs" / "aaaaa1")
    with places(f"ipc://{state}/nobody") as found, pytest.raises(Unreachable):
        found.jobs()


def test_a_job_is_not_called_unknown_while_a_head_does_not_answer(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = make(state / "runs" / "aaaaa1")
    paths.make_token(paths.token_file(state))
    monkeypatch.setenv("RUDRA_HEAD_ADDRESS", "tcp://127.0.0.1:1")
    with places() as found:
        assert found.find(here).row.job == here
        with pytest.raises(Unreachable, match=r"no job '7f3a01' where jobs could be asked for. Fix: "):
            found.find("7f3a01")
    assert "psd cannot be reached: refused" in capsys.readouterr().err


def test_endpoints_of_the_dead(state: Path) -> None:
    run = state / "runs" / "aaaaa1"
    make(run)
    file = paths.endpoint_file(run)
    for text in ("", "{}", "[1]", '{"pid": "x"}', f'{{"pid": {os.getpid()}}}', '{"pid": 4194303}'):
        file.write_text(text)
        assert live_endpoint(run) is None

    class Head:
        def __init__(self, folder: Path | None) -> None:
            self.run = folder

    assert isinstance(ended_run(Head(run)), FinishedRun)  # type: ignore[arg-type]
    assert ended_run(Head(None)) is None  # type: ignore[arg-type]


def test_where_nothing_could_be_asked_the_reason_is_the_error(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["jobs"]) == 0  # there are none, and nobody who would have any
    assert main(["status"]) == 3 and "there are no jobs" in capsys.readouterr().err
    # A head beyond this machine, and there is no key.
    monkeypatch.setenv("RUDRA_HEAD_KEY", "a" * 64)
    (state.parent / ".config" / "rudra").mkdir(parents=True)
    (state.parent / ".config" / "rudra" / "rudra.toml").write_text('[head]\naddress = "tcp://192.0.2.1:7"\n')
    for line in (["jobs"], ["status"], ["status", "x"], ["wait"]):
        assert main(line) == 5
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "there is no key of user here" in err, err
    job = make(state / "runs" / "aaaaa1")
    assert main(["jobs"]) == 0  # what there is is shown
    out, err = capsys.readouterr()
    assert job in out and "there is no key of user here" in err
    assert main(["status", "nosuch"]) == 5  # it may be there
    assert "there is no key of user here" in capsys.readouterr().err


def test_a_torn_registry_is_no_empty_table(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths.registry_file(state).write_bytes(b"x" * 8192)
    for line in (["jobs"], ["jobs", "--json"], ["status"]):
        assert main(line) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "the registry cannot be read" in err


def test_down_goes_on_where_rudra_toml_cannot_be_read(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / ".config" / "rudra"
    own.mkdir(parents=True)
    (own / "rudra.toml").write_bytes(b"[psd]\n# \xff\n")
    assert main(["down"]) == 3
    warning, error = capsys.readouterr().err.splitlines()
    assert "rudra.toml:2" in warning and "mend that line" in warning
    assert "nothing is up" in error and str(state) in error
    # Of a file with one wrong key the others hold.
    monkeypatch.delenv("RUDRA_PATHS_STATE")
    (own / "rudra.toml").write_text(f'[paths]\nstate = "{tmp_path}/other"\n[psd]\nnosuch = 1\n')
    assert main(["down"]) == 3
    assert f"{tmp_path}/other" in capsys.readouterr().err.splitlines()[-1]
