"""A learner's connection through a sealed channel: what is said is understood, what does not open ends it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rudra_zmq.learner.link import Link, LinkLost
from rudra_zmq.net.addresses import parse
from rudra_zmq.net.channel import Channel
from rudra_zmq.net.sockets import WINDOW, Router
from rudra_zmq.wire import seal
from rudra_zmq.wire.codec import decode_to_node, encode_data
from rudra_zmq.wire.messages.data import Bulk, Credit, Ping, Pong
from tests.net.conftest import Net

PATIENCE_S = 10.0


@dataclass
class Ends:
    """Both ends of a channel, in one thread."""

    link: Link
    router: Router
    bulk: Bulk
    channel: Channel

    def say(self, message: Any) -> None:
        assert self.channel.send(lambda out, copy: self.router.send(self.bulk.identity, out, copy=copy), message)

    def hear(self) -> Any:
        assert self.router.wait(PATIENCE_S)
        received = self.router.recv()
        assert received is not None and received[0] == self.bulk.identity
        return decode_to_node(self.channel.open(received[1]))[0]


@pytest.fixture
def ends(net: Net) -> Ends:
    front, back = net.router("data"), net.router("data")
    address = front.bind_tcp("127.0.0.1", 0)
    port = parse(back.bind_tcp("127.0.0.1", 0)).port
    keys = secrets.token_bytes(16), secrets.token_bytes(16)
    bulk = Bulk(port=port, connection=3, identity=b"b" + secrets.token_bytes(15), up=keys[0], down=keys[1])
    link = Link(net.context("data"), address, "learner", lambda: None)
    net.close_at_end(link.close)
    link.wait_connected(PATIENCE_S)
    link.move(bulk, WINDOW, PATIENCE_S)
    link.send(Credit(chunks=1))
    made = Ends(link, back, bulk, Channel(bulk, WINDOW, node=True))
    assert made.hear() == Credit(chunks=1)
    return made


def test_both_ways(ends: Ends) -> None:
    for step in range(5):
        ends.say(encode_data(Pong(stop=bool(step % 2))))
        assert ends.link.receive(Pong, seconds=PATIENCE_S).stop == bool(step % 2)
        ends.link.send(Credit(chunks=step + 1))
        assert ends.hear() == Credit(chunks=step + 1)


def _plain(ends: Ends) -> list[bytes]:
    return [bytes(frame) for frame in encode_data(Pong())]


def _replayed(ends: Ends) -> list[bytes]:
    kept: list[list[bytes]] = []
    ends.channel.send(lambda out, copy: bool(kept.append([bytes(f) for f in out])) or True, encode_data(Pong()))
    ends.router.send(ends.bulk.identity, kept[0])
    assert ends.link.receive(Pong, seconds=PATIENCE_S) == Pong()
    return kept[0]


def _reflected(ends: Ends) -> list[bytes]:
    """What the learner itself said."""
    ends.link.send(Ping())
    assert ends.router.wait(PATIENCE_S)
    received = ends.router.recv()
    assert received is not None
    return [bytes(frame) for frame in received[1]]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [(_plain, "bulk-"), (_replayed, "bulk-replay"), (_reflected, "bulk-foreign")],
    ids=["in clear", "a second time", "its own"],
)
def test_what_does_not_open(ends: Ends, frames: Callable[[Ends], list[bytes]], reason: str) -> None:
    assert ends.router.send(ends.bulk.identity, frames(ends))
    with pytest.raises(LinkLost, match=reason):
        ends.link.receive(Pong, seconds=PATIENCE_S)


def test_keys_that_were_used_for_long(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "WORN", 1)
    with pytest.raises(LinkLost, match="long enough"):
        ends.link.send(Ping())
