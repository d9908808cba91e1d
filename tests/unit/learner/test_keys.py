"""A learner's key is read once and from no file; what is to be encrypted is never said in clear."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rudra_zmq.errors import ConfigError, RefusedBySecurity
from rudra_zmq.learner.keys import Keys
from rudra_zmq.learner.spec import LearnerSpec, NodeFile
from rudra_zmq.net.auth import KeyPair
from rudra_zmq.wire.messages.data import Hello

TCP, IPC = "tcp://127.0.0.1:7740", "ipc:///run/n.sock"
NODE = KeyPair.new().public
HELLO = Hello(role="learner", job="abc123", token="t", rank=0, incarnation=1)


def spec(encrypt: bool = True, key_fd: int = -1) -> LearnerSpec:
    toml = f'[job]\ntask = "a:b"\n[wire]\nencrypt = {str(encrypt).lower()}\n'
    rest: dict[str, Any] = dict.fromkeys(("token", "node_file", "log", "output", "cwd", "host"), "x")
    return LearnerSpec(
        job="abc123", rank=0, incarnation=1, role="learner", toml=toml, threads=1, ppid=1, key_fd=key_fd, **rest
    )  # fmt: skip


def left_by(data: bytes) -> int:
    fd = os.memfd_create("key")
    os.write(fd, data)
    return fd


def test_the_key_is_taken() -> None:
    pair = KeyPair.new()
    fd = left_by(pair.secret.encode())
    keys = Keys(spec(key_fd=fd))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    curve = keys.curve(NodeFile([TCP], key=NODE), TCP)
    assert curve == (pair, NODE)
    assert keys.sign(HELLO, curve).key == pair.public and keys.sign(HELLO, None) == HELLO
    assert pair.secret not in repr(curve)


@pytest.mark.parametrize("data", [b"", b"short", b"~" * 40, b"\xff" * 40, b"a" * 41])
def test_what_is_no_key(data: bytes) -> None:
    fd = left_by(data)
    with pytest.raises(ConfigError, match=r"key cannot be read.*Fix: "):
        Keys(spec(key_fd=fd))


def test_a_descriptor_that_is_closed() -> None:
    fd = left_by(b"")
    os.close(fd)
    with pytest.raises(ConfigError, match="key cannot be read"):
        Keys(spec(key_fd=fd))


@pytest.mark.parametrize(
    ("encrypt", "own", "nodes", "address", "expected"),
    [
        (True, True, NODE, TCP, True),
        (True, True, "", TCP, "the node's key is missing"),
        (True, False, NODE, TCP, "a key of this learner's is missing"),
        (False, True, "", TCP, False),
        (False, False, "", TCP, False),
        (False, False, NODE, TCP, "a key of this learner's is missing"),
        (True, False, "", IPC, False),
        (True, True, NODE, IPC, False),
    ],
)
def test_who_is_spoken_to_and_how(encrypt: bool, own: bool, nodes: str, address: str, expected: bool | str) -> None:
    keys = Keys(spec(encrypt, left_by(KeyPair.new().secret.encode()) if own else -1))
    known = NodeFile([address], key=nodes)
    if isinstance(expected, str):
        with pytest.raises(RefusedBySecurity, match=expected):
            keys.curve(known, address)
    else:
        assert (keys.curve(known, address) is not None) is expected
