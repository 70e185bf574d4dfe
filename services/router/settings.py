"""Settings of the router service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.limits import GENERATE_QUEUE_COUNT_MAX
from shared.settings import RoostSettings


class RouterSettings(RoostSettings):
    """ROOST_ROUTER_*."""

    # How a worker is chosen (services/router/policies.py): by what it would cost there, or in turn.
    router_policy: Literal["residency", "round_robin"] = "residency"
    # Generations that may wait; beyond, loops are refused as overloaded.
    router_queue: int = Field(default=GENERATE_QUEUE_COUNT_MAX, ge=1, le=100_000)
    # Longest wait for a busy worker that holds the prompt; less where a miss would cost less.
    router_patience_s_max: float = Field(default=2.0, ge=0, le=60)
    # Prompts with at least so many tokens to compute go to a prefill worker first, if there is one with room.
    router_prefill_tokens_min: int = Field(default=1024, ge=1)
    # A worker that does not answer an assignment within this has lost it. Shorter than the loop's patience with silence.
    router_assign_timeout_s: float = Field(default=1.0, gt=0, le=3)
    # A page of a holder's snapshot that takes longer is asked for again.
    router_snapshot_timeout_s: float = Field(default=2.0, gt=0, le=30)
