"""Whether this host can run a job's learners: interpreter, script, folder, named paths.

Owns: the questions, and the interpreter of a job on this host. Must not know: who asks, and what is done about it.
"""

from __future__ import annotations

import os
import sys

from rudra_zmq.config import JobFile
from rudra_zmq.config.host import HostSection
from rudra_zmq.config.places import path_names, python_name


def interpreter(job: JobFile, host: HostSection) -> str:
    """The path of the job's interpreter on this host; "" where its name means nothing here."""
    name = python_name(job)
    return host.python.get(name, "") if name else job.run.python or sys.executable


def problems(job: JobFile, cwd: str, host: HostSection) -> list[str]:
    """What the job needs and this host lacks, a line each: the key, what is wrong, the fix.

    ``cwd`` is "" where the job's code goes with it, and its folder and script are in there.
    """
    found = []
    whom = f" that {host.user} may use" if host.user else ""
    name, python = python_name(job), interpreter(job, host)
    key = f"python.{name}" if name else "run.python"
    if not python:
        found.append(f'{key} is not set here. Fix: add {key} = "/.../bin/python" to [host]')
    else:
        found += _interpreter_problems(key, python, whom)
    folder = job.run.cwd or cwd
    if cwd and not os.path.isdir(folder):
        found.append(f"run.cwd: there is no folder {folder}{whom}. Fix: make it, or set run.cwd")
    if cwd and job.run.script and not os.path.isfile(os.path.join(folder, job.run.script)):
        found.append(f"run.script: there is no file {job.run.script}. Fix: put it there, or correct run.script")
    for place in path_names(job):
        path = host.paths.get(place, "")
        if not path:
            found.append(f'paths.{place} is not set here. Fix: add paths.{place} = "/..." to [host]')
        else:
            found += _path_problems(place, path)
    return found


def own_problems(host: HostSection) -> list[str]:
    """What of [host] itself names something that is not there, a line each."""
    whom = f" that {host.user} may use" if host.user else ""
    found = []
    for name, python in host.python.items():
        found += _interpreter_problems(f"python.{name}", python, whom)
    for name, path in host.paths.items():
        found += _path_problems(name, path)
    return found


def _interpreter_problems(key: str, python: str, whom: str) -> list[str]:
    if os.path.isfile(python) and os.access(python, os.X_OK):
        return []
    return [f"{key}: there is no interpreter {python}{whom}. Fix: correct it, or install it there"]


def _path_problems(name: str, path: str) -> list[str]:
    return [] if os.path.exists(path) else [f"paths.{name}: there is no {path}. Fix: correct it, or mount it"]
