"""The units of rudra, where systemd runs: failed, not enabled, not running, without linger.

Owns: what systemctl says of them. Must not know: what the daemons do.
"""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rudra_zmq.doctor.findings import Finding
from rudra_zmq.errors import EXIT_CONFIG_DAEMON

UNITS = ("rudra.target", "rudra-psd.service", "rudra-learnerd.service")
SYSTEMD, LINGER = Path("/run/systemd/system"), Path("/var/lib/systemd/linger")
SYSTEMCTL_S = 10.0
_ASKED = "Id,LoadState,UnitFileState,ActiveState,Result,ExecMainStatus"


def look(systemd: Path = SYSTEMD, linger: Path = LINGER) -> Iterator[Finding]:
    """Nothing where systemd does not run, or the units are not installed. The system's units, and one's own."""
    if not systemd.exists():
        return
    yield from _manager(None)
    if not os.environ.get("XDG_RUNTIME_DIR"):
        return
    user = getpass.getuser()
    yield from _manager(None if (linger / user).exists() else user, "--user")


def _manager(lingers_not: str | None, *option: str) -> Iterator[Finding]:
    ctl = " ".join(["systemctl", *option])
    units = _ask(option)
    services = [name for name in units if name.endswith(".service")]
    for name, unit in units.items():
        yield from _unit(ctl, " ".join(["journalctl", *option]), name, unit)
    enabled = [name for name in services if units[name].get("UnitFileState", "").startswith("enabled")]
    running = [name for name in services if units[name].get("ActiveState") == "active"]
    if services and not enabled:
        fix = f"{ctl} enable --now rudra.target {' '.join(running or services)}"
        if running:
            text = f"{' '.join(running)} will not run after a reboot: not enabled"
            yield Finding("unit-not-enabled", "warning", ctl, text, fix)
        else:
            yield Finding("unit-not-enabled", "note", ctl, "the units are installed, and none is enabled", fix)
    elif enabled and units.get("rudra.target", {}).get("UnitFileState") == "disabled":
        text = f"rudra.target is not enabled, so {' '.join(enabled)} will not start at boot"
        yield Finding("unit-not-enabled", "error", ctl, text, f"{ctl} enable --now rudra.target")
    if enabled and lingers_not:
        text = "without linger your units end with your last session, and start at your next login"
        yield Finding("no-linger", "warning", ctl, text, f"loginctl enable-linger {lingers_not}")


def _unit(ctl: str, journal: str, name: str, unit: dict[str, str]) -> Iterator[Finding]:
    active, state = unit.get("ActiveState", ""), unit.get("UnitFileState", "")
    if active == "failed":
        status = unit.get("ExecMainStatus", "0")
        text = f"{name} has failed ({unit.get('Result', 'unknown')}, status {status})"
        first = "`rudra config check`" if status == str(EXIT_CONFIG_DAEMON) else f"`{journal} -u {name} -e` says why"
        yield Finding("unit-failed", "error", ctl, text, f"{first}, then {ctl} restart {name}")
    elif state in ("masked", "masked-runtime"):
        yield Finding("unit-masked", "warning", ctl, f"{name} is masked: nobody can start it", f"{ctl} unmask {name}")
    elif state == "enabled" and active == "inactive":
        text = f"{name} is enabled, and does not run"
        yield Finding("unit-not-running", "error", ctl, text, f"{ctl} start {name}")


def _ask(option: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Name -> properties of the units that are installed; nothing where the manager does not answer."""
    try:
        done = subprocess.run(
            ["systemctl", *option, "show", "--no-pager", "-p", _ASKED, *UNITS],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SYSTEMCTL_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = {}
    for block in done.stdout.split("\n\n"):
        unit = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if unit.get("LoadState") not in ("not-found", "", None):
            found[unit.get("Id", "")] = unit
    return found
