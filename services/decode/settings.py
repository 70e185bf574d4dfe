"""Settings of the decode service: those of every worker."""

from __future__ import annotations

from shared.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """ROOST_WORKER_*."""
