"""What the gateway reads from its environment. Everything it derives from these is derived elsewhere."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from services.gateway.auth import TENANT_CHARACTERS_MAX, is_tenant
from shared.settings import RoostSettings


class GatewaySettings(RoostSettings):
    """Variables ROOST_GATEWAY_*."""

    # Address of the API. On any other than loopback, keys should be set.
    gateway_host: str = "127.0.0.1"
    gateway_port: int = Field(default=8080, ge=0, le=65535)
    # JSON object, key -> tenant. Empty: no key is asked for and everyone is the tenant "default".
    gateway_api_keys: dict[SecretStr, str] = Field(default_factory=dict)
    # JSON object, name -> model: further names under which a model may be asked for.
    gateway_model_aliases: dict[str, str] = Field(default_factory=dict)
    # Turns (streams and waiting answers) of this replica at once; more are refused with 429.
    gateway_turns_max: int = Field(default=512, ge=1, le=100_000)
    # Answer length when the request names none; never more than the model's window.
    gateway_max_tokens: int = Field(default=1024, ge=1)
    # A comment is written on a silent stream after this time; proxies cut streams that are silent for longer.
    gateway_heartbeat_s: float = Field(default=8.0, gt=0, le=10)
    # A client that takes nothing for this long is cut off; so is one whose request takes longer to arrive.
    gateway_stall_s: float = Field(default=30.0, gt=0, le=600)
    # Memory for events that one slow client has not taken yet; what does not fit is read back from the trail.
    gateway_reader_bytes: int = Field(default=256 * 1024, ge=16 * 1024)
    # How long a client that asks for the events of an unknown turn waits for its first one.
    gateway_attach_wait_s: float = Field(default=30.0, gt=0, le=600)

    @field_validator("gateway_api_keys")
    @classmethod
    def _keys_name_tenants(cls, keys: dict[SecretStr, str]) -> dict[SecretStr, str]:
        for key, tenant in keys.items():
            if not key.get_secret_value():
                raise ValueError("a key is empty")
            if not is_tenant(tenant):
                raise ValueError(f"a tenant is 1 to {TENANT_CHARACTERS_MAX} printable characters, not {tenant[:40]!r}")
        return keys
