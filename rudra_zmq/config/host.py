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


class PsdSection(Section, frozen=True):
    listen: kinds.BindAddress = ""
    ports: kinds.Ports = "7740-7799"
    data: Literal["auto", "shm", "ipc", "tcp"] = "auto"

    @property
    def port_range(self) -> tuple[int, int]:
        """First and last port that a node may bind; (0, 0): any free one."""
        return kinds.parse_ports(self.ports) or (0, 0)


class LearnerdSection(Section, frozen=True):
    name: kinds.Name = ""
    slots: kinds.Slots = 0

    @property
    def host_name(self) -> str:
        return self.name or os.uname().nodename

    @property
    def slot_count(self) -> int:
        """Learners that this host takes at once: max(4, cores) where none is set."""
        return self.slots or max(4, len(os.sched_getaffinity(0)))


class LogSection(Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class PathsSection(Section, frozen=True):
    state: kinds.AbsolutePath = ""
    runtime: kinds.AbsolutePath = ""


class RudraToml(Section, frozen=True):
    head: HeadSection = HeadSection()
    psd: PsdSection = PsdSection()
    learnerd: LearnerdSection = LearnerdSection()
    log: LogSection = LogSection()
    paths: PathsSection = PathsSection()
