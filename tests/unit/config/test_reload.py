"""What a running daemon takes of changed settings."""

from __future__ import annotations

from rudra_zmq.config import RudraToml, merge
from rudra_zmq.config.host import HeadSection, LogSection, PsdSection

LIVE = ("log.level", "psd.ports")


def test_live_keys_are_taken_and_the_rest_is_named() -> None:
    old = RudraToml()
    new = RudraToml(
        head=HeadSection(address="ipc:///x"),
        psd=PsdSection(listen="ipc:///y", ports="1-2"),
        log=LogSection(level="debug", format="json"),
    )
    settings, applied, later = merge(old, new, live=LIVE, others=("head.",))
    assert settings == RudraToml(psd=PsdSection(ports="1-2"), log=LogSection(level="debug"))
    assert applied == ['psd.ports = "1-2"', 'log.level = "debug"']
    assert later == ["psd.listen", "log.format"]


def test_what_waits_is_named_each_time_and_what_was_taken_is_not() -> None:
    new = RudraToml(psd=PsdSection(listen="ipc:///y"), log=LogSection(level="debug"))
    settings, _, _ = merge(RudraToml(), new, live=LIVE)
    assert merge(settings, new, live=LIVE) == (settings, [], ["psd.listen"])
    assert merge(settings, RudraToml(), live=LIVE)[1:] == (['log.level = "info"'], [])
