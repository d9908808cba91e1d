"""The ways into a node: nothing that is to be encrypted is listened for in the clear."""

from __future__ import annotations

import pytest

from rudra_zmq.errors import ConfigError
from rudra_zmq.net.entrance import Entrance
from rudra_zmq.net.loop import Loop
from tests.net.conftest import Net


def test_encrypted_tcp_is_never_a_port_of_a_plain_socket(net: Net) -> None:
    loop = Loop()
    entrance = Entrance(net.context("data"), loop, "node", lambda reason: None)
    try:
        entrance.bind_ipc(net.path())
        with pytest.raises(ConfigError, match="cannot be had together"):
            entrance.bind_tcp("127.0.0.1", 0, 0, encrypted=True)
        assert len(entrance.addresses) == 1 and not entrance.key
    finally:
        entrance.close()
        loop.close()
