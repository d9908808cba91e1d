"""A job of this program as a contender: `rudra run` in folders of its own, whose learners do rounds when told.

Owns: the job file, the processes, the node's part of what rounds cost, and that nothing stays. Must not know: what the
learners do, who else is timed. What is timed is what jobs run: psd, learnerd, a node and learners, all of them real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rudra_zmq.bench.contender import Contender
from rudra_zmq.bench.control import Control, usage_of
from rudra_zmq.bench.tied import tied
from rudra_zmq.bench.timing import Block
from rudra_zmq.config.write import toml_value
from rudra_zmq.errors import EXIT_USAGE, RudraError, UsageError

START_S = 120.0
BLOCK_S = 300.0
LEAVE_S = 10.0
STOP_S = 60.0
BEAT_S = 0.01

RUDRA = "import sys; from rudra_zmq.cli.main import main; sys.exit(main(sys.argv[1:]))"
TRANSPORTS = ("shm", "ipc", "tcp")
PROTOCOLS = ("hardsync", "softsync", "async")


@dataclass(frozen=True)
class Setting:
    """A job to time. size: bytes of the model in float32. n: of softsync. sets: as with ``rudra run -s``."""

    size: int
    learners: int
    transport: str = "shm"
    protocol: str = "hardsync"
    n: int = 1
    rule: str = "momentum"
    minibatch: int = 1
    lr: float = 1e-6
    sets: tuple[str, ...] = ()

    @property
    def c(self) -> int:
        """Gradients of an update."""
        return {"hardsync": self.learners, "softsync": self.learners // self.n, "async": 1}[self.protocol]

    @property
    def traffic(self) -> int:
        """Bytes of the gradients and weights that an update takes over the transport."""
        return 2 * self.c * self.size


def job_file(setting: Setting, module: str, args: Sequence[str]) -> str:
    """The job file; ``module`` is what the learners run."""
    sync = [f"protocol = {toml_value(setting.protocol)}"]
    if setting.protocol == "softsync":
        sync.append(f"n = {setting.n}")
    return "\n".join(
        [
            "[job]",
            'name = "bench"',
            "[run]",
            f"module = {toml_value(module)}",
            f"args = {toml_value(list(args))}",
            "[learners]",
            f"count = {setting.learners}",
            f"minibatch = {setting.minibatch}",
            "threads = 1",
            'on_lost = "fail"',
            "restarts = 0",
            'step_timeout = "2h"',  # others have their turn
            "[sync]",
            *sync,
            "[update]",
            f"rule = {toml_value(setting.rule)}",
            f"lr = {setting.lr}",
            'schedule = {kind = "constant"}',
            "[servers]",
            'snapshot = "none"',
            "",
        ]
    )


class Product(Contender):
    """``with Product(...) as job: job.block(100)``. RudraError, one line, where it cannot be, or ends."""

    def __init__(self, name: str, setting: Setting, module: str, args: Sequence[str]) -> None:
        """The learners get ``args`` after the control's path."""
        super().__init__()
        self.name = name
        self.setting = setting
        self._module, self._args = module, list(args)
        self._process: subprocess.Popen[bytes] | None = None
        self._node = 0

    def _start(self) -> None:
        with Control(self._folder) as control:
            file = self._folder / "bench.toml"
            file.write_text(job_file(self.setting, self._module, [str(control.path), *self._args]))
            sets = [word for text in self.setting.sets for word in ("-s", text)]
            env = dict(os.environ)
            env |= {
                "RUDRA_PSD_DATA": self.setting.transport,
                "RUDRA_PATHS_STATE": str(self._folder / "s"),
                "RUDRA_PATHS_RUNTIME": str(self._folder / "r"),
            }
            with open(self._folder / "out", "wb") as out:
                self._process = subprocess.Popen(
                    tied([sys.executable, "-c", RUDRA, "run", *sets, str(file)]),
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,  # Ctrl-C is the benchmark's to handle
                )
            self._group = control.gather(self.name, self.setting.learners, self._check, START_S)
        self._node = node_below(self._process.pid)

    def _check(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            said = self._said().strip().splitlines()
            why = [line for line in said if "Fix:" in line or "FAILED" in line] or said
            text = f"the job ended: {why[-1].removeprefix('rudra: ') if why else 'it said nothing'}"
            raise UsageError(text) if self._process.returncode == EXIT_USAGE else RudraError(text)

    def _said(self) -> str:
        return (self._folder / "out").read_text(errors="replace")

    # ---- what it is

    @property
    def transport(self) -> str:
        """What the learners use, which is not always what was asked for."""
        assert self._group is not None
        asked = self.setting.transport
        return asked if asked != "shm" or all(f.get("shared", True) for f in self._group.facts) else "ipc"

    @property
    def weights(self) -> str:
        """How new weights come to a learner."""
        assert self._group is not None
        return "copy" if all(f.get("copied", True) for f in self._group.facts) else "shared"

    @property
    def encrypted(self) -> bool:
        """Whether what passes between node and learners is."""
        assert self._group is not None
        return self.setting.transport == "tcp" and all(f.get("encrypt", False) for f in self._group.facts)

    # ---- rounds

    def block(self, rounds: int) -> Block:
        """So many pushes by each learner. The seconds are those of an update."""
        updates = rounds * self.setting.learners / self.setting.c
        return self._block(rounds, updates, self.setting.protocol == "hardsync")

    def steps(self, rounds: int) -> Block:
        """So many steps of each learner. The seconds are those of a step of all of them, pauses and all."""
        return self._block(rounds, rounds, False)

    def _block(self, rounds: int, updates: float, in_step: bool) -> Block:
        assert self._group is not None
        cpu, faults = usage_of(self._node)
        answers = self._group.do({"rounds": rounds}, BLOCK_S)
        after = usage_of(self._node)
        return Block.of(answers, updates=updates, in_step=in_step, cpu=after[0] - cpu, faults=after[1] - faults)

    # ---- the end

    def close(self) -> None:
        """End the job at once: nobody wants its weights. Nothing of it is left."""
        if self._group is not None:
            self._group.close()
        process = self._process
        if process is not None and process.poll() is None:
            with undisturbed():
                self._stop(process)
        self._temporary.close()

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """As two times Ctrl-C: the second one, once the first was heard, does without a snapshot.

        Learners go first: whoever is killed leaves the processes that load its data.
        """
        facts = self._group.facts if self._group is not None else []
        end = time.monotonic() + LEAVE_S
        while any(Path("/proc", str(f["pid"])).exists() for f in facts) and time.monotonic() < end:
            time.sleep(BEAT_S)
        end = time.monotonic() + STOP_S
        process.terminate()
        while process.poll() is None and "stopping:" not in self._said() and time.monotonic() < end:
            time.sleep(BEAT_S)
        process.terminate()
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # psd and learnerd end with it
            process.wait()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and TERM wait: what is under way has a deadline."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def node_below(pid: int) -> int:
    """The node among the descendants of a process. RudraError where there is none."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    below = {pid}
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    for candidate in sorted(below):
        try:
            words = Path(f"/proc/{candidate}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rudra_zmq.node" in words:
            return candidate
    raise RudraError("the job's node is not to be found", where="rudra bench")
