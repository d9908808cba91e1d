"""GPUs that [host] devices declares: driver, presence, device files, who else computes on them.

Owns: what nvidia-smi and /proc say of them. Must not know: CUDA, which is never loaded here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from rudra_zmq.daemons import hardware
from rudra_zmq.doctor.findings import HERE, Finding

DEV, PROC = Path("/dev"), Path("/proc")
SMI_S = 10.0


def look(declared: Sequence[str], dev: Path = DEV, proc: Path = PROC) -> Iterator[Finding]:
    """``declared``: by index or UUID. Where none is, a GPU that lies idle is worth a note."""
    if not declared:
        if there := sorted(name for name in hardware.present() if name.isdigit()):
            text = f"GPU {' '.join(there)} is here and not declared: learners compute on the CPU"
            yield Finding(
                "gpu-unused", "note", HERE, text, f"set devices = [{', '.join(there)}] in [host] of rudra.toml"
            )
        return
    if missing := hardware.absent(declared):
        reason, fix = _why(dev, proc)
        text = f"GPU {' '.join(missing)} of [host] devices is not there: {reason}"
        yield Finding("gpu-absent", "error", HERE, text, fix)
        return
    if not (dev / "nvidia-uvm").exists():
        text = "CUDA needs /dev/nvidia-uvm, which is not there"
        fix = "modprobe nvidia_uvm; for rudra-learnerd the drop-in gpu.conf orders it (docs/SERVICES.rst)"
        yield Finding("gpu-device-file", "error", HERE, text, fix)
    yield from _busy(declared, proc)


def _smi(*args: str) -> tuple[int, str]:
    """Status and output of nvidia-smi; 127 where there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *args],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SMI_S,
        )
    except subprocess.TimeoutExpired:
        return 124, f"nvidia-smi has not ended within {SMI_S:g} s"
    except OSError as error:
        return 127, f"nvidia-smi: {error.strerror}"
    return done.returncode, done.stdout.strip()


def _why(dev: Path, proc: Path) -> tuple[str, str]:
    """Why declared GPUs are missing, and what helps."""
    status, said = _smi("-L")
    if status and not (proc / "driver/nvidia/version").exists():
        nodes = "" if list(dev.glob("nvidia[0-9]*")) else ", no /dev/nvidia0"
        fix = "install NVIDIA's driver, or `modprobe nvidia`; without a GPU set devices = []"
        return f"no NVIDIA driver is loaded (no /proc/driver/nvidia{nodes})", fix
    if status:
        fix = "make `nvidia-smi` work: a driver that was upgraded needs a reboot, or its modules loaded anew"
        return f"the driver is loaded, and {(said.splitlines() or ['nvidia-smi fails'])[0]}", fix
    count = sum(line.startswith("GPU ") for line in said.splitlines())
    return f"nvidia-smi lists {count}", "correct [host] devices: `nvidia-smi -L` shows what there is"


def _busy(declared: Sequence[str], proc: Path) -> Iterator[Finding]:
    status, said = _smi("--query-gpu=index,uuid,compute_mode", "--format=csv,noheader")
    index: dict[str, str] = {}
    for line in said.splitlines() if status == 0 else ():
        number, uuid, mode, *_ = [*(word.strip() for word in line.split(",")), "", ""]
        if number not in declared and uuid not in declared:
            continue
        index[uuid] = number
        if mode == "Prohibited":
            text = f"GPU {number} takes no computations (compute mode Prohibited)"
            yield Finding("gpu-prohibited", "error", HERE, text, f"nvidia-smi -i {number} -c DEFAULT")
    status, said = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader")
    for line in said.splitlines() if status == 0 else ():
        words = [word.strip() for word in line.split(",")]
        if len(words) != 4 or words[0] not in index or not words[1].isdigit() or _ours(int(words[1]), proc):
            continue
        uuid, pid, name, memory = words
        text = f"GPU {index[uuid]} is used by PID {pid} ({os.path.basename(name)}, {memory}), which is no learner"
        yield Finding("gpu-busy", "warning", HERE, text, f"end it (kill {pid}), or take the GPU out of [host] devices")


def _ours(pid: int, proc: Path) -> bool:
    """Whether a process is of rudra: learners are children of learnerd, whatever they run."""
    while pid > 1:
        try:
            if b"rudra_zmq." in (proc / str(pid) / "cmdline").read_bytes():
                return True
            pid = int((proc / str(pid) / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False
