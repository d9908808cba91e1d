"""The environment of a child: built from a short list, never inherited whole.

Owns which variables pass. A launcher's leftovers (RANK, WORLD_SIZE, MASTER_ADDR, SLURM_*), tokens and settings of the
daemon itself stay behind, so that a script behaves the same whoever started the daemon.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import rudra_zmq
from rudra_zmq.config.host import HostSection

PASSED = (
    "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PATH", "XDG_CACHE_HOME", "RUDRA_DATA",
)  # fmt: skip
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def base_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every child gets of the daemon's own environment (``source``), and what makes this package importable."""
    given = os.environ if source is None else source
    env = {name: given[name] for name in PASSED if name in given}
    env.setdefault("PATH", os.defpath)
    root = str(Path(rudra_zmq.__file__).resolve().parent.parent)
    if _found_by_path(root, given.get("PYTHONPATH", "")):
        env["PYTHONPATH"] = root
    env["PYTHONUNBUFFERED"] = "1"  # `logs -f` shows a line when it is printed
    return env


def _found_by_path(root: str, python_path: str) -> bool:
    """Whether the package came from PYTHONPATH or from where ``python -m`` was called, so not from the interpreter."""
    given = [*python_path.split(os.pathsep), sys.path[0] if sys.path else ""]
    return any(entry and os.path.realpath(entry) == root for entry in given)


def learner_environment(
    *,
    spec: Path,
    threads: int,
    job: Mapping[str, str],
    code: Path | None = None,
    host: HostSection | None = None,
    device: str | None = None,
    source: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Of a learner: the base, its threads, the host's and the job's ``env`` over them, and what is ours: where its
    spec is, the host's named paths, its GPU. Modules of the job's own ``code`` come before installed
    ones.

    ``device``: "" hides all GPUs of a host that has declared some, None leaves them alone.
    """
    host = host or HostSection()
    env = base_environment(source)
    env |= dict.fromkeys(THREADS, str(threads))
    env |= host.env
    env |= job
    if code is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(code), *filter(None, [env.get("PYTHONPATH", "")])])
    env["RUDRA_LEARNER"] = str(spec)
    env["RUDRA_PLACES"] = json.dumps(host.paths)
    if device is not None:
        env |= {"CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return env


def node_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a node: its arithmetic is single-threaded by design, so no library may start a pool."""
    return base_environment(source) | dict.fromkeys(THREADS, "1")
