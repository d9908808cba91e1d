"""rudra.toml: layers, variables, what is refused; the shipped files against the structs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rudra_zmq.config import LoadedRudra, RudraToml, check_job, check_rudra, load_job, load_rudra
from rudra_zmq.config.host import HostSection, PsdSection
from rudra_zmq.config.layers import parse_toml
from rudra_zmq.config.schema import flat
from rudra_zmq.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "etc" / "rudra"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(tmp_path: Path, *sets: str, **environ: str) -> LoadedRudra:
    return load_rudra(sets, environ=environ, etc=tmp_path / "etc", home=tmp_path / "home")


def test_without_files_everything_is_default(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.config == RudraToml()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.files == ()


def test_layers_win_key_by_key(tmp_path: Path) -> None:
    etc, home = tmp_path / "etc", tmp_path / "home"
    base = write(etc / "rudra.toml", "[host]\nslots = 1\nname = 'a'\n[log]\nlevel = 'error'\nformat = 'json'\n")
    first = write(etc / "conf.d" / "10.toml", "host.slots = 2\nhost.name = 'b'\npsd.ports = '2000-2001'\n")
    second = write(etc / "conf.d" / "20.toml", "[host]\nslots = 3\n")
    own = write(home / "rudra.toml", "[psd]\nports = '3000-3001'\ndata = 'tcp'\n")
    write(etc / "conf.d" / "30.txt", "nonsense")
    loaded = load(tmp_path, "psd.data=ipc", RUDRA_PSD_PORTS="4000-4001", RUDRA_PSD_DATA="auto")
    config, origins = loaded.config, loaded.origins
    assert (config.host.slots, origins["host.slots"]) == (3, f"{second}:2")
    assert (config.host.name, origins["host.name"]) == ("b", f"{first}:2")
    assert (config.psd.ports, origins["psd.ports"]) == ("4000-4001", "RUDRA_PSD_PORTS")
    assert (config.psd.data, origins["psd.data"]) == ("ipc", "-s psd.data=ipc")
    assert (config.log.level, origins["log.level"]) == ("error", f"{base}:5")
    assert (config.paths.state, origins["paths.state"]) == ("", "default")
    assert loaded.files == (base, first, second, own)
    assert ("log.format", '"json"', f"{base}:6") in loaded.rows()


def test_ones_own_folder_follows_xdg(tmp_path: Path) -> None:
    write(tmp_path / "xdg" / "rudra" / "rudra.toml", "log.level = 'debug'")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert load_rudra(environ=environ, etc=tmp_path / "no").config.log.level == "debug"
    relative = {"XDG_CONFIG_HOME": "xdg"}
    assert load_rudra(environ=relative, etc=tmp_path / "no", home=tmp_path / "no").config.log.level == "info"


def test_variables(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        RUDRA_HOST_SLOTS="6",
        RUDRA_HOST_NAME="7",
        RUDRA_PATHS_STATE="/s",
        RUDRA_LOG_LEVEL="",
        RUDRA_RANK="3",
        RUDRA_LEARNER="/x.json",
        RUDRA_PSD_PID="1",
        LANG="C",
    ).config
    assert (config.host.slots, config.host.name, config.paths.state) == (6, "7", "/s")
    assert config.log.level == "info"


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "RUDRA_LOG_LEVL",
            "debug",
            "unknown variable RUDRA_LOG_LEVL, did you mean RUDRA_LOG_LEVEL? (environment)."
            " Fix: set RUDRA_LOG_LEVEL instead",
        ),
        (
            "RUDRA_LOG_LEVEL",
            "loud",
            'log.level cannot be "loud" (RUDRA_LOG_LEVEL).'
            ' Fix: this version supports "debug", "info", "warning", "error"',
        ),
        (
            "RUDRA_HOST_SLOTS",
            "-1",
            "host.slots cannot be -1 (RUDRA_HOST_SLOTS). Fix: give a whole number from 0 to 4096",
        ),
        (
            "RUDRA_HOST_SLOTS",
            '"4',
            "the value of host.slots is not valid TOML (RUDRA_HOST_SLOTS). Fix: close its quotes and brackets",
        ),
    ],
)
def test_variables_that_cannot_be(tmp_path: Path, name: str, value: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **{name: value})
    assert str(caught.value) == line


ADDRESS = 'give an address such as "tcp://ps0.example.org:7733", "tcp://[::1]:7733" or "ipc:///PATH"'


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("[hed]", "unknown key hed, did you mean head?", "write head"),
        ("[psd]\nlisten = 'tcp://*:7733'", 'psd.listen cannot be "tcp://*:7733"', ADDRESS),
        ("[psd]\nlisten = 'tcp://127.0.0.1'", 'psd.listen cannot be "tcp://127.0.0.1"', ADDRESS),
        ("[psd]\nlisten = 'tcp://127.0.0.1:70000'", 'psd.listen cannot be "tcp://127.0.0.1:70000"', ADDRESS),
        ("[psd]\nlisten = 'ipc://@rudra'", 'psd.listen cannot be "ipc://@rudra"', ADDRESS),
        ("[head]\nkey = 'abc'", 'head.key cannot be "abc"', "give 64 hex digits, as `rudra keys list` prints them"),
        ("[head]\naddress = 'tcp://127.0.0.1:0'", 'head.address cannot be "tcp://127.0.0.1:0"', ADDRESS),
        ("[head]\naddress = '127.0.0.1:7733'", 'head.address cannot be "127.0.0.1:7733"', ADDRESS),
        (
            "[head]\naddress = 'ipc:///" + "x" * 100 + "'",
            "the path of a socket has 101 bytes, at most 100 work",
            "give head.address a shorter path",
        ),
        (
            "[psd]\nports = '7799-7740'",
            'psd.ports cannot be "7799-7740"',
            'give a range within 1024-65535 such as "7740-7799", or "0" for any free port',
        ),
        (
            "[psd]\nports = '80-90'",
            'psd.ports cannot be "80-90"',
            'give a range within 1024-65535 such as "7740-7799", or "0" for any free port',
        ),
        ("[psd]\ndata = 'udp'", 'psd.data cannot be "udp"', 'this version supports "auto", "shm", "ipc", "tcp"'),
        ("[paths]\nstate = 'here'", 'paths.state cannot be "here"', "give an absolute path"),
        (
            "[log]\nformat = 'jsn'",
            'log.format cannot be "jsn", did you mean "json"?',
            'this version supports "text", "json"',
        ),
        (
            "[host]\nname = 'a b'",
            'host.name cannot be "a b"',
            "give 1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, what: str, fix: str) -> None:
    file = write(tmp_path / "home" / "rudra.toml", text)
    (line,) = check_rudra(file)
    assert line == f"{what} ({file}:{1 + text.count(chr(10))}). Fix: {fix}"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://127.0.0.1:7733",
        "tcp://ps0.example.org:1",
        "tcp://0.0.0.0:7733",
        "tcp://[::1]:65535",
        "ipc:///run/rudra/psd.sock",
    ],
)
def test_addresses(tmp_path: Path, address: str) -> None:
    assert load(tmp_path, f"psd.listen={address}", f"head.address={address}").config.psd.listen == address


def test_any_free_port() -> None:
    assert PsdSection(ports="0").port_range == (0, 0)
    assert PsdSection().port_range == (7740, 7799)


def test_slots_of_a_host_are_its_cores_and_at_least_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, slots in ((1, 4), (4, 4), (16, 16)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert HostSection().slot_count == slots
    assert HostSection(slots=2).slot_count == 2
    assert HostSection(name="x").host_name == "x"
    assert HostSection().host_name


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    file = write(tmp_path / "home" / "rudra.toml", "[log\n")
    (line,) = check_rudra(file)
    assert line.startswith("not valid TOML: ")
    assert line.endswith(f'({file}:1). Fix: write it as key = value, texts in "quotes"')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value) == line
    assert check_rudra(tmp_path / "no") == [f"there is no such file ({tmp_path}/no). Fix: check the path"]


# ---- the shipped files


def test_the_shipped_rudra_toml_shows_every_key_with_its_default() -> None:
    text = (SHIPPED / "rudra.toml").read_text()
    shown = {f"{table}.{key}": v for table, keys in parse_toml(text, "x").items() for key, v in keys.items()}
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in shown.items()} == flat(RudraToml())
    assert check_rudra(SHIPPED / "rudra.toml") == []


def test_every_key_of_the_shipped_rudra_toml_has_a_comment_above_it() -> None:
    lines = (SHIPPED / "rudra.toml").read_text().splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    assert len(keys) == len(flat(RudraToml()))
    for i in keys:
        assert lines[i - 1].startswith("# "), lines[i]


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
def test_the_shipped_jobs_are_the_settings_that_were_tried(protocol: str) -> None:
    file = SHIPPED / "jobs" / f"fashion-{protocol}.toml"
    assert check_job(file) == []
    job = load_job(file).job
    assert (job.job.name, job.job.task) == (f"fashion-{protocol}", "rudra_zmq.tasks.fashion_mnist:cnn")
    assert (job.sync.protocol, job.sync.n, job.sync.modulation) == (protocol, 1, "auto")
    assert (job.job.epochs, job.job.seed, job.learners.count, job.learners.minibatch) == (3, 1, 4, 32)
    update = job.update
    assert (update.rule, update.lr, update.momentum, update.weight_decay) == ("momentum", 0.03, 0.9, 0.0005)
    assert (update.schedule.kind, update.clip_norm, update.groups) == ("cosine", None, ())
    assert (job.sync.backup, job.sync.warmup_epochs, job.sync.staleness_bound) == (0, 0, None)


def test_every_shipped_job_is_tested() -> None:
    assert sorted(path.stem for path in (SHIPPED / "jobs").iterdir()) == [
        "fashion-async",
        "fashion-hardsync",
        "fashion-softsync",
    ]


def test_this_package_is_light() -> None:
    """psd and learnerd import it: what it pulls in counts against their 60 MB."""
    import subprocess

    code = (
        "import sys, rudra_zmq, rudra_zmq.config, rudra_zmq.errors, rudra_zmq.log, rudra_zmq.paths\n"
        "print(sorted({'torch', 'numpy', 'zmq', 'asyncio', 'socket', 'pickle'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "[]\n"


def test_public_names_come_lazily() -> None:
    import rudra_zmq

    assert rudra_zmq.__version__ == "0.1.0"
    assert {"join", "Learner"} <= set(dir(rudra_zmq))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rudra_zmq.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9733", ("127.0.0.1", 9733)), ("0.0.0.0:9733", ("0.0.0.0", 9733)), ("[::]:9733", ("::", 9733)),
        ("192.0.2.7:0", ("192.0.2.7", 0)), ("", None),
    ],
)  # fmt: skip
def test_where_metrics_are_served(tmp_path: Path, text: str, address: tuple[str, int] | None) -> None:
    assert load(tmp_path, f"metrics.listen={text!r}").config.metrics.address == address


@pytest.mark.parametrize(
    "text", ["x", "host:9733", ":9733", "70000", "127.0.0.1", "::1:9733", "[127.0.0.1]:9733", "1.2.3.4:-1"]
)
def test_what_is_no_address_for_metrics(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.listen cannot be"):
        load(tmp_path, f"metrics.listen={text!r}")
