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
    elif not (os.path.isfile(python) and os.access(python, os.X_OK)):
        found.append(f"{key}: there is no interpreter {python}{whom}. Fix: correct it, or install it there")
    folder = job.run.cwd or cwd
    if cwd and not os.path.isdir(folder):
        found.append(f"run.cwd: there is no folder {folder}{whom}. Fix: make it, or set run.cwd")
    if cwd and job.run.script and not os.path.isfile(os.path.join(folder, job.run.script)):
        found.append(f"run.script: there is no file {job.run.script}. Fix: put it there, or correct run.script")
    for place in path_names(job):
        path = host.paths.get(place, "")
        if not path:
            found.append(f'paths.{place} is not set here. Fix: add paths.{place} = "/..." to [host]')
        elif not os.path.exists(path):
            found.append(f"paths.{place}: there is no {path}. Fix: correct it, or mount it")
    return found
