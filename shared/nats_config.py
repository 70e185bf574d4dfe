"""Pure: the nats-server configuration that Roost relies on. Used by the console, compose and the tests."""

from __future__ import annotations

from typing import Final

from shared.limits import PAYLOAD_BYTES_MAX

# More than the streams and buckets reserve together (shared/streams.py, proto/subjects.py).
MAX_FILE_STORE: Final = "20GB"

# JetStream acknowledges before fsync unless told otherwise; "recorded before its effect is visible" needs `always`.
# max_pending bounds what a slow reader may leave in the server, per connection.
TEMPLATE = """\
server_name: roost
listen: "{host}:{port}"
max_payload: {payload}
max_pending: 268435456
ping_interval: "10s"
lame_duck_duration: "30s"
lame_duck_grace_period: "1s"
jetstream {{
  store_dir: "{store}"
  sync_interval: always
  max_memory_store: 1GB
  max_file_store: {max_file_store}
}}
"""


def nats_config(*, host: str, port: int, store_dir: str, max_file_store: str = MAX_FILE_STORE) -> str:
    """Text of a nats-server config file. `store_dir` is where sessions, turns and documents live."""
    return TEMPLATE.format(
        host=host, port=port, store=store_dir, payload=PAYLOAD_BYTES_MAX, max_file_store=max_file_store
    )
