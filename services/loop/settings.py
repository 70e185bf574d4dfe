"""Settings of the loop service."""

from __future__ import annotations

from pydantic import Field

from shared.settings import RoostSettings


class LoopSettings(RoostSettings):
    """ROOST_LOOP_*."""

    # Turns that one replica runs at once; the rest waits in the queue.
    loop_turns: int = Field(default=64, ge=1, le=4096)
    # Sessions whose fold is kept in memory between turns, and the tokens they may hold together.
    loop_sessions_cached: int = Field(default=512, ge=1)
    loop_tokens_cached: int = Field(default=20_000_000, ge=1)
    # A turn waits this long for another turn of its session to end, then it is refused as a conflict.
    loop_session_wait_s: float = Field(default=10.0, ge=0)
    # JSON map of tenant -> salt name. Tenants with one salt share KV blocks; by default none do.
    loop_shared_salts: dict[str, str] = Field(default_factory=dict)
