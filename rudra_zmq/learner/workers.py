"""Worker processes that load data: a clean server forks them, and they know the script's classes without running it.

Owns: how a worker comes to have the script's dataset and functions. Must not know: leases, jobs, sockets.

Workers come from a fork server that has torch and nothing of this process: no thread, no socket is inherited. What
they are given is pickled by name, so they need the script's module. multiprocessing would run the whole script for
that; here it is run up to its `join()`, which is where a worker's part ends. So a script needs no
`if __name__ == "__main__"`, though what stands before join() is done once more in each worker.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from multiprocessing.context import BaseContext
from typing import Any

PRELOAD = ["torch", "torch.utils.data", "rudra_zmq.learner.workers", "rudra_zmq.learner.data"]
MAIN = "__mp_main__"

_reading = False
_read = False


class EndOfWorkersPart(BaseException):
    """Raised by join() in a worker that reads the script: it has all that stands before."""


def stop_here() -> None:
    """Called by join(): in a worker that is reading the script, end it here."""
    if _reading:
        raise EndOfWorkersPart


def in_worker() -> bool:
    """Whether this process was started by multiprocessing."""
    # The first is so once it runs, the second while it unpickles what it is to run.
    return multiprocessing.parent_process() is not None or hasattr(multiprocessing.current_process(), "_inheriting")


def end_with_learner() -> None:
    """In a worker: end when the process that it loads for is gone, killed say.

    torch's workers look at their parent for that, which is the fork server here; and that one waits for its workers.
    """
    learner = multiprocessing.parent_process()
    if learner is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([learner.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-learner", daemon=True).start()


def context() -> BaseContext:
    """The fork server's context; the server starts with the first worker."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


class Script:
    """Travels in front of the script's objects: where it arrives, the script is read before they are looked up."""

    def __reduce__(self) -> tuple[Any, ...]:
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        ours = spec is not None and spec.name.partition(".")[0] == "rudra_zmq"
        path = "" if ours else getattr(main, "__file__", None) or ""
        return arrive, (path, (spec.parent or "") if spec is not None else "")


def arrive(path: str, package: str) -> Script:
    """In a worker, read the script at `path`; "" where nothing of it is needed."""
    if path and in_worker():
        read_script(path, package)
    return Script()


class Carried:
    """An object of the script's on its way into a worker."""

    def __init__(self, value: Any, script: Script | None = None) -> None:
        self.script = script or Script()
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _carry, (self.script, self.value)  # in this order


def _carry(script: Script, value: Any) -> Carried:
    return Carried(value, script)


class _Loader(SourceFileLoader):
    """Leaves no compiled file beside the script, as running it would not."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Nothing is written."""


def read_script(path: str, package: str) -> None:
    """Run the script as __main__ named __mp_main__, once in a process, up to its join()."""
    global _reading, _read
    if _read:
        return
    loader = _Loader(MAIN, path)
    module = module_from_spec(ModuleSpec(MAIN, loader, origin=path))
    module.__file__, module.__package__ = path, package
    sys.modules["__main__"] = sys.modules[MAIN] = module
    _reading = _read = True
    try:
        loader.exec_module(module)
    except EndOfWorkersPart:
        pass
    finally:
        _reading = False


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that are started inside do not run the script by themselves."""
    prepare = multiprocessing.spawn.get_preparation_data

    def bare(name: str) -> dict[str, Any]:
        return {k: v for k, v in prepare(name).items() if not k.startswith("init_main")}

    multiprocessing.spawn.get_preparation_data = bare
    try:
        yield
    finally:
        multiprocessing.spawn.get_preparation_data = prepare
