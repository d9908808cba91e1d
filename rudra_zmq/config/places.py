"""Names in a job file that each host gives a meaning of its own: ``{path:imagenet}``, ``run.python = "ml"``.

Owns: how they are written, which of them a job needs, what takes their place. Must not know: what a host has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rudra_zmq.config.job import JobFile
from rudra_zmq.config.kinds import NAME
from rudra_zmq.errors import ConfigError

_PLACE = re.compile(r"\{path:([^{}]*)\}")


def python_name(job: JobFile) -> str:
    """The name of the interpreter that the job asks for; "" where it gives a path, or none."""
    python = job.run.python
    return "" if python.startswith("/") else python


def path_names(job: JobFile) -> tuple[str, ...]:
    """The names of [host] paths in the job's arguments, each once."""
    found = (match[1] for text in _texts([*job.run.args, job.job.task_args]) for match in _PLACE.finditer(text))
    return tuple(dict.fromkeys(found))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def misnamed(job: JobFile) -> list[str]:
    """Names in ``{path:NAME}`` that no host can have."""
    return [name for name in path_names(job) if not NAME.fullmatch(name)]


def place(name: str, paths: Mapping[str, str], where: str = "") -> str:
    """The path of a name on this host. ConfigError where it has none."""
    if name not in paths:
        known = f"it has {', '.join(sorted(paths))}" if paths else "it has none"
        fix = f'add paths.{name} = "/..." to [host] of its rudra.toml; {known}'
        raise ConfigError(f"paths.{name} is not set on this host", where=where, fix=fix)
    return paths[name]


def with_places(job: JobFile, paths: Mapping[str, str], where: str = "") -> JobFile:
    """The job with this host's paths in its arguments. ConfigError where one is missing."""

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return _PLACE.sub(lambda match: place(match[1], paths, where), value)
        if isinstance(value, list):
            return [filled(item) for item in value]
        return value

    run = msgspec.structs.replace(job.run, args=tuple(map(filled, job.run.args)))
    section = msgspec.structs.replace(job.job, task_args={k: filled(v) for k, v in job.job.task_args.items()})
    return msgspec.structs.replace(job, run=run, job=section)
