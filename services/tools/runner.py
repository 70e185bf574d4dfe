"""Runs one call that was claimed: the right tool, within its limits, to a ToolResult."""

from __future__ import annotations

from typing import Any, Final

from proto.errors import ErrorCode, WireError
from proto.retrieval import Passages, Search
from proto.subjects import SEARCH
from proto.tools import RunTool, ToolOutcome, ToolResult
from services.tools.cage import program
from services.tools.http_fetch import Answer, fetch
from services.tools.http_policy import parse_allowed
from services.tools.ladder import Found, limits_of
from services.tools.output import HeadTail
from services.tools.registry import Tool
from services.tools.settings import ToolsSettings
from services.tools.verdict import content, verdict
from shared.bus import Bus
from shared.clock import Clock
from shared.metrics import counter, histogram

# Kept back from the caller's deadline, so that the result can still be sent.
DEADLINE_MARGIN_S: Final = 0.1
RETRIEVE_S: Final = 10.0

CALLS = counter("roost_tool_calls_total", "Calls that ended.", ("tool", "outcome"))
SECONDS = histogram("roost_tool_seconds", "Time of one call, without waiting for a slot.", ("tool",))
KILLED = counter("roost_tool_killed_total", "Calls that a limit ended.", ("limit",))


class Runner:
    """Holds the sandbox; knows nothing of claims."""

    def __init__(self, bus: Bus, clock: Clock, settings: ToolsSettings, found: Found) -> None:
        self._bus, self._clock, self._settings, self._found = bus, clock, settings, found
        self._allowed = parse_allowed(settings.tools_http_hosts)

    def limit_s(self, call: RunTool, tool: Tool) -> float:
        """The smaller of the tool's own bound and what the deadline leaves; may be negative."""
        own = {"http_fetch": self._settings.tools_http_s, "retrieve": RETRIEVE_S}
        left_s = call.deadline_at - self._clock.now() - DEADLINE_MARGIN_S
        return min(own.get(tool.spec.name, self._settings.tools_wall_s), left_s)

    async def run(self, call: RunTool, tool: Tool, arguments: dict[str, Any], slot: int) -> ToolResult:
        """Run it. Raises nothing but cancellation."""
        started = self._clock.monotonic()
        limit_s = self.limit_s(call, tool)
        if limit_s <= 0:
            outcome, text, dropped = ToolOutcome.TIMEOUT, "Not run: its deadline had passed.", 0
        elif tool.needs_sandbox:
            outcome, text, dropped = await self._code(tool.spec.name, arguments, limit_s, slot)
        elif tool.spec.name == "http_fetch":
            outcome, text, dropped = await fetch(arguments["url"], self._allowed, self._settings, limit_s)
        else:
            outcome, text, dropped = await self._retrieve(call.tenant, arguments, limit_s)
        seconds = self._clock.monotonic() - started
        CALLS.labels(tool=tool.spec.name, outcome=outcome.value).inc()
        SECONDS.labels(tool=tool.spec.name).observe(seconds)
        return ToolResult(
            call_id=call.call_id,
            name=call.name,
            outcome=outcome,
            content=text,
            dropped_bytes=dropped,
            seconds=seconds,
            sandbox=self._found.rung if tool.needs_sandbox else "",
        )

    async def _code(self, name: str, arguments: dict[str, Any], limit_s: float, slot: int) -> Answer:
        sandbox = self._found.sandbox
        if sandbox is None:
            return ToolOutcome.REFUSED, f"Refused: {self._found.reasons[0]}.", 0
        text = arguments["code"] if name == "python" else arguments["command"]
        limits = limits_of(self._settings, limit_s)
        content_bytes = self._settings.tools_content_bytes
        ran = await sandbox.run(program(sandbox.cage, name, text), limits, slot=slot, content_bytes=content_bytes)
        found = verdict(ran.end, ran.status, limit_s)
        if found.limit:
            KILLED.labels(limit=found.limit).inc()
        dropped = ran.stdout.dropped_bytes + ran.stderr.dropped_bytes
        return found.outcome, content(ran.stdout.text(), ran.stderr.text(), found.why), dropped

    async def _retrieve(self, tenant: str, arguments: dict[str, Any], limit_s: float) -> Answer:
        search = Search(tenant=tenant, query=arguments["query"], limit=arguments["limit"])
        try:
            answer = await self._bus.request(SEARCH, search, Passages, timeout_s=limit_s)
        except WireError as failed:
            outcome = ToolOutcome.TIMEOUT if failed.code is ErrorCode.DEADLINE else ToolOutcome.ERROR
            return outcome, f"Failed: {failed}", 0
        if not answer.passages:
            return ToolOutcome.OK, "[no passages]", 0
        body = HeadTail(self._settings.tools_content_bytes)
        for place, passage in enumerate(answer.passages, 1):
            title = passage.title or passage.document_id
            body.add(f"[{place}] {title} ({passage.document_id}#{passage.chunk})\n{passage.text}\n\n".encode())
        return ToolOutcome.OK, body.text().rstrip(), body.dropped_bytes
