"""Settings: environment variables `ROOST_*`, typed, frozen, read once. A malformed or unknown one stops the start.

pydantic-settings itself passes over variables that no field claims, so the environment is scanned here. A variable of
another service (`ROOST_ROUTER_...` seen by the gateway) is that service's to judge.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import AliasChoices, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.errors import SettingsError
from shared.limits import DRAIN_S

ENV_PREFIX: Final = "ROOST_"
SERVICES: Final = ("gateway", "loop", "router", "prefill", "decode", "kvstore", "tools", "retrieval")
# Those whose heartbeats carry a ModelCard.
WORKER_SERVICES: Final = ("prefill", "decode")
# First words of variables that belong to someone else: the services, the console, and the tests.
OWNERS: Final = (*SERVICES, "worker", "console", "test")

DEFAULT_MODEL: Final = "smollm2-135m-instruct"


class RoostSettings(BaseSettings):
    """What every process has."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    # Where the nats-server is. `roost up` starts one of its own when this is not given.
    nats_url: str = Field(
        default="nats://127.0.0.1:4222", validation_alias=AliasChoices("ROOST_NATS_URL", "NATS_URL", "NATS_SERVER")
    )
    # NATS user and password, if the server asks for one.
    nats_user: str | None = None
    nats_password: SecretStr | None = None
    # Everything Roost keeps: models, KV, JetStream, logs, sockets.
    home: Path = Path("~/.roost")
    # Name of a folder in `models` of the home: what workers serve, and whose tokenizer the loop uses.
    model: str = DEFAULT_MODEL
    # Stable name of this replica over its restarts, such as decode-0; made up when not given.
    instance: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    # Logs go to standard error, as JSON lines or for eyes.
    log_format: Literal["console", "json"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Address of /metrics, /readyz and /livez of this process; port 0 takes any free one.
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(default=0, ge=0, le=65535)
    # SIGTERM to exit.
    drain_s: float = Field(default=DRAIN_S, gt=0, le=300)

    @property
    def home_path(self) -> Path:
        """`home` with ~ resolved."""
        return self.home.expanduser().resolve()

    def shown(self) -> dict[str, str]:
        """Effective values for the log; secrets stay hidden."""
        return {name: str(getattr(self, name)) for name in sorted(type(self).model_fields)}


S = TypeVar("S", bound=RoostSettings)


def variables_of(kind: type[RoostSettings]) -> frozenset[str]:
    """Names of all environment variables that a settings class reads."""
    names: set[str] = set()
    for name, field in kind.model_fields.items():
        alias = field.validation_alias
        if isinstance(alias, AliasChoices):
            names.update(str(choice) for choice in alias.choices)
        else:
            names.add(ENV_PREFIX + name.upper())
    return frozenset(names)


def read_settings(kind: type[S], *, environment: Mapping[str, str] | None = None, **overrides: Any) -> S:
    """The settings of this process. Raises SettingsError naming the variable."""
    environment = os.environ if environment is None else environment
    known = variables_of(kind)
    for variable in sorted(environment):
        if not variable.startswith(ENV_PREFIX) or variable in known:
            continue
        owner = variable.removeprefix(ENV_PREFIX).split("_")[0].lower()
        if owner in OWNERS and not any(name.startswith(f"{ENV_PREFIX}{owner.upper()}_") for name in known):
            continue
        raise SettingsError(variable, "unknown setting")
    try:
        return kind(**overrides)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        place = str(first["loc"][0]) if first["loc"] else ""
        variable = place if place.startswith(ENV_PREFIX) else ENV_PREFIX + place.upper()
        raise SettingsError(variable, f"{first['msg']} (got {first.get('input')!r})") from invalid
