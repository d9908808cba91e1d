"""``rudra doctor``: all checks at once, a line per finding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial

import click

from rudra_zmq.cli import reloads
from rudra_zmq.cli.base import Cli, command, json_option
from rudra_zmq.cli.output import emit_json, note, say
from rudra_zmq.cli.places import Head
from rudra_zmq.doctor import cluster, gpus, here, services
from rudra_zmq.doctor.findings import Check, Finding, examine, verdict
from rudra_zmq.errors import ConfigError, RudraError
from rudra_zmq.net.addresses import lock_holder


class Way:
    """To the head that the other commands talk to."""

    def __init__(self, cli: Cli) -> None:
        self._cli = cli

    def address(self) -> str:
        with self._cli.places() as places:
            return places.where()[0]

    @contextmanager
    def dial(self) -> Iterator[Head]:
        with self._cli.places() as places:
            yield places.head()


@command("doctor")
@json_option
@click.pass_obj
def doctor(cli: Cli, as_json: bool) -> int:
    """Look for what is wrong here, on the way to the head, and with the other hosts.

    \b
      rudra doctor

    A line per finding, with what mends it, within 20 s; mending is left to you. Looked at here: settings, state folder,
    its registry and disk, keys, open files and memory that the daemons may have, ports, GPUs, units. At the head:
    whether and why not it is reached, its clock, which hosts are silent, lack a declared GPU, or have other versions.

    Exit status: 0, or of the errors the first of: 4 or 5 the head cannot be reached, or refuses; 1 something here;
    7 some hosts. Warnings and notes change nothing. Run it as the user of the daemons, or as root.
    """
    begun = time.monotonic()
    checks = _checks(cli)
    findings = examine(checks)
    if as_json:
        rows = [{k: v for k, v in asdict(finding).items() if k != "status"} for finding in findings]
        emit_json({"ok": verdict(findings) == 0, "checks": list(checks), "findings": rows})
    else:
        _say(findings, len(checks), time.monotonic() - begun)
    return verdict(findings)


def _say(findings: list[Finding], count: int, seconds: float) -> None:
    for level in ("error", "warning", "note"):
        for finding in findings:
            if finding.level == level:
                say(str(finding))
    levels = Counter(finding.level for finding in findings)
    told = ", ".join(f"{levels[level]} {level}{'s' if levels[level] > 1 else ''}" for level in levels)
    note(f"{count} things were looked at in {seconds:.1f} s: {told or 'all is well'}")


def _checks(cli: Cli) -> dict[str, Check]:
    """What needs no settings, and where they are right, the rest."""
    try:
        config = cli.settings
    except ConfigError:
        return {"settings": here.settings, "limits": partial(here.limits, (), False), "units": services.look}
    daemons = []
    with suppress(RudraError, OSError):  # the state folder: a check of its own tells
        holders = [(name, lock_holder(folder / name, name)) for name, folder in reloads.places(config) if name != "up"]
        daemons = [(name, pid) for name, pid in holders if pid]

    return {
        "settings": here.settings,
        "[host]": partial(here.host_section, config.host),
        "state folder": partial(here.state, config),
        "registry": partial(here.registries, config),
        "keys": here.own_keys,
        "limits": partial(here.limits, daemons, bool(config.host.devices)),
        "memory": partial(here.memory, daemons),
        "ports": partial(here.ports, config, [pid for name, pid in daemons if name == "psd"]),
        "gpus": partial(gpus.look, config.host.device_names),
        "units": services.look,
        "head": partial(cluster.look, Way(cli)),
    }
