"""Settings of the prefill service: those of every worker, with a smaller pool."""

from __future__ import annotations

from pydantic import Field

from shared.limits import MIB
from shared.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """ROOST_WORKER_*."""

    # A prompt's blocks are handed over when it is done, so a prefill worker needs room for those in hand, not for a cache.
    worker_pool_bytes: int = Field(default=512 * MIB, ge=1)
