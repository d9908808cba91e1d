"""``rudra hosts`` and ``rudra host ...``: what the hosts of the cluster have, and whether they take learners."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import click

from rudra_zmq.cli.base import COMMANDS, Cli, json_option
from rudra_zmq.cli.base import command as listed
from rudra_zmq.cli.output import ago, emit_json, note, say, screen, table, utc
from rudra_zmq.commands import Group
from rudra_zmq.errors import RudraError, TimedOut, Unreachable
from rudra_zmq.wire.messages.control import ForgetHost, HostRow, Standing

BEAT_S = 2.0
VERSIONS = ("rudra", "python", "torch", "cuda", "driver")


@listed("hosts")
@click.option("-w", "--watch", "beat", is_flag=True, help="Draw it anew every two seconds until Ctrl-C.")
@json_option
@click.pass_obj
def hosts(cli: Cli, beat: bool, as_json: bool) -> None:
    """Show the hosts that offer learners: slots and devices (free of all), versions, address, when each was heard.

    \b
      rudra hosts
      rudra hosts -w

    A host that was not heard for seven days is no longer listed, unless it is drained or banned.
    """
    with cli.places() as places:
        head = places.head()
        while True:
            try:
                rows = head.hosts()
                with screen() if beat and sys.stdout.isatty() else contextlib.nullcontext():
                    _show(rows, as_json)
            except (Unreachable, TimedOut) as error:
                if not beat:
                    raise
                note(f"waiting for psd: {error.message}")
            if not beat:
                return
            time.sleep(BEAT_S)


def _show(rows: list[HostRow], as_json: bool) -> None:
    if as_json:
        emit_json({"hosts": [_object(row) for row in rows]})
        return
    table(
        ["host", "state", "labels", "slots", "devices", *VERSIONS, "address", "heard"],
        [
            [
                row.name,
                _state(row),
                ",".join(row.labels) or "-",
                f"{row.free} of {row.slots}",
                _devices(row),
                *(row.versions.get(name, "-") for name in VERSIONS),
                row.address or "local",
                ago(row.last_seen),
            ]
            for row in rows
        ],
    )
    for row in rows:
        if row.absent:
            note(f"{row.name} waits for devices that are not there: {' '.join(row.absent)}")


def _state(row: HostRow) -> str:
    if row.state == "ready":
        return "silent" if row.silent else "ready"
    return f"{row.state}, silent" if row.silent else row.state


def _devices(row: HostRow) -> str:
    if not row.devices:
        return "cpu"
    return f"{row.free_devices} of {len(row.devices)}"


def _object(row: HostRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "state": row.state,
        "silent": row.silent,
        "labels": row.labels,
        "slots": row.slots,
        "free": row.free,
        "devices": row.devices,
        "absent": row.absent,
        "free_devices": row.free_devices,
        "versions": row.versions,
        "address": row.address,
        "pid": row.pid,
        "last_seen": utc(row.last_seen),
    }


@click.group("host", cls=Group, short_help=COMMANDS["host"][1])
def host() -> None:
    """Decide whether hosts take learners.

    \b
      rudra host drain a      it takes no new learners, those that run go on
      rudra host ban a        those leave as well, after their running step
      rudra host unban a      it takes learners again
    """


def _decision(name: str, state: Standing, short: str, text: str) -> click.Command:
    @host.command(name, short_help=short, help=text)
    @click.argument("names", nargs=-1, required=True, metavar="HOST...")
    @json_option
    @click.pass_obj
    def decide(cli: Cli, names: tuple[str, ...], as_json: bool) -> None:
        done: dict[str, str] = {}
        with cli.places() as places:
            head = places.head()
            for one in names:
                try:
                    done[one] = head.set_host(one, state)
                except RudraError as error:
                    if done and not as_json:
                        say("\n".join(done.values()))
                    raise error from None
        if as_json:
            emit_json({"hosts": [{"name": one, "state": state} for one in done]})
        else:
            say("\n".join(done.values()))

    return decide


drain = _decision(
    "drain",
    "drained",
    "Start no new learners on hosts; those that run go on.",
    "Start no new learners on these hosts; those that run go on to the end of their jobs.\n\n"
    "\b\n  rudra host drain a b\n\n`rudra host unban a` takes it back.",
)
ban = _decision(
    "ban",
    "banned",
    "Have all learners leave hosts, and start none there.",
    "Have the learners of these hosts leave after their running step, and start none there. They start on other\n"
    "hosts where there is room; else their jobs go on with fewer.\n\n\b\n  rudra host ban a",
)
unban = _decision(
    "unban",
    "ready",
    "Have hosts take learners again.",
    "Have these hosts take learners again, whether they were drained or banned.\n\n\b\n  rudra host unban a",
)


@host.command("forget", short_help="Drop a host from the list and revoke its key.")
@click.argument("name")
@json_option
@click.pass_obj
def forget(cli: Cli, name: str, as_json: bool) -> None:
    """Drop a host from the list and revoke its key: it comes back by a new invitation alone.

    \b
      rudra host forget gpu-3
    """
    with cli.places() as places:
        text = places.head().do(ForgetHost(name=name))
    emit_json({"name": name, "text": text}) if as_json else say(text)
