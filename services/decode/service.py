"""decode: the worker that says tokens."""

from __future__ import annotations

from proto.generate import Stage
from services.decode.settings import DecodeSettings
from shared.worker.service import WorkerService


class DecodeService(WorkerService[DecodeSettings]):
    """A worker of the decode stage."""

    name = "decode"
    settings_type = DecodeSettings
    stage = Stage.DECODE
