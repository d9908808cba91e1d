"""``rudra invite`` on the head and ``rudra host-join`` on a new host: one line makes a machine a host.

The line carries the head's public key and a secret that is of use once. The secret is a key itself: the new host
proves under CURVE that it has it, and its own key takes its place. Nothing secret is ever sent.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from pathlib import Path

import click

from rudra_zmq.cli.base import Cli, command, json_option, key_name
from rudra_zmq.cli.job_commands import duration
from rudra_zmq.cli.output import emit_json, note, say
from rudra_zmq.config.edit import with_values
from rudra_zmq.config.layers import read_text
from rudra_zmq.config.load import ETC, own_folder
from rudra_zmq.errors import RefusedBySecurity, Rejected, RudraError, Unreachable, UsageError
from rudra_zmq.net import keys
from rudra_zmq.net.addresses import Address, is_any, parse
from rudra_zmq.net.auth import KeyPair, to_hex, to_z85
from rudra_zmq.net.client import RpcClient
from rudra_zmq.wire.messages import control as c

JOIN_S = 15.0
_INVITATION = re.compile(r"(tcp://\S+?)/([0-9a-f]{64})/([0-9a-f]{64})")


def _held(ctx: click.Context, param: click.Parameter, value: str) -> float:
    seconds = duration(ctx, param, value) or 0.0
    if not 1 <= seconds <= c.INVITE_MOST_S:
        raise click.BadParameter(f"{value} is not within 1s to 7d")
    return seconds


@command("invite")
@click.argument("name", callback=key_name)
@click.option("--address", default="", metavar="ADDRESS", help="Of the head, as the new host is to dial it.")
@click.option(
    "--for", "seconds", callback=_held, default="1h", show_default=True, help="How long it holds, at most 7d."
)
@json_option
@click.pass_obj
def invite(cli: Cli, name: str, address: str, seconds: float, as_json: bool) -> None:
    """Print the line that makes another machine the host NAME. It works once; who has it can join in its stead.

    \b
      rudra invite gpu-3
    """
    pair = KeyPair.new()
    with cli.places() as places:
        head = places.head()
        known = head.keys()
        address = address or _reachable(known.addresses)
        parse(address)
        head.invite(c.Invite(key=to_hex(pair.public), name=name, seconds=seconds))
    invitation = f"{address}/{known.head}/{to_hex(pair.secret)}"
    if as_json:
        emit_json({"name": name, "address": address, "invitation": invitation, "seconds": seconds})
        return
    note(f"{name} is told to dial {address} (--address for another); with --system it joins as a service")
    say(f"rudra host-join '{invitation}'")


def _reachable(bound: list[str]) -> str:
    """The address to tell. Of all interfaces it is the one of the default route."""
    if not bound:
        fix = "set psd.listen to a tcp address, `rudra keys new psd`, and start psd again"
        raise Rejected("this psd listens at no tcp address", fix=fix)
    target = parse(bound[0])
    if not is_any(target.host):
        return bound[0]
    family, far = (socket.AF_INET6, "2001:db8::1") if ":" in target.host else (socket.AF_INET, "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as plain:
        plain.connect((far, 9))  # of a datagram socket: nothing is sent
        return str(Address("tcp", host=plain.getsockname()[0], port=target.port))
    raise Rejected(
        "psd listens at all interfaces, and none has a default route", fix="name one: --address tcp://IP:PORT"
    )


@command("host-join")
@click.argument("invitation")
@click.option("--system", is_flag=True, help="For the system's learnerd: /etc/rudra instead of ~/.config/rudra.")
@json_option
def host_join(invitation: str, system: bool, as_json: bool) -> None:
    """Make this machine a host: its key is made, the head's is pinned, rudra.toml is written.

    \b
      rudra host-join 'tcp://10.0.0.1:7733/3fa9.../77c0...'

    INVITATION is what `rudra invite` printed on the head; "-" reads it from stdin.
    """
    text = sys.stdin.readline().strip() if invitation == "-" else invitation.strip()
    match = _INVITATION.fullmatch(text)
    if match is None:
        raise UsageError("this is no invitation", fix="give the whole of what `rudra invite` printed, in quotes")
    address, head = match[1], match[2]
    parse(address)
    file = ETC / "conf.d" / "50-head.toml" if system else own_folder(os.environ) / "rudra.toml"
    before = read_text(file) if file.exists() else ""
    with_values(before, {"head.address": address, "head.key": head, "host.name": "x"}, str(file))  # it can be done
    name, public = _join(address, head, match[3], keys.SYSTEM if system else keys.person_folder())
    _write(file, with_values(before, {"head.address": address, "head.key": head, "host.name": name}, str(file)))
    start = "systemctl enable --now rudra-learnerd" if system else "systemctl --user enable --now rudra-learnerd"
    if as_json:
        emit_json({"name": name, "key": public, "head": address, "path": str(file), "start": start})
        return
    say(f"this machine is the host {name} of {address} (key {public[:8]}, settings in {file})")
    say(f"start it: {start}" + ("" if system else "   (without systemd: learnerd)"))


def _join(address: str, head: str, secret: str, folder: Path) -> tuple[str, str]:
    """The host's name and its public key, once the head has taken it."""
    path = folder / "learnerd.key"
    made = not path.exists()
    pair = keys.make("learnerd", folder)[1] if made else keys.read(path)
    try:
        curve = KeyPair.of(to_z85(secret)), to_z85(head)
        with RpcClient(address, curve=curve, patience=5.0) as client:
            joined = client.call(c.Join(key=to_hex(pair.public)), JOIN_S, expect=c.Joined)
    except (RudraError, ValueError) as error:
        if made:
            path.unlink(missing_ok=True)
        if isinstance(error, RefusedBySecurity) and to_hex(KeyPair.of(to_z85(secret)).public)[:8] in error.message:
            fix = "`rudra invite` on the head makes another"
            raise RefusedBySecurity("the invitation was used, or its time is over", where=address, fix=fix) from None
        if isinstance(error, Unreachable) and "kill -CONT" not in error.fix:
            fix = "on the head: start psd, or `rudra invite --address` with the one that it listens at"
            raise Unreachable(error.message, where=error.where, fix=fix) from None
        raise
    return joined.name, to_hex(pair.public)


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, "utf-8")
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RudraError(
            f"cannot write: {error.strerror}", where=str(file), fix="see to its folder, join anew"
        ) from None
