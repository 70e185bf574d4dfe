"""What the console reads from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from pydantic import Field, SecretStr

from services.console.errors import ConsoleError
from shared.limits import MIB
from shared.settings import RoostSettings

# The gateway's own variables; its default port is stated in its settings.
GATEWAY_HOST, GATEWAY_PORT = "ROOST_GATEWAY_HOST", "ROOST_GATEWAY_PORT"
GATEWAY_PORT_DEFAULT: Final = 8080
NATS_VARIABLES: Final = ("ROOST_NATS_URL", "NATS_URL", "NATS_SERVER")


class ConsoleSettings(RoostSettings):
    """Variables ROOST_CONSOLE_*."""

    # Port of the nats-server that `roost up` starts; 0 takes any free one. With ROOST_NATS_URL none is started.
    console_nats_port: int = Field(default=0, ge=0, le=65535)
    # How long `roost up` waits for all services before it says which are late; they go on starting.
    console_ready_s: float = Field(default=120.0, gt=0, le=3600)
    # The whole of a shutdown; what has not ended by then is killed.
    console_stop_s: float = Field(default=30.0, gt=0, le=600)
    # A log file is moved aside at this size, and one old one is kept; looked at every 10 s.
    console_log_bytes: int = Field(default=16 * MIB, ge=64 * 1024)
    # Key that `roost turn` and `roost chat` send to a gateway that asks for one.
    console_api_key: SecretStr | None = None


def gateway_address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and first port of the gateways, as they will read it themselves."""
    text = environment.get(GATEWAY_PORT, str(GATEWAY_PORT_DEFAULT))
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise ConsoleError(f"{GATEWAY_PORT}: not a port: {text!r}")
    return environment.get(GATEWAY_HOST, "127.0.0.1"), int(text)


def names_own_nats(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user brings a NATS server, so that none is started."""
    return any(name in environment for name in NATS_VARIABLES)
