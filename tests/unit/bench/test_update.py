"""`rudra bench update`: its rows, what it counts as traffic, and the kernel that it holds updates against."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from rudra_zmq.bench import update as bench_update
from rudra_zmq.bench.__main__ import main
from rudra_zmq.bench.stream import SHAPES, Stream
from rudra_zmq.bench.update import Case, measure
from rudra_zmq.cli.main import main as rudra
from rudra_zmq.update import compiled, jit
from rudra_zmq.update.rules import RULES, aligned

NAMES = {
    "what", "rule", "c", "size", "threads", "backend", "encoding", "clip", "median_ms", "gb_per_s", "against", "ratio",
}  # fmt: skip


def rows(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict]:
    assert main(["update", *args, "--json", "--turns", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 1
    return told["rows"]


def test_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llvmlite")
    told = rows(capsys, "--size", "4kB", "--size", "8kB", "--rule", "sgd", "--rule", "adam", "--threads", "1")
    assert [(r["size"], r["c"], r["rule"]) for r in told] == [
        (size, c, rule) for size in (3840, 7936) for c in (1, 4) for rule in ("sgd", "adam")
    ]
    for row in told:
        assert set(row) == NAMES
        assert (row["what"], row["backend"], row["against"], row["threads"]) == (
            "update",
            "compiled",
            "stream kernel",
            1,
        )
        streams = {"sgd": 0, "adam": 4}[row["rule"]] + 3 + row["c"]
        assert row["gb_per_s"] == pytest.approx(streams * row["size"] / row["median_ms"] / 1e6)
        assert row["ratio"] > 0


@pytest.mark.parametrize("encoding", ["float16", "bfloat16"])
@pytest.mark.parametrize("clip", [False, True])
def test_other_cases(encoding: str, clip: bool) -> None:
    row = measure(Case("momentum", 2, 8192, 2, "numpy", encoding, clip), 1)
    assert (row.backend, row.encoding, row.clip) == ("numpy", encoding, clip)
    assert Case("momentum", 2, 8192, 2, "numpy", encoding, clip).traffic == 2048 * (4 * 5 + 2 * 2)


def test_all_rules_and_both_counts_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Case] = []

    def note(case: Case, turns: int) -> bench_update.Row:
        seen.append(case)
        return bench_update.Row(
            "update", case.rule, case.c, case.size, 1, "numpy", "float32", False, 1.0, 1.0, None, None
        )

    monkeypatch.setattr("rudra_zmq.bench.__main__.measure", note)
    assert main(["update"]) == 0
    out, err = capsys.readouterr()
    assert {case.rule for case in seen} == set(RULES)
    assert {(case.c, case.size) for case in seen} == {
        (c, s) for c in (1, 4) for s in (350_000, 25_000_000, 100_000_000)
    }
    assert len(out.splitlines()) == len(seen) + 1
    assert "pip install 'rudra-zmq[fast]'" in err
    seen.clear()
    assert main(["update", "--quick"]) == 0
    assert len(seen) == 3 * 2 * 2
    assert {case.threads for case in seen} == {1}


def test_a_slow_row_is_followed_by_advice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def note(case: Case, turns: int) -> bench_update.Row:
        ratio = 0.5 if case.c == 1 else 0.9
        return bench_update.Row("update", "sgd", case.c, 1, 1, "compiled", "float32", False, 1.0, 1.0, "stream", ratio)

    monkeypatch.setattr("rudra_zmq.bench.__main__.measure", note)
    assert main(["update", "--rule", "sgd", "--size", "4kB", "--threads", "1"]) == 0
    assert "1 of 2 rows below 0.85" in capsys.readouterr().err


def test_without_a_compiler_there_is_no_limit_to_hold_it_against(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no() -> None:
        raise jit.Unavailable("none here")

    monkeypatch.setattr(jit, "_binding", no)
    monkeypatch.setattr(compiled, "_code", compiled._code.__wrapped__)
    (row,) = rows(capsys, "--size", "4kB", "--rule", "sgd", "--c", "1", "--threads", "1")
    assert (row["backend"], row["against"], row["ratio"]) == ("numpy", None, None)
    assert main(["update", "--backend", "compiled", "--size", "4kB"]) == 2
    assert "no compiled update here: none here. Fix:" in capsys.readouterr().err


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_stream_kernel_reads_and_writes_what_it_says(shape: tuple[int, bool], threads: int) -> None:
    pytest.importorskip("llvmlite")
    n = 64 * 7
    w, out, first, state, other = (aligned(n) for _ in range(5))
    half = aligned(n, np.uint16)
    for k, vector in enumerate((w, first, state, other)):
        vector[:] = 10.0**k
    stream = Stream([half, first], [state, other], threads, shape)
    stream(w, out)
    stream.close()
    assert (state == 111.0).all()
    assert (other == 1111.0).all()
    assert (out == 1111.0).all()


def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("Usage: rudra bench")


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["update", "--size", "much"]) == 2
    assert "much" in capsys.readouterr().err


def test_the_command_line_hands_it_over(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, argv: started.append([program, *argv]))
    rudra(["bench", "update", "--quick", "--help"])
    assert started == [[sys.executable, sys.executable, "-m", "rudra_zmq.bench", "update", "--quick", "--help"]]
