"""This host: settings, state folder, disk, limits of processes and control groups, ports.

Owns: what is too little, and what is in the way. Must not know: the head, other hosts, GPUs, systemd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from rudra_zmq import cgroups, paths
from rudra_zmq.config import RudraToml, check_rudra
from rudra_zmq.config.host import HostSection
from rudra_zmq.daemons.readiness import own_problems
from rudra_zmq.doctor.findings import HERE, Finding, of_error, of_line, size
from rudra_zmq.errors import ConfigError, NotFound, RudraError
from rudra_zmq.head.registry import Registry
from rudra_zmq.net import keys
from rudra_zmq.net.addresses import Address, is_any, is_daemon, lock_holder, parse, port_owner, probe

PROC = Path("/proc")
Running: TypeAlias = tuple[str, int]
"""Name and PID of a daemon."""
FEW_FILES = 1024
FULL_FILES = 0.8
MEMLOCK = 64 << 20
DISK_ERROR, DISK_WARNING = 256 << 20, 2 << 30
INODES = 0.01
MEMORY_ERROR, MEMORY_WARNING = 128 << 20, 512 << 20


def settings() -> Iterator[Finding]:
    """Every mistake in the layers of rudra.toml that hold here."""
    return (of_line("config", "error", line) for line in check_rudra())


def host_section(host: HostSection) -> Iterator[Finding]:
    """Interpreters and paths of [host] that are not there."""
    return (of_line("host-place", "error", f"[host] {line}") for line in own_problems(host))


def state(config: RudraToml, mounts: str | None = None, system: Path = paths.SYSTEM_PSD) -> Iterator[Finding]:
    """State and runtime folder: their file system, owner, mode; the system's as well. ``mounts``: as /proc/mounts."""
    folders = []
    try:
        folders.append(paths.state_folder(config.paths.state, mounts=mounts))
        if paths.runtime_place(config.paths.runtime).exists():
            paths.runtime_folder(config.paths.runtime)
    except RudraError as error:
        yield of_error("state-folder", error)
    if system.exists():
        try:
            paths.check_local(system, mounts)
        except ConfigError as error:
            yield of_error("state-folder", error)
        folders.append(system)
    for folder in {os.stat(folder).st_dev: folder for folder in reversed(folders)}.values():
        yield from _room(folder)


def own_keys(system: Path | None = None) -> Iterator[Finding]:
    """Secret keys that a daemon or a command would refuse. ``system``: its daemons' keys, root's to look at."""
    if system is None and os.getuid() == 0:
        system = keys.SYSTEM
    for folder in [keys.person_folder(), *([system] if system else [])]:
        for owner in ("psd", "learnerd", "user"):
            try:
                keys.read(folder / f"{owner}.key")
            except NotFound:
                continue
            except RudraError as error:
                yield of_error("key", error)


def registries(config: RudraToml, system: Path = paths.SYSTEM_PSD) -> Iterator[Finding]:
    """Those that psd could not open: torn, newer, no database. The state folder's own faults are told by ``state``."""
    folders = [system] if os.access(system, os.W_OK) else []  # another's cannot be judged without its -shm file
    with contextlib.suppress(RudraError):
        folders.insert(0, paths.state_folder(config.paths.state))
    for file in map(paths.registry_file, folders):
        try:
            if file.exists() and file.stat().st_size:  # psd takes an empty one
                Registry.open_readonly(file).close()
        except NotFound:
            continue
        except RudraError as error:
            yield of_error("registry", error)


def _room(folder: Path) -> Iterator[Finding]:
    disk, stat = shutil.disk_usage(folder), os.statvfs(folder)
    fix = "make room (`rudra df`, `rudra prune`), or set paths.state to a folder on a larger disk"
    if disk.free < DISK_WARNING:
        text = f"the disk of {folder} is nearly full: {size(disk.free)} of {size(disk.total)} are free"
        yield Finding("disk-full", "error" if disk.free < DISK_ERROR else "warning", HERE, text, fix)
    elif stat.f_files and stat.f_favail < INODES * stat.f_files:
        text = f"the disk of {folder} has no room for more files: {stat.f_favail} inodes of {stat.f_files} are free"
        yield Finding("disk-full", "error", HERE, text, fix)


def limits(daemons: Sequence[Running], gpus: bool, proc: Path = PROC) -> Iterator[Finding]:
    """Open files and, where GPUs are declared, pinned memory: of the daemons that run, else of this shell."""
    for who, folder in _processes(daemons, proc):
        files, locked = _limit(folder, "Max open files"), _limit(folder, "Max locked memory")
        fix = "LimitNOFILE=65536 in its unit (`systemctl edit`); in a shell `ulimit -n 65536` before `rudra up`"
        if files is not None:
            used = sum(1 for _ in (folder / "fd").iterdir()) if daemons else 0
            if used > FULL_FILES * files:
                text = f"{who} has {used} of {files} files open that it may have"
                yield Finding("open-files", "error", HERE, text, fix)
            elif files < FEW_FILES:
                yield Finding("open-files", "warning", HERE, f"{who} may have only {files} files open", fix)
        if gpus and locked is not None and locked < MEMLOCK:
            text = f"{who} may pin only {size(locked)} of memory for GPUs"
            fix = "LimitMEMLOCK=infinity in its unit; in a shell `ulimit -l unlimited` before `rudra up`"
            yield Finding("locked-memory", "warning", HERE, text, fix)


def memory(daemons: Sequence[Running], proc: Path = PROC, root: Path = cgroups.ROOT) -> Iterator[Finding]:
    """What control groups leave to the daemons that run, else to this shell: the tightest of each."""
    told = set()
    for who, folder in _processes(daemons, proc):
        found = list(cgroups.limits(folder, root))
        if not found or (group := min(found, key=lambda one: one.left)) in told:
            continue
        told.add(group)
        text = f"{group.name} of {who} leaves {size(group.left)} of {size(group.most)} of memory"
        fix = f"raise its {group.key} (MemoryMax= of a unit, --memory of a container)"
        if group.left < MEMORY_WARNING:
            yield Finding("memory-limit", "error" if group.left < MEMORY_ERROR else "warning", HERE, text, fix)
        else:
            yield Finding("memory-limit", "note", HERE, text, f"if jobs are refused for want of memory, {fix}")


def _processes(daemons: Sequence[Running], proc: Path) -> list[tuple[str, Path]]:
    if not daemons:
        return [("this shell", proc / "self")]
    return [(f"{name} (PID {pid})", proc / str(pid)) for name, pid in daemons]


def _limit(process: Path, name: str) -> int | None:
    """The soft limit; None where there is none, or it is not told."""
    try:
        lines = (process / "limits").read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    word = next((line.removeprefix(name).split()[0] for line in lines if line.startswith(name)), "")
    return int(word) if word.isdigit() else None


def ports(config: RudraToml, psds: Collection[int], proc: Path = PROC) -> Iterator[Finding]:
    """Others where psd listens, or would. ``psds``: the PIDs of those that may."""
    listen = parse(config.psd.listen) if config.psd.listen else None
    own = paths.runtime_place(config.paths.runtime) / "psd.sock"
    socket = Path(listen.path) if listen and listen.kind == "ipc" else own
    holder = lock_holder(socket, "psd")
    if holder and holder not in psds:
        text = f"another psd (PID {holder}) holds the socket {socket}"
        yield Finding("another-psd", "error", HERE, text, f"use that one, or stop it: kill {holder}")
    wanted = [("psd.listen", listen.host, listen.port)] if listen and listen.kind == "tcp" else []
    wanted += [("metrics.listen", *config.metrics.address)] if config.metrics.address else []
    for key, host, port in wanted:
        owner, text = port_owner(port), f"port {port} of {key} is taken by"
        if owner is None and _listens(host, port) and not _any_psd(proc):
            text, fix = f"{text} another user's process", f"as root `ss -lptn 'sport = :{port}'` names it; end it"
            yield Finding("port-taken", "error", HERE, text, f"{fix}, or choose another port")
        elif owner is not None and owner not in psds:
            id, what = ("another-psd", " another psd,") if is_daemon(owner, "psd") else ("port-taken", "")
            fix = f"stop it (kill {owner}), or choose another port"
            yield Finding(id, "error", HERE, f"{text}{what} PID {owner}{_named(owner, proc)}", fix)


def _listens(host: str, port: int) -> bool:
    """Whether somebody does at this port of this machine."""
    if is_any(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return probe(Address("tcp", host=host, port=port), 1.0) == ""


def _any_psd(proc: Path) -> bool:
    """Whether a psd runs on this machine: one of another user does not show us its sockets."""
    return any(is_daemon(int(entry.name), "psd") for entry in proc.iterdir() if entry.name.isdigit())


def _named(pid: int, proc: Path) -> str:
    try:
        return f" ({(proc / str(pid) / 'comm').read_text('utf-8', 'replace').strip()})"
    except OSError:
        return ""
