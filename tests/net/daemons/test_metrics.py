"""psd's page of metrics: off unless told, on loopback unless told, and whoever misuses it hurts nobody."""

from __future__ import annotations

import re
import socket
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rudra_zmq.daemons.metrics import MOST_AT_ONCE
from rudra_zmq.head.figures import METRICS
from rudra_zmq.wire.messages import control as c
from tests.net.daemons.conftest import Place, free_port, memory, until
from tests.net.daemons.test_cluster import SLEEP, Cluster


def url(place: Place) -> str:
    found: re.Match[str] = until(lambda: re.search(r"metrics url=(\S+)", place.log("psd")), "the page")
    return found[1]


def scrape(address: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    rows = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rows[(sample.name, *sample.labels.values())] = sample.value
    return rows


@pytest.fixture
def place(place: Place) -> Place:
    place.env["RUDRA_METRICS_LISTEN"] = "0"
    return place


def test_a_cluster_is_scraped(place: Place) -> None:
    cluster = Cluster(place)
    address = url(place)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", address)
    assert cluster.client.call(c.ListHosts(), expect=c.Hosts).rows
    host = cluster.place.hosts()[0].name
    job = cluster.submit(SLEEP)
    until(lambda: scrape(address).get(("rudra_host_slots_free", host)) == 2, "the job's slots")
    rows = until(lambda: (r := scrape(address)) and ("rudra_job_generation", job, "demo") in r and r, "its figures")
    assert rows["rudra_host_up", host] == 1 and rows["rudra_job_learners_declared", job, "demo"] == 2
    assert rows["rudra_job_staleness_count", job, "demo"] == 0
    assert rows["process_resident_memory_bytes",] > 1e6 and memory(cluster.psd.pid) < 60
    with urllib.request.urlopen(address, timeout=10) as answer:
        told = re.findall(r"^# TYPE (rudra_\w+) (\w+)$", answer.read().decode(), re.MULTILINE)
    assert told == [(m.name + ("_total" if m.kind == "counter" else ""), m.kind) for m in METRICS]


def test_who_says_nothing_or_nonsense_holds_up_nobody(place: Place) -> None:
    child = place.psd()
    address = url(place)
    port = int(address.split(":")[2].split("/")[0])
    client = place.client()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_AT_ONCE)]
    more = socket.create_connection(("127.0.0.1", port))
    more.settimeout(10)
    assert more.recv(1) == b""  # one too many
    slowest = 0.0
    for _ in range(50):
        began = time.monotonic()
        client.call(c.ListJobs(), expect=c.Jobs)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 5
    for sock, words in zip(
        silent, (b"\0" * 5000, b"GET / HTTP/9.9\r\n\r\n", b"POST /metrics HTTP/1.0\r\n\r\n"), strict=False
    ):
        sock.sendall(words)
    for sock in [*silent, more]:
        sock.close()
    until(lambda: ("rudra_jobs", "DONE") in _try(address), "a page again")
    assert child.poll() is None and "Traceback" not in place.log("psd")


def _try(address: str) -> dict[tuple[str, ...], float]:
    try:
        return scrape(address)
    except OSError:
        return {}


def test_a_port_that_is_taken_is_said_and_jobs_are_served(place: Place) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        place.env["RUDRA_METRICS_LISTEN"] = str(taken.getsockname()[1])
        place.psd()
        until(lambda: "no metrics" in place.log("psd"), "the word")
        assert place.client().call(c.ListJobs(), expect=c.Jobs).rows == []


def test_off_by_default_and_in_the_cluster_of_one_run(place: Place) -> None:
    import os

    child = place.psd("--private", str(os.getpid()))
    assert place.client().call(c.ListJobs(), expect=c.Jobs).rows == []
    assert "metrics" not in place.log("psd")
    child.terminate()
    child.wait(20)
    del place.env["RUDRA_METRICS_LISTEN"]
    child = place.psd()
    assert place.client().call(c.ListJobs(), expect=c.Jobs).rows == []
    assert "metrics" not in place.log("psd")
