"""The public names of the Python interface, and the version.

Owns: which names a training script may import from `rudra_zmq`. They come lazily, so that the command line
and the daemons, which import this package too, never pay for torch. Must not know: anything else; it imports
no third party.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rudra_zmq.learner.join import Learner, join
    from rudra_zmq.learner.places import path

__version__ = "0.1.0"
__all__ = ["Learner", "__version__", "join", "path"]

_HOMES = {
    "Learner": "rudra_zmq.learner.join",
    "join": "rudra_zmq.learner.join",
    "path": "rudra_zmq.learner.places",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
