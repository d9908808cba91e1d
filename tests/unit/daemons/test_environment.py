"""R11: nobody else's launcher, no secret, no setting of the daemon reaches a child."""

from __future__ import annotations

from pathlib import Path

import pytest

import rudra_zmq
from rudra_zmq.config.host import HostSection
from rudra_zmq.daemons.environment import base_environment, learner_environment, node_environment

FOREIGN = {
    "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "MASTER_PORT": "1", "SLURM_PROCID": "1",
    "OMPI_COMM_WORLD_RANK": "1", "RUDRA_TOKEN_FILE": "/t", "RUDRA_PSD_LISTEN": "tcp://127.0.0.1:1", "LD_PRELOAD": "x",
    "NOTIFY_SOCKET": "/n", "OMP_NUM_THREADS": "64", "PYTHONSTARTUP": "x", "SSH_AUTH_SOCK": "s", "PYTHONPATH": "/elsewhere",
}  # fmt: skip
OWN = {"HOME": "/home/u", "USER": "u", "LANG": "C.UTF-8", "TZ": "UTC", "PATH": "/bin", "RUDRA_DATA": "/d"}


def test_a_learner_gets_the_list_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["/somewhere"])
    env = learner_environment(spec=Path("/r/l.json"), threads=2, job={"MY": "1", "TZ": "CET"}, source=FOREIGN | OWN)
    assert env == OWN | {
        "TZ": "CET", "MY": "1", "RUDRA_LEARNER": "/r/l.json", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "NUMEXPR_NUM_THREADS": "2", "RUDRA_PLACES": "{}",
    }  # fmt: skip


def test_the_job_may_set_threads_of_its_own() -> None:
    env = learner_environment(spec=Path("/x"), threads=2, job={"OMP_NUM_THREADS": "1"}, source=OWN)
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"]) == ("1", "2")


def test_a_node_has_one_thread_and_no_data_of_others() -> None:
    env = node_environment(FOREIGN | OWN)
    assert env["OPENBLAS_NUM_THREADS"] == "1"
    assert not set(env) & (set(FOREIGN) - {"OMP_NUM_THREADS", "PYTHONPATH"})


@pytest.mark.parametrize(
    ("python_path", "first", "passed"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_the_package_is_passed_on_only_where_a_path_found_it(
    monkeypatch: pytest.MonkeyPatch, python_path: bool, first: bool, passed: bool
) -> None:
    root = str(Path(rudra_zmq.__file__).resolve().parent.parent)
    monkeypatch.setattr("sys.path", [root if first else "/somewhere"])
    env = base_environment({"PYTHONPATH": f"/a:{root}" if python_path else "/a"})
    assert env.get("PYTHONPATH") == (root if passed else None)
    assert env["PATH"]


def test_a_hosts_own_is_weaker_than_the_jobs_and_stronger_than_the_daemons() -> None:
    host = HostSection(env={"MY": "host", "TZ": "host", "NEW": "host"}, paths={"data": "/nvme/a b"})
    env = learner_environment(spec=Path("/s"), threads=1, job={"MY": "job"}, host=host, source=OWN)
    assert (env["MY"], env["TZ"], env["NEW"], env["RUDRA_PLACES"]) == ("job", "host", "host", '{"data": "/nvme/a b"}')


@pytest.mark.parametrize(("device", "seen"), [("GPU-1dc8", "GPU-1dc8"), ("", ""), (None, None)])
def test_the_gpu_is_not_for_the_job_to_choose(device: str | None, seen: str | None) -> None:
    job = {} if device is None else {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    env = learner_environment(spec=Path("/s"), threads=1, job=job, device=device, source=OWN)
    assert env.get("CUDA_VISIBLE_DEVICES") == seen
    assert ("CUDA_DEVICE_ORDER" in env) == (device is not None)
