"""psd and learnerd as processes: start, addresses, tokens, ends, and what happens while the other one is away."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from rudra_zmq.errors import RefusedBySecurity, RudraError, Unreachable
from rudra_zmq.wire.messages import control as c
from tests.net.daemons.conftest import ROOT, Place, cpu, free_port, memory, until

FORBIDDEN = ("torch", "numpy", "cupy", "rudra_zmq.node", "rudra_zmq.update", "rudra_zmq.learner", "rudra_zmq.tasks")


def test_daemons_are_light(place: Place) -> None:
    psd, learnerd = place.psd(), place.learnerd()
    for child in (psd, learnerd):
        assert memory(child.pid) < 60, child.args
    before = [cpu(psd.pid), cpu(learnerd.pid)]
    began = time.monotonic()
    time.sleep(3.0)  # what an idle daemon costs shows only in time
    spent = time.monotonic() - began
    for child, was in zip((psd, learnerd), before, strict=True):
        assert (cpu(child.pid) - was) / spent < 0.01 + 0.011, child.args  # and one tick of the kernel's clock


@pytest.mark.parametrize("daemon", ["psd", "learnerd"])
def test_nothing_heavy_is_imported(daemon: str) -> None:
    code = f"import sys, rudra_zmq.daemons.{daemon}; print([m for m in {FORBIDDEN!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("daemon", ["psd", "learnerd"])
def test_help_is_quick_and_begins_with_an_example(place: Place, daemon: str) -> None:
    times = []
    for _ in range(3):
        began = sum(os.times()[2:4])  # of a core, not of the clock: other tests may want it too
        done = subprocess.run(
            [sys.executable, "-m", f"rudra_zmq.daemons.{daemon}", "--help"],
            env=place.env,
            capture_output=True,
            text=True,
        )
        times.append(sum(os.times()[2:4]) - began)
        assert done.returncode == 0 and f"example: {daemon}" in done.stdout
    assert min(times) < 0.4


def test_what_psd_writes_about_itself(place: Place) -> None:
    psd = place.psd()
    endpoint = place.endpoint()
    assert endpoint["address"] == f"ipc://{place.runtime}/psd.sock" and endpoint["pid"] == psd.pid
    assert endpoint["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for path in (place.state / "token", place.state / "endpoint.json", place.runtime / "psd.sock"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    token = (place.state / "token").read_text()
    psd.send_signal(signal.SIGTERM)
    assert psd.wait(5) == 0
    assert not (place.state / "endpoint.json").exists()
    place.psd()
    assert (place.state / "token").read_text() == token


def test_tcp_on_loopback_and_a_port_that_is_taken(place: Place) -> None:
    port = free_port()
    first = place.psd("--listen", f"tcp://127.0.0.1:{port}")
    assert place.endpoint()["address"] == f"tcp://127.0.0.1:{port}"
    assert place.client().call(c.ListJobs(), expect=c.Jobs).rows == []
    other = place.state / "other"
    status, text = place.run(
        "psd", "--state", str(other), "--runtime", str(place.home / "r2"), "--listen", f"tcp://127.0.0.1:{port}"
    )
    assert status == 1 and f"psd: psd is already running as PID {first.pid}" in text and text.count("\n") == 1
    first.send_signal(signal.SIGTERM)
    first.wait(5)
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        foreign.bind(("127.0.0.1", port))
        foreign.listen()
        status, text = place.run(
            "psd", "--state", str(other), "--runtime", str(place.home / "r2"), "--listen", f"tcp://127.0.0.1:{port}"
        )
    assert status == 1 and f"the port is held by PID {os.getpid()}" in text


@pytest.mark.parametrize(
    "listen",
    [
        "tcp://*:7733",
        "tcp://127.0.0.1",
        "http://x",
        "tcp://127.0.0.1:99999",
    ],
)
def test_an_address_that_is_none(place: Place, listen: str) -> None:
    for how in (["--listen", listen], []):
        env = {} if how else {"RUDRA_PSD_LISTEN": listen}
        status, text = place.run("psd", "--state", str(place.state), "--runtime", str(place.runtime), *how, env=env)
        assert status == 78 and "Fix: " in text and text.count("\n") == 1 and "Traceback" not in text


@pytest.mark.parametrize("args", [["--nonsense"], ["--private", "x"], ["--listen"]])
def test_a_wrong_command_line_is_78(place: Place, args: list[str]) -> None:
    status, text = place.run("psd", *args)
    assert status == 78 and text.count("\n") == 1


def test_a_runtime_folder_with_too_long_a_path(place: Place) -> None:
    long = place.home / ("x" * 90)
    status, text = place.run("psd", "--state", str(place.state), "--runtime", str(long))
    assert status == 78 and "shorter folder" in text


def test_a_second_daemon_names_the_first(place: Place) -> None:
    psd, learnerd = place.psd(), place.learnerd()
    for args in (["--state", str(place.state)], ["--state", str(place.home / "s2")]):
        status, text = place.run("psd", *args, "--runtime", str(place.runtime))
        assert status == 1 and f"psd: psd is already running as PID {psd.pid}" in text
        assert text.count("\n") == 1
    status, text = place.run("learnerd", "--state", str(place.state), "--runtime", str(place.runtime))
    assert status == 1 and f"learnerd: learnerd is already running as PID {learnerd.pid}" in text
    assert place.client().call(c.ListJobs(), expect=c.Jobs).rows == []  # the first was not hurt


def test_what_a_killed_daemon_leaves_is_no_hindrance(place: Place) -> None:
    psd = place.psd()
    psd.kill()
    psd.wait()
    assert (place.runtime / "psd.sock").exists()
    place.psd()
    assert place.client().call(c.ListJobs(), expect=c.Jobs).rows == []


# ------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("daemon", ["psd", "learnerd"])
def test_term_in_any_phase(place: Place, daemon: str, delay: float) -> None:
    child = place.spawn(daemon)
    time.sleep(delay)
    child.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert child.wait(5) in (0, -signal.SIGTERM)
    assert time.monotonic() - began < 5
    # Before its handlers are there TERM is the kernel's to obey: then nothing was begun either.
    if child.returncode == 0:
        assert not list(place.runtime.glob("*.sock"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_both_end_well_together(place: Place, number: signal.Signals) -> None:
    children = [place.psd(), place.learnerd()]
    for child in children:
        child.send_signal(number)
    assert [child.wait(5) for child in children] == [0, 0]
    assert list(place.runtime.iterdir()) == []


def test_a_private_daemon_goes_with_its_parent(place: Place) -> None:
    code = (
        "import os, subprocess, sys, threading, time\n"
        "for _ in range(4):\n"  # each may be the daemons' parent for a moment while the process dies
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "def daemon(name, *args):\n"
        "    a = [sys.executable, '-m', 'rudra_zmq.daemons.' + name, '--state', sys.argv[1], '--runtime', sys.argv[2]]\n"
        "    return subprocess.Popen([*a, '--private', str(os.getpid()), *args]).pid\n"
        "print(daemon('psd'), daemon('learnerd'), flush=True)\n"
        "time.sleep(60)\n"
    )
    with open(place.home / "said", "w") as said:
        parent = subprocess.Popen(
            [sys.executable, "-c", code, str(place.state), str(place.runtime)],
            env=place.env, stdout=subprocess.PIPE, stderr=said, text=True,
        )  # fmt: skip
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    until(lambda: (place.state / "endpoint.json").exists() and place.hosts(), "the cluster")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(_alive(pid) for pid in pids), "the end of both", 5.0)
    until(lambda: not place.runtime.exists(), "a clean folder")
    place.runtime.mkdir(mode=0o700)
    text = (place.home / "said").read_text()
    assert text.count("stopped status=0") == 2 and "forced" not in text, text


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_hears_of_it(place: Place, abstract: bool) -> None:
    path = str(place.home / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + path if abstract else path)
        sock.settimeout(10)
        psd = place.psd(env={"NOTIFY_SOCKET": "@" + path if abstract else path, "WATCHDOG_USEC": "300000"})
        heard: list[str] = []

        def hear(word: str) -> None:
            while word not in heard:
                heard.extend(sock.recv(4096).decode().splitlines())

        hear("READY=1")
        assert place.client().call(c.ListJobs(), expect=c.Jobs).rows == []  # ready is ready
        assert heard == ["READY=1", f"MAINPID={psd.pid}"]
        hear("STATUS=no jobs; 0 hosts")
        hear("WATCHDOG=1")
        place.learnerd()
        hear("STATUS=no jobs; 1 host")
        heard.clear()
        psd.send_signal(signal.SIGHUP)
        hear("RELOADING=1")
        assert any(line.startswith("MONOTONIC_USEC=") for line in heard)
        hear("READY=1")
        psd.send_signal(signal.SIGTERM)
        hear("STOPPING=1")
        assert psd.wait(5) == 0


def test_the_watchdogs_signal_says_where_the_loop_is(place: Place) -> None:
    psd = place.psd()
    psd.send_signal(signal.SIGABRT)
    assert psd.wait(5) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in place.log("psd") and "loop.py" in place.log("psd")
    place.psd()  # which takes what is left away


# ------------------------------------------------------------------------------------------ settings read again


def rudra(place: Place, *args: str) -> subprocess.CompletedProcess[str]:
    env = place.env | {"RUDRA_PATHS_STATE": str(place.state), "RUDRA_PATHS_RUNTIME": str(place.runtime)}
    command = [str(Path(sys.executable).parent / "rudra"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)


def settings(place: Place, text: str) -> None:
    path = place.home / "c" / "rudra" / "rudra.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_reload_takes_what_can_be_taken_and_names_the_rest(place: Place) -> None:
    psd = place.psd()
    settings(
        place,
        '[log]\nlevel = "debug"\n[psd]\nports = "7800-7801"\nlisten = "tcp://127.0.0.1:0"\n[host]\nslots = 2\n',
    )
    done = rudra(place, "reload")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f'psd (PID {psd.pid}): psd.ports = "7800-7801" holds from now on; log.level = "debug" holds from now on; '
        "psd.listen needs a restart"
    ]
    line = next(line for line in place.log("psd").splitlines() if "settings read again" in line)
    assert "needs_restart=psd.listen" in line
    done = rudra(place, "reload", "--json")
    assert json.loads(done.stdout)["daemons"] == [
        {"daemon": "psd", "pid": psd.pid, "applied": [], "needs_restart": ["psd.listen"], "error": ""}
    ]
    settings(place, '[log]\nlevel = "loud"\n')
    done = rudra(place, "reload")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Fix: " in done.stderr
    psd.send_signal(signal.SIGHUP)
    line = until(lambda: [line for line in place.log("psd").splitlines() if "nothing changes" in line], "a line")
    assert len(line) == 1 and " E psd settings not taken, nothing changes" in line[0] and "Fix: " in line[0]
    settings(place, '[log]\nlevel = "debug"\nformat = "json"\n')
    done = rudra(place, "reload")
    said = 'psd.ports = "7740-7799" holds from now on; log.format = "json" holds from now on'
    assert done.stdout.splitlines() == [f"psd (PID {psd.pid}): {said}"]
    assert json.loads(place.log("psd").splitlines()[-1])["sentence"] == "settings read again"
    psd.send_signal(signal.SIGTERM)
    psd.wait(5)
    assert rudra(place, "reload").returncode == 3
    assert not list(place.state.glob("*.reload.json"))


def test_logs_are_opened_again(place: Place) -> None:
    file = place.home / "learnerd.log"
    learnerd = place.spawn("learnerd", "--log", str(file))
    until(lambda: file.exists() and "psd cannot be reached" in file.read_text(), "a line")
    file.rename(place.home / "learnerd.log.1")
    learnerd.send_signal(signal.SIGHUP)
    until(lambda: file.exists() and "settings read again" in file.read_text(), "a new file")
    assert "settings read again" not in (place.home / "learnerd.log.1").read_text()


# ------------------------------------------------------------------------------------------ the other one is away


def test_learnerd_waits_for_a_psd_that_comes_later(place: Place) -> None:
    learnerd = place.spawn("learnerd", "--slots", "3", "--name", "box")
    until(lambda: "psd cannot be reached" in place.log("learnerd"), "a line")
    line = next(line for line in place.log("learnerd").splitlines() if "cannot be reached" in line)
    assert f"ipc://{place.runtime}/psd.sock" in line and "no such socket" in line and "Fix: start it" in line
    place.psd()
    (host,) = until(place.hosts, "the registration")
    assert (host.name, host.slots, host.free, host.pid) == ("box", 3, 3, learnerd.pid)
    assert place.log("learnerd").count("cannot be reached") == 1


def test_learnerd_registers_again_with_a_new_psd(place: Place) -> None:
    psd = place.psd()
    learnerd = place.learnerd()
    for _ in range(2):
        psd.kill()
        psd.wait()
        psd = place.psd()
        until(lambda: [h for h in place.hosts() if h.pid == learnerd.pid and h.free], "the registration")
    assert learnerd.poll() is None


def test_learnerd_finds_a_psd_that_moved(place: Place) -> None:
    psd = place.psd("--listen", "tcp://127.0.0.1:0")
    learnerd = place.learnerd()
    old = place.endpoint()["address"]
    psd.kill()
    psd.wait()
    with socket.socket() as taken:  # so that the kernel gives another port
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(old.rpartition(":")[2])))
        place.psd("--listen", "tcp://127.0.0.1:0")
        assert place.endpoint()["address"] != old
        until(lambda: [h for h in place.hosts() if h.pid == learnerd.pid and h.free], "the registration")


def test_a_stopped_learnerd_is_admitted_again(place: Place) -> None:
    place.psd()
    learnerd = place.learnerd()
    learnerd.send_signal(signal.SIGSTOP)
    until(lambda: place.hosts()[0].free == 0, "the silence")
    learnerd.send_signal(signal.SIGCONT)
    until(lambda: place.hosts()[0].free > 0, "the registration")


def test_a_wrong_token_is_said_and_survived(place: Place) -> None:
    place.psd()
    wrong = place.home / "token"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    place.spawn("learnerd", "--token-file", str(wrong))
    until(lambda: "the token is not this psd's" in place.log("learnerd"), "a line")
    assert place.hosts() == []
    wrong.write_text((place.state / "token").read_text())
    until(place.hosts, "the registration", 15.0)


# ------------------------------------------------------------------------------------------ strangers


def test_without_the_token_nothing_is_answered(place: Place) -> None:
    place.psd()
    with pytest.raises(RefusedBySecurity):
        place.client(token="f" * 64).call(c.ListJobs())


def test_garbage_costs_nothing(place: Place) -> None:
    psd = place.psd("--listen", "tcp://127.0.0.1:0")
    learnerd = place.learnerd()
    host, port = place.endpoint()["address"].removeprefix("tcp://").split(":")
    context = zmq.Context()
    before = memory(psd.pid)
    for size in (0, 1, 7, 1000, 70_000):
        with socket.create_connection((host, int(port)), 5) as raw:
            raw.sendall(os.urandom(size))
    for frames in (
        [b""], [b"", b""], [b"RZ"], [b"RZ\x01"], [b"RZ\x01" + os.urandom(40)], [os.urandom(5000)] * 3, [b"x"] * 50,
        [b"RZ\x02\x92\xa0\xc2", b"\x81\xa1m\xa9list_jobs"], [b"\x80\x04cos\nsystem\n(S'true'\ntR."],
        [b"R" * (1 << 20)],
    ):  # fmt: skip
        for _ in range(20):
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 200
            dealer.connect(f"tcp://{host}:{port}")
            dealer.send_multipart(frames)
            dealer.close()
    context.term()
    assert place.client().call(c.ListJobs(), expect=c.Jobs).rows == []
    assert psd.poll() is None and learnerd.poll() is None
    assert memory(psd.pid) < before + 12
    assert "message dropped" in place.log("psd") and "Traceback" not in place.log("psd")


def test_a_thousand_connections_leave_memory_flat(place: Place) -> None:
    psd = place.psd()
    token = (place.state / "token").read_text().strip()

    def greet(count: int) -> None:
        from rudra_zmq.net.rpc import RpcClient
        from rudra_zmq.net.sockets import make_context

        context = make_context("control")
        for _ in range(count):
            with RpcClient(place.endpoint()["address"], whoami=c.Whoami(token=token), context=context) as client:
                client.call(c.ListJobs(), expect=c.Jobs)
        context.close(5.0)

    greet(100)
    before = memory(psd.pid)
    greet(1000)
    assert memory(psd.pid) < before + 5


# ------------------------------------------------------------------------------------------ jobs without a node


def test_submits_wait_are_listed_and_survive(place: Place) -> None:
    psd = place.psd()
    toml = '[job]\ntask = "rudra_zmq.tasks.fashion_mnist:cnn"\n'
    client = place.client()
    reply = client.call(c.Submit(request="r1", name="demo", toml=toml, cwd="/tmp"), expect=c.Submitted)
    assert json.loads(json.dumps(reply.job)) == reply.job
    events = client.call(c.GetEvents(job=reply.job, after=0, wait=5.0), expect=c.Events)
    assert events.rows[0].text == "submitted as demo"
    until(lambda: client.call(c.GetJob(job="demo"), expect=c.JobReply).row.reason != "", "a reason")
    row = client.call(c.GetJob(job="demo"), expect=c.JobReply).row
    assert (row.state, row.reason) == ("PENDING", "needs 4 slots, no learnerd is registered")
    psd.kill()
    psd.wait()
    place.psd()
    again = client.call(c.GetJob(job="demo"), 20.0, expect=c.JobReply).row
    assert (again.job, again.state) == (reply.job, "PENDING")
    with pytest.raises(RudraError, match="did you mean"):
        client.call(c.Submit(request="r2", name="x", toml="[job]\nepoch = 3\n", cwd="/tmp"))
    client.call(c.StopJob(job=reply.job), expect=c.Ok)
    assert client.call(c.GetJob(job=""), expect=c.JobReply).row.state == "STOPPED"
    client.call(c.RemoveJob(job=reply.job), expect=c.Ok)
    assert not (place.state / "jobs" / reply.job).exists()


def test_no_psd_is_said_with_a_fix(place: Place) -> None:
    psd = place.psd()
    client = place.client()
    psd.send_signal(signal.SIGTERM)
    psd.wait(5)
    with pytest.raises(Unreachable) as caught:
        client.call(c.ListJobs(), 3.0)
    assert caught.value.fix
