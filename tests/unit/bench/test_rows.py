"""Rows: what each figure counts, how they are shown, and what is advised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rudra_zmq.bench.product import Setting, job_file
from rudra_zmq.bench.rows import Row, advice, cells, figure, row, show, size_text
from rudra_zmq.bench.timing import Block, Blocks
from rudra_zmq.config import job_from_toml

ROW = Row(
    "roundtrip", "momentum", 4, 25_000_000, 4, "shm", "hardsync", "shared", False, 10.0, 20.0, 0.1, 0.05,
    "fused kernel", 9.5, 0.95,
)  # fmt: skip


class Job:
    """What `row` reads of a job."""

    transport, weights, encrypted = "tcp", "copy", True

    def __init__(self, setting: Setting) -> None:
        self.setting = setting


def test_a_row_counts_gradients_and_weights_over_all_processes() -> None:
    ours = [Block(0.010, 5, cpu=0.2, faults=3), Block(0.020, 5, cpu=0.3, faults=1), Block(0.040, 5, 0.5, 0)]
    theirs = [Block(0.030, 9), Block(0.020, 9), Block(0.080, 9)]
    setting = Setting(1_000_000, 4, "tcp", "softsync", n=2)
    made: Any = Job(setting)
    told = row("roundtrip", made, Blocks({"ours": ours, "it": theirs}), "It", "it")
    assert setting.c == 2
    assert told.as_object() == {
        "what": "roundtrip",
        "rule": "momentum",
        "c": 2,
        "size": 1_000_000,
        "learners": 4,
        "transport": "tcp",
        "protocol": "softsync",
        "weights": "copy",
        "encrypted": True,
        "median_ms": pytest.approx(20.0),
        "gb_per_s": pytest.approx(2 * 2 * 1e6 / 0.020 / 1e9),
        "faults": pytest.approx(4 / 15),
        "cpu_s_per_gb": pytest.approx(1.0 / 15 / 0.004),
        "against": "It",
        "against_ms": pytest.approx(30.0),
        "ratio": pytest.approx(2.0),  # the median of 3, 1 and 2
        "samples_per_s": None,
    }


def test_a_job_tells_its_samples_per_second() -> None:
    made: Any = Job(Setting(1000, 4, minibatch=32))
    told = row("job", made, Blocks({"a": [Block(0.1, 3)], "b": [Block(0.2, 3)]}), "B", "b", name="a")
    assert told.samples_per_s == pytest.approx(1280.0)


@pytest.mark.parametrize(
    ("protocol", "n", "c"), [("hardsync", 1, 4), ("softsync", 1, 4), ("softsync", 3, 1), ("async", 1, 1)]
)
def test_the_job_file_is_one_without_keys_that_have_no_effect(protocol: str, n: int, c: int) -> None:
    setting = Setting(8, 4, "shm", protocol, n, "adam", 32, lr=0.5)
    loaded = job_from_toml(job_file(setting, "some.module", ["a b", "1"]), name="bench")
    job = loaded.job
    assert setting.c == c
    assert (job.run.module, list(job.run.args)) == ("some.module", ["a b", "1"])
    assert (job.learners.count, job.learners.minibatch, job.learners.threads) == (4, 32, 1)
    assert (job.sync.protocol, job.sync.n) == (protocol, n)
    assert (job.update.rule, job.update.lr, job.servers.snapshot) == ("adam", 0.5, "none")


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (350_000, "350 kB"), (24_999_936, "25 MB"), (2_200_000_000, "2.2 GB")]
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(("value", "text"), [(0.05512, "0.0551"), (17.62, "17.6"), (1429.4, "1429")])
def test_figures(value: float, text: str) -> None:
    assert figure(value) == text


def test_what_is_piped_is_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show([ROW, replace(ROW, transport="tcp", encrypted=True)])
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["SIZE", "LEARNERS", "TRANSPORT", "PROTOCOL"]
    assert head.endswith("RATIO")
    assert " ".join(first.split()) == "25 MB 4 shm hardsync c=4 shared 10 20 0.1 0.05 fused kernel 9.5 0.95"
    assert second.index("tcp, encrypted") == first.index("shm")


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    show([replace(ROW, samples_per_s=1234.4)])
    out = capsys.readouterr().out
    assert "samples/s" in out.splitlines()[0]
    assert "1234" in out.splitlines()[1]
    assert len(cells(ROW)) == 12


@pytest.mark.parametrize(
    ("one", "cores", "backend", "words"),
    [
        (ROW, 8, "compiled", None),
        (ROW, 2, "compiled", None),  # what is near its limit needs no more cores
        (ROW, 8, "numpy", "pip install 'rudra-zmq[fast]'"),
        (replace(ROW, transport="ipc"), 8, "compiled", "memory was not shared"),
        (replace(ROW, faults=600.0), 8, "compiled", "up to 600 page faults per round trip"),
        (replace(ROW, ratio=0.4), 8, "compiled", "the update alone is 40 % of a round trip"),
        (replace(ROW, ratio=0.4, weights="copy"), 8, "compiled", "weights = copy"),
        (replace(ROW, ratio=0.4), 2, "compiled", "4 learners and a node share 2 cores"),
        (replace(ROW, transport="tcp"), 4, "compiled", "4 learners and a node share 4 cores"),
        (replace(ROW, ratio=0.4, size=350_000), 8, "compiled", None),  # waking a process is the bound
    ],
)
def test_advice_is_drawn_from_the_row(one: Row, cores: int, backend: str, words: str | None) -> None:
    lines = advice([one], ["shm"], backend, cores)
    if words is None:
        assert lines == []
    else:
        assert any(words in line for line in lines), lines
