"""Processes that end with the one that started them: ``python -m rudra_zmq.bench.tied PID SIGNAL PROGRAM ...``.

Owns: the tie, which exec keeps. Must not know: what the program is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie(parent: int, number: int) -> None:
    """Get signal ``number`` when process ``parent`` ends; SystemExit if it has ended already.

    It is the thread that started this process whose end counts.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which wanted this one, has ended")


def tied(program: list[str], number: int = signal.SIGTERM) -> list[str]:
    """The command that runs ``program`` tied to this process."""
    return [sys.executable, "-m", "rudra_zmq.bench.tied", str(os.getpid()), str(int(number)), *program]


def main() -> None:
    """Tie, then become the program."""
    parent, number, *program = sys.argv[1:]
    tie(int(parent), int(number))
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
