"""Pure: who is asking. A key names a tenant; without keys everyone is the tenant `default`.

A tenant is an opaque text: it is compared and hashed, never cleaned, cut or put into a path (failure catalogue F-SEC-02).
Keys are looked up by their digest, so the time of a look-up says nothing about a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from blake3 import blake3

from proto.errors import ErrorCode, WireError

DEFAULT_TENANT: Final = "default"
TENANT_CHARACTERS_MAX: Final = 256


def is_tenant(text: str) -> bool:
    """Whether this can be a tenant's name."""
    return 0 < len(text) <= TENANT_CHARACTERS_MAX and text.isprintable()


class KeyRing:
    """The keys of this gateway. Immutable."""

    def __init__(self, tenants_by_key: Mapping[str, str]) -> None:
        self._tenants = {_digest(key): tenant for key, tenant in tenants_by_key.items()}

    @property
    def is_open(self) -> bool:
        """No key is asked for."""
        return not self._tenants

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """The tenant of `Authorization: Bearer KEY` or `x-api-key: KEY`. Raises UNAUTHORIZED."""
        if self.is_open:
            return DEFAULT_TENANT
        key = _presented(headers)
        if key is None:
            raise WireError(
                ErrorCode.UNAUTHORIZED,
                "no API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                field="Authorization",
            )
        tenant = self._tenants.get(_digest(key))
        if tenant is None:
            raise WireError(ErrorCode.UNAUTHORIZED, "this API key is not known here", field="Authorization")
        return tenant


def _presented(headers: Mapping[str, str]) -> str | None:
    scheme, _, rest = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and rest.strip():
        return rest.strip()
    return headers.get("x-api-key") or None


def _digest(key: str) -> bytes:
    return blake3(key.encode("utf-8", "surrogatepass")).digest()
