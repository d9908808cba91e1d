"""The flags of roundtrip, peers and job: what is measured for them, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from typing import Any

import pytest

from rudra_zmq.bench import measure
from rudra_zmq.bench.__main__ import main
from rudra_zmq.bench.measure import FULL, QUICK, Effort
from rudra_zmq.bench.peers import TUNED, environment
from rudra_zmq.bench.product import Setting
from tests.unit.bench.test_rows import ROW


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What would have been measured."""
    calls: list[tuple] = []

    def roundtrip(setting: Setting, others: tuple[str, ...], effort: Effort) -> tuple[Any, str]:
        calls.append((setting, effort, others))
        return [replace(ROW, size=setting.size)], "compiled"

    def peers(settings: list[Setting], kinds: list[str], effort: Effort) -> list[Any]:
        calls.append((settings, kinds, effort))
        return [ROW]

    def job(*args: Any) -> list[Any]:
        calls.append(args)
        return [replace(ROW, what="job", samples_per_s=1.0)]

    monkeypatch.setattr(measure, "roundtrip", roundtrip)
    monkeypatch.setattr(measure, "peers", peers)
    monkeypatch.setattr(measure, "job", job)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else object())
    return calls


def test_roundtrip_makes_a_row_for_each_combination(seen: list[tuple], capsys: pytest.CaptureFixture[str]) -> None:
    args = "--transport shm --transport tcp --size 350kB --size 1MB --learners 3 --protocol softsync --n 3 --rule adam"
    assert (
        main(
            [
                "roundtrip",
                *args.split(),
                "--set",
                "wire.compress=none",
                "--against",
                "update.lr=1",
                "--turns",
                "7",
                "--json",
            ]
        )
        == 0
    )
    assert [setting for setting, *_ in seen] == [
        Setting(size, 3, transport, "softsync", 3, "adam", sets=("wire.compress=none",))
        for size in (350_000, 1_000_000)
        for transport in ("shm", "tcp")
    ]
    assert {effort for _, effort, _ in seen} == {Effort(7, FULL.seconds)}
    assert {others for *_, others in seen} == {("update.lr=1",)}
    told = json.loads(capsys.readouterr().out)
    assert told["schema_version"] == 1
    assert [row["size"] for row in told["rows"]] == [350_000, 350_000, 1_000_000, 1_000_000]


def test_roundtrip_by_default_and_quick(seen: list[tuple]) -> None:
    assert main(["roundtrip"]) == 0
    whole = [setting for setting, *_ in seen]
    assert {(s.transport, s.learners, s.size, s.protocol) for s in whole} == {
        (t, c, s, "hardsync") for t in ("shm", "tcp") for c in (1, 4) for s in (350_000, 25_000_000)
    }
    seen.clear()
    assert main(["roundtrip", "--quick"]) == 0
    assert {effort for _, effort, _ in seen} == {QUICK}
    assert len(seen) < len(whole)


def test_peers_share_the_jobs_of_all_transports(seen: list[tuple]) -> None:
    assert main(["peers", "--size", "25MB", "--learners", "4"]) == 0
    ((settings, kinds, effort),) = seen
    assert settings == [Setting(25_000_000, 4, "shm"), Setting(25_000_000, 4, "tcp")]
    assert (kinds, effort) == (["limits", "all-reduce", "send-recv", "sockets", "rpc"], FULL)


def test_job_holds_one_against_a_loop_and_four_against_ddp(seen: list[tuple]) -> None:
    assert main(["job", "--turns", "3"]) == 0
    assert seen == [(1, ["hardsync"], "plain", 1, 150, 3), (4, ["hardsync", "softsync"], "ddp", 1, 150, 3)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("roundtrip --size much", "much"),
        ("roundtrip --size 3B", "--size 3B holds no number (rudra bench). Fix: give 4 bytes or more"),
        ("roundtrip --learners 2 --protocol softsync --n 3", "--n 3 is more than 2 learners"),
        ("roundtrip --learners 0", "--learners"),
        ("peers --with ray", "ray is not installed (rudra bench). Fix: pip install ray"),
        ("peers --rule adam", "--rule"),
        ("job --learners 2", "--learners"),
    ],
)
def test_what_is_refused_starts_nothing(
    seen: list[tuple], capsys: pytest.CaptureFixture[str], args: str, words: str
) -> None:
    assert main(args.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert seen == []


@pytest.mark.parametrize("verb", ["peers", "job"])
def test_without_torch_the_fix_is_said(
    seen: list[tuple], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([verb]) == 2
    said = "rudra: torch is not installed (rudra bench). Fix: pip install 'rudra-zmq[torch]'\n"
    assert capsys.readouterr().err == said
    assert main(["peers", "--peer", "limits"]) == 0  # which needs none


def test_what_does_not_fit_into_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "available", lambda: 10_000_000_000)
    assert main(["roundtrip", "--size", "1GB", "--learners", "4", "--transport", "shm"]) == 2
    assert "1 GB with 4 learners takes about 30 GB of memory, 10 GB are free" in capsys.readouterr().err
    measure.room([Setting(250_000_000, 4)], peer=False)


def test_peers_have_malloc_tuned_and_stay_on_loopback() -> None:
    env = environment({"PATH": "/bin", "GLOO_SOCKET_IFNAME": "eth0"})
    assert env == {"PATH": "/bin", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", **TUNED}
