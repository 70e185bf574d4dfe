"""The gateway's own metrics."""

from __future__ import annotations

from shared.metrics import counter, gauge, histogram

HTTP_REQUESTS = counter(
    "roost_gateway_http_requests_total", "HTTP requests that were answered.", ("route", "status_class")
)
TURNS_IN_FLIGHT = gauge("roost_gateway_turns_in_flight", "Turns that a client reads or waits for here.")
TTFT_SECONDS = histogram("roost_gateway_ttft_seconds", "Request to the first text or call of its answer.")
TURN_SECONDS = histogram("roost_gateway_turn_seconds", "Request to the end of its turn.")
CLIENTS_GONE = counter(
    "roost_gateway_clients_gone_total", "Clients that were gone before the end of their turn.", ("why",)
)
