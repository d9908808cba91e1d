"""Requests and replies: answered once, repeated safely, refused politely; bad input is counted, no more."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from rudra_zmq import __version__
from rudra_zmq.errors import NotFound, RefusedBySecurity, Rejected, RudraError, TimedOut, Unreachable, UsageError
from rudra_zmq.net.loop import Loop
from rudra_zmq.net.rpc import RpcClient, RpcServer
from rudra_zmq.net.sockets import Dealer, Router, make_context
from rudra_zmq.wire import codec
from rudra_zmq.wire.codec import REASONS, decode_control, encode_control
from rudra_zmq.wire.messages.control import (
    AuthorizeKey,
    DiskUse,
    Envelope,
    Error,
    GetEvents,
    GetJob,
    Jobs,
    ListJobs,
    NodeStop,
    Ok,
    SetHost,
    Whoami,
)
from rudra_zmq.wire.messages.data import Message
from tests.net.conftest import PATIENCE, Net, in_thread, until

Handler = Callable[[bytes, str, Any], Message | None]


class Psd:
    """A server in the test's own loop, with raw dealers that ask it."""

    def __init__(self, net: Net, handler: Handler, kind: str = "ipc") -> None:
        self.net = net
        self.loop = net.loop()
        self.router, self.address = net.bound(kind)
        self.gone: list[bytes] = []
        self.answers: list[tuple[bytes, str, Any]] = []
        self.server = RpcServer(
            self.loop,
            self.router,
            handler,
            on_reply=lambda *args: self.answers.append(args),
            on_gone=self.gone.append,
        )
        net.close_at_end(self.server.close)

    def ask(self, dealer: Dealer, message: Message, id: str = "", *, reply: bool = False) -> None:
        assert dealer.send(encode_control(Envelope(id, reply), message))

    def answer(self, dealer: Dealer) -> tuple[Envelope, Any]:
        until(self.loop, lambda: dealer.wait(0.0))
        frames = dealer.recv()
        assert frames is not None
        return decode_control(frames)

    def settle(self, dealer: Dealer) -> None:
        """Everything that ``dealer`` sent so far was handled: a message behind it is answered."""
        self.ask(dealer, DiskUse(), "settle")
        self.answer(dealer)


class TestServer:
    def test_answers_and_errors(self, net: Net, kind: str) -> None:
        def handler(peer: bytes, id: str, message: Any) -> Message | None:
            match message:
                case ListJobs():
                    return Jobs(rows=[])
                case GetJob(job=job):
                    raise NotFound(f"no job {job}", fix="see rudra jobs")
            raise ZeroDivisionError("a bug")

        psd = Psd(net, handler, kind)
        dealer = net.dealer(psd.address)
        psd.ask(dealer, ListJobs(), "1")
        assert psd.answer(dealer) == (Envelope("1", True), Jobs(rows=[]))
        psd.ask(dealer, GetJob(job="x"), "2")
        assert psd.answer(dealer)[1] == Error(code="not-found", message="no job x", fix="see rudra jobs")
        psd.ask(dealer, DiskUse(), "3")
        bug = psd.answer(dealer)[1]
        assert isinstance(bug, Error) and "a bug" in bug.message
        assert psd.server.drops == {"internal": 1}
        psd.ask(dealer, ListJobs(), "4")
        assert psd.answer(dealer)[0].id == "4"

    def test_a_notice_has_no_answer(self, net: Net) -> None:
        seen: list[Any] = []

        def handler(peer: bytes, id: str, message: Any) -> Message | None:
            seen.append((id, message))
            return Ok()

        psd = Psd(net, handler)
        dealer = net.dealer(psd.address)
        psd.ask(dealer, GetJob(job="1"))
        psd.ask(dealer, GetJob(job="2"), "1")
        assert psd.answer(dealer) == (Envelope("1", True), Ok())
        assert dealer.recv() is None
        assert seen == [("", GetJob(job="1")), ("1", GetJob(job="2"))]

    def test_a_repeated_request_runs_once(self, net: Net) -> None:
        runs: list[str] = []

        def handler(peer: bytes, id: str, message: Any) -> Message | None:
            runs.append(id)
            return Ok(text=f"run {len(runs)}")

        psd = Psd(net, handler)
        first, second = net.dealer(psd.address), net.dealer(psd.address)
        psd.ask(first, GetJob(job="1"), "same")
        assert psd.answer(first)[1] == Ok(text="run 1")
        psd.ask(second, GetJob(job="1"), "same")
        assert psd.answer(second)[1] == Ok(text="run 1")
        psd.ask(second, GetJob(job="1"), "other")
        assert psd.answer(second)[1] == Ok(text="run 2")
        assert runs == ["same", "other"]

    def test_repeated_while_it_runs_the_answer_goes_to_the_new_connection(self, net: Net) -> None:
        waiting: list[tuple[bytes, str]] = []

        def handler(peer: bytes, id: str, message: Any) -> Message | None:
            if isinstance(message, GetEvents):
                waiting.append((peer, id))
                return None
            return Ok()

        psd = Psd(net, handler)
        first, second = net.dealer(psd.address), net.dealer(psd.address)
        question = GetEvents(job="a1b2c3", after=0, wait=20.0)
        psd.ask(first, question, "long")
        until(psd.loop, lambda: waiting)
        first.close(0.0)
        psd.ask(second, question, "long")
        psd.settle(second)
        assert len(waiting) == 1
        assert psd.server.reply(*waiting[0], Ok(text="at last"))
        assert psd.answer(second) == (Envelope("long", True), Ok(text="at last"))

    def test_the_record_of_replies_is_bounded(self, net: Net) -> None:
        runs: list[str] = []

        def handler(peer: bytes, id: str, message: Any) -> Message | None:
            runs.append(id)
            return Error(code="failed", message="x" * 4096, where="é" * 4096, fix="日" * 4096)  # 24 KiB

        psd = Psd(net, handler)
        dealer = net.dealer(psd.address)
        asked = [f"{i}" for i in range(500)]
        for id in [*asked, "499", "0"]:  # 8 MiB are the last 341
            psd.ask(dealer, ListJobs(), id)
            psd.answer(dealer)
        assert runs == [*asked, "0"]

    def test_requests_of_its_own(self, net: Net) -> None:
        psd = Psd(net, lambda peer, id, message: Ok())
        dealer = net.dealer(psd.address)
        psd.ask(dealer, GetJob(job="1"), "1")
        psd.answer(dealer)
        stop = NodeStop(now=True, state="STOPPED", reason="asked")
        assert psd.server.send(dealer.identity, stop, id="mine")
        assert psd.answer(dealer) == (Envelope("mine", False), stop)
        psd.ask(dealer, Ok(text="stopping"), "mine", reply=True)
        until(psd.loop, lambda: psd.answers)
        assert psd.answers == [(dealer.identity, "mine", Ok(text="stopping"))]

    def test_an_answer_that_breaks_a_limit_is_an_error_and_ends_nothing(self, net: Net) -> None:
        psd = Psd(net, lambda peer, id, message: Ok(text="x" * 5000))
        dealer = net.dealer(psd.address)
        psd.ask(dealer, ListJobs(), "1")
        answer = psd.answer(dealer)[1]
        assert isinstance(answer, Error) and answer.message.startswith("Ok cannot be sent: field: ")
        assert psd.server.send(dealer.identity, Ok(text="x" * 5000)) is False
        assert psd.server.drops == {"unsendable": 2}

    def test_a_vanished_peer_is_told_of(self, net: Net) -> None:
        psd = Psd(net, lambda peer, id, message: Ok())
        dealer = net.dealer(psd.address)
        psd.ask(dealer, GetJob(job="1"), "1")
        psd.answer(dealer)
        dealer.close(0.0)
        until(psd.loop, lambda: not psd.server.send(dealer.identity, Ok()))
        until(psd.loop, lambda: psd.gone)
        assert set(psd.gone) == {dealer.identity}

    def test_a_full_queue_is_counted_and_nobody_waits(self, net: Net) -> None:
        psd = Psd(net, lambda peer, id, message: Ok())
        dealer = net.dealer(psd.address)
        psd.ask(dealer, GetJob(job="1"), "1")
        psd.answer(dealer)
        text = Ok(text="x" * 4000)
        sent = 0
        while psd.server.send(dealer.identity, text):
            sent += 1
            assert sent < 20_000
        assert psd.server.drops["full"] == 1
        other = net.dealer(psd.address)
        psd.ask(other, GetJob(job="2"), "2")
        assert psd.answer(other)[1] == Ok()

    def test_bad_input_is_counted_by_reason(self, net: Net, kind: str) -> None:
        psd = Psd(net, lambda peer, id, message: Ok(), kind)
        dealer = net.dealer(psd.address)
        good = encode_control(Envelope("1", False), GetJob(job="1"))
        for frames in (
            [b""],
            [b"GET / HTTP/1.1"],
            [b"x"] * 50,
            [b"RZ\x09" + bytes(good[0])[3:], good[1]],
            [good[0]],
            [good[0], b"\xc1"],
            [good[0], bytes(good[1])[:-1]],
            [good[0], encode_control(Envelope("", False), Ok())[1], b"more"],
        ):
            assert dealer.send(frames)
        noise = random.Random(1)
        for _ in range(200):
            assert dealer.send([noise.randbytes(20), noise.randbytes(20)])
        psd.ask(dealer, Ok(), "what was asked?", reply=True)
        envelope, told = psd.answer(dealer)  # of the other version: it is told
        assert (envelope, told.code) == (Envelope("", False), "rejected")
        assert told.message == f"wire versions differ: it speaks 9, this side (rudra-zmq {__version__}) speaks 1"
        psd.settle(dealer)
        assert set(psd.server.drops) <= set(REASONS)
        assert sum(psd.server.drops.values()) == 208
        assert psd.server.drops["version"] == 1
        assert len(psd.answers) == 1

    def test_who_speaks_the_version_before_is_answered_in_it(self, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(codec, "ACCEPTED", frozenset({1, 2}))
        psd = Psd(net, lambda peer, id, message: Jobs(rows=[]))
        older, ours = net.dealer(psd.address), net.dealer(psd.address)
        assert older.send(codec.in_version(encode_control(Envelope("a", False), ListJobs()), 2))
        psd.ask(ours, ListJobs(), "b")
        for dealer, version, id in ((older, 2, "a"), (ours, 1, "b")):
            until(psd.loop, lambda dealer=dealer: dealer.wait(0.0))  # type: ignore[misc]
            frames = dealer.recv()
            assert frames is not None
            assert (codec.version_of(frames), decode_control(frames)) == (version, (Envelope(id, True), Jobs(rows=[])))

    def test_strangers_on_the_port(self, net: Net) -> None:
        psd = Psd(net, lambda peer, id, message: Ok(), "tcp")
        host, _, port = psd.address.removeprefix("tcp://").rpartition(":")
        for body in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f" + b"\xff" * 100, b""):
            with socket.create_connection((host, int(port)), timeout=PATIENCE) as stranger:
                stranger.sendall(body)
                psd.settle(net.dealer(psd.address))


def serving(net: Net, path: str, handler: Handler) -> Callable[[Loop], tuple[RpcServer, Callable[[], object]]]:
    """What in_thread runs: a server with a context of its own on ``path``."""

    def build(loop: Loop) -> tuple[RpcServer, Callable[[], object]]:
        context = make_context("control")
        router = context.router("psd")
        router.bind_ipc(path)
        server = RpcServer(loop, router, handler)

        def close() -> None:
            server.close()
            router.close()
            assert context.close()

        return server, close

    return build


class TestClient:
    def test_call(self, net: Net) -> None:
        seen: list[Any] = []

        def handler(peer: bytes, id: str, message: Any) -> Message | None:
            seen.append(message)
            if isinstance(message, GetJob):
                raise NotFound("no such job", where=message.job, fix="see rudra jobs")
            return Jobs(rows=[]) if isinstance(message, ListJobs) else Ok()

        path = net.path()
        who = Whoami(token="t")
        with in_thread(serving(net, path, handler)), RpcClient(f"ipc://{path}", whoami=who) as client:
            assert client.call(ListJobs(), expect=Jobs) == Jobs(rows=[])
            assert client.call(ListJobs()) == Jobs(rows=[])
            with pytest.raises(NotFound) as caught:
                client.call(GetJob(job="x"))
            assert str(caught.value) == "no such job (x). Fix: see rudra jobs"
            with pytest.raises(RudraError, match="Ok came as the answer to DiskUse"):
                client.call(DiskUse(), expect=Jobs)
        assert seen.count(who) == 1
        assert seen[0] == who

    def test_a_server_of_another_version_is_named_at_once(self, net: Net) -> None:
        path = net.path()

        def newer(loop: Loop) -> tuple[Router, Callable[[], object]]:
            router = net_context.router("newer")
            router.bind_ipc(path)

            def answer() -> None:
                while (received := router.recv()) is not None:
                    router.send(received[0], codec.in_version(encode_control(Envelope("x", True), Ok()), 9))

            loop.on_readable(router, answer)

            def close() -> None:
                loop.forget(router)
                router.close()

            return router, close

        net_context = net.context("control")
        with in_thread(newer), RpcClient(f"ipc://{path}") as client, pytest.raises(Rejected) as caught:
            client.call(ListJobs())
        assert "it speaks 9, this side" in str(caught.value) and path in str(caught.value)

    def test_a_refused_token(self, net: Net) -> None:
        def handler(peer: bytes, id: str, message: Any) -> Message | None:
            if isinstance(message, Whoami):
                raise RefusedBySecurity("the token is not this psd's", fix="use its token file")
            return None

        path = net.path()
        who = Whoami(token="wrong")
        with (
            in_thread(serving(net, path, handler)),
            RpcClient(f"ipc://{path}", whoami=who) as client,
            pytest.raises(RefusedBySecurity, match="Fix: use its token file"),
        ):
            client.call(ListJobs())

    def test_no_answer(self, net: Net) -> None:
        path = net.path()
        with in_thread(serving(net, path, lambda *_: None)), RpcClient(f"ipc://{path}") as client:
            begun = time.monotonic()
            with pytest.raises(TimedOut, match=f"no answer to ListJobs in time .*{path}"):
                client.call(ListJobs(), 0.3)
            assert 0.3 <= time.monotonic() - begun < 5.0

    def test_nobody_there(self, net: Net) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # bound, and not listening
            for address, reason in (
                (f"ipc://{net.path()}", "no such socket"),
                (f"tcp://127.0.0.1:{closed.getsockname()[1]}", "refused: nobody listens"),
            ):
                with RpcClient(address, patience=0.1) as client, pytest.raises(Unreachable) as caught:
                    client.call(ListJobs())
                assert str(caught.value).startswith(f"psd cannot be reached: {reason} ({address}). Fix: ")

    def test_a_port_that_is_no_psd(self, net: Net) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
            with RpcClient(address, patience=0.1) as client, pytest.raises(Unreachable) as caught:
                client.call(ListJobs(), 1.0)
            assert "accepts connections, and does not answer" in str(caught.value)
            assert "Fix: see its log" in str(caught.value)  # to start it would not help

    def test_a_server_that_is_busy_at_the_first_contact_is_waited_for(self, net: Net) -> None:
        """A daemon that the machine has stopped, or starves, for longer than `patience`."""
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
            begun = time.monotonic()
            with RpcClient(address, patience=0.1) as client, pytest.raises(Unreachable):
                client.call(ListJobs(), 2.0)
            assert time.monotonic() - begun >= 2.0

    def test_a_server_that_restarts_gets_the_request_again_under_its_id(self, net: Net) -> None:
        path = net.path()
        ids: list[str] = []
        asked: list[Any] = []
        loops: list[Loop] = []

        def vanish(peer: bytes, id: str, message: Any) -> Message | None:
            ids.append(id)
            loops[0].stop()  # its answer will never come
            return None

        def answer(peer: bytes, id: str, message: Any) -> Message | None:
            ids.append(id)
            return Ok(text="from the second")

        def first(loop: Loop) -> tuple[RpcServer, Callable[[], object]]:
            loops.append(loop)
            return serving(net, path, vanish)(loop)

        def second_life(loop: Loop) -> tuple[list[Any], Callable[[], object]]:
            """The client, in a thread of its own."""

            def ask() -> None:
                with RpcClient(f"ipc://{path}") as client:
                    asked.append(client.call(GetJob(job="1"), expect=Ok))

            loop.after(0.0, ask)
            return asked, lambda: None

        with in_thread(first) as _, in_thread(second_life):
            until(net.loop(), lambda: ids)
            until(net.loop(), lambda: not os.path.exists(path))
            with in_thread(serving(net, path, answer)):
                until(net.loop(), lambda: asked)
        assert asked == [Ok(text="from the second")]
        assert len(ids) == 2 and ids[0] == ids[1]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (AuthorizeKey(key="a" * 64, name="bad name", role="read"), "AuthorizeKey: its name cannot be sent"),
        (SetHost(host="\udcff", state="drained"), "SetHost: its host cannot be sent: not UTF-8"),
        (SetHost(host="x" * 5000, state="drained"), "SetHost: its host cannot be sent"),
        (GetEvents(job="a1b2c3", after=0, wait=99.0), "GetEvents: its wait cannot be sent"),
    ],
)
def test_a_request_that_cannot_be_said_is_a_usage_error_before_anything_is_sent(message: Message, words: str) -> None:
    with (
        RpcClient("ipc:///nowhere/at/all", patience=0.0) as client,
        pytest.raises(UsageError, match=words) as caught,
    ):
        client.call(message, 1.0)
    assert caught.value.fix and str(caught.value).isprintable()
