"""What people's scripts do (SCENARIOS S27, S28, S36, S37, R1, R7 to R11, R13), by real processes from `rudra run`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from .harness import Result, Rudra, decisions, wait_for

torch = pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent / "scripts"
EVERYDAY = SCRIPTS / "everyday.py"
CORES = len(os.sched_getaffinity(0))


def module_of(path: Path) -> ModuleType:
    """A script as a module: its model and data, for the test's own arithmetic."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sets(**keys: object) -> list[str]:
    """``-s`` for each key, written with __ for the dot."""
    return [arg for key, value in keys.items() for arg in ("-s", f"{key.replace('__', '.')}={value}")]


def notes(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """Gradient id -> indices, of every learner; the batches of an accumulated gradient are added up."""
    found: dict[tuple[int, ...], list[int]] = {}
    for line in lines(folder, "seen-*.jsonl"):
        found.setdefault(tuple(line["id"]), []).extend(line["indices"])
    return found


def lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob(pattern)) for line in path.read_text().splitlines()]


def applied(done: dict[str, Any], folder: Path) -> dict[int, Counter[int]]:
    """Epoch -> how often each index is part of an applied gradient; ranges, counts and notes agree."""
    seen = notes(folder)
    counts: dict[int, Counter[int]] = {}
    for record in decisions(Path(done["folder"]) / "decisions.jsonl"):
        for gid, ranges, count in zip(record["ids"], record["ranges"], record["counts"], strict=True):
            indices = seen[tuple(gid)]
            assert len(indices) == count == sum(stop - start for _, start, stop in ranges)
            (epoch,) = {epoch for epoch, _, _ in ranges}
            counts.setdefault(epoch, Counter()).update(indices)
    return counts


def each_once(done: dict[str, Any], folder: Path, samples: int) -> None:
    counts = applied(done, folder)
    assert sorted(counts) == list(range(len(done["epochs"])))
    assert all(counter == Counter(range(samples)) for counter in counts.values())
    assert [row["distinct"] for row in done["epochs"]] == [samples] * len(counts)


def replayed(done: dict[str, Any], folder: Path, *, clip: bool = False, gamma: float = 1.0) -> dict[str, np.ndarray]:
    """The job's updates made by torch alone: the mean over the samples of each, from the notes of its gradients."""
    everyday = module_of(EVERYDAY)
    torch.manual_seed(1)
    model = everyday.net()
    opt = everyday.optimizer(model)
    train, seen = everyday.data(), notes(folder)
    for record in decisions(Path(done["folder"]) / "decisions.jsonl"):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for gid, count in zip(record["ids"], record["counts"], strict=True):
            x, y, _ = train[seen[tuple(gid)]]
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if clip:
                everyday.clip(model)
            for t, p in zip(total, model.parameters(), strict=True):
                t += p.grad * count / sum(record["counts"])
        for t, p in zip(total, model.parameters(), strict=True):
            p.grad = t
        (epoch,) = {epoch for ranges in record["ranges"] for epoch, _, _ in ranges}
        opt.param_groups[0]["lr"] = rate = 0.2 * gamma**epoch
        assert record["lr"] == pytest.approx(rate)
        opt.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6, err_msg=name)


# ------------------------------------------------------------------------------------- a whole everyday script


def test_an_everyday_script(rudra: Rudra, tmp_path: Path) -> None:
    """Its arguments, its environment and its threads; a schedule, clipping, GradScaler; the servers do what torch does."""
    strangers = {"RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1",
                 "SLURM_PROCID": "3", "SLURM_NTASKS": "9", "OMP_NUM_THREADS": "64", "PYTHONSTARTUP": "/no/such"}  # fmt: skip
    rudra.env.update(strangers)
    odd = ["--log", "-s", "a b", "", "--", "-s", "sync.n=9", "--json", "*", "$HOME"]
    result = rudra(
        "run", "--json", *sets(sync__protocol="hardsync", learners__count=2, job__epochs=3), EVERYDAY, tmp_path,
        "amp", "scheduler", *odd,
    )  # fmt: skip
    done = result.json

    for rank in (0, 1):
        who = json.loads((tmp_path / f"who-{rank}-1.json").read_text())
        assert who["argv"][1:] == [str(tmp_path), "amp", "scheduler", *odd]  # R1
        assert not (strangers.keys() - {"OMP_NUM_THREADS"}) & who["env"].keys()  # R11
        assert not [name for name in who["env"] if name.startswith(("SLURM", "TORCHELASTIC"))]
        threads = max(1, CORES // 2)  # R13
        assert who["threads"] == threads and who["env"]["OMP_NUM_THREADS"] == str(threads)
        assert f"{threads} thread{'s' if threads > 1 else ''} each, {CORES} cores" in result.err

    assert result.err.count("hardsync: lambda 2, n 1, c 2; global batch 8, rate 0.2") == 1  # S36
    assert "global batch" not in result.err.split("rate 0.2", 1)[1]
    log = (Path(done["folder"]) / "logs" / "learner-0.log").read_text()
    assert log.count("the script's batch_size is used") == 1

    assert done["gradients"]["skipped"] == 1 and done["gradients"]["dropped"] == {}  # R9: the step of GradScaler
    each_once(done, tmp_path, 101)  # S28: 101 = 12 * 8 + 5
    assert [row["updates"] for row in done["epochs"]] == [14, 13, 13]  # the round of the skip was half a one
    weights = load_file(done["weights"])
    close(weights, replayed(done, tmp_path, clip=True, gamma=0.5))  # R8, R9
    assert [row["lr"] for row in done["epochs"]] == pytest.approx([0.2, 0.1, 0.05])
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    close(weights, {name: value.numpy() for name, value in saved["model"].items()})
    assert all(torch.isfinite(v).all() and not torch.equal(v, saved["model"][k]) for k, v in saved["average"].items())


def test_accumulation_leaves_a_remainder(rudra: Rudra, tmp_path: Path) -> None:
    """R7: 101 = 8 * 12 + 5, the last gradient of an epoch is of two batches, 4 + 1, and weighs 5 samples."""
    result = rudra(
        "run", "--json", *sets(sync__protocol="hardsync", learners__count=2, job__epochs=2), EVERYDAY, tmp_path,
        "accumulate",
    )  # fmt: skip
    done = result.json
    assert "c 2; global batch 24, rate 0.2" in result.err
    each_once(done, tmp_path, 101)
    records = decisions(Path(done["folder"]) / "decisions.jsonl")
    assert [record["counts"] for record in records] == 2 * [*4 * [[12, 12]], [5]]
    close(load_file(done["weights"]), replayed(done, tmp_path))


@pytest.mark.parametrize("protocol", ["hardsync", "async"])
def test_less_data_than_one_round(rudra: Rudra, tmp_path: Path, protocol: str) -> None:
    """S28: 5 samples for three learners of 4; under hardsync the third one never gets any, and waits for nobody."""
    args = sets(sync__protocol=protocol, learners__count=3, job__epochs=4)
    done = rudra("run", "--json", *args, EVERYDAY, tmp_path, "tiny").json
    assert done["state"] == "DONE" and done["samples"] == 20
    each_once(done, tmp_path, 5)
    if protocol == "hardsync":
        assert (tmp_path / "seen-2-1.jsonl").read_text() == "" and done["updates"] == 4


# ------------------------------------------------------------------------------------------- parts of models


def test_frozen_unused_and_normalised_parts(rudra: Rudra, tmp_path: Path) -> None:
    """S27, S37: what gets no gradient stays and is named once; statistics are the mean of those of an update."""
    done = rudra("run", "--json", *sets(learners__count=2, job__epochs=3), SCRIPTS / "parts.py", tmp_path).json
    parts = module_of(SCRIPTS / "parts.py")
    torch.manual_seed(1)
    first = {name: value.numpy() for name, value in parts.Net().state_dict().items()}
    weights = load_file(done["weights"])
    assert weights.keys() == first.keys()
    moved = {name for name in weights if not np.array_equal(weights[name], first[name])}
    assert moved == {name for name in weights if not name.startswith(("fixed.", "spare."))}
    for rank in (0, 1):
        log = (Path(done["folder"]) / "logs" / f"learner-{rank}.log").read_text()
        assert log.count("parameters without a gradient") == 1
        assert "names=spare.weight,spare.bias" in log

    buffers = {tuple(note["id"]): note for note in lines(tmp_path, "buffers-*.jsonl")}
    last = decisions(Path(done["folder"]) / "decisions.jsonl")[-1]
    mine = [buffers[tuple(gid)] for gid in last["ids"]]
    for name in ("norm.running_mean", "norm.running_var"):
        expected = np.average([note[name] for note in mine], axis=0, weights=last["counts"])
        np.testing.assert_allclose(weights[name], expected, rtol=1e-6)
    assert weights["norm.num_batches_tracked"] == max(note["norm.num_batches_tracked"] for note in mine)

    model = parts.Net()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    accuracy = parts.test(model)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"tests-{rank}.json").read_text()) == [accuracy] * 2
    assert done["accuracy"] == done["epochs"][-1]["accuracy"] == pytest.approx(accuracy)


def test_a_learner_that_sends_nan(rudra: Rudra, tmp_path: Path) -> None:
    """S37b: one broken step of rank 1 costs nothing; a broken sample is skipped, with its batch, after two attempts."""
    result = rudra("run", "--json", *sets(learners__count=2, job__epochs=3), EVERYDAY, tmp_path, "nan")
    done = result.json
    assert done["gradients"]["dropped"] == {"nonfinite": 1}
    assert result.err.count("warning: a gradient of rank 1 is NaN or infinite and is refused") == 1
    each_once(done, tmp_path, 101)
    assert all(np.isfinite(w).all() for w in load_file(done["weights"]).values())


def test_a_sample_that_is_nan(rudra: Rudra, tmp_path: Path) -> None:
    """S37b: given back once, then counted as skipped with its batch; every epoch ends, nothing counts twice."""
    done = rudra("run", "--json", *sets(learners__count=2, job__epochs=2), EVERYDAY, tmp_path, "poison").json
    assert done["state"] == "DONE" and done["gradients"]["dropped"] == {"nonfinite": 4}
    for epoch, counter in applied(done, tmp_path).items():
        missing = set(range(101)) - set(counter)
        assert set(counter.values()) == {1} and 17 in missing and len(missing) <= 4
        assert done["epochs"][epoch]["distinct"] == len(counter)


# ------------------------------------------------------------------------------------------------ membership


def test_the_chief_and_the_figures_move_when_rank_0_is_killed(rudra: Rudra, tmp_path: Path) -> None:
    """R10: rank 1 writes once rank 0 is dead. S36: lambda, global batch and rate are said anew."""
    keys = sets(
        sync__protocol="hardsync", learners__count=2, job__epochs=2, learners__restarts=0, learners__deadline="10s",
        update__rule="momentum", update__lr=0.1, update__scaling="linear", update__reference_batch=8,
        update__schedule__kind="constant",
    )  # fmt: skip
    with rudra.start("run", "--json", *keys, EVERYDAY, tmp_path, "slow") as run:
        wait_for("ten steps", lambda: len(lines(tmp_path, "seen-0-1.jsonl")) > 10, 60, run)
        os.kill(lines(tmp_path, "who-0-1.json")[0]["pid"], signal.SIGKILL)
        out, err = run.communicate(timeout=100)
    assert run.returncode == 0, out + err
    done = Result(0, out, err).json
    assert "warning: rank 0 (incarnation 1): killed by SIGKILL, is not started again" in err
    assert all(note["chief"] for note in lines(tmp_path, "seen-0-1.jsonl"))
    chief = [note["chief"] for note in lines(tmp_path, "seen-1-1.jsonl")]
    assert chief == sorted(chief) and set(chief) == {False, True}  # once, and for good
    assert lines(tmp_path, "seen-1-1.jsonl")[-1]["size"] == 1
    figures = [line for line in err.splitlines() if "global batch" in line]
    assert [line.partition("hardsync: ")[2] for line in figures] == [
        "lambda 2, n 1, c 2; global batch 8, rate 0.1", "lambda 1, n 1, c 1; global batch 4, rate 0.05",
    ]  # fmt: skip
    rates = [record["lr"] for record in decisions(Path(done["folder"]) / "decisions.jsonl")]
    assert rates == sorted(rates, reverse=True) and {rates[0], rates[-1]} == {0.1, 0.05}
    each_once(done, tmp_path, 101)


# --------------------------------------------------------------------------------------------- what is refused


def test_what_the_servers_cannot_do_is_refused_by_name(rudra: Rudra) -> None:
    """R9: two optimizers, another dtype, weights loaded after attach(); what can be done goes on in between."""
    result = rudra("run", *sets(learners__count=1), SCRIPTS / "refused.py", status=8)
    assert f"{CORES} thread{'s' if CORES > 1 else ''} each, {CORES} cores" in result.err  # R13: a lone learner has all
    said = rudra("logs", "--learner", "0").out
    assert "second optimizer: there is an optimizer already (learner.optimizer()). Fix: one optimizer with" in said
    assert "another dtype: parameter 0.weight became float64 on cpu after attach(). Fix: " in said
    assert [line for line in said.splitlines() if "| step " in line] == [
        "0| step 0 torch.float32", "0| step 1 torch.float32", "0| step 2 torch.bfloat16",
    ]  # fmt: skip
    assert "parameter 0.weight was changed outside the optimizer" in result.err
    assert "Fix: load weights before learner.attach(model)" in result.err
    assert "Traceback" not in result.err
