"""The user code of jobs on this host: fetched from the head where it is lacking, unpacked for each job.

Owns the two steps and what waits for them. Must not know: learners; who asks is told by ``then``.

A bundle comes once to a host, whatever number of learners and jobs run it. Each job has a copy of its own below its
folder, so that what a script writes beside itself is seen by no other job. Everything happens in the loop, a slice at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rudra_zmq import log, paths
from rudra_zmq.errors import RudraError
from rudra_zmq.head import bundles
from rudra_zmq.net.loop import Loop
from rudra_zmq.wire import bundle
from rudra_zmq.wire.codec import error_of
from rudra_zmq.wire.messages.control import Error, FileData, GetBundle
from rudra_zmq.wire.messages.data import Message

logger = log.get()

RETRY_S = 1.0
PATIENCE_S = 600.0  # without a piece; then the learners that wait for it are given up
SLICE_S = 0.02
_AWAY = ("unreachable", "timed-out")

Then: TypeAlias = Callable[[str], None]
"""Called with "" when the code is there, else with what went wrong."""


@dataclass
class _Fetch:
    waiting: list[Callable[[str], None]] = field(default_factory=list)
    incoming: bundles.Incoming | None = None
    heard: float = 0.0


class Code:
    """Of one learnerd. ``ask(message, on_reply)`` sends a request to the head."""

    def __init__(self, loop: Loop, state: Path, ask: Callable[[GetBundle, Callable[[Message], None]], object]) -> None:
        self._loop, self._state, self._ask = loop, state, ask
        self._fetches: dict[str, _Fetch] = {}

    def provide(self, job: str, name: str, then: Then) -> None:
        """Have the bundle ``name`` unpacked in the job's folder; ``then`` is called in a later turn of the loop."""
        if paths.job_folder(self._state, job).code.is_dir():
            self._loop.after(0.0, lambda: then(""))
        elif bundles.have(self._state, name):
            self._unpack(job, name, then)
        else:
            self._fetch(name, lambda problem: then(problem) if problem else self._unpack(job, name, then))

    # ---------------------------------------------------------------------------------------- fetching

    def _fetch(self, name: str, then: Then) -> None:
        fetch = self._fetches.get(name)
        if fetch is not None:
            fetch.waiting.append(then)
            return
        self._fetches[name] = _Fetch([then], heard=self._loop.now())
        logger.info("code is fetched", code=name[:12])
        self._ask_on(name)

    def _ask_on(self, name: str) -> None:
        fetch = self._fetches[name]
        held = fetch.incoming.held if fetch.incoming is not None else 0
        self._ask(GetBundle(name=name, offset=held), lambda answer: self._answered(name, answer))

    def _answered(self, name: str, answer: Message) -> None:
        fetch = self._fetches[name]
        if isinstance(answer, Error) and answer.code in _AWAY:
            if self._loop.now() - fetch.heard < PATIENCE_S:
                self._loop.after(RETRY_S, lambda: self._ask_on(name))
            else:
                self._fetched(name, f"its code {name[:12]} did not come in {PATIENCE_S:.0f} s: {answer.message}")
            return
        try:
            if isinstance(answer, Error):
                raise error_of(answer)
            if not isinstance(answer, FileData) or not answer.data or answer.size > bundle.MOST_BYTES:
                raise RudraError("the head's answer is none")
            fetch.heard = self._loop.now()
            fetch.incoming = fetch.incoming or bundles.Incoming(self._state, name, answer.size)
            whole = fetch.incoming.write(answer.data)
        except RudraError as error:
            self._fetched(name, f"its code {name[:12]} cannot be had: {error.message}")
            return
        if whole:
            self._fetched(name, "")
        else:
            self._ask_on(name)

    def _fetched(self, name: str, problem: str) -> None:
        fetch = self._fetches.pop(name)
        if problem and fetch.incoming is not None:
            fetch.incoming.drop()
        for then in fetch.waiting:
            then(problem)

    # ---------------------------------------------------------------------------------------- unpacking

    def _unpack(self, job: str, name: str, then: Then) -> None:
        target = paths.job_folder(self._state, job).code
        steps = bundle.unpack(bundles.place(self._state, name), name, target)
        self._loop.after(0.0, lambda: self._unpack_on(job, steps, then))

    def _unpack_on(self, job: str, steps: Iterator[None], then: Then) -> None:
        end = self._loop.now() + SLICE_S
        try:
            for _ in steps:
                if self._loop.now() > end:
                    self._loop.after(0.0, lambda: self._unpack_on(job, steps, then))
                    return
        except RudraError as error:
            logger.warning("code was not unpacked", job=job, error=str(error))
            then(error.message)
            return
        then("")

    def close(self) -> None:
        """Nothing half-fetched stays."""
        for fetch in self._fetches.values():
            if fetch.incoming is not None:
                fetch.incoming.drop()
        self._fetches.clear()
