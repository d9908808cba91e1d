"""`rudra bench roundtrip`, `peers` and `job` as a person types them, with tiny models; what they leave is nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from .harness import Rudra, wait_for

FIELDS = {
    "what", "rule", "c", "size", "learners", "transport", "protocol", "weights", "encrypted", "median_ms", "gb_per_s",
    "faults", "cpu_s_per_gb", "against", "against_ms", "ratio", "samples_per_s",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _temporary(rudra: Rudra) -> None:
    """Temporary folders where they are looked at afterwards."""
    rudra.env["TMPDIR"] = os.environ["TMPDIR"]


def bench(rudra: Rudra, *args: str) -> list[dict]:
    done = rudra("bench", *args, "--quick", "--turns", "1", "--json", timeout=120)
    assert done.json["schema_version"] == 1
    rows = done.json["rows"]
    for row in rows:
        assert set(row) == FIELDS
        assert row["ratio"] == pytest.approx(row["against_ms"] / row["median_ms"])  # of one turn
        assert row["cpu_s_per_gb"] > 0
    left = list(Path(os.environ["TMPDIR"]).glob("rudra-bench-*"))
    assert not left
    return rows


def test_roundtrip_over_every_transport(rudra: Rudra) -> None:
    args = ["--size", "80kB", "--learners", "2", "--transport", "shm", "--transport", "tcp"]
    rows = bench(rudra, "roundtrip", *args, "--protocol", "hardsync", "--protocol", "async")
    assert [(r["transport"], r["protocol"], r["c"]) for r in rows] == [
        ("shm", "hardsync", 2), ("shm", "async", 1), ("tcp", "hardsync", 2), ("tcp", "async", 1),
    ]  # fmt: skip
    for row in rows:
        assert (row["what"], row["size"], row["learners"], row["against"]) == ("roundtrip", 79872, 2, "fused kernel")
        assert row["gb_per_s"] == pytest.approx(2 * row["c"] * row["size"] / row["median_ms"] / 1e6)
        assert row["ratio"] < 1


def test_a_setting_against_another(rudra: Rudra) -> None:
    args = ["--size", "80kB", "--learners", "1", "--transport", "shm", "--against", "learners.weights=copy"]
    rows = bench(rudra, "roundtrip", *args)
    assert [r["against"] for r in rows] == ["fused kernel", "with learners.weights=copy"]
    assert rows[0]["median_ms"] == rows[1]["median_ms"]


def test_a_rule_that_the_job_file_sets_is_refused_as_in_a_job(rudra: Rudra) -> None:
    done = rudra("bench", "roundtrip", "--size", "8kB", "-s", "update.momentun=0.5", status=None, timeout=60)
    assert done.status == 2
    assert "did you mean update.momentum?" in done.err.splitlines()[-1]


def test_peers_take_turns_with_ours(rudra: Rudra) -> None:
    pytest.importorskip("torch")
    args = ["--size", "80kB", "--learners", "2", "--transport", "shm", "--peer", "limits", "--peer", "all-reduce"]
    rows = bench(rudra, "peers", *args)
    label = "gloo all_reduce + fused step"
    assert {r["against"] for r in rows} >= {"fused kernel", "memcpy", label, f"{label}, consistent"}
    assert {(r["what"], r["transport"], r["protocol"]) for r in rows} == {("peers", "shm", "hardsync")}


@pytest.mark.parametrize("kind", ["send-recv", "rpc", "sockets"])
def test_peers_with_a_server(rudra: Rudra, kind: str) -> None:
    pytest.importorskip("torch")
    args = ["--size", "80kB", "--learners", "1", "--transport", "shm", "--peer", kind]
    assert len(bench(rudra, "peers", *args)) == 2


def test_a_job_against_a_plain_loop(rudra: Rudra) -> None:
    pytest.importorskip("torch")
    if "RUDRA_DATA" not in rudra.env:
        pytest.skip("no Fashion-MNIST here")
    (row,) = bench(rudra, "job", "--learners", "1", "--rounds", "4", "--workers", "0")
    assert (row["what"], row["transport"], row["against"]) == ("job", "shm", "plain PyTorch loop")
    assert row["samples_per_s"] == pytest.approx(32e3 / row["median_ms"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_is_interrupted_leaves_no_process(rudra: Rudra, number: int) -> None:
    process = rudra.start("bench", "roundtrip", "--size", "8kB", "--turns", "1000", "--learners", "1")

    def learners() -> bool:
        return any("rudra_zmq.bench.pusher" in command for command in rudra.processes().values())

    wait_for("learner", learners, alive=process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert (process.returncode, err.splitlines()[-1]) == (130, "rudra: interrupted")
        assert not list(Path(os.environ["TMPDIR"]).glob("rudra-bench-*"))
    wait_for("end", lambda: not rudra.processes(), 60)
    if number == signal.SIGKILL:  # the next one removes what nobody could
        for folder in Path(os.environ["TMPDIR"]).glob("rudra-bench-*"):
            os.utime(folder, (0, 0))
        rudra("bench", "roundtrip", "--size", "8kB", "--turns", "1", "--learners", "1", "--transport", "ipc")
        assert not list(Path(os.environ["TMPDIR"]).glob("rudra-bench-*"))


def test_what_is_missing_is_said_in_one_line(rudra: Rudra) -> None:
    done = rudra("bench", "peers", "--with", "ray", "--quick", status=None)
    if done.status == 0:
        pytest.skip("Ray is installed")
    assert done.status == 2
    assert json.dumps(done.err.strip()).endswith('is not installed (rudra bench). Fix: pip install ray"')
