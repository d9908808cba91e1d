"""The ways into a node: nothing that is to be encrypted is listened for in the clear, and nobody is taken for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rudra_zmq.net.auth import KeyPair
from rudra_zmq.net.entrance import LOCAL, Entrance
from rudra_zmq.net.loop import Loop
from tests.net.conftest import PATIENCE, Net


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def both(net: Net, loop: Loop) -> Iterator[Entrance]:
    """Open for this host and, encrypted, for others."""
    entrance = Entrance(net.context("data"), loop, "node", lambda reason: None)
    entrance.bind_ipc(net.path())
    entrance.bind_tcp("127.0.0.1", 0, 0, encrypted=True)
    yield entrance
    entrance.close()


def turn(loop: Loop, done: Callable[[], object]) -> None:
    end = loop.now() + PATIENCE
    while not done():
        assert loop.now() < end
        loop.turn(0.05)


def test_ipc_and_encrypted_tcp_never_share_a_socket(net: Net, loop: Loop, both: Entrance) -> None:
    local, tcp = both.addresses
    assert local.startswith("ipc:") and tcp.startswith("tcp://127.0.0.1:") and both.key
    heard: list[tuple[bytes, bytes, str]] = []
    both.listen(lambda: both.receive(lambda peer, frames, key: heard.append((peer, bytes(frames[0]), key)), 8))
    plain = net.dealer(local, "data")
    plain.send([b"local"])
    keys = KeyPair.new()
    sealed = net.context("data").dealer(tcp, "far", curve=(keys, both.key))
    net.close_at_end(lambda: sealed.close(0.0))
    turn(loop, lambda: sealed.wait_connected(0.0))
    sealed.send([b"far"])
    turn(loop, lambda: len(heard) == 2)
    assert sorted((text, key) for _, text, key in heard) == [(b"far", keys.public), (b"local", "")]
    for peer, text, _ in heard:
        assert both.send(peer, [b"to " + text])
    turn(loop, lambda: plain.wait(0.0) and sealed.wait(0.0))
    assert (plain.recv(), sealed.recv()) == ([b"to local"], [b"to far"])
    assert {peer: both.channel(peer) is not None for peer, _, _ in heard} == {
        LOCAL + plain.identity: False,
        sealed.identity: True,
    }
    stranger = net.dealer(tcp, "data", connected=False)
    stranger.send([b"in the clear"])
    for _ in range(10):
        loop.turn(0.02)
    assert len(heard) == 2


def test_the_name_of_a_local_peer_cannot_be_taken_from_elsewhere(net: Net, loop: Loop) -> None:
    entrance = Entrance(net.context("data"), loop, "node", lambda reason: None)
    entrance.bind_ipc(net.path())
    entrance.bind_tcp("127.0.0.1", 0, 0, encrypted=False)
    local, tcp = entrance.addresses
    heard: list[bytes] = []
    entrance.listen(lambda: entrance.receive(lambda peer, frames, key: heard.append(peer), 8))
    mine = net.dealer(local, "data")
    mine.send([b"x"])
    theirs = net.context("data").dealer(tcp, "thief", identity=mine.identity)
    net.close_at_end(lambda: theirs.close(0.0))
    assert theirs.wait_connected(PATIENCE)
    theirs.send([b"x"])
    turn(loop, lambda: len(heard) == 2)
    assert len(set(heard)) == 2
    entrance.send(next(peer for peer in heard if peer.startswith(LOCAL)), [b"secret"])
    turn(loop, lambda: mine.wait(0.0))
    assert not theirs.wait(0.1)
    entrance.close()
