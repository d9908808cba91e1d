"""Addresses: how they are written, what they resolve to, why nobody answers, who holds them.

Owns the two forms tcp://HOST:PORT and ipc:///PATH, the lock of an ipc path, and the reasons of an unreachable
address. Must not know ZeroMQ: plain sockets answer all of this exactly, and name resolution inside libzmq would
stall every socket of the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from rudra_zmq.errors import AlreadyRunning, ConfigError, RudraError, Unreachable

_SIOCGIFADDR = 0x8915
MAX_PATH = 107  # bytes of sun_path without its NUL


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed address; ``path`` for ipc, ``host`` and ``port`` for tcp."""

    kind: str  # ipc | tcp
    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.kind == "ipc":
            return f"ipc://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse(text: str) -> Address:
    """Address of its written form. Raises ConfigError with the form that is meant."""
    if text.startswith("ipc://"):
        path = text[len("ipc://") :]
        if not path.startswith("/") or "\0" in path:
            raise ConfigError(f"address {text!r} has no absolute path", fix="write ipc:///run/user/1000/rudra/psd")
        if len(os.fsencode(path)) > MAX_PATH:
            what = f"socket path of {len(os.fsencode(path))} bytes; the kernel takes {MAX_PATH}"
            raise ConfigError(what, where=path, fix="choose a shorter runtime folder")
        return Address("ipc", path=path)
    match = re.fullmatch(r"tcp://(?:\[([0-9A-Fa-f:.%]+)\]|([^:/\[\]\s]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ConfigError(f"address {text!r} is none", fix="write tcp://HOST:PORT or ipc:///PATH")
    return Address("tcp", host=match[1] or match[2], port=int(match[3]))


def resolve(address: Address) -> Address:
    """``address`` with an IP for its host (IPv4 before IPv6). Raises Unreachable naming the host that failed."""
    if address.kind == "ipc":
        return address
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        where = f"{address}, looked up on {socket.gethostname()}"
        raise Unreachable(f"name not found: {address.host}", where=where, fix="check the host's name") from None
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return Address("tcp", host=str(found[0][4][0]), port=address.port)


def way_to(host: str) -> str:
    """ "10.0.0.2 (eth0)": the address and the interface from which this machine goes to an IP; "" where it does not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as plain:
            plain.connect((host, 9))  # of a datagram socket: nothing is sent
            own = str(plain.getsockname()[0])
    except OSError:
        return ""
    name = interface_of(own)
    return f"{own} ({name})" if name else own


def interface_of(ip: str) -> str:
    """The name of the interface that has this IP; "" where none has."""
    if ":" in ip:
        packed = socket.inet_pton(socket.AF_INET6, ip.partition("%")[0]).hex()
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines():
                if line.startswith(packed):
                    return line.split()[-1]
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(plain, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == ip:
                    return name
    return ""


def is_loopback(host: str) -> bool:
    """Whether an IP (or localhost) never leaves its machine."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def is_any(host: str) -> bool:
    """Whether binding this host means all interfaces."""
    return host in ("*", "0.0.0.0", "::")


def probe(address: Address, timeout: float = 2.0) -> str:
    """Why nobody can be reached at ``address``, in words; "" where somebody listens. Waits ``timeout`` seconds."""
    try:
        target = resolve(address)
    except Unreachable as error:
        return error.message
    try:
        _connected(target, timeout).close()
    except TimeoutError:
        return f"no answer in {timeout:g} s (host down, or filtered)"
    except OSError as error:
        return _reason(error, target)
    return ""


def _connected(target: Address, timeout: float) -> socket.socket:
    """A plain socket connected to an IP or a path. Raises OSError."""
    family = socket.AF_UNIX if target.kind == "ipc" else socket.AF_INET6 if ":" in target.host else socket.AF_INET
    plain = socket.socket(family, socket.SOCK_STREAM)
    plain.settimeout(timeout)
    try:
        plain.connect(target.path if target.kind == "ipc" else (target.host, target.port))
    except BaseException:
        plain.close()
        raise
    return plain


def _reason(error: OSError, address: Address) -> str:
    if error.errno == errno.ENOENT:
        return "no such socket"
    if error.errno == errno.ECONNREFUSED:
        return "refused: nobody listens" if address.kind == "tcp" else "refused: its owner is gone"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "no permission on the socket"
    if error.errno == errno.EAGAIN:
        return "its owner accepts no connections"
    return os.strerror(error.errno) if error.errno else str(error)


def other_than_zmtp(address: Address, timeout: float = 2.0) -> str:
    """What answers at ``address`` without speaking ZeroMQ's protocol, in words; "" where it does speak it.

    Of a greeting (ZMTP 3, section 2.2) the first and the tenth byte are fixed, and it comes unasked.
    """
    try:
        with _connected(resolve(address), timeout) as plain:
            got = b""
            while len(got) < 10 and (piece := plain.recv(64)):
                got += piece
    except TimeoutError:
        return f"it says nothing in {timeout:g} s: stopped, or a program that waits to be spoken to (HTTP, say)"
    except OSError as error:
        return f"it ends the connection ({os.strerror(error.errno) if error.errno else error})"
    if got[:1] == b"\xff" and got[9:10] == b"\x7f":
        return ""
    if not got:
        return "it ends the connection without a word"
    line = got.split(b"\n")[0][:40].decode("ascii", "replace").strip()
    return f"it says {line!r}"


def stopped(address: Address) -> int:
    """PID of the process of this machine that holds ``address`` and was stopped (SIGSTOP, Ctrl-Z); 0 where none was."""
    pid = port_owner(address.port) if address.kind == "tcp" and is_here(address) else None
    if address.kind == "ipc":
        with contextlib.suppress(OSError, ValueError):
            try:
                with _connected(address, 0.1) as plain:
                    pid = struct.unpack("3i", plain.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            except (BlockingIOError, TimeoutError):  # its queue is full, so that its owner lives
                pid = int(Path(f"{address.path}.lock").read_text("ascii"))
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0] if pid else ""
    except OSError:
        return 0
    return pid if pid and state in ("T", "t") else 0


def is_here(address: Address) -> bool:
    """Whether ``address`` is one of this machine; not where its host has no IP."""
    if address.kind == "ipc" or is_any(address.host) or is_loopback(address.host):
        return True
    try:
        host = resolve(address).host
    except Unreachable:
        return False
    return is_loopback(host) or interface_of(host) != ""


def unreachable(address: Address, what: str = "nobody answers", *, fix: str = "", timeout: float = 2.0) -> Unreachable:
    """The error for ``address``, with the reason found by a plain connect. ``fix``: where nobody is there."""
    if pid := stopped(address):
        return Unreachable(f"{what}: PID {pid} is stopped", where=str(address), fix=f"kill -CONT {pid}")
    if reason := probe(address, timeout):
        return Unreachable(f"{what}: {reason}", where=str(address), fix=fix or "start it, or give another address")
    text = f"{what}: it accepts connections, and does not answer"
    return Unreachable(text, where=str(address), fix="see its log: it is busy, stopped, or another program")


# ------------------------------------------------------------------------------------------- who holds it


def in_the_way(what: str, number: int | None, path: str) -> RudraError:
    """The error of a lock or socket that cannot be made at ``path``, with the fix for its reason (an errno)."""
    folder = os.path.dirname(path) or "/"
    text = f"{what}: {os.strerror(number) if number else 'no reason is known'}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return RudraError(text, where=path, fix=f"make room on the disk of {folder}")
    if number in (errno.EMFILE, errno.ENFILE):
        return RudraError(text, where=path, fix="raise the limit of open files (ulimit -n)")
    fixes = {
        errno.ENOENT: f"make the folder {folder}",
        errno.ENOTDIR: f"make {folder} a folder, or choose another one",
        errno.ELOOP: f"remove {path}, a link that is not ours",
        errno.EISDIR: f"remove {path}, a folder that is not ours",
        errno.EADDRINUSE: f"stop who listens at {path}, or choose another folder",
        errno.ENAMETOOLONG: "choose a shorter folder",
        errno.EROFS: f"mount {folder} writable, or choose another folder",
        errno.ENOLCK: f"choose a folder on a local disk instead of {folder}",
        errno.EOPNOTSUPP: f"choose a folder on a local disk instead of {folder}",
    }
    return ConfigError(
        text, where=path, fix=fixes.get(number or 0, f"chown {folder} to yourself, or choose another folder")
    )


class PathLock:
    """The right to bind an ipc path: a second bind would silently take the path from a living owner.

    The lock is a file beside the socket with the owner's PID; it goes with the process, whatever it dies of.
    """

    def __init__(self, path: str) -> None:
        """Takes the lock, and removes a dead owner's socket. Raises AlreadyRunning, else what ``in_the_way`` says."""
        self.path = path
        self.lock = f"{path}.lock"
        self._fd = self._take()
        try:
            Path(path).unlink(missing_ok=True)
        except OSError as error:
            Path(self.lock).unlink(missing_ok=True)
            os.close(self._fd)
            raise in_the_way("cannot take the place of what is there", error.errno, path) from None

    def _take(self) -> int:
        while True:
            try:
                fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise in_the_way("cannot write the lock", error.errno, self.lock) from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    os.close(fd)
                    raise in_the_way("cannot lock", error.errno, self.lock) from None
                pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                what = f"already running as PID {pid}" if pid else "already being started"
                fix = f"use it, or stop it: kill {pid}" if pid else "use the one that is being started"
                raise AlreadyRunning(what, where=self.path, fix=fix) from None
            # The owner before removed the file between our open and our lock: what we hold has no name.
            try:
                same = os.stat(self.lock).st_ino == os.fstat(fd).st_ino
            except FileNotFoundError:
                same = False
            if same:
                try:
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                except OSError as error:
                    Path(self.lock).unlink(missing_ok=True)
                    os.close(fd)
                    raise in_the_way("cannot write the lock", error.errno, self.lock) from None
                return fd
            os.close(fd)

    def release(self) -> None:
        """Removes socket and lock file; harmless the second time."""
        if self._fd < 0:
            return
        Path(self.path).unlink(missing_ok=True)
        Path(self.lock).unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def is_daemon(pid: int, name: str) -> bool:
    """Whether a process of this machine is our daemon of this name, by its command line."""
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return False
    return any(
        word == f"rudra_zmq.daemons.{name}" or word.endswith((f"/{name}", f"daemons/{name}.py")) for word in words
    )


def lock_holder(path: Path, name: str) -> int:
    """PID of the daemon ``name`` that holds the lock (``PathLock``) of ``path``; 0 where none does.

    A lock whose owner was killed may carry the PID of somebody else by now. Raises PermissionError.
    """
    try:
        pid = int(path.with_name(f"{path.name}.lock").read_text("ascii"))
        return pid if is_daemon(pid, name) else 0
    except PermissionError:
        raise
    except (OSError, ValueError):
        return 0


def port_owner(port: int) -> int | None:
    """PID of the process that listens on tcp ``port`` of this host, where /proc lets us see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if any(os.readlink(fd) in inodes for fd in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue
    return None
