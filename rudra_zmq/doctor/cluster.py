"""The head and the hosts that it knows: reached or not and why, clocks, versions, who is silent, which GPUs are gone.

Owns: the questions, in the order in which an answer makes the next one sensible. Must not know: where the head's
address comes from, how a request is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rudra_zmq import __version__
from rudra_zmq.doctor.findings import Finding, of_error
from rudra_zmq.errors import EXIT_SOME_HOSTS, EXIT_UNREACHABLE, RudraError
from rudra_zmq.head.fleet import differing
from rudra_zmq.net.addresses import (
    Address,
    is_loopback,
    other_than_zmtp,
    parse,
    port_owner,
    probe,
    resolve,
    stopped,
    way_to,
)
from rudra_zmq.wire.messages.control import HostRow, Hosts

PROBE_S = 2.0
SKEW_S = 2.0
_FIXES = (
    ("name not found", "correct the name in head.address (or --head), or add it to /etc/hosts or to the name server"),
    ("no answer", "see that the host is up and that firewalls on the way let this port pass"),
    ("refused: nobody listens", "start psd there (`rudra up`, `systemctl start rudra-psd`), or correct the port"),
    ("no permission", "run as psd's own user, or become a member of the group rudra"),
    ("Network is unreachable", "this host has no route there: see `ip route`"),
    ("No route to host", "the host is down, a firewall rejects, or no route leads there: see `ip route get`"),
)


class Cluster(Protocol):
    """A head that can be asked."""

    def listing(self) -> Hosts: ...


class Way(Protocol):
    """To a head. Both raise a RudraError where there is none."""

    def address(self) -> str: ...
    def dial(self) -> AbstractContextManager[Cluster]: ...


def look(way: Way, clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """All that the head can be asked for."""
    try:
        address = parse(way.address())
        if fault := _unreached(address):
            yield fault
            return
        with way.dial() as cluster:
            cluster.listing()  # the connection and its greeting, which are no part of a round trip
            before = clock()
            found = cluster.listing()
            after = clock()
    except RudraError as error:
        yield of_error(f"head-{error.code}", error, status=error.exit_status)
        return
    yield from _skew(str(address), found.now, before, after)
    yield from _hosts(str(address), found, after)


def _unreached(address: Address) -> Finding | None:
    """Why no psd can answer at this address."""
    if still := stopped(address):
        text, fix = f"what listens there (PID {still}) is stopped", f"kill -CONT {still}"
        return Finding("head-stopped", "error", str(address), text, fix, EXIT_UNREACHABLE)
    if reason := probe(address, PROBE_S):
        known = next((fix for start, fix in _FIXES if start in reason), "")
        fix = known or "start psd with `rudra up`, or name another address (head.address, --head)"
        text = f"the head cannot be reached{_way(address)}: {reason}"
        return Finding("head-unreachable", "error", str(address), text, fix, EXIT_UNREACHABLE)
    if other := other_than_zmtp(address, PROBE_S):
        pid = port_owner(address.port) if address.kind == "tcp" and is_loopback(resolve(address).host) else None
        who = f" (PID {pid})" if pid else ""
        text = f"what listens there{who} is no psd that works: {other}"
        fix = "correct the port (head.address, --head), or see psd's log: it is stopped or stuck"
        return Finding("head-other", "error", str(address), text, fix, EXIT_UNREACHABLE)
    return None


def _way(address: Address) -> str:
    """ " from 10.0.0.2 (eth0)": which way was tried, where there is one."""
    if address.kind == "ipc":
        return ""
    try:
        way = way_to(resolve(address).host)
    except RudraError:
        return ""
    return f" from {way}" if way else ""


def _skew(where: str, theirs: float, before: float, after: float) -> Iterator[Finding]:
    """``theirs`` was read between ``before`` and ``after`` of our clock: what lies outside of that is certain."""
    skew = before - theirs if theirs < before else theirs - after
    if theirs and skew > SKEW_S:
        text = f"the head's clock is {skew:.1f} s {'behind' if theirs < before else 'ahead of'} this host's"
        fix = "have both set by NTP: `timedatectl set-ntp true`, `timedatectl status` shows whether they are"
        yield Finding("clock-skew", "warning", where, text, fix)


def _hosts(head: str, found: Hosts, now: float) -> Iterator[Finding]:
    def fault(id: str, name: str, text: str, fix: str) -> Finding:
        return Finding(id, "error", f"host {name}", text, fix, EXIT_SOME_HOSTS)

    if not found.rows:
        fix = "start one: `rudra up`, or `systemctl enable --now rudra-learnerd`"
        yield Finding("no-hosts", "error", head, "no host offers learners", fix, EXIT_SOME_HOSTS)
    for row in found.rows:
        if row.silent:
            ago = max(0.0, (found.now or now) - row.last_seen)
            text = f"its learnerd was not heard for {_span(ago)}"
            yield fault(
                "host-silent", row.name, text, "`systemctl status rudra-learnerd` and `rudra doctor` on that host"
            )
        if row.absent:
            text = f"GPU {' '.join(row.absent)} of its [host] devices is not there"
            yield fault("host-gpu", row.name, text, "`rudra doctor` on that host says why")
    yield from _versions(head, found.rows, found.version)


def _versions(head: str, rows: Sequence[HostRow], version: str) -> Iterator[Finding]:
    for text in differing({row.name: row.versions for row in rows if not row.silent}):
        name = text.split(" ", 1)[0]
        yield Finding(
            "versions", "warning", "hosts", f"versions differ: {text}", f"install the same {name} on all of them"
        )
    if version and version != __version__:
        text = f"rudra is {version} there and {__version__} here"
        yield Finding("versions", "warning", head, text, "install the same rudra on both")


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
