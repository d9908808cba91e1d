"""The small supervisor of ``rudra up``: starts psd and learnerd, starts them again when they die.

Owns the two processes and up.json, which says who runs. Must not know: jobs, messages. Where systemd runs the
units, this is not used.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rudra_zmq import log
from rudra_zmq.daemons.base import Daemon, Options, launch, parser, write_json
from rudra_zmq.daemons.spawn import Child
from rudra_zmq.errors import EXIT_CONFIG_DAEMON
from rudra_zmq.net.loop import Timer

logger = log.get()

DAEMONS = ("psd", "learnerd")
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
STEADY_S = 60.0  # a daemon that ran this long has its next wait at the beginning again
GRACE_S = 30.0


class Up(Daemon):
    """The supervisor."""

    name = "up"
    others = ("head.", "psd.", "host.", "metrics.")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._children: dict[str, Child] = {}
        self._begun: dict[str, float] = {}
        self._waits = dict.fromkeys(DAEMONS, FIRST_WAIT_S)
        self._timers: dict[str, Timer] = {}
        self._file = options.state / "up.json"

    def begin(self) -> None:
        """Both daemons are started in their order; learnerd waits for psd by itself."""
        self.lock(self.options.state)
        for daemon in DAEMONS:
            self._start(daemon)
        write_json(self._file, {"pid": os.getpid()})

    def _start(self, daemon: str) -> None:
        state, runtime = self.options.state, self.options.runtime
        argv = [sys.executable, "-m", f"rudra_zmq.daemons.{daemon}", "--state", str(state), "--runtime", str(runtime)]
        if daemon == "psd":
            argv.append("--lasting")
        file = state / f"{daemon}.log"
        argv += ["--log", str(file)]
        self._begun[daemon] = self.loop.now()
        self._children[daemon] = self.supervisor.spawn(
            [*argv, "--private", str(os.getpid())],
            env=os.environ,  # the daemons read the user's settings; what children inherit is theirs to decide
            cwd="/",
            on_exit=lambda child: self._ended(daemon, child),
            log=file,
        )
        logger.info("started", daemon=daemon, pid=self._children[daemon].pid)

    def _ended(self, daemon: str, child: Child) -> None:
        del self._children[daemon]
        if self.stopping:
            self._stop_next()
            return
        if child.returncode == EXIT_CONFIG_DAEMON:
            status = child.returncode
            logger.error("a setting is wrong, not started again", daemon=daemon, status=status, see=f"{daemon}.log")
            self.terminate()
            return
        if self.loop.now() - self._begun[daemon] > STEADY_S:
            self._waits[daemon] = FIRST_WAIT_S
        wait = self._waits[daemon]
        self._waits[daemon] = min(2 * wait, LONGEST_WAIT_S)
        logger.warning("ended, is started again", daemon=daemon, status=child.returncode, wait=f"{wait:g}s")
        self._timers[daemon] = self.loop.after(wait, lambda: self._start(daemon))

    def drain(self) -> None:
        """psd first: it drains its jobs while their learners still run; then learnerd."""
        for timer in self._timers.values():
            timer.cancel()
        self._stop_next()

    def _stop_next(self) -> None:
        child = next(iter(self._children.values()), None)
        if child is None:
            self.finish()
        else:
            self.supervisor.stop(self._children.get("psd", child), GRACE_S)

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


def _sets(args: argparse.Namespace) -> list[str]:
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m rudra_zmq.daemons.up``."""
    options = parser("up", "Run psd and learnerd, and start them again when they die.", "rudra up")
    return launch(options, argv, _sets, Up)


if __name__ == "__main__":
    sys.exit(main())
