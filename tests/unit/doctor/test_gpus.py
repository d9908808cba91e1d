"""GPUs that are declared and absent, blocked or in use, told by a program that stands for nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rudra_zmq.daemons import hardware
from rudra_zmq.doctor import gpus
from rudra_zmq.doctor.findings import Finding

A, B = "GPU-1dc8a7f2-aaaa-bbbb-cccc-000000000001", "GPU-1dc8a7f2-aaaa-bbbb-cccc-000000000002"
LISTED = f"GPU 0: NVIDIA H200 (UUID: {A})\nGPU 1: NVIDIA H200 (UUID: {B})\n"


class Host:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self.dev, self.proc = folder / "bin", folder / "dev", folder / "proc"
        for path in (self.bin, self.dev, self.proc):
            path.mkdir()
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setattr(hardware, "PROC", self.proc / "driver/nvidia")

    def driver(self) -> None:
        (self.proc / "driver/nvidia").mkdir(parents=True)
        (self.proc / "driver/nvidia/version").write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.1\n"
        )
        (self.dev / "nvidia-uvm").touch()

    def smi(self, *, apps: str = "", mode: str = "Default", status: int = 0, says: str = LISTED) -> None:
        cards = f"0, {A}, {mode}\n1, {B}, Default\n"
        program = self.bin / "nvidia-smi"
        program.write_text(
            "#!/bin/sh\n"
            f"case $1 in -L) printf '%s' '{says}';; --query-gpu=index,uuid,compute_mode) printf '%s' '{cards}';;\n"
            f"--query-compute-apps=gpu_uuid,pid,process_name,used_memory) printf '%s' '{apps}';; *) exit 9;; esac\n"
            f"exit {status}\n"
        )
        program.chmod(0o755)

    def look(self, *declared: str) -> list[Finding]:
        return list(gpus.look(declared, self.dev, self.proc))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_what_is_declared_and_there_is_fine(host: Host) -> None:
    host.driver()
    host.smi()
    assert host.look("0", B) == []


def test_no_driver(host: Host) -> None:
    (found,) = host.look("0", "1")
    assert found.id == "gpu-absent" and found.level == "error"
    assert (
        "GPU 0 1 of [host] devices is not there: no NVIDIA driver is loaded" in found.text and "modprobe" in found.fix
    )


def test_a_driver_that_does_not_answer_as_it_should(host: Host) -> None:
    host.driver()
    host.smi(status=18, says="Failed to initialize NVML: Driver/library version mismatch")
    (found,) = host.look("0")
    assert "the driver is loaded, and Failed to initialize NVML: Driver/library version mismatch" in found.text
    assert "reboot" in found.fix


def test_a_gpu_that_is_not_there(host: Host) -> None:
    host.driver()
    host.smi()
    (found,) = host.look("0", "2")
    assert "GPU 2 of [host] devices is not there: nvidia-smi lists 2" in found.text and "nvidia-smi -L" in found.fix


def test_a_device_file_is_missing(host: Host) -> None:
    host.driver()
    host.smi()
    (host.dev / "nvidia-uvm").unlink()
    (found,) = host.look("0")
    assert found.id == "gpu-device-file" and "modprobe nvidia_uvm" in found.fix


def test_others_compute_on_it(host: Host) -> None:
    host.driver()
    for pid, words, parent in ((50, b"python\0train.py\0", 40), (40, b"python\0-m\0rudra_zmq.daemons.learnerd\0", 1)):
        (host.proc / str(pid)).mkdir()
        (host.proc / str(pid) / "cmdline").write_bytes(words)
        (host.proc / str(pid) / "stat").write_text(f"{pid} (a b) c) S {parent} 0")
    host.smi(apps=f"{A}, 50, python, 900 MiB\n{A}, 60, /usr/bin/blender, 40000 MiB\n{B}, 61, other, 1 MiB\nnonsense\n")
    (found,) = host.look("0")  # a script under learnerd is a learner; GPU 1 is not ours
    assert (found.id, found.level) == ("gpu-busy", "warning")
    assert found.text == "GPU 0 is used by PID 60 (blender, 40000 MiB), which is no learner" and "kill 60" in found.fix


def test_a_compute_mode_that_forbids(host: Host) -> None:
    host.driver()
    host.smi(mode="Prohibited")
    (found,) = host.look(A)
    assert found.id == "gpu-prohibited" and found.fix == "nvidia-smi -i 0 -c DEFAULT"
    assert host.look("1") == []


def test_a_gpu_that_nobody_declared_is_worth_a_note(host: Host) -> None:
    host.smi(says="")
    assert [one for one in host.look() if not os.path.exists("/dev/nvidia0")] == []
    host.smi()
    (found,) = host.look()
    assert found.level == "note" and found.fix == "set devices = [0, 1] in [host] of rudra.toml"
