"""rudra.toml: the settings of a host or of a person, for the daemons and the command line.

Owns: the frozen structs, their defaults, and what follows from one value. Must not know: job files, where a
value came from. etc/rudra/rudra.toml shows the same keys and defaults with their explanations.
"""

from __future__ import annotations

import os
from typing import Literal

from rudra_zmq.config import kinds
from rudra_zmq.config.job import Section


class HeadSection(Section, frozen=True):
    address: kinds.Address = ""
    key: kinds.PublicKey = ""


class PsdSection(Section, frozen=True):
    listen: kinds.BindAddress = ""
    ports: kinds.Ports = "7740-7799"
    data: Literal["auto", "shm", "ipc", "tcp"] = "auto"

    @property
    def port_range(self) -> tuple[int, int]:
        """First and last port that a node may bind; (0, 0): any free one."""
        return kinds.parse_ports(self.ports) or (0, 0)


class HostSection(Section, frozen=True):
    """What this host is and has. `python`, `paths`: names that jobs use -> paths here; `env`: of every learner."""

    name: kinds.Name = ""
    labels: kinds.Names = ()
    devices: kinds.Devices = ()
    slots: kinds.Slots = 0
    python: kinds.Places = {}
    paths: kinds.Places = {}
    env: kinds.Variables = {}
    user: kinds.User = ""

    @property
    def host_name(self) -> str:
        return self.name or os.uname().nodename

    @property
    def slot_count(self) -> int:
        """Learners that this host takes at once. Where none is set: one per device, or max(4, cores)."""
        return self.slots or len(self.devices) or max(4, len(os.sched_getaffinity(0)))

    @property
    def device_names(self) -> tuple[str, ...]:
        """As CUDA_VISIBLE_DEVICES takes them."""
        return tuple(map(str, self.devices))


def misnamed_entry(table: str, name: str) -> tuple[str, str] | None:
    """What is wrong with a name in a free table of [host], and how to mend it; None where it is good."""
    if table != "host.env":
        fix = "use up to 64 letters, digits, '.', '_' and '-', the first a letter or a digit"
        return None if kinds.NAME.fullmatch(name) else (f'{table}: "{name}" is no name', fix)
    if not kinds.VARIABLE.fullmatch(name):
        return f'{table}: "{name}" is no name of a variable', "use up to 100 letters, digits and '_'"
    if name.startswith("RUDRA_"):
        return f"{table}: {name} would hide what rudra itself sets", "take a name without RUDRA_"
    return None


class MetricsSection(Section, frozen=True):
    listen: kinds.Listen = ""

    @property
    def address(self) -> tuple[str, int] | None:
        """Where psd serves its metrics; None: nowhere."""
        return kinds.parse_listen(self.listen) if self.listen else None


class LogSection(Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class PathsSection(Section, frozen=True):
    state: kinds.AbsolutePath = ""
    runtime: kinds.AbsolutePath = ""


class RudraToml(Section, frozen=True):
    head: HeadSection = HeadSection()
    psd: PsdSection = PsdSection()
    host: HostSection = HostSection()
    metrics: MetricsSection = MetricsSection()
    log: LogSection = LogSection()
    paths: PathsSection = PathsSection()
