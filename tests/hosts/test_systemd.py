"""rudra as services of a machine: installed, started, watched, stopped and taken away again."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.machine import CHECKOUT, Machine, lacking, until

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())

DAEMONS = ("rudra-psd", "rudra-learnerd")
USERS = ("rudra", "rudra-learnerd", "rudra-job")
TRAINS = """
import os, sys, torch
import torch.nn.functional as F
import rudra_zmq as rudra
status = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith(("Cap", "Umask")))
print("I am", os.getuid(), os.environ["HOME"], os.environ["USER"], *(status[k].strip() for k in ("CapPrm", "CapEff", "CapAmb")))
for path in ("/var/lib/rudra/psd/token", "/run/rudra/psd.sock", "/etc/rudra/keys"):
    print(path, os.access(path, os.R_OK) or os.access(path, os.W_OK))
open("beside-the-script", "w").write("own")
x, y = torch.randn(200, 6), torch.randint(0, 3, (200,))
with rudra.join() as learner:
    model = learner.attach(torch.nn.Linear(6, 3))
    opt = learner.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for epoch in learner.epochs():
        for a, b in learner.batches(torch.utils.data.TensorDataset(x, y), batch_size=10):
            learner.step(F.cross_entropy(model(a), b))
"""


def job(machine: Machine, name: str, epochs: int, home: str) -> str:
    """The path of a job file in a home that nobody else can enter: its code goes with it. The learners' interpreter is
    the one that runs the tests."""
    folder = machine.tree / f"home/{home}/job"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAINS)
    (folder / f"{name}.toml").write_text(
        f'[job]\nname = "{name}"\nepochs = {epochs}\n[learners]\ncount = 2\n[sync]\nprotocol = "softsync"\n'
        f'[run]\ncode = "."\nscript = "train.py"\npython = "{sys.executable}"\nenv = {{PYTHONPATH = "{CHECKOUT}"}}\n'
    )
    machine("chown", "-R", home, f"/home/{home}")
    machine("chmod", "700", f"/home/{home}")
    return f"/home/{home}/job/{name}.toml"


@pytest.fixture(scope="module")
def installed() -> Iterator[Machine]:
    base = Path(tempfile.mkdtemp(prefix="rz-systemd-"))
    machine = Machine(base / "machine")
    try:
        machine.boot()
        machine(CHECKOUT / "bin/rudra-install", timeout=240)
        machine("useradd", "-m", "-G", "rudra", "ann")
        machine("useradd", "-m", "bob")
        yield machine
    finally:
        machine.close()
        shutil.rmtree(base)


@pytest.fixture
def machine(installed: Machine) -> Iterator[Machine]:
    """With everything started, whatever the test before did."""
    installed("systemctl", "reset-failed")
    installed("systemctl", "enable", "--now", "rudra.target", *DAEMONS)
    until(lambda: " 4 " in installed.say("rudra", "hosts"), "the registration")
    yield installed


def pid(machine: Machine, unit: str) -> int:
    return int(machine.show(unit, "MainPID"))


def of_rudra(machine: Machine) -> str:
    """Processes of rudra's users."""
    return machine.say("ps", "-o", "pid,user,args", "--no-headers", "-u", ",".join(USERS))


def test_units_are_in_order(machine: Machine) -> None:
    for folder, how in (("system", "--system"), ("user", "--user")):
        units = [f"/usr/local/lib/systemd/{folder}/{unit}" for unit in ("rudra-psd.service", "rudra-learnerd.service")]
        done = machine(
            "env",
            "XDG_RUNTIME_DIR=/run",
            "systemd-analyze",
            how,
            "verify",
            *units,
            f"/usr/local/lib/systemd/{folder}/rudra.target",
        )
        assert (done.stdout + done.stderr).strip() == ""
    worst = {"rudra-psd": 3.0, "rudra-learnerd": 4.5}
    for unit in DAEMONS:
        found = machine.say(
            "systemd-analyze", "security", "--offline=true", f"/usr/local/lib/systemd/system/{unit}.service"
        )
        exposure = re.search(r"exposure level for \S+: (\d+\.\d)", found)
        assert exposure is not None and float(exposure[1]) < worst[unit], found[-200:]


def test_only_rudra_is_on_the_path_and_its_pages_read(machine: Machine) -> None:
    assert [
        os.path.basename(p)
        for p in machine.say("ls", "/usr/local/bin").split()
        if "rudra" in p or p in ("psd", "learnerd")
    ] == ["rudra"]
    for section, page in ((1, "rudra"), (8, "psd"), (8, "learnerd"), (5, "rudra.toml")):
        assert "NAME" in machine("man", "-P", "cat", str(section), page).stdout
    assert machine.say("stat", "-c", "%a %U", "/etc/rudra/keys") == "700 root"


def test_a_member_of_the_group_trains_and_learners_can_do_nothing_else(machine: Machine) -> None:
    done = machine("rudra", "submit", "--follow", job(machine, "small", 1, "ann"), user="ann")
    assert "DONE" in done.stdout
    said = machine("rudra", "logs", "small", user="ann").stdout
    uid = machine.say("id", "-u", "rudra-job")
    nothing = "0000000000000000"
    assert said.count(f"I am {uid} /var/lib/rudra/job rudra-job {nothing} {nothing} {nothing}") == 2, said
    for path in ("/var/lib/rudra/psd/token", "/run/rudra/psd.sock", "/etc/rudra/keys"):
        assert f"{path} False" in said and f"{path} True" not in said
    assert "small" not in machine.say("rudra", "jobs", user="bob")
    assert said.count("the node's memory is shared") == 2
    machine("rudra", "rm", "--yes", "small", user="ann")
    until(lambda: not machine.say("sh", "-c", "ls /var/lib/rudra/*/jobs/*"), "the removal")


def test_the_journal_has_priorities_and_a_reload_is_in_it(machine: Machine) -> None:
    conf = machine.tree / "etc/rudra/conf.d/level.toml"
    try:
        conf.write_text('[log]\nlevel = "debug"\n')
        machine("systemctl", "reload", "rudra-psd")
        conf.write_text('[log]\nlevel = "loud"\n')
        machine("systemctl", "reload", "rudra-psd")
        said = machine("rudra", "reload", status=None)
        assert said.returncode == 2 and said.stderr.count("\n") == 1
    finally:
        conf.unlink()
    lines = [json.loads(line) for line in machine("journalctl", "-u", "rudra-psd", "-o", "json").stdout.splitlines()]
    found = {
        line["MESSAGE"]: line["PRIORITY"]
        for line in lines
        if "psd" in line.get("_EXE", "") or "psd" in line.get("_CMDLINE", "")
    }
    assert any('settings read again applied="log.level' in text and level == "6" for text, level in found.items())
    assert any("nothing changes" in text and level == "3" for text, level in found.items())
    assert machine.show("rudra-psd", "ActiveState") == "active"
    assert "1 host" in machine.show("rudra-psd", "StatusText")
    done = machine("rudra", "reload")
    assert "psd (PID" in done.stdout and "learnerd (PID" in done.stdout and "log.level" in done.stdout


def test_a_key_is_handed_over_and_its_absence_is_no_hindrance(machine: Machine) -> None:
    def environment() -> str:
        return machine.say("sh", "-c", f"tr '\\0' '\\n' </proc/{pid(machine, 'rudra-psd')}/environ")

    key, conf = machine.tree / "etc/rudra/keys/psd.key", machine.tree / "etc/rudra/conf.d/tcp.toml"
    handed = "/run/credentials/rudra-psd.service/psd.key"
    assert machine("cat", handed).stdout == "none"
    try:
        public = json.loads(machine("rudra", "keys", "new", "psd", "--system", "--json").stdout)["key"]
        conf.write_text('[psd]\nlisten = "tcp://127.0.0.1:0"\n')
        machine("systemctl", "restart", "rudra-psd")
        assert public in machine.say("rudra", "keys", "list")
        assert f"CREDENTIALS_DIRECTORY={os.path.dirname(handed)}" in environment()
        assert machine("cat", handed).stdout == key.read_text()
        machine("runuser", "-u", "rudra", "--", "cat", handed)
        machine("runuser", "-u", "rudra-job", "--", "cat", handed, status=1)
    finally:
        key.unlink(missing_ok=True)
        conf.unlink(missing_ok=True)
        machine("systemctl", "restart", "rudra-psd")


def test_a_psd_that_is_killed_is_started_again(machine: Machine) -> None:
    before = pid(machine, "rudra-psd")
    machine("kill", "-9", str(before))
    until(
        lambda: pid(machine, "rudra-psd") not in (0, before) and machine.show("rudra-psd", "ActiveState") == "active",
        "the restart",
    )
    until(lambda: " 4 " in machine.say("rudra", "hosts"), "the registration")


@pytest.mark.parametrize("unit", DAEMONS)
def test_a_loop_that_is_blocked_is_started_again(machine: Machine, unit: str) -> None:
    folder = machine.tree / f"run/systemd/system/{unit}.service.d"
    machine("mkdir", "-p", f"/run/systemd/system/{unit}.service.d")
    conf = f"/run/systemd/system/{unit}.service.d/quick.conf"
    del folder
    try:
        machine("sh", "-c", f"printf '[Service]\\nWatchdogSec=1\\nTimeoutAbortSec=1\\n' >{conf}")
        machine("systemctl", "daemon-reload")
        machine("systemctl", "restart", unit)
        until(lambda: " 4 " in machine.say("rudra", "hosts"), "the registration")
        before = pid(machine, unit)
        machine("kill", "-STOP", str(before))
        until(
            lambda: pid(machine, unit) not in (0, before) and machine.show(unit, "ActiveState") == "active",
            "the restart",
        )
        assert "Watchdog timeout" in machine.say("journalctl", "-u", unit, "-o", "cat")
        assert machine.show(unit, "NRestarts") == "1"
    finally:
        machine("rm", "-r", f"/run/systemd/system/{unit}.service.d")
        machine("systemctl", "daemon-reload")
        machine("systemctl", "restart", unit)


def test_a_wrong_setting_is_said_once_and_not_tried_again(machine: Machine) -> None:
    conf = machine.tree / "etc/rudra/conf.d/wrong.toml"
    try:
        conf.write_text('[log]\nlevel = "loud"\n')
        machine("systemctl", "restart", "rudra-psd", status=1)
        assert machine.show("rudra-psd", "ExecMainStatus") == "78"
        assert (machine.show("rudra-psd", "ActiveState"), machine.show("rudra-psd", "NRestarts")) == ("failed", "0")
        lines = machine.say("journalctl", "-u", "rudra-psd", "-o", "cat", "-p", "err").splitlines()
        said = [line for line in lines if line.startswith("psd: log.level cannot be")]
        assert said and len(set(said)) == 1 and "Fix: " in said[0]
    finally:
        conf.unlink()


def updates(machine: Machine, name: str) -> int:
    found = machine("rudra", "status", name, "--json", user="ann", status=None)
    return int(json.loads(found.stdout)["updates"]) if found.returncode == 0 else 0


def test_a_stop_leaves_nothing_and_the_job_goes_on_at_the_next_start(machine: Machine) -> None:
    machine("rudra", "submit", job(machine, "long", 100_000, "ann"), user="ann")
    before = until(lambda: updates(machine, "long"), "the first updates")
    machine("systemctl", "stop", "rudra.target", *DAEMONS)
    assert of_rudra(machine) == ""
    assert machine.say("sh", "-c", "ls -d /run/rudra* /dev/shm/*rudra* /tmp/rudra* 2>/dev/null") == ""
    for unit in DAEMONS:
        assert (machine.show(unit, "ActiveState"), machine.show(unit, "Result")) == ("inactive", "success")
    machine("systemctl", "start", "rudra.target")
    resumed = until(lambda: updates(machine, "long"), "its progress")
    until(lambda: updates(machine, "long") > max(before, resumed), "that it goes on")
    until(lambda: "RUNNING" in machine.say("rudra", "status", "long", user="ann"), "that it runs")
    assert "100000" in machine("rudra", "show", "long", user="ann").stdout
    machine("rudra", "stop", "long", user="ann")


def test_a_cluster_of_ones_own_by_the_same_units(machine: Machine) -> None:
    uid = machine.say("id", "-u", "bob")
    machine("loginctl", "enable-linger", "bob")
    until(lambda: machine.show(f"user@{uid}.service", "ActiveState") == "active", "bob's systemd")
    own = f"XDG_RUNTIME_DIR=/run/user/{uid}"
    try:
        machine(
            own, "systemctl", "--user", "enable", "--now", "rudra.target", "rudra-psd", "rudra-learnerd", user="bob"
        )
        until(lambda: " 4 " in machine.say(own, "rudra", "hosts", user="bob"), "the registration")
        machine(own, "rudra", "submit", "--follow", job(machine, "own", 1, "bob"), user="bob")
        assert f"I am {uid} /home/bob bob" in machine(own, "rudra", "logs", "own", user="bob").stdout
        assert "own" not in machine.say("rudra", "jobs", user="ann")
        machine(
            own, "systemctl", "--user", "disable", "--now", "rudra.target", "rudra-psd", "rudra-learnerd", user="bob"
        )
        assert machine.say("pgrep", "-u", "bob", "-f", "psd|learnerd") == ""
    finally:
        machine("loginctl", "disable-linger", "bob")


def files(machine: Machine) -> set[str]:
    """Everything where an installation could leave something."""
    places = ("/etc", "/opt", "/srv/checkout", "/usr/local", "/var/lib/rudra", "/var/cache/rudra", "/run")
    told = machine.say(
        "find", *places, "-not", "-path", "/run/*/*", "-not", "-name", "*-", "-not", "-path", "*/__pycache__*"
    )
    return set(told.splitlines())


def test_an_uninstall_is_exact_and_edited_settings_survive(machine: Machine) -> None:
    settings = machine.tree / "etc/rudra/rudra.toml"
    shipped = machine.tree / "srv/checkout/etc/rudra/rudra.toml"
    original = shipped.read_text()
    install = CHECKOUT / "bin/rudra-install"
    try:
        settings.write_text(original.replace("slots = 0", "slots = 4"))
        shipped.write_text(original + "# of a later version\n")
        assert "rudra.toml was edited and is kept" in machine(install, timeout=240).stdout
        assert "slots = 4" in settings.read_text() and "later version" in Path(f"{settings}.new").read_text()
        before = files(machine)
        assert "rm -f /usr/local/bin/rudra" in machine(install, "--uninstall", "--dry-run").stdout
        assert files(machine) == before
        machine(install, "--uninstall")
        left = [path for path in files(machine) if "rudra" in path]
        assert "/etc/rudra/rudra.toml" in left and "/var/lib/rudra/psd/registry.sqlite" in left
        assert not [
            p for p in left if not p.startswith(("/etc/rudra", "/var/lib/rudra", "/var/cache/rudra", "/srv"))
        ], left
        machine(install, "--uninstall", status=1)
        machine(install, "--uninstall", "--purge")
        assert not [path for path in files(machine) if "rudra" in path and not path.startswith("/srv")]
        assert not [path for path in files(machine) if path.startswith("/usr/local/lib/systemd")]
        assert machine.say("getent", "passwd", *USERS) == "" and machine.say("getent", "group", *USERS) == ""
        assert of_rudra(machine) == ""
    finally:
        shipped.write_text(original)
        machine(install, timeout=240)
        machine("usermod", "-aG", "rudra", "ann")
