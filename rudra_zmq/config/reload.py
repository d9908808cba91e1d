"""What of changed settings a running daemon takes.

Owns the comparison of two rudra.toml. Must not know: which daemon it is for; the caller says which keys it can take.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from rudra_zmq.config.host import RudraToml
from rudra_zmq.config.schema import flat
from rudra_zmq.config.write import toml_value


def merge(
    running: RudraToml, fresh: RudraToml, *, live: Sequence[str], others: Sequence[str] = ()
) -> tuple[RudraToml, list[str], list[str]]:
    """The settings to run with from now on, the changes that they bring ("log.level = "debug""), and the changed keys
    that hold only after a restart.

    ``live``: keys ("section.name") that can be taken while running; ``others``: beginnings of keys that are not this
    daemon's. Every other key needs a restart.
    """
    old, new = flat(running), flat(fresh)
    changed = [
        key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key) and not key.startswith(tuple(others))
    ]
    taken = [key for key in changed if key in live]
    settings = running
    for key in taken:
        section, _, name = key.partition(".")
        now = replace(getattr(settings, section), **{name: getattr(getattr(fresh, section), name)})
        settings = replace(settings, **{section: now})
    return settings, [f"{key} = {toml_value(new[key])}" for key in taken], [k for k in changed if k not in live]
