"""psd's metrics over HTTP, for Prometheus: one page, in threads of its own.

Owns the socket and the form of the page. Must not know: what is measured (head.figures). The daemon's loop hands over
finished figures and waits for nobody; a scraper reads the newest ones. Whatever happens here, the daemon goes on.
"""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector, CollectorRegistry

from rudra_zmq import log
from rudra_zmq.head.figures import METRICS, Bins, Figure
from rudra_zmq.net.loop import Loop

logger = log.get()

EVERY_S = 1.0
RETRY_S = 30.0
MOST_AT_ONCE = 8
SLOWEST_S = 5.0  # between two bytes of a scraper
BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
"""Of the staleness's buckets, in updates."""


class Metrics:
    """Serves what ``figures`` gives, from ``begin`` on; ``url`` is where, "" while the address is taken."""

    def __init__(self, loop: Loop, host: str, port: int, figures: Callable[[], list[Figure]]) -> None:
        self.url = ""
        self._loop, self._host, self._port, self._figures = loop, host, port, figures
        self._newest: Sequence[Figure] = ()
        self._server: _Server | None = None
        self._limit = log.RateLimiter(600.0)

    def begin(self) -> None:
        """Bind, now or (said) later: metrics that cannot be had are no reason not to serve jobs."""
        try:
            self._server = _Server((self._host, self._port), _Quiet)
        except OSError as error:
            where = f"{self._host}:{self._port}"
            logger.limited(self._limit, "error", "no metrics", listen=where, reason=error.strerror, again_s=RETRY_S)
            self._loop.after(RETRY_S, self.begin)
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Pages(self))
        ProcessCollector(registry=registry)
        self._server.set_app(make_wsgi_app(registry))
        self._take()
        self._loop.every(EVERY_S, self._take)
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="metrics", daemon=True).start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        logger.info("metrics", url=self.url)
        if not ipaddress.ip_address(self._host).is_loopback:
            logger.warning("metrics can be read by whoever reaches this address", listen=self._host)

    def _take(self) -> None:
        try:
            self._newest = tuple(self._figures())
        except Exception as error:  # a mistake of ours here must not end the daemon
            reason = f"{type(error).__name__}: {error}"
            logger.limited(self._limit, "error", "metrics could not be taken", reason=reason)

    def newest(self) -> Sequence[Figure]:
        """The figures of the last second; for any thread."""
        return self._newest

    def close(self) -> None:
        """No more scrapes."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Pages(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, list[Figure]] = {}
        for figure in self._metrics.newest():
            by_name.setdefault(figure.name, []).append(figure)
        kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily,
                                 "histogram": HistogramMetricFamily}  # fmt: skip
        for metric in METRICS:
            family = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
            for figure in by_name.get(metric.name, ()):
                if isinstance(figure.value, tuple):
                    total = sum(value * count for value, count in figure.value)
                    family.add_metric(figure.labels, buckets(figure.value), total)
                else:
                    family.add_metric(figure.labels, figure.value)
            yield family


def buckets(bins: Bins) -> list[tuple[str, int]]:
    """(upper bound, how many up to it), the last bound infinite."""
    rows = [(f"{bound}.0", sum(count for value, count in bins if value <= bound)) for bound in BOUNDS]
    return [*rows, ("+Inf", sum(count for _, count in bins))]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each scrape, few at once."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.Semaphore(MOST_AT_ONCE)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # not HTTPServer's, which asks DNS for our own name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be had
            self._room.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that went away, or never spoke HTTP, is no news."""


class _Quiet(WSGIRequestHandler):
    timeout = SLOWEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""
