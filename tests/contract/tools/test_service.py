"""The tools service as a process of its own, over a real nats-server: at most once, whatever is killed when."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proto.errors import ErrorCode, WireError
from proto.fleet import Heartbeat, ServiceState
from proto.message import encode
from proto.retrieval import Passage, Passages, Search
from proto.subjects import HEARTBEAT, LIST_TOOLS, RUN_TOOL, SEARCH
from proto.tools import ListTools, RunTool, ToolList, ToolOutcome, ToolResult
from shared.bus import Bus
from tests.nats_server import NatsServer

START_S_MAX = 20.0


class Process:
    """One life after another of `python -P -m services.tools`."""

    def __init__(self, folder: Path, nats_url: str, **settings: str) -> None:
        self._log = folder / "tools.log"
        self._environment = {
            **os.environ,
            "ROOST_NATS_URL": nats_url,
            "ROOST_HOME": str(folder / "home"),
            "ROOST_INSTANCE": f"tools-{os.getpid()}",
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            line = [sys.executable, "-P", "-m", "services.tools"]
            self.process = subprocess.Popen(line, env=self._environment, stdout=log, stderr=log)

    def end(self, how: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        status = self.process.wait(timeout=20)
        self.process = None
        return status

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def start(nats_server: NatsServer, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(**settings: str) -> Process:
        process = Process(tmp_path, nats_server.url, **settings)
        process.start()
        started.append(process)
        return process

    yield make
    for process in started:
        if process.process is not None:
            process.end(signal.SIGKILL)


async def listed(bus: Bus) -> ToolList:
    """The service's list, as soon as it serves."""
    until = time.monotonic() + START_S_MAX
    while True:
        try:
            return await bus.request(LIST_TOOLS, ListTools(), ToolList, timeout_s=1.0)
        except WireError:
            assert time.monotonic() < until, "the service did not start"
            await asyncio.sleep(0.05)


def call(name: str, call_id: str = "c1", *, within_s: float = 20.0, **arguments: object) -> RunTool:
    return RunTool(
        session_id="s1",
        turn_id="t1",
        request_id="r1",
        call_id=call_id,
        tenant="acme",
        name=name,
        arguments=json.dumps(arguments),
        deadline_at=time.time() + within_s,
    )


async def ask(bus: Bus, request: RunTool, timeout_s: float = 25.0) -> ToolResult:
    return await bus.request(RUN_TOOL, request, ToolResult, timeout_s=timeout_s)


async def test_a_call_runs_once_and_its_result_is_replayed_over_lives(start: Callable[..., Process], bus: Bus) -> None:
    service = start()
    tools = await listed(bus)
    assert [tool.name for tool in tools.tools] == ["http_fetch", "python", "retrieve", "shell"]
    request = call("python", code="import time, os; print(time.time_ns(), os.urandom(8).hex())")
    first, joined = await asyncio.gather(ask(bus, request), ask(bus, request))
    if not tools.sandbox:
        assert first.outcome is ToolOutcome.REFUSED
        pytest.skip("no sandbox on this machine")
    assert first.outcome is ToolOutcome.OK and first.sandbox == tools.sandbox
    assert encode(first) == encode(joined) == encode(await ask(bus, request))
    service.end(signal.SIGKILL)
    service.start()
    await listed(bus)
    assert encode(first) == encode(await ask(bus, request))
    with pytest.raises(WireError) as conflict:
        await ask(bus, call("python", code="print(2)"))
    assert conflict.value.code is ErrorCode.CONFLICT


def running(mark: str) -> bool:
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "cmdline").read_text(errors="replace"):
                return True
        except OSError:
            continue
    return False


async def until_true(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, "did not happen in time"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("rung", ["bwrap", "sandlock"])
async def test_kill_9_in_the_middle_of_a_call(start: Callable[..., Process], bus: Bus, rung: str) -> None:
    """Its processes go with it, and the repeated call says that nobody knows (F-RST-01, F-SBX-03)."""
    service = start(ROOST_TOOLS_SANDBOX=rung)
    if not (await listed(bus)).sandbox:
        pytest.skip(f"{rung} does not work on this machine")
    mark = f"7{os.getpid()}1"
    request = call("shell", command=f"sleep {mark} & sleep {mark}")
    asking = asyncio.create_task(ask(bus, request, 30.0))
    await until_true(lambda: running(mark))
    service.end(signal.SIGKILL)
    await until_true(lambda: not running(mark))
    asking.cancel()
    service.start()
    await listed(bus)
    result = await ask(bus, request)
    assert result.outcome is ToolOutcome.UNKNOWN and not running(mark)
    assert encode(result) == encode(await ask(bus, request))


async def test_kill_9_in_the_middle_of_a_call_that_may_run_again(start: Callable[..., Process], bus: Bus) -> None:
    asked: list[Search] = []
    first = asyncio.Event()

    async def search(request: Search) -> Passages:
        asked.append(request)
        first.set()
        if len(asked) == 1:
            await asyncio.sleep(60)
        passage = Passage(document_id="d", chunk=0, title="", text="nest", score=1.0)
        return Passages(passages=(passage,), document_count=1)

    await bus.serve(SEARCH, Search, search)
    service = start()
    await listed(bus)
    request = call("retrieve", query="where?")
    asking = asyncio.create_task(ask(bus, request, 30.0))
    await asyncio.wait_for(first.wait(), 10)
    service.end(signal.SIGKILL)
    asking.cancel()
    service.start()
    await listed(bus)
    result = await ask(bus, request)
    assert result.outcome is ToolOutcome.OK and "nest" in result.content and len(asked) == 2
    assert asked[0].tenant == "acme"


async def test_another_replica_waits_for_the_owner_of_a_claim(start: Callable[..., Process], bus: Bus) -> None:
    """Two replicas, asked many times at once: one run, one result."""
    ready: set[str] = set()
    await bus.subscribe(
        HEARTBEAT,
        Heartbeat,
        lambda beat: ready.add(beat.instance_id) if beat.state is ServiceState.READY else None,
    )
    start()
    start(ROOST_INSTANCE="tools-other", ROOST_TOOLS_UID_FIRST="62000")
    if not (await listed(bus)).sandbox:
        pytest.skip("no sandbox on this machine")
    await until_true(lambda: len(ready) == 2, START_S_MAX)
    request = call("python", code="import time, os; time.sleep(1); print(os.urandom(8).hex())")
    results = await asyncio.gather(*(ask(bus, request) for _ in range(12)))
    assert results[0].outcome is ToolOutcome.OK and len({encode(result) for result in results}) == 1


async def test_bad_calls_name_the_field_and_refusals_the_setting(start: Callable[..., Process], bus: Bus) -> None:
    start()
    await listed(bus)
    bad = await ask(bus, call("python", "b1", code=1))
    assert bad.outcome is ToolOutcome.BAD_CALL and "code" in bad.content
    refused = await ask(bus, call("http_fetch", "b2", url="http://example.org/"))
    assert refused.outcome is ToolOutcome.REFUSED and "ROOST_TOOLS_HTTP_HOSTS" in refused.content
    late = await ask(bus, call("shell", "b3", command="true", within_s=-1.0))
    assert late.outcome is ToolOutcome.TIMEOUT
    alone = await ask(bus, call("retrieve", "b4", query="q"))
    assert alone.outcome is ToolOutcome.ERROR and "nobody serves" in alone.content


async def test_the_deadline_of_the_turn_bounds_a_call(start: Callable[..., Process], bus: Bus) -> None:
    start()
    if not (await listed(bus)).sandbox:
        pytest.skip("no sandbox on this machine")
    started = time.monotonic()
    result = await ask(bus, call("shell", command="sleep 60", within_s=1.5))
    assert result.outcome is ToolOutcome.TIMEOUT and time.monotonic() - started < 8.0


async def test_too_many_calls_are_told_to_come_later(start: Callable[..., Process], bus: Bus) -> None:
    start(ROOST_TOOLS_CALLS_MAX="1", ROOST_TOOLS_WAITING_MAX="1", ROOST_TOOLS_WAIT_S="0.2")
    if not (await listed(bus)).sandbox:
        pytest.skip("no sandbox on this machine")
    requests = [call("shell", f"c{number}", command="sleep 1.5") for number in range(4)]
    results = await asyncio.gather(*(ask(bus, request) for request in requests), return_exceptions=True)
    refused = [result for result in results if isinstance(result, WireError)]
    assert len(refused) == 3 and {each.code for each in refused} == {ErrorCode.OVERLOADED}


async def test_sigterm_lets_running_calls_end(start: Callable[..., Process], bus: Bus) -> None:
    service = start()
    if not (await listed(bus)).sandbox:
        pytest.skip("no sandbox on this machine")
    mark = f"1.{os.getpid()}"
    asking = asyncio.create_task(ask(bus, call("shell", command=f"sleep {mark}; echo done")))
    await until_true(lambda: running(mark))
    status = await asyncio.to_thread(service.end, signal.SIGTERM)
    result = await asking
    assert (status, result.outcome, result.content) == (0, ToolOutcome.OK, "done")
