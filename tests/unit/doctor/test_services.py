"""Units that have failed, are not enabled or do not run, told by a program that stands for systemctl."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from rudra_zmq.doctor import services
from rudra_zmq.doctor.findings import Finding

GONE = ("not-found", "", "inactive", "success", "0")
UP = ("loaded", "enabled", "active", "success", "0")
OFF = ("loaded", "disabled", "inactive", "success", "0")
NONE = (GONE, GONE, GONE)
Unit = tuple[str, str, str, str, str]


class Machine:
    def __init__(self, folder: Path) -> None:
        self.systemd, self.linger, self.bin = folder / "run", folder / "linger", folder / "bin"
        for path in (self.systemd, self.linger, self.bin):
            path.mkdir()

    def look(self, *units: Unit, user: tuple[Unit, ...] = NONE) -> list[Finding]:
        program = self.bin / "systemctl"
        program.write_text(
            "#!/bin/sh\n"
            f"[ \"$1\" = --user ] && {{ cat <<'X'\n{blocks(user)}\nX\nexit; }}\n[ \"$1\" = show ] || exit 9\ncat <<'X'\n{blocks(units)}\nX\n"
        )
        program.chmod(0o755)
        return list(services.look(self.systemd, self.linger))


def blocks(units: tuple[Unit, ...]) -> str:
    names = ("Id", "LoadState", "UnitFileState", "ActiveState", "Result", "ExecMainStatus")
    rows = ((name, *unit) for name, unit in zip(services.UNITS, units, strict=True))
    return "\n\n".join("\n".join(f"{key}={value}" for key, value in zip(names, row, strict=True)) for row in rows)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return made


def test_all_run_or_are_not_installed(machine: Machine) -> None:
    assert machine.look(UP, UP, UP) == []
    assert machine.look(*NONE) == []
    assert machine.look(UP, OFF, UP) == []  # a host that only computes


def test_without_systemd_nobody_is_asked(machine: Machine) -> None:
    machine.systemd.rmdir()
    assert machine.look(UP, OFF, OFF) == []


def test_a_unit_that_has_failed(machine: Machine) -> None:
    (found,) = machine.look(UP, ("loaded", "enabled", "failed", "exit-code", "78"), UP)
    assert (found.id, found.level) == ("unit-failed", "error")
    assert found.text == "rudra-psd.service has failed (exit-code, status 78)" and "rudra config check" in found.fix
    (found,) = machine.look(UP, UP, ("loaded", "enabled", "failed", "watchdog", "6"))
    assert "`journalctl -u rudra-learnerd.service -e` says why" in found.fix


def test_not_enabled(machine: Machine) -> None:
    (found,) = machine.look(OFF, OFF, OFF)
    assert (found.id, found.level) == ("unit-not-enabled", "note")
    assert found.fix == "systemctl enable --now rudra.target rudra-psd.service rudra-learnerd.service"
    (found,) = machine.look(OFF, ("loaded", "disabled", "active", "success", "0"), OFF)
    assert found.level == "warning" and found.fix.endswith("rudra.target rudra-psd.service")
    (found,) = machine.look(OFF, UP, OFF)
    assert found.level == "error" and "rudra.target is not enabled" in found.text


def test_enabled_and_not_running_or_masked(machine: Machine) -> None:
    (found,) = machine.look(UP, ("loaded", "enabled", "inactive", "success", "0"), UP)
    assert found.id == "unit-not-running" and found.fix == "systemctl start rudra-psd.service"
    (found,) = machine.look(UP, ("masked", "masked", "inactive", "success", "0"), UP)
    assert found.id == "unit-masked"


def test_ones_own_units_and_linger(machine: Machine) -> None:
    (found,) = machine.look(*NONE, user=(UP, UP, UP))
    assert found.id == "no-linger" and found.fix == f"loginctl enable-linger {getpass.getuser()}"
    (machine.linger / getpass.getuser()).touch()
    assert machine.look(*NONE, user=(UP, UP, UP)) == []
    (found,) = machine.look(*NONE, user=(UP, ("loaded", "enabled", "failed", "signal", "9"), UP))
    assert found.where == "systemctl --user" and "journalctl --user -u rudra-psd" in found.fix
