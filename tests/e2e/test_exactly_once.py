"""Every sample counts once per epoch, seen from outside: the script's own notes joined with the decision log."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .harness import Rudra, decisions, wait_for

SCRIPT = Path(__file__).parent / "scripts" / "indexed.py"
SAMPLES, MU, EPOCHS = 1000, 7, 3  # 1000 = 35 * 28 + 20: the last round of an epoch is short


def seen(folder: Path) -> dict[tuple[int, int, int], list[int]]:
    """Gradient id -> indices, as the learners wrote them down."""
    notes: dict[tuple[int, int, int], list[int]] = {}
    for path in folder.glob("seen-*.jsonl"):
        for line in path.read_text().splitlines():
            note: dict[str, Any] = json.loads(line)
            if "id" in note:
                rank, incarnation, seq = note["id"]
                notes[rank, incarnation, seq] = note["indices"]
    return notes


def check(folder: Path, log: Path, epochs: int = EPOCHS) -> None:
    """Each index exactly once per epoch among the applied gradients; ids never twice."""
    notes = seen(folder)
    counts: dict[int, Counter[int]] = {}
    used: Counter[tuple[int, int, int]] = Counter()
    for record in decisions(log):
        for gid, ranges, count in zip(record["ids"], record["ranges"], record["counts"], strict=True):
            key = (gid[0], gid[1], gid[2])
            used[key] += 1
            indices = notes[key]
            assert len(indices) == count == sum(b - a for _, a, b in ranges)
            (epoch,) = {e for e, _, _ in ranges}
            counts.setdefault(epoch, Counter()).update(indices)
    assert set(used.values()) == {1}
    assert sorted(counts) == list(range(epochs))
    for epoch, counter in counts.items():
        assert counter == Counter(range(SAMPLES)), f"epoch {epoch}: {counter.most_common(3)}, {len(counter)} distinct"


def arguments(protocol: str, folder: Path) -> list[str | Path]:
    """The command line of a job with four learners."""
    return [
        "run", "--json", "-s", f"sync.protocol={protocol}", "-s", f"job.epochs={EPOCHS}", "-s", "learners.count=4",
        "-s", "learners.threads=1", SCRIPT, folder, str(SAMPLES), str(MU),
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
def test_every_index_once_per_epoch(rudra: Rudra, tmp_path: Path, protocol: str) -> None:
    done = rudra(*arguments(protocol, tmp_path)).json
    assert done["state"] == "DONE"
    assert [row["distinct"] for row in done["epochs"]] == [SAMPLES] * EPOCHS
    check(tmp_path, Path(done["folder"]) / "decisions.jsonl")


@pytest.mark.parametrize("protocol", ["hardsync", "softsync", "async"])
def test_every_index_once_per_epoch_when_a_learner_is_killed(rudra: Rudra, tmp_path: Path, protocol: str) -> None:
    with rudra.start(*arguments(protocol, tmp_path)) as run:
        path = tmp_path / "seen-2-1.jsonl"

        def middle() -> int | None:
            """The pid of rank 2 once it is well inside an epoch."""
            if not path.exists():
                return None
            lines = path.read_text().splitlines()
            return int(json.loads(lines[0])["pid"]) if len(lines) > 12 else None

        os.kill(wait_for("a dozen steps of rank 2", middle, 60, run), signal.SIGKILL)
        out, err = run.communicate(timeout=200)
    assert run.returncode == 0, out + err
    done = json.loads(out.strip().splitlines()[-1])
    if protocol == "hardsync":  # elsewhere the others may have done all the rest before it is back
        assert (tmp_path / "seen-2-2.jsonl").exists(), "the next incarnation never came"
    check(tmp_path, Path(done["folder"]) / "decisions.jsonl")
