"""rudra.toml and job.toml as frozen structs: loading, checking, writing.

Owns: the functions below; the structs of single sections are in `config.job` and `config.host`, and nothing
else here is for other packages. Must not know: numpy, zmq, torch.
"""

from __future__ import annotations

from rudra_zmq.config.host import RudraToml
from rudra_zmq.config.job import Group, JobFile, Schedule
from rudra_zmq.config.load import (
    LoadedJob,
    LoadedRudra,
    check_job,
    check_rudra,
    job_for_script,
    job_from_toml,
    job_to_toml,
    load_job,
    load_rudra,
)
from rudra_zmq.config.reload import merge
from rudra_zmq.config.units import parse_duration, parse_size

__all__ = [
    "Group",
    "JobFile",
    "LoadedJob",
    "LoadedRudra",
    "RudraToml",
    "Schedule",
    "check_job",
    "check_rudra",
    "job_for_script",
    "job_from_toml",
    "job_to_toml",
    "load_job",
    "load_rudra",
    "merge",
    "parse_duration",
    "parse_size",
]
