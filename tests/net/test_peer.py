"""A daemon's lasting connection: it comes back with a new identity, and every request ends with an answer."""

from __future__ import annotations

import socket
from typing import Any

from rudra_zmq.net.loop import Loop
from rudra_zmq.net.peer import RpcPeer
from rudra_zmq.net.retry import FAST_FOR, LONGEST, Backoff
from rudra_zmq.net.rpc import RpcServer
from rudra_zmq.net.sockets import Router
from rudra_zmq.wire.messages.control import Error, GetJob, ListHosts, NodeStop, Ok, Register
from rudra_zmq.wire.messages.data import Message
from tests.net.conftest import Net, until

REGISTER = Register(token="t", name="a", slots=1, pid=1, boot="b")
STOP = NodeStop(now=True, state="STOPPED", reason="asked")


class World:
    """A psd that can be taken away and a daemon that wants it, in one loop."""

    def __init__(self, net: Net, kind: str = "ipc", **options: Any) -> None:
        self.net = net
        self.loop: Loop = net.loop()
        self.kind = kind
        self.router: Router | None = None
        self.server: RpcServer | None = None
        self.mute = False  # the psd answers nothing
        self.seen: list[tuple[bytes, Any]] = []
        self.registered: list[Any] = []
        self.notices: list[tuple[str, Any]] = []
        self.lost: list[str] = []
        self.address = ""
        self.serve()
        self.peer = self.dial(self.address, **options)

    def dial(self, address: str, **options: Any) -> RpcPeer:
        peer = RpcPeer(
            self.loop,
            self.net.context("control"),
            address,
            "learnerd",
            on_connect=lambda: self.peer.request(REGISTER, self.registered.append),
            on_message=self.message,
            on_lost=self.lost.append,
            **options,
        )
        self.net.close_at_end(lambda: peer.close(0.0))
        return peer

    def message(self, id: str, message: Any) -> Message | None:
        self.notices.append((id, message))
        return Ok(text="done") if id == "now" else None

    def serve(self) -> None:
        self.router = self.net.router()
        if not self.address:
            self.address = (
                self.router.bind_ipc(self.net.path()) if self.kind == "ipc" else self.router.bind_tcp("127.0.0.1", 0)
            )
        elif self.kind == "ipc":
            self.router.bind_ipc(self.address.removeprefix("ipc://"))
        else:
            self.router.bind_tcp("127.0.0.1", int(self.address.rsplit(":", 1)[1]))
        self.answers: list[Any] = []
        self.server = RpcServer(
            self.loop, self.router, self.handle, on_reply=lambda peer, id, message: self.answers.append((id, message))
        )

    def vanish(self) -> None:
        assert self.server is not None and self.router is not None
        self.server.close()
        self.router.close()

    def handle(self, peer: bytes, id: str, message: Any) -> Message | None:
        self.seen.append((peer, message))
        return None if self.mute else Ok(text=type(message).__name__)


def test_it_registers_and_asks(net: Net, kind: str) -> None:
    world = World(net, kind)
    until(world.loop, lambda: world.registered)
    assert world.peer.connected
    answers: list[Any] = []
    world.peer.request(ListHosts(), answers.append)
    until(world.loop, lambda: answers)
    assert world.peer.notify(GetJob(job="3"))
    until(world.loop, lambda: len(world.seen) == 3)
    assert world.registered == [Ok(text="Register")]
    assert answers == [Ok(text="ListHosts")]
    assert [message for _, message in world.seen] == [REGISTER, ListHosts(), GetJob(job="3")]
    assert world.lost == []


def test_it_comes_back_with_a_new_identity(net: Net, kind: str) -> None:
    world = World(net, kind)
    until(world.loop, lambda: world.registered)
    world.mute = True
    unanswered: list[Any] = []
    world.peer.request(ListHosts(), unanswered.append)
    until(world.loop, lambda: len(world.seen) == 2)
    world.vanish()
    until(world.loop, lambda: unanswered)
    assert isinstance(unanswered[0], Error) and unanswered[0].code == "unreachable"
    assert world.lost == ["connection closed by the other side"]
    assert world.peer.notify(GetJob(job="1")) is False
    world.mute = False
    world.serve()
    until(world.loop, lambda: len(world.registered) == 2)
    assert world.seen[-1][1] == REGISTER
    assert world.seen[-1][0] != world.seen[0][0]
    assert len(world.lost) == 1


def test_a_silent_server_is_a_lost_one(net: Net) -> None:
    world = World(net, ping=lambda: GetJob(job="2"), ping_s=0.01, liveness_s=1.0)
    until(world.loop, lambda: (world.seen[-1:] or [(b"", None)])[0][1] == GetJob(job="2"))
    assert world.lost == []
    world.mute = True
    until(world.loop, lambda: world.lost)
    assert world.lost[0].startswith("silent for 1.")
    world.mute = False
    until(world.loop, lambda: len(world.registered) >= 2)


def test_pings_keep_it_alive(net: Net) -> None:
    world = World(net, ping=lambda: GetJob(job="2"), ping_s=0.1, liveness_s=0.6)
    until(world.loop, lambda: sum(message == GetJob(job="2") for _, message in world.seen) >= 6)
    assert world.lost == []


def test_a_request_without_an_answer_ends(net: Net) -> None:
    world = World(net)
    until(world.loop, lambda: world.registered)
    world.mute = True
    answers: list[Any] = []
    id = world.peer.request(ListHosts(), answers.append, timeout=0.05)
    until(world.loop, lambda: answers)
    assert isinstance(answers[0], Error) and answers[0].code == "timed-out"
    assert world.server is not None
    world.server.reply(world.seen[-1][0], id, Ok())  # too late
    until(world.loop, lambda: world.peer.drops)
    assert world.peer.drops == {"late reply": 1}
    assert len(answers) == 1


def test_what_the_server_asks(net: Net) -> None:
    world = World(net)
    until(world.loop, lambda: world.registered)
    assert world.server is not None
    peer = world.seen[0][0]
    for id in ("", "now", "later"):
        assert world.server.send(peer, STOP, id=id)
    until(world.loop, lambda: len(world.notices) == 3)
    assert world.notices == [("", STOP), ("now", STOP), ("later", STOP)]
    assert world.peer.reply("later", Ok(text="done at last"))
    until(world.loop, lambda: len(world.answers) == 2)
    assert world.answers == [("now", Ok(text="done")), ("later", Ok(text="done at last"))]


def test_a_message_that_breaks_a_limit_ends_nothing(net: Net) -> None:
    world = World(net)
    until(world.loop, lambda: world.registered)
    answers: list[Any] = []
    world.peer.request(Ok(text="x" * 5000), answers.append)
    until(world.loop, lambda: answers)
    assert isinstance(answers[0], Error) and answers[0].message.startswith("Ok cannot be sent: ")
    assert world.peer.notify(Ok(text="x" * 5000)) is False
    assert world.peer.drops == {"unsendable": 2}
    assert world.peer.connected


def test_nobody_there_is_said_once_with_the_reason(net: Net) -> None:
    world = World(net)
    path = net.path()
    world.peer.reconnect(f"ipc://{path}")
    until(world.loop, lambda: len(world.lost) == 1)
    for _ in range(5):
        world.loop.turn(0.1)
    assert world.lost == ["no such socket"]
    asked: list[Any] = []
    world.peer.request(ListHosts(), asked.append)
    until(world.loop, lambda: asked)
    assert isinstance(asked[0], Error) and asked[0].code == "unreachable"
    world.address = f"ipc://{path}"
    world.vanish()
    world.serve()
    until(world.loop, lambda: world.registered)
    assert world.peer.connected


def test_a_name_that_cannot_be_found_now(net: Net, monkeypatch: Any) -> None:
    world = World(net, "tcp")
    until(world.loop, lambda: world.registered)
    real = socket.getaddrinfo

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    world.peer.reconnect(world.address.replace("127.0.0.1", "localhost"))
    world.lost.clear()
    world.peer.reconnect()
    for _ in range(5):
        world.loop.turn(0.1)
    assert not world.peer.connected
    monkeypatch.setattr(socket, "getaddrinfo", real)
    until(world.loop, lambda: world.peer.connected)


def test_closed_it_calls_nobody(net: Net) -> None:
    world = World(net)
    until(world.loop, lambda: world.registered)
    world.mute = True
    answers: list[Any] = []
    world.peer.request(ListHosts(), answers.append, timeout=0.05)
    world.peer.close()
    world.vanish()
    for _ in range(5):
        world.loop.turn(0.05)
    assert answers == []
    assert world.lost == []


def test_closed_from_its_own_callback(net: Net) -> None:
    world = World(net)
    until(world.loop, lambda: world.registered)
    world.lost = []
    world.peer._on_lost = lambda reason: (world.lost.append(reason), world.peer.close())
    world.vanish()
    until(world.loop, lambda: world.lost)
    for _ in range(5):
        world.loop.turn(0.05)
    assert not world.peer.connected


def test_garbage_is_counted(net: Net) -> None:
    world = World(net)
    until(world.loop, lambda: world.registered)
    assert world.router is not None
    world.router.send(world.seen[0][0], [b"RZ\x07", b"x"])
    world.router.send(world.seen[0][0], [b"junk"])
    until(world.loop, lambda: len(world.peer.drops) == 2)
    assert world.peer.drops == {"version": 1, "frames": 1}
    assert world.peer.connected


def test_back_off() -> None:
    backoff = Backoff()
    now = 0.0
    waits = []
    while now < 60.0:
        wait = backoff.next(now)
        waits.append((now, wait))
        now += wait
    assert all(0.07 < wait < 0.13 for at, wait in waits if at < FAST_FOR)
    assert waits[-1][1] > 0.7 * LONGEST
    assert all(wait <= 1.25 * LONGEST for _, wait in waits)
    backoff.reset()
    assert backoff.next(now) < 0.13
