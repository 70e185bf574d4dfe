"""Settings of the tools service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from services.tools.http_policy import parse_allowed
from shared.settings import RoostSettings

MIB = 1024 * 1024


class ToolsSettings(RoostSettings):
    """ROOST_TOOLS_*."""

    # The rung that code tools run in. `auto` takes the first that a probe proves to work; the last one must be typed.
    tools_sandbox: Literal["auto", "bwrap", "sandlock", "none-i-accept-the-risk"] = "auto"
    # Interpreter of the python tool; empty takes the one Roost runs on, or /usr/bin/python3 where a probe fails with it.
    tools_python: str = ""
    # First of the user ids that calls run as when the service is root (one a slot, so that process limits bind).
    tools_uid_first: int = Field(default=61_000, ge=1_000, le=2_000_000_000)
    # Where work folders of calls are made (sandlock); empty is the system's folder for temporary files.
    tools_scratch_path: str = ""
    # Calls that run at once; memory of all calls is bounded by this times tools_memory_bytes.
    tools_calls_max: int = Field(default=4, ge=1, le=64)
    # Calls that may wait for a slot, and for how long; beyond, the caller is told to come later.
    tools_waiting_max: int = Field(default=32, ge=0, le=256)
    tools_wait_s: float = Field(default=2.0, ge=0, le=60)
    # Wall clock of one code call.
    tools_wall_s: float = Field(default=30.0, gt=0, le=600)
    # CPU seconds of one process of a call.
    tools_cpu_s: int = Field(default=20, ge=1, le=600)
    # Memory of a call: address space of each process, and resident memory of all of them together.
    tools_memory_bytes: int = Field(default=512 * MIB, ge=64 * MIB)
    # Processes of a call.
    tools_processes_max: int = Field(default=32, ge=2, le=1024)
    # Files of a call: one of them, and all together.
    tools_scratch_bytes: int = Field(default=64 * MIB, ge=4096)
    # Output after which a call is killed, and how much of it the model gets to see (head and tail).
    tools_output_bytes: int = Field(default=1 * MIB, ge=1024)
    tools_content_bytes: int = Field(default=16 * 1024, ge=512, le=256 * 1024)
    # Hosts that http_fetch may ask: host, host:port, address or network, with commas between; empty refuses all.
    tools_http_hosts: str = ""
    tools_http_s: float = Field(default=10.0, gt=0, le=120)
    tools_http_bytes: int = Field(default=1 * MIB, ge=1024, le=16 * MIB)
    tools_http_redirects_max: int = Field(default=3, ge=0, le=10)

    @field_validator("tools_http_hosts")
    @classmethod
    def _is_a_list_of_hosts(cls, text: str) -> str:
        parse_allowed(text)
        return text

    @property
    def install_path(self) -> Path:
        """The folder that holds Roost's own code; never readable inside."""
        return Path(__file__).resolve().parents[2]
