"""``rudra up`` and ``down``: a cluster of one's own on this machine, without systemd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from rudra_zmq import paths
from rudra_zmq.cli import reloads
from rudra_zmq.cli.base import Cli, command, json_option
from rudra_zmq.cli.cluster import without_words
from rudra_zmq.cli.output import emit_json, note, say
from rudra_zmq.cli.places import Places
from rudra_zmq.config.load import paths_alone
from rudra_zmq.errors import AlreadyRunning, ConfigError, NotRunning, Rejected, RudraError, TimedOut, of_daemon
from rudra_zmq.net.addresses import is_daemon, is_here, parse

START_S = 20.0
STOP_S = 60.0


@command("up")
@json_option
@click.pass_obj
def up(cli: Cli, as_json: bool) -> None:
    """Start psd and learnerd in the background; a small supervisor restarts them if they die.

    \b
      rudra up && rudra submit --follow job.toml
    """
    state = paths.state_folder(cli.settings.paths.state)
    pid = _supervisor(state)
    if pid:
        raise AlreadyRunning(f"the cluster of {state} is already up as PID {pid}", fix="`rudra down` stops it")
    head = cli.settings.head.address
    if head and not is_here(parse(head)):
        fix = "start learnerd alone: `systemctl --user enable --now rudra-learnerd`, without systemd `learnerd`"
        what = "this host's head is elsewhere (head.address), and `rudra up` would start another"
        raise Rejected(what, where=head, fix=fix)
    log = state / "up.log"
    with open(log, "ab") as out:
        start = out.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "rudra_zmq.daemons.up", "--state", str(state), "--log", str(log)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd="/",
        )
    hosts = _await_hosts(cli, child, log, start)
    if as_json:
        emit_json({"pid": child.pid, "state": str(state), "hosts": hosts})
    else:
        say(f"psd and learnerd are up (PID {child.pid}, logs in {log}); `rudra down` stops them")


def _await_hosts(cli: Cli, child: subprocess.Popen[bytes], log: Path, start: int) -> list[str]:
    """The names of the hosts that have joined since ``child`` was started."""
    begun, end = time.time(), time.monotonic() + START_S
    while time.monotonic() < end:
        if why := _why(log, start, child.poll()):
            _give_up(child)
            status, text = why
            fix = "" if "Fix: " in text else f"see the logs in {log.parent}"
            raise of_daemon(status, f"it did not start: {text}", fix=fix)
        try:
            with Places(cli.settings) as places:
                found = places.head().hosts()
            if joined := [h.name for h in found if h.last_seen >= begun - 1.0]:
                return joined
        except RudraError:
            pass  # not there yet: the deadline is ours
        time.sleep(0.05)
    _give_up(child)
    raise TimedOut(f"no host has joined within {START_S:g} s", where=str(log.parent), fix="see the logs there")


_DAEMON_ENDED = re.compile(r"(?:ended, is|a setting is wrong, not) started again daemon=(\w+) status=(-?\d+)")


def _why(log: Path, start: int, ended: int | None) -> tuple[int, str] | None:
    """Status and last words of a daemon that has ended, or of the supervisor if it has; None while all is well."""
    with open(log, errors="replace") as file:
        file.seek(start)
        text = file.read()
    status = ended or 0
    if match := _DAEMON_ENDED.search(text):
        text, status = (log.parent / f"{match[1]}.log").read_text(errors="replace"), int(match[2])
    elif ended is None:
        return None
    return status, (text.strip().splitlines() or [without_words(log.parent, status)])[-1]


def _give_up(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _supervisor(state: Path) -> int:
    """The pid of the supervisor that lives, else 0."""
    try:
        value = json.loads((state / "up.json").read_text())
        pid = int(value["pid"])
    except (OSError, ValueError, KeyError):
        return 0
    return pid if is_daemon(pid, "up") else 0


@command("down")
@json_option
@click.pass_obj
def down(cli: Cli, as_json: bool) -> None:
    """Stop what `rudra up` started; running jobs are drained, and go on at the next `up`.

    \b
      rudra down
    """
    try:
        folder = cli.settings.paths.state
    except ConfigError as error:  # what runs must be stopped all the same
        note(f"rudra: {error}")
        folder = paths_alone().state
    state = paths.state_folder(folder)
    pid = _supervisor(state)
    if not pid:
        raise NotRunning("nothing is up", where=str(state), fix="`rudra up` starts a cluster")
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + STOP_S
    while time.monotonic() < end:
        if not is_daemon(pid, "up"):  # its file goes before its lock does
            emit_json({"pid": pid, "state": str(state)}) if as_json else say("down")
            return
        time.sleep(0.05)
    raise TimedOut(f"PID {pid} has not ended within {STOP_S:g} s", fix=f"kill -9 {pid}")


@command("reload")
@json_option
@click.pass_obj
def reload(cli: Cli, as_json: bool) -> None:
    """Have your psd and learnerd on this machine (root: the system's too) read rudra.toml again, and open their logs
    anew (SIGHUP).

    \b
      rudra reload

    Says what holds from now on, and which changed keys need a restart. A file that is wrong changes nothing.
    """
    asked = [reloads.ask(name, folder) for name, folder in reloads.places(cli.settings)]
    answers = [reloads.answer(one) for one in asked if one is not None]
    if not answers:
        fix = "`rudra up` starts a cluster, `systemctl start rudra.target` the system's"
        raise NotRunning("no daemon of yours runs here", where=str(reloads.places(cli.settings)[0][1]), fix=fix)
    if as_json:
        emit_json({"daemons": [answer.row for answer in answers]})
    else:
        for one in answers:
            say(one.line)
    for one in answers:
        if one.error is not None:
            raise one.error
