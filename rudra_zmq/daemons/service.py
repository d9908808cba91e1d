"""The service manager: what a daemon tells systemd about itself, over the datagram socket of $NOTIFY_SOCKET.

Owns the protocol of sd_notify(3) and its watchdog. Must not know: what the daemon serves. Without a manager every
call does nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping

from rudra_zmq.net.loop import Loop

LOOK_S = 1.0  # between two looks at what the status is
MOST_STATUS = 200


class Manager:
    """Takes its variables out of ``environ``, so that no child speaks in the daemon's name.

    ``watchdog`` is how many seconds the manager bears silence, 0.0 where it does not watch this process.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address if address.startswith("/") else ""
        watched = bool(self._address) and usec.isdigit() and pid in ("", str(os.getpid()))
        self.watchdog = int(usec) / 1e6 if watched else 0.0
        self._status = ""

    def ready(self) -> None:
        """The daemon serves; also the end of a reload."""
        self._say("READY=1", f"MAINPID={os.getpid()}")

    def reloading(self) -> None:
        """The settings are being read again; ``ready`` ends it. The time tells systemd which order was meant."""
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """The daemon's end has begun."""
        self._say("STOPPING=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """What `systemctl status` shows, said where it differs from before."""
        text = " ".join(text.split())[:MOST_STATUS]
        if text != self._status:
            self._status = text
            self._say(f"STATUS={text}")

    def attend(self, loop: Loop, status: Callable[[], str]) -> None:
        """From now on feed the watchdog, twice as often as it asks for, and say the status when it changes.

        Both are timers of the loop that does the daemon's work: one that is stuck feeds nobody.
        """
        if not self._address:
            return
        if self.watchdog:
            loop.every(self.watchdog / 2, lambda: self._say("WATCHDOG=1"))
        self.status(status())
        loop.every(LOOK_S, lambda: self.status(status()))

    def _say(self, *lines: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as plain:
            plain.setblocking(False)  # a manager that does not read must not hold up the loop
            plain.sendto("\n".join(lines).encode(), self._address)
