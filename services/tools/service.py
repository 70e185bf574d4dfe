"""THE SHELL of tools: checks a call, claims it, runs it in a slot, answers. A repeated call gets the first one's result."""

from __future__ import annotations

import asyncio
from typing import Any

from proto.errors import ErrorCode, WireError
from proto.fleet import ServiceState
from proto.subjects import LIST_TOOLS, RUN_TOOL, TOOL_CLAIMS
from proto.tools import ListTools, RunTool, ToolList, ToolOutcome, ToolResult
from services.tools.claim_book import ClaimBook
from services.tools.claims import digest_of, key_of
from services.tools.ladder import Found, find
from services.tools.registry import TOOLS, BadCall, Tool, checked_arguments
from services.tools.runner import CALLS, Runner
from services.tools.settings import ToolsSettings
from services.tools.slots import Slots
from shared.limits import SILENT_AFTER_S
from shared.metrics import Health, gauge
from shared.service import Service

RUNNING = gauge("roost_tools_running_calls", "Calls that run at this moment.")


class ToolsService(Service[ToolsSettings]):
    """Shell of tools."""

    name = "tools"
    settings_type = ToolsSettings

    async def start(self) -> None:
        """See Service."""
        settings = self.settings
        self._found: Found = await find(settings, self.instance_id)
        self._slots = Slots(settings.tools_calls_max, settings.tools_waiting_max, settings.tools_wait_s)
        self._runner = Runner(self.bus, self.clock, settings, self._found)
        self._book = ClaimBook(await self.bus.bucket(TOOL_CLAIMS), self.clock, self.instance_id, self.epoch)
        # Calls that are being settled here; a repetition joins the first. Bounded by the handlers of the bus.
        self._settling: dict[str, tuple[bytes, asyncio.Task[ToolResult]]] = {}
        await self.hear_fleet(self._book.hear, self.name)
        await self.bus.serve(LIST_TOOLS, ListTools, self._list)
        await self.bus.serve(RUN_TOOL, RunTool, self._run)
        self.spawn(self._forget())

    async def _forget(self) -> None:
        while True:
            await self.clock.sleep(SILENT_AFTER_S)
            self._book.forget_silent()

    def health(self) -> Health:
        """See Service."""
        found = getattr(self, "_found", None)
        reasons = found.reasons if found is not None else ()
        return Health(ready=self.state is ServiceState.READY, degraded=bool(reasons), reasons=reasons)

    def load(self) -> dict[str, float]:
        """See Service. One of the `sandbox_...` is 1: the rung."""
        if not hasattr(self, "_slots"):
            return {}
        rung = self._found.rung or "refuse"
        return {"running_calls": float(self._slots.held), f"sandbox_{rung}": 1.0}

    async def _list(self, _: ListTools) -> ToolList:
        return ToolList(tools=tuple(tool.spec for tool in TOOLS.values()), sandbox=self._found.rung)

    async def _run(self, call: RunTool) -> ToolResult:
        if self.state is ServiceState.DRAINING:
            raise WireError(ErrorCode.DRAINING, "this replica stops", retry_after_s=0.5)
        try:
            tool, arguments = checked_arguments(call.name, call.arguments)
        except BadCall as bad:
            CALLS.labels(tool=call.name if call.name in TOOLS else "none", outcome=ToolOutcome.BAD_CALL.value).inc()
            return _bad_call(call, bad)
        key = key_of(call)
        digest, settling = self._settling.get(key, (b"", None))
        if settling is None:
            settling = asyncio.get_running_loop().create_task(self._settle(call, tool, arguments))
            self._settling[key] = digest_of(call), settling
            settling.add_done_callback(lambda _: self._settling.pop(key, None))
        elif digest != digest_of(call):
            raise WireError(ErrorCode.CONFLICT, f"call {call.call_id} runs with other arguments")
        # A caller that goes away does not stop a call that others may ask for.
        return await asyncio.shield(settling)

    async def _settle(self, call: RunTool, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        async with self._slots.take() as slot:
            RUNNING.set(self._slots.held)
            try:
                until = self.clock.now() + max(0.0, self._runner.limit_s(call, tool))
                return await self._book.settled(
                    call, tool.rerun_safe, until, lambda: self._runner.run(call, tool, arguments, slot)
                )
            finally:
                RUNNING.set(self._slots.held - 1)

    async def drain(self) -> None:
        """See Service. New calls go to other replicas, running ones end."""
        await self.bus.unsubscribe(RUN_TOOL)
        tasks = [task for _, task in self._settling.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        # The handlers that waited with us send their answers while this asks the server for a sign.
        await self.bus.flush()

    async def stop(self) -> None:
        """See Service. What did not end in time is killed; its claim says so in the next life."""
        tasks = [task for _, task in getattr(self, "_settling", {}).values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _bad_call(call: RunTool, bad: BadCall) -> ToolResult:
    return ToolResult(
        call_id=call.call_id, name=call.name, outcome=ToolOutcome.BAD_CALL, content=f"Bad call: {bad}.", seconds=0.0
    )
