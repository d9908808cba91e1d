"""Names that each host gives a meaning: in arguments, in code, in the sections of a host."""

from __future__ import annotations

from pathlib import Path

import pytest

import rudra_zmq as rudra
from rudra_zmq.config import check_job, check_rudra, job_from_toml
from rudra_zmq.config.places import path_names, with_places
from rudra_zmq.errors import ConfigError
from rudra_zmq.learner import places

SCRIPT = "[run]\nscript = '/x.py'\nargs = ['--in={path:in}', '{path:in}/{path:out}', 'a b', '{other}']\n"
TASK = "[job]\ntask = 'm:t'\n[job.task_args]\ndata = '{path:in}'\nmany = ['{path:out}', 'x', 3]\nsize = 2\n"


def test_which_names_a_job_needs() -> None:
    assert path_names(job_from_toml(SCRIPT, name="x").job) == ("in", "out")
    assert path_names(job_from_toml(TASK, name="x").job) == ("in", "out")


def test_paths_take_the_place_of_names_and_blanks_stay_in_one_argument() -> None:
    paths = {"in": "/nvme/a b", "out": "/o; rm -r $HOME"}
    job = with_places(job_from_toml(SCRIPT, name="x").job, paths)
    assert job.run.args == ("--in=/nvme/a b", "/nvme/a b//o; rm -r $HOME", "a b", "{other}")
    task = with_places(job_from_toml(TASK, name="x").job, paths)
    assert task.job.task_args == {"data": "/nvme/a b", "many": ["/o; rm -r $HOME", "x", 3], "size": 2}


def test_a_name_that_this_host_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        with_places(job_from_toml(SCRIPT, name="x").job, {"out": "/o"})
    assert str(caught.value) == (
        'paths.in is not set on this host. Fix: add paths.in = "/..." to [host] of its rudra.toml; it has out'
    )


@pytest.mark.parametrize("name", ["", "a b", "/in", "-x"])
def test_what_is_no_name_is_refused_where_it_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.py").touch()
    file = tmp_path / "job.toml"
    file.write_text(f"[run]\nscript = 'x.py'\nargs = ['{{path:{name}}}']\n")
    (line,) = check_job(file)
    assert line.startswith(f"{{path:{name}}} names no path ({file}:3). Fix: ")


def test_rudra_path_in_a_job_and_alone(monkeypatch: pytest.MonkeyPatch, private_home: object, tmp_path: Path) -> None:
    for given, expected in (('{"in": "/nvme/in"}', "/nvme/in"), (None, "/mine/in")):
        places.known.cache_clear()
        if given is None:
            monkeypatch.delenv("RUDRA_PLACES")
            own = private_home.config / "rudra" / "rudra.toml"  # type: ignore[attr-defined]
            own.parent.mkdir()
            own.write_text("[host]\npaths.in = '/mine/in'\n")
        else:
            monkeypatch.setenv("RUDRA_PLACES", given)
        assert rudra.path("in") == Path(expected)
        with pytest.raises(ConfigError, match=r"paths.out is not set on this host \(rudra.path\(\)\)"):
            rudra.path("out")
    places.known.cache_clear()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("devices = [0, 0]", "host.devices cannot be [0, 0]"),
        ("devices = ['cuda:0']", 'host.devices cannot be ["cuda:0"]'),
        ("devices = [-1]", "host.devices cannot be [-1]"),
        ("labels = ['a b']", 'host.labels cannot be ["a b"]'),
        ("python.ml = 'bin/python'", 'host.python.ml cannot be "bin/python"'),
        ("paths.in = ''", 'host.paths.in cannot be ""'),
        ("paths.'a b' = '/x'", 'host.paths: "a b" is no name'),
        ("env.RUDRA_X = '1'", "host.env: RUDRA_X would hide what rudra itself sets"),
        ("env.'A-B' = '1'", 'host.env: "A-B" is no name of a variable'),
    ],
)
def test_what_a_host_section_cannot_say(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "rudra.toml"
    file.write_text(f"[host]\n{text}\n")
    (found,) = check_rudra(file)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("text", "names"),
    [("'auto'", ()), ("'gpu'", ("gpu",)), ("['a', 'gpu']", ("a", "gpu")), ("['a', 'auto']", ())],
)
def test_hosts_of_a_job(text: str, names: tuple[str, ...]) -> None:
    job = job_from_toml(f"[job]\ntask = 'm:t'\n[learners]\nhosts = {text}", name="x").job
    assert job.learners.host_names == names
