"""How learners and the evaluator are named: on the wire, in files, to people."""

from __future__ import annotations

from typing import NamedTuple

EVALUATOR = 65535
"""Stands for the evaluator wherever a rank is asked for; no job has so many learners."""


class Seat(NamedTuple):
    """Where a rank runs: a host, and the GPU of it that is its alone ("": none)."""

    host: str
    device: str = ""


def called(rank: int) -> str:
    """In a sentence."""
    return "the evaluator" if rank == EVALUATOR else f"learner {rank}"


def file_stem(rank: int) -> str:
    """In the names of its log files."""
    return "evaluator" if rank == EVALUATOR else f"learner-{rank}"
