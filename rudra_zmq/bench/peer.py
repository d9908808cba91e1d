"""One process of another system: ``python -m rudra_zmq.bench.peer KIND PLACE``, with PLACE as JSON.

Owns: which member of which system this process is, and its life. Must not know: how a round is made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

from rudra_zmq.bench.control import Order, Orders, stamps
from rudra_zmq.bench.peer_torch import (
    AllReduce,
    Member,
    SendRecvLearner,
    SendRecvServer,
    SocketLearner,
    SocketServer,
)
from rudra_zmq.bench.place import Place
from rudra_zmq.bench.tied import tie

MEMBERS: dict[str, tuple[Callable[[Place], Member], Callable[[Place], Member]]] = {
    "all-reduce": (AllReduce, AllReduce),
    "send-recv": (SendRecvServer, SendRecvLearner),
    "sockets": (SocketServer, SocketLearner),
}
"""Member 0 and the others."""


def member(kind: str, place: Place) -> Member:
    """This process's part."""
    if kind == "rpc":
        from rudra_zmq.bench import peer_rpc

        return peer_rpc.member(place)
    if kind == "ray":
        from rudra_zmq.bench import peer_ray

        return peer_ray.Driver(place)
    if kind in ("plain", "ddp"):
        from rudra_zmq.bench import loops

        return loops.Plain(place) if kind == "plain" else loops.Ddp(place)
    first, other = MEMBERS[kind]
    return (other if place.index else first)(place)


def main() -> None:
    """Until the other end is gone."""
    kind, text = sys.argv[1:]
    place = Place(**json.loads(text))
    tie(place.parent, signal.SIGKILL)
    orders = Orders(place.control)
    try:
        mine = member(kind, place)
    except Exception as error:
        orders.fail(f"{type(error).__name__}: {error}")
        raise

    def rounds(order: Order) -> list[float]:
        mine.prepare(order)
        return stamps(int(order["rounds"]), mine.round)

    orders.ready(place.index)
    orders.work(rounds)
    mine.close()
    sys.stdout.flush()
    os._exit(0)  # the others of the group may be gone: nobody is to wait for them


if __name__ == "__main__":
    main()
