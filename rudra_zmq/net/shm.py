"""Memory that processes of one host share: sealed, without a name, its descriptors handed over by a Unix socket.

Owns memfd, seals and mappings, and both ends of the socket: deadlines, bounds, what is dropped. Must not know what
lies in a segment nor who may have one: the server asks a function.

    asker   hello                          ->
                                           <-  segments + descriptors | refused      (then the end)
    asker   mapped                         ->
                                           <-  mapped | refused                      the end

Each message is one packet, frame 0 of the data plane. The credentials of the socket say which process asks.

    >>> owner = Segment.create("example", 3 * PAGE, sealed=True)
    >>> reader = Segment.map(os.dup(owner.fd), 3 * PAGE, writable=False)
    >>> owner.memory[5] = 7
    >>> reader.memory[5], reader.memory.readonly
    (7, True)
    >>> try:
    ...     Segment.map(os.dup(owner.fd), 3 * PAGE, writable=True)
    ... except PermissionError:
    ...     print("sealed")
    sealed
    >>> reader.close(); owner.close()
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rudra_zmq.errors import RudraError
from rudra_zmq.net.loop import Loop, Timer
from rudra_zmq.wire.codec import WireError, decode_from_node, decode_to_node, encode_data, refusal
from rudra_zmq.wire.messages.data import FromNode, Hello, Mapped, Message, Refused, Segments, ToNode

PAGE = mmap.PAGESIZE
MOST_ASKING = 16
DEADLINE_S = 2.0

_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_MAX_PACKET = 8192
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def rounded(nbytes: int) -> int:
    """Whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Segment:
    """``memory``: its bytes, of ``nbytes``. ``fd`` is -1 where it was mapped from another process."""

    def __init__(self, memory: memoryview, fd: int = -1) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes
        self.fd = fd

    @classmethod
    def create(cls, name: str, nbytes: int, *, sealed: bool) -> Segment:
        """Zeros, whose size nobody can change. ``sealed``: nobody can write but by this mapping. Raises OSError."""
        fd = os.memfd_create(f"rudra-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            seals = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
            fcntl.fcntl(fd, _ADD_SEALS, seals | (_SEAL_FUTURE_WRITE if sealed else 0))
        except BaseException:
            os.close(fd)
            raise
        return cls(memoryview(mapping), fd)

    @classmethod
    def map(cls, fd: int, nbytes: int, *, writable: bool) -> Segment:
        """What another process created; takes ``fd``. Raises OSError where it is of another size, or could shrink."""
        try:
            if os.fstat(fd).st_size != nbytes or not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
                raise OSError(errno.EINVAL, "the memory is not what was announced")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            return cls(memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, protection)))
        finally:
            os.close(fd)

    def note(self, place: int, number: int) -> None:
        """Write a number below 2**53 into the first pages, at one of their places from 0."""
        struct.pack_into("<Q", self.memory, 8 * place, number)

    def noted(self, place: int) -> int:
        """What ``note`` wrote."""
        return int(struct.unpack_from("<Q", self.memory, 8 * place)[0])

    def close(self) -> None:
        """Give up the descriptor; the memory goes with the last array that lies in it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.memory = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Offer:
    """An answer with descriptors, and what becomes of the asker's word that it has mapped them (may raise)."""

    message: Segments
    fds: tuple[int, ...]
    confirm: Callable[[Mapped], Mapped]


class _Asker:
    """One connection, and how far it has come."""

    __slots__ = ("confirm", "socket", "timer")

    def __init__(self, plain: socket.socket) -> None:
        self.socket = plain
        self.confirm: Callable[[Mapped], Mapped] | None = None
        self.timer: Timer | None = None


class FdServer:
    """Hands descriptors out, from a loop that it never blocks: at most 16 askers at a time, 2 s for each.

    ``ask(hello, pid)`` makes the offer, or raises RudraError, which the asker is told; ``drop(reason)`` counts what
    was nonsense or came too late. The socket is open to everybody who may enter its folder: the token and the
    process decide.
    """

    def __init__(
        self, loop: Loop, path: str, ask: Callable[[Hello, int], Offer], drop: Callable[[str], object]
    ) -> None:
        """The caller holds the right to ``path``. Raises OSError."""
        self.path = path
        self._loop = loop
        self._ask = ask
        self._drop = drop
        self._askers: dict[int, _Asker] = {}
        self._listening = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            Path(path).unlink(missing_ok=True)
            self._socket.bind(path)
            os.chmod(path, 0o666)
            self._socket.listen(128)
        except BaseException:
            self._socket.close()
            raise
        self._listen()

    @property
    def asking(self) -> int:
        """Connections that are not through yet."""
        return len(self._askers)

    def close(self) -> None:
        """No more; the path goes."""
        for fd in list(self._askers):
            self._end(fd)
        if self._listening:
            self._loop.forget(self._socket.fileno())
        self._socket.close()
        Path(self.path).unlink(missing_ok=True)

    def _listen(self) -> None:
        """As long as there is room; the others wait in the kernel's queue."""
        room = len(self._askers) < MOST_ASKING
        if room and not self._listening:
            self._loop.on_readable(self._socket.fileno(), self._accept)
        elif self._listening and not room:
            self._loop.forget(self._socket.fileno())
        self._listening = room

    def _accept(self) -> None:
        try:
            plain, _ = self._socket.accept()
        except OSError:
            return  # it has gone again, or there is no descriptor left: the next turn finds out
        plain.setblocking(False)
        fd = plain.fileno()
        asker = self._askers[fd] = _Asker(plain)
        asker.timer = self._loop.after(DEADLINE_S, lambda: self._end(fd, "shm-slow"))
        self._loop.on_readable(fd, lambda: self._read(fd))
        self._listen()

    def _read(self, fd: int) -> None:
        asker = self._askers[fd]
        try:
            packet = asker.socket.recv(_MAX_PACKET)
            if packet:
                message, _ = decode_to_node([packet])
                self._hear(fd, asker, message)
            else:
                self._end(fd, "shm-left")
        except BlockingIOError:
            return
        except RudraError as error:
            self._send(asker, refusal(error))
            self._end(fd)
        except (WireError, OSError):
            self._end(fd, "shm-garbage")

    def _hear(self, fd: int, asker: _Asker, message: ToNode) -> None:
        if isinstance(message, Hello) and asker.confirm is None:
            pid, _, _ = _CREDENTIALS.unpack(
                asker.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            offer = self._ask(message, pid)
            asker.confirm = offer.confirm
            self._send(asker, offer.message, offer.fds)
        elif isinstance(message, Mapped) and asker.confirm is not None:
            self._send(asker, asker.confirm(message))
            self._end(fd)
        else:
            self._end(fd, "shm-garbage")

    def _send(self, asker: _Asker, message: Message, fds: Sequence[int] = ()) -> None:
        """One packet; who has no room for it is gone or not honest, and its deadline ends it."""
        with contextlib.suppress(OSError):
            _send(asker.socket, message, fds)

    def _end(self, fd: int, reason: str = "") -> None:
        asker = self._askers.pop(fd, None)
        if asker is None:
            return
        if reason:
            self._drop(reason)
        if asker.timer is not None:
            asker.timer.cancel()
        self._loop.forget(fd)
        asker.socket.close()
        self._listen()


class FdAsker:
    """The other end: blocks, for ``seconds`` in all. Raises OSError, and what a refusal stands for as PermissionError.

    Connected once it exists. Descriptors that come belong to the caller.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connect(path)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> FdAsker:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _connect(self, path: str) -> None:
        while True:
            self._socket.settimeout(self._left())
            try:
                return self._socket.connect(path)
            except BlockingIOError:  # the queue is full: Unix sockets do not wait
                time.sleep(min(0.02, self._left()))

    def _left(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
        return left

    def ask(self, message: Message, descriptors: int = 0) -> tuple[FromNode, list[int]]:
        """Say something, hear the answer, with at most so many descriptors."""
        self._socket.settimeout(self._left())
        _send(self._socket, message)
        self._socket.settimeout(self._left())
        space = socket.CMSG_SPACE(struct.calcsize("i") * descriptors) if descriptors else 0
        packet, extra, _, _ = self._socket.recvmsg(_MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
        fds = [fd for level, kind, raw in extra if (level, kind) == _RIGHTS for fd in _ints(raw)]
        try:
            if not packet:
                raise ConnectionResetError(errno.ECONNRESET, "the node ended the conversation")
            answer, _ = decode_from_node([packet])
            if isinstance(answer, Refused):
                raise PermissionError(errno.EPERM, answer.message)
        except WireError as error:
            _close(fds)
            raise OSError(errno.EPROTO, str(error)) from None
        except BaseException:
            _close(fds)
            raise
        return answer, fds


_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)


def _send(plain: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    rights = [(*_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
    plain.sendmsg([bytes(frame) for frame in encode_data(message)], rights)


def _ints(raw: bytes) -> tuple[int, ...]:
    count = len(raw) // struct.calcsize("i")
    return struct.unpack(f"{count}i", raw[: count * struct.calcsize("i")])


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
