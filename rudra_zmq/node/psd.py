"""The node's line to psd: hello, reports, events; orders that come back.

Owns: what is kept while psd does not know the node (yet, or again), and that the last report is repeated until it was
heard. Must not know: what is reported.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence

from rudra_zmq import log
from rudra_zmq.errors import EXIT_FAILED, TimedOut, Unreachable
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.rpc import RpcPeer
from rudra_zmq.net.sockets import Context
from rudra_zmq.node.spec import NodeSpec
from rudra_zmq.wire.messages.control import Control, Error, NodeDone, NodeHello, NodeReport, Ok, Progress
from rudra_zmq.wire.messages.data import Message

_log = log.get("node")
REPORT_S = 1.0
AGAIN_S = 1.0
GIVE_UP_S = 60.0
KEPT = 1000


class Psd:
    """``progress`` makes the figures, ``command`` carries out an order.

    ``ended(status)``: 0 once psd heard the end; 1 where it never will, or does not take this node.
    """

    def __init__(
        self,
        loop: Loop,
        context: Context,
        spec: NodeSpec,
        addresses: Sequence[str],
        key: str = "",
        *,
        progress: Callable[[], Progress],
        command: Callable[[Control], Message],
        ended: Callable[[int], object],
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._addresses = list(addresses)
        self._key = key
        self._progress = progress
        self._ended = ended
        self._known = False
        self._kept: deque[Message] = deque(maxlen=KEPT)
        self._done: NodeDone | None = None
        self._peer = RpcPeer(
            loop,
            context,
            spec.psd_address,
            f"node-{spec.job}",
            on_connect=self._hello,
            on_message=lambda _, message: command(message),
            on_lost=self._lost,
            ping=self._report,
            ping_s=REPORT_S,
        )

    # ---------------------------------------------------------------------------------------- the line

    def _hello(self) -> None:
        spec = self._spec
        hello = NodeHello(
            job=spec.job,
            token=spec.token,
            generation=spec.generation,
            pid=os.getpid(),
            addresses=self._addresses,
            key=self._key,
        )
        self._peer.request(hello, self._welcomed)

    def _welcomed(self, reply: Control) -> None:
        if isinstance(reply, Error) and reply.code == TimedOut.code:
            self._hello()
            return
        if isinstance(reply, Error) and reply.code == Unreachable.code:
            return  # the next connection says hello again
        if not isinstance(reply, Ok):
            _log.error("psd does not take this node", reply=str(reply))
            self._ended(EXIT_FAILED)
            return
        self._known = True
        while self._kept:
            self._peer.notify(self._kept.popleft())
        if self._done is not None:
            self._say_done()

    def _lost(self, reason: str) -> None:
        self._known = False
        _log.warning("no line to psd", reason=reason)

    def _report(self) -> NodeReport:
        return NodeReport(job=self._spec.job, progress=self._progress())

    # ---------------------------------------------------------------------------------------- as a Head

    def notify(self, message: Message) -> None:
        """Now, or once psd knows the node."""
        if not (self._known and self._peer.notify(message)):
            self._kept.append(message)

    def report(self) -> None:
        """The figures of now, if psd can hear them."""
        if self._known and self._done is None:
            self._peer.notify(self._report())

    def done(self, message: NodeDone) -> None:
        """The end, repeated until psd has it; then ``ended(0)``."""
        self._done = message
        self._loop.after(GIVE_UP_S, lambda: self._ended(EXIT_FAILED))
        if self._known:
            self._say_done()

    def _say_done(self) -> None:
        if self._done is not None:
            self._peer.request(self._done, self._heard, timeout=5.0)

    def _heard(self, reply: Control) -> None:
        if isinstance(reply, Ok):
            self._ended(0)
        elif self._known:
            self._loop.after(AGAIN_S, self._say_done)

    def close(self) -> None:
        """Last words have two seconds."""
        self._peer.close()
