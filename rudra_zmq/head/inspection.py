"""Are the chosen hosts able to run a job? All are asked before anything of it starts, and all answers are told at once.

Owns: the questions under way and what their answers come to. Must not know: what becomes of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from rudra_zmq.head.fleet import Fleet
from rudra_zmq.wire.messages.control import Checked, CheckJob, Error
from rudra_zmq.wire.messages.data import Message


class Findings(NamedTuple):
    """Of the hosts that were asked: ``answers`` of those that answered, ``silent`` the names of the others."""

    answers: dict[str, Checked]
    silent: tuple[str, ...]

    @property
    def problems(self) -> dict[str, list[str]]:
        """What each host lacks, hosts that lack something alone."""
        return {host: list(answer.problems) for host, answer in self.answers.items() if answer.problems}

    def refusal(self) -> str:
        """Why the job cannot start, in a line; "" where nothing is in its way."""
        lacking = self.problems
        if not lacking:
            return ""
        told = "; ".join(f"{host}: {line}" for host, lines in lacking.items() for line in lines)
        return f"{len(lacking)} of its {len(self.answers)} hosts cannot run it: {told}"


Then: TypeAlias = Callable[[Findings], None]


def inspect(fleet: Fleet, names: Iterable[str], question: CheckJob, now: float, then: Then) -> None:
    """Ask the hosts; ``then`` is called once, when each has answered or will not."""
    order = list(dict.fromkeys(names))
    answers: dict[str, Message | None] = {}

    def heard(name: str, answer: Message | None) -> None:
        answers[name] = answer
        if len(answers) == len(order):
            then(_findings({name: answers[name] for name in order}))

    for name in order:
        host = fleet.registered(name)
        if host is None:
            heard(name, None)
        else:
            fleet.ask(host, question, now, lambda answer, name=name: heard(name, answer))  # type: ignore[misc]


def _findings(answers: dict[str, Message | None]) -> Findings:
    found: dict[str, Checked] = {}
    for name, answer in answers.items():
        if isinstance(answer, Checked):
            found[name] = answer
        elif isinstance(answer, Error) and answer.code != "unreachable":
            fix = f". Fix: {answer.fix}" if answer.fix else ""
            found[name] = Checked(problems=[f"{answer.message}{fix}"[:4000]])
    return Findings(found, tuple(name for name in answers if name not in found))
