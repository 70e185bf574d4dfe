"""prefill: the worker that only computes prompts."""

from __future__ import annotations

from proto.generate import Stage
from services.prefill.settings import PrefillSettings
from shared.worker.service import WorkerService


class PrefillService(WorkerService[PrefillSettings]):
    """A worker of the prefill stage."""

    name = "prefill"
    settings_type = PrefillSettings
    stage = Stage.PREFILL
