"""psd with a key on loopback: learnerd and the command line come in with theirs, and nobody else does."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rudra_zmq.net import keys as files
from rudra_zmq.net.auth import KeyPair, to_hex
from rudra_zmq.wire.messages import control as c
from tests.net.daemons.conftest import Place, until

PORT = re.compile(r"tcp://127\.0\.0\.1:\d+")


class Person:
    """Somebody with a configuration of their own, on the command line."""

    def __init__(self, place: Place, name: str) -> None:
        self.folder = place.home / name
        self.folder.mkdir()
        self.env = place.env | {
            "XDG_CONFIG_HOME": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "s"),
            "XDG_RUNTIME_DIR": str(place.runtime),
        }

    def make(self, owner: str = "user") -> str:
        """The public key of a new one."""
        return str(json.loads(self("keys", "new", owner, "--json")[1])["key"])

    def set(self, **values: str) -> None:
        """[head] of their rudra.toml."""
        lines = "".join(f'{key} = "{value}"\n' for key, value in values.items())
        (self.folder / "rudra").mkdir(exist_ok=True)
        (self.folder / "rudra" / "rudra.toml").write_text(f"[head]\n{lines}")

    def __call__(self, *args: str, status: int = 0) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from rudra_zmq.cli.main import main; sys.exit(main())", *args],
            env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == status, (args, done.returncode, done.stdout, done.stderr)
        if status:
            assert done.stderr.count("\n") == 1 and "Fix: " in done.stderr and "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr


class Keyed:
    """A psd with a key, and whoever runs it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.boss = Person(place, "boss")
        self.boss.env |= {"RUDRA_PATHS_STATE": str(place.state), "RUDRA_PATHS_RUNTIME": str(place.runtime)}
        self.key = self.boss.make("psd")
        self.psd = place.psd("--listen", "tcp://127.0.0.1:0", env={"XDG_CONFIG_HOME": self.boss.env["XDG_CONFIG_HOME"]})
        listed: dict[str, Any] = json.loads(self.boss("keys", "list", "--json")[1])
        (self.address,) = listed["addresses"]
        assert listed["head"] == self.key and PORT.fullmatch(self.address)
        assert place.endpoint()["address"].startswith("ipc:")  # what this machine's own dial

    def refused(self) -> dict[str, int]:
        return dict(json.loads(self.boss("keys", "list", "--json")[1])["refused"])


@pytest.fixture
def keyed(place: Place) -> Keyed:
    return Keyed(place)


def test_the_way_of_a_key(keyed: Keyed) -> None:
    """Refused in four ways, each with its line and its count; authorised; kept to its role; revoked."""
    alice = Person(keyed.place, "alice")
    alice.set(address=keyed.address)
    assert "head.key is not set" in alice("hosts", status=5)[2]
    alice.set(address=keyed.address, key=keyed.key)
    assert "there is no key of user here" in alice("hosts", status=5)[2]
    public = alice.make()
    assert f"rudra keys authorize {public}" in alice("hosts", status=5)[2]
    keyed.boss("keys", "authorize", public, "alice", "--role", "read")
    alice("hosts")
    assert "role read may not" in alice("keys", "revoke", "alice", status=5)[2]
    alice.set(address=keyed.address, key=to_hex(KeyPair.new().public))
    assert "does not have the key" in alice("hosts", status=5)[2]
    alice.set(address=keyed.address, key=keyed.key)
    keyed.boss("keys", "revoke", "alice")
    assert "was revoked" in alice("hosts", status=5)[2]
    alice.set(address="tcp://127.0.0.1:1", key=keyed.key)
    assert "refused: nobody listens" in alice("hosts", status=4)[2]
    assert set(keyed.refused()) == {"no-key", "unknown-key", "wrong-server-key", "revoked-key", "role"}
    assert "revoked" in keyed.boss("keys", "list")[1]


def test_a_host_comes_in_by_its_key_and_is_revoked(keyed: Keyed) -> None:
    place, host = keyed.place, Person(keyed.place, "host")
    public = host.make("learnerd")
    env = {"XDG_CONFIG_HOME": host.env["XDG_CONFIG_HOME"], "RUDRA_HEAD_KEY": keyed.key}
    args = ("--head", keyed.address, "--name", "calls-itself-this", "--state", str(place.home / "s2"))
    (place.home / "r2").mkdir(mode=0o700)
    learnerd = place.spawn("learnerd", *args, "--runtime", str(place.home / "r2"), env=env)
    until(lambda: f"rudra keys authorize {public}" in place.log("learnerd"), "its line")
    keyed.boss("keys", "authorize", public, "h1", "--role", "host")
    until(lambda: [row.name for row in place.hosts()] == ["h1"], "registration")
    keyed.boss("keys", "revoke", "h1")
    until(lambda: "was revoked" in place.log("learnerd"), "its line", 10)
    assert place.hosts()[0].silent and learnerd.poll() is None
    keyed.boss("keys", "authorize", public, "h1", "--role", "host")
    until(lambda: not place.hosts()[0].silent, "its return")
    learnerd.send_signal(signal.SIGTERM)
    learnerd.wait(10)


PROGRAM = """#!{python}
import ctypes, json, os, signal, sys, time
ctypes.CDLL(None).prctl(1, 9)
spec = json.load(open(os.environ["RUDRA_LEARNER"]))
signal.signal(15, signal.SIG_IGN)
open({starts!r}, "a").write("%d %d\\n" % (spec["incarnation"], os.getpid()))
time.sleep(120)
"""


def test_learners_of_a_revoked_host_end_and_start_with_it_again(keyed: Keyed) -> None:
    place, host = keyed.place, Person(keyed.place, "host")
    public = host.make("learnerd")
    keyed.boss("keys", "authorize", public, "h1", "--role", "host")
    env = {"XDG_CONFIG_HOME": host.env["XDG_CONFIG_HOME"], "RUDRA_HEAD_KEY": keyed.key}
    (place.home / "r2").mkdir(mode=0o700)
    args = ("--head", keyed.address, "--state", str(place.home / "s2"), "--runtime", str(place.home / "r2"))
    place.spawn("learnerd", *args, env=env)
    until(lambda: [row.name for row in place.hosts()] == ["h1"], "registration")
    program, starts = place.home / "learner", place.home / "starts"
    program.write_text(PROGRAM.format(python=sys.executable, starts=str(starts)))
    program.chmod(0o700)
    (place.home / "x.py").touch()
    toml = f'[run]\nscript = "{place.home}/x.py"\npython = "{program}"\n[learners]\ncount = 1\nhosts = ["h1"]\n'
    client = place.client()
    job = client.call(c.Submit(request="r1", name="demo", toml=toml, cwd="/"), expect=c.Submitted).job

    def started() -> list[list[int]]:
        return [[int(word) for word in line.split()] for line in starts.read_text().splitlines()]

    until(starts.exists, "the learner")
    until(started, "the learner")
    keyed.boss("keys", "revoke", "h1")
    until(lambda: "this host may not run them" in place.log("learnerd"), "its line", 10)
    until(lambda: not list((place.home / "r2").glob("n-*")), "the end of its learner", 10)
    ((first, pid),) = started()
    assert not Path(f"/proc/{pid}").exists()
    keyed.boss("keys", "authorize", public, "h1", "--role", "host")
    until(lambda: len(started()) == 2, "its return", 20)
    assert started()[1][0] > first + 3
    client.call(c.StopJob(job=job))
    until(lambda: client.call(c.GetJob(job=job), expect=c.JobReply).row.state == "STOPPED", "the end", 20)


def test_an_invitation_makes_a_host_once(keyed: Keyed) -> None:
    place, host, thief = keyed.place, Person(keyed.place, "host"), Person(keyed.place, "thief")
    host.set(address="tcp://elsewhere:1")
    line = keyed.boss("invite", "h1")[1].strip()
    assert re.fullmatch(r"rudra host-join '[^' ]+'", line)
    invitation = line.split("'")[1]
    wrong = invitation.replace(keyed.key, to_hex(KeyPair.new().public))
    assert "does not have the key" in host("host-join", wrong, status=5)[2]
    assert "rudra-learnerd" in host("host-join", invitation)[1]
    secret = files.person_folder(host.env) / "learnerd.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    settings = (host.folder / "rudra" / "rudra.toml").read_text()
    assert f'address = "{keyed.address}"' in settings and keyed.key in settings and "elsewhere" not in settings
    assert "was used, or its time is over" in thief("host-join", invitation, status=5)[2]
    assert not (files.person_folder(thief.env) / "learnerd.key").exists()
    (place.home / "r2").mkdir(mode=0o700)
    args = ("--state", str(place.home / "s2"), "--runtime", str(place.home / "r2"))
    learnerd = place.spawn("learnerd", *args, env={"XDG_CONFIG_HOME": host.env["XDG_CONFIG_HOME"]})
    until(lambda: [row.name for row in place.hosts()] == ["h1"], "registration")
    keyed.boss("host", "forget", "h1")
    until(lambda: "was revoked" in place.log("learnerd"), "its line", 10)
    assert place.hosts() == []
    learnerd.send_signal(signal.SIGTERM)
    learnerd.wait(10)


def test_this_machines_own_need_no_keys(keyed: Keyed) -> None:
    keyed.place.learnerd()
    assert len(keyed.place.hosts()) == 1 and keyed.refused() == {}


def test_without_a_key_only_loopback_is_bound(place: Place) -> None:
    place.psd("--listen", "tcp://0.0.0.0:0")
    assert place.endpoint()["address"].startswith("tcp://127.0.0.1:")
    (line,) = [line for line in place.log("psd").splitlines() if "only loopback is bound" in line]
    assert "rudra keys new psd" in line


def test_a_secret_that_others_may_read_is_not_used(place: Place) -> None:
    boss = Person(place, "boss")
    boss.make("psd")
    secret = files.person_folder(boss.env) / "psd.key"
    secret.chmod(0o644)
    status, text = place.run(
        "psd", "--state", str(place.state), "--runtime", str(place.runtime), "--listen", "tcp://127.0.0.1:0",
        env={"XDG_CONFIG_HOME": boss.env["XDG_CONFIG_HOME"]},
    )  # fmt: skip
    assert status == 5 and text.count("\n") == 1 and f"chmod 600 {secret}" in text
    assert not Path(place.state / "endpoint.json").exists()


@pytest.mark.parametrize("fault", ["others may read it", "it is none"])
def test_learnerd_does_not_start_with_a_key_that_is_not_to_be_trusted(place: Place, fault: str) -> None:
    host = Person(place, "host")
    host.make("learnerd")
    key = host.folder / "rudra/keys/learnerd.key"
    if fault == "it is none":
        key.write_text("rubbish")
    else:
        key.chmod(0o644)
    env = {"XDG_CONFIG_HOME": str(host.folder), "RUDRA_HEAD_KEY": to_hex(KeyPair.new().public)}
    folders = ("--state", str(place.state), "--runtime", str(place.runtime))
    status, said = place.run("learnerd", "--head", "tcp://127.0.0.1:1", *folders, env=env)
    words = "this is no secret key" if fault == "it is none" else "others can read the secret key (mode 0644)"
    assert status == 5 and words in said and "Fix: " in said  # as psd's


def test_an_invitation_to_where_nobody_listens(place: Place) -> None:
    host = Person(place, "host")
    head, secret = (to_hex(KeyPair.new().public) for _ in range(2))
    said = host("host-join", f"tcp://127.0.0.1:1/{head}/{secret}", status=4)[2]
    assert "refused: nobody listens" in said and "Fix: on the head: start psd" in said and "rudra up" not in said


def test_up_where_the_head_is_another_machine(place: Place) -> None:
    host = Person(place, "host")
    host.env["RUDRA_PATHS_STATE"] = str(place.state)
    host.set(address="tcp://192.0.2.1:7733", key=to_hex(KeyPair.new().public))
    said = host("up", status=2)[2]
    assert "head is elsewhere" in said and "tcp://192.0.2.1:7733" in said and "start learnerd alone" in said
    assert not (place.state / "up.log").exists()
