"""Prometheus metrics, and the small port on which a process shows them and its health.

`GET /metrics`, `GET /readyz` (200 ready, 503 not, with reasons as JSON) and `GET /livez`, served by the standard library's
WSGI server in a daemon thread, so that a stuck event loop can still be seen from outside.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

REGISTRY = CollectorRegistry(auto_describe=True)

# Buckets of the OpenTelemetry GenAI conventions for seconds.
SECONDS_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
)


def counter(name: str, about: str, labels: Iterable[str] = ()) -> Counter:
    """A counter `roost_...`; label values must come from a closed set."""
    return Counter(name, about, tuple(labels), registry=REGISTRY)


def gauge(name: str, about: str, labels: Iterable[str] = ()) -> Gauge:
    """A gauge `roost_...`."""
    return Gauge(name, about, tuple(labels), registry=REGISTRY)


def histogram(
    name: str, about: str, labels: Iterable[str] = (), buckets: tuple[float, ...] = SECONDS_BUCKETS
) -> Histogram:
    """A histogram `roost_..._seconds`."""
    return Histogram(name, about, tuple(labels), registry=REGISTRY, buckets=buckets)


BUILD_INFO = gauge("roost_build_info", "Always 1; the labels say what runs.", ("service", "version"))
BUS_DROPPED = counter(
    "roost_bus_invalid_messages_total", "Messages that failed validation and were dropped.", ("subject",)
)
BUS_SLOW = counter("roost_bus_slow_consumers_total", "Times the bus client reported messages lost to a slow consumer.")
BUS_RECONNECTS = counter("roost_bus_reconnects_total", "Times the connection to NATS was lost and made again.")
FRAMES_REJECTED = counter(
    "roost_frames_rejected_total", "KV frames that failed a check and were not served.", ("reason",)
)


@dataclass(frozen=True, slots=True)
class Health:
    """What /readyz says. `degraded` is ready, but slower or less safe than it should be; `reasons` says why."""

    ready: bool
    alive: bool = True
    degraded: bool = False
    reasons: tuple[str, ...] = ()


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class MetricsServer:
    """The port. Starts in the constructor; `port` is the real one."""

    def __init__(self, host: str, port: int, health: Callable[[], Health]) -> None:
        self._health = health
        self._server = make_server(host, port, self._answer, server_class=_Server, handler_class=_QuietHandler)
        self.port: int = self._server.server_port
        # The poll interval bounds only how long close() takes; 2 s keeps an idle process asleep.
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 2.0}, name="metrics", daemon=True
        )
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            body, kind, status = generate_latest(REGISTRY), CONTENT_TYPE_LATEST, "200 OK"
        elif path in ("/readyz", "/livez"):
            health = self._health()
            good = health.ready if path == "/readyz" else health.alive
            status = "200 OK" if good else "503 Service Unavailable"
            kind = "application/json"
            body = json.dumps({"ready": health.ready, "degraded": health.degraded, "reasons": health.reasons}).encode()
        else:
            body, kind, status = b"not found\n", "text/plain", "404 Not Found"
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    def close(self) -> None:
        """Stop serving without waiting for the poll interval; the thread is a daemon."""
        self._server.socket.close()
