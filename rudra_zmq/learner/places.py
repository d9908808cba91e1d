"""``rudra.path("imagenet")``: what a name of [host] paths means on the host that this code runs on.

Owns: where the names come from: learnerd's word in a job, rudra.toml of this host alone. Must not know: torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from rudra_zmq.config import load_rudra
from rudra_zmq.config import places as names
from rudra_zmq.errors import ConfigError

PLACES = "RUDRA_PLACES"
"""Of a learner and of what it starts, workers of a DataLoader for one: name -> path as JSON, by learnerd."""


def path(name: str) -> Path:
    """The path that [host] paths of this host's rudra.toml gives to ``name``. ConfigError where it gives none."""
    return Path(names.place(name, known(), "rudra.path()"))


@cache
def known() -> Mapping[str, str]:
    """All names of this host. ConfigError."""
    given = os.environ.get(PLACES)
    if given is None:
        return load_rudra().config.host.paths
    try:
        return msgspec.json.decode(given.encode(), type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"no table of paths: {error}", where=PLACES, fix=f"unset {PLACES}") from None
