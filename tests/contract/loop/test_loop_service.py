"""The loop as a service on a real bus, with the real tokenizer; router and worker are played by the test, word by word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proto.chat import ChatMessage, FinishReason, Role, Sampling
from proto.errors import ErrorCode, WireError
from proto.fleet import Heartbeat, ModelCard, ServiceState
from proto.generate import Generate, GenerateAccepted, Generated, GenerateEvent, TokensOut, Working
from proto.receipt import Source, StepReceipt
from proto.sessions import CreateSession, GetSession, Record, SessionInfo, StepGenerated, TurnClosed
from proto.subjects import CREATE_SESSION, GENERATE, GET_SESSION, HEARTBEAT, SESSION_LOG, START_TURN, TURN_EVENT
from proto.turns import StartTurn, TextDelta, TurnDone, TurnEvent, TurnFailed, TurnStarted
from services.loop.service import LoopService
from services.loop.settings import LoopSettings
from shared.block_hash import Namespace, chain_keys
from shared.bus import Bus
from shared.clock import RealClock
from shared.model_dir import find_tokenizer
from shared.settings import DEFAULT_MODEL
from shared.tokenizer import Tokenizer
from tests.nats_server import NatsServer

ANSWER = "The capital of France is Paris."


class Worker:
    """Says heartbeats with a card, accepts every generation, and answers with the text it was given."""

    def __init__(self, bus: Bus, home: Path) -> None:
        directory = find_tokenizer(DEFAULT_MODEL, home)
        self.bus, self.tokenizer = bus, Tokenizer.load(directory.path)
        self.card = ModelCard(
            worker_id="decode-0", epoch=1, model=directory.name, fingerprint="f",
            tokenizer_digest=directory.tokenizer_digest, kv_dtype="float32", layout_version=1, block_tokens=16,
            context_tokens=2048, block_bytes=1024,
        )  # fmt: skip
        self.asked: list[Generate] = []
        # How many tokens of its answer the n-th generation says before it falls silent for ever.
        self.cuts: list[int] = []

    async def start(self) -> None:
        await self.bus.serve(GENERATE, Generate, self.generate)
        self.bus.spawn(self.beat())

    async def beat(self) -> None:
        while True:
            heartbeat = Heartbeat(
                service="decode", instance_id="decode-0", epoch=1, state=ServiceState.READY, host="h", pid=1,
                metrics_port=0, started_at=0.0, sent_at=0.0, model_card=self.card,
            )  # fmt: skip
            await self.bus.publish(HEARTBEAT, heartbeat, service="decode")
            await asyncio.sleep(0.2)

    async def generate(self, request: Generate) -> GenerateAccepted:
        self.asked.append(request)
        self.bus.spawn(self.answer(request))
        return GenerateAccepted(depth=0)

    async def answer(self, request: Generate) -> None:
        answer = (*self.tokenizer.encode_content(ANSWER), request.eos_token_ids[0])
        cut = self.cuts.pop(0) if self.cuts else len(answer)
        sources = {Source.COMPUTED: len(request.tokens)}
        await self.say(request, Working(worker_id="decode-0", tokens_by_source=sources))
        for index in range(request.emitted, cut):
            await self.say(request, TokensOut(first=index, token_ids=(answer[index],)))
        if cut == len(answer):
            done = Generated(
                finish_reason=FinishReason.STOP, total=cut, worker_id="decode-0", prompt_tokens=len(request.tokens),
                tokens_by_source=sources,
            )  # fmt: skip
            await self.say(request, done)

    async def say(self, request: Generate, body: Working | TokensOut | Generated) -> None:
        event = GenerateEvent(generation_id=request.generation_id, attempt=request.attempt, body=body)
        await self.bus.publish_to(request.reply_subject, event)


class Reader:
    """Hears the events of all turns."""

    def __init__(self) -> None:
        self.events: list[TurnEvent] = []
        self.heard = asyncio.Event()

    def hear(self, event: TurnEvent) -> None:
        self.events.append(event)
        self.heard.set()

    async def end_of(self, turn_id: str) -> list[TurnEvent]:
        async with asyncio.timeout(20):
            while True:
                mine = [event for event in self.events if event.turn_id == turn_id]
                if mine and mine[-1].is_terminal:
                    return mine
                self.heard.clear()
                await self.heard.wait()


def start_turn(turn_id: str, text: str, **changes: object) -> StartTurn:
    now = RealClock().now()
    return StartTurn(
        turn_id=turn_id, session_id="s1", request_id="r1", tenant="acme", model=DEFAULT_MODEL,
        messages=(ChatMessage(role=Role.USER, content=text),), sampling=Sampling(max_tokens=64),
        deadline_at=now + 60, started_at=now,
    ).model_copy(update=changes)  # fmt: skip


def text_of(events: list[TurnEvent]) -> str:
    return "".join("".join(event.body.pieces) for event in events if isinstance(event.body, TextDelta))


@pytest.fixture
async def worker(bus: Bus, models: Path) -> Worker:
    made = Worker(bus, models.parent)
    await made.start()
    return made


@pytest.fixture
async def reader(bus: Bus) -> Reader:
    made = Reader()
    await bus.subscribe(TURN_EVENT, TurnEvent, made.hear)
    return made


@pytest.fixture
async def run_loop(nats_server: NatsServer, models: Path) -> AsyncIterator[Callable[[], object]]:
    @asynccontextmanager
    async def running(*, status: int = 0) -> AsyncIterator[LoopService]:
        service = LoopService(LoopSettings(nats_url=nats_server.url, home=models.parent, instance="loop-0"))
        life = asyncio.ensure_future(service.run())
        while service.state is ServiceState.STARTING:
            assert not life.done(), life
            await asyncio.sleep(0.01)
        yield service
        service.request_stop()
        assert await life == status

    yield running


async def test_two_turns_of_a_session(bus: Bus, worker: Worker, reader: Reader, run_loop: Callable[[], object]) -> None:
    """Turn 2's prompt begins with turn 1's prompt and answer, token by token, and its keys are those of the worker's card."""
    async with run_loop():  # type: ignore[attr-defined]
        create = CreateSession(session_id="s1", tenant="acme", model=DEFAULT_MODEL, system="Be brief.")
        await bus.request(CREATE_SESSION, create, SessionInfo)
        await bus.enqueue(START_TURN, start_turn("t1", "What is the capital of France?"), dedup_id="t1")
        first = await reader.end_of("t1")
        await bus.enqueue(START_TURN, start_turn("t2", "And of Italy?"), dedup_id="t2")
        second = await reader.end_of("t2")
        info = await bus.request(GET_SESSION, GetSession(session_id="s1", tenant="acme"), SessionInfo)
    assert isinstance(first[0].body, TurnStarted) and isinstance(first[-1].body, TurnDone)
    assert text_of(first) == text_of(second) == ANSWER
    answer = (*worker.tokenizer.encode_content(ANSWER), worker.asked[0].eos_token_ids[0])
    known = (*worker.asked[0].tokens, *answer)
    assert worker.asked[1].tokens[: len(known)] == known
    namespace = Namespace.of_card(worker.card, worker.asked[1].salt).digest()
    assert worker.asked[1].keys == chain_keys(namespace, worker.asked[1].tokens, 16)
    assert [turn.status for turn in info.turns] == ["done", "done"]


async def test_a_silent_worker_is_replaced_where_it_was_cut(
    bus: Bus, worker: Worker, reader: Reader, run_loop: Callable[[], object]
) -> None:
    """The worker dies after three tokens without a word: the next attempt begins with the fourth, nothing is said twice."""
    worker.cuts = [3]
    async with run_loop():  # type: ignore[attr-defined]
        create = CreateSession(session_id="s1", tenant="acme", model=DEFAULT_MODEL)
        await bus.request(CREATE_SESSION, create, SessionInfo)
        await bus.enqueue(START_TURN, start_turn("t1", "What is the capital of France?"), dedup_id="t1")
        events = await reader.end_of("t1")
    assert text_of(events) == ANSWER
    assert [request.emitted for request in worker.asked] == [0, 3]
    assert worker.asked[1].attempt > worker.asked[0].attempt


async def test_a_new_loop_goes_on_where_the_old_one_was_cut(
    bus: Bus, worker: Worker, reader: Reader, run_loop: Callable[[], object]
) -> None:
    """A loop dies in the middle of a stream; the next life takes the tokens over from the trail and asks for the fifth."""
    worker.cuts = [4]
    async with run_loop(status=1) as service:  # type: ignore[attr-defined]
        create = CreateSession(session_id="s1", tenant="acme", model=DEFAULT_MODEL)
        await bus.request(CREATE_SESSION, create, SessionInfo)
        await bus.enqueue(START_TURN, start_turn("t1", "What is the capital of France?"), dedup_id="t1")
        while sum(isinstance(event.body, TextDelta) for event in reader.events) < 4:
            await asyncio.sleep(0.01)
        # A bug ends the process without a drain.
        service.fail(RuntimeError("killed by the test"))
        while service.state is not ServiceState.STOPPED:
            await asyncio.sleep(0.01)
        async with run_loop():  # type: ignore[attr-defined]
            events = await reader.end_of("t1")
    assert sum(event.is_terminal for event in events) == 1
    assert worker.asked[-1].emitted == 4


async def test_refusals_are_typed(bus: Bus, worker: Worker, reader: Reader, run_loop: Callable[[], object]) -> None:
    """No such session, another tenant's session, another model, too long a prompt: each names its field."""
    async with run_loop():  # type: ignore[attr-defined]
        with pytest.raises(WireError) as model:
            await bus.request(CREATE_SESSION, CreateSession(session_id="s1", tenant="acme", model="no"), SessionInfo)
        assert (model.value.code, model.value.reply.field) == (ErrorCode.MODEL_NOT_FOUND, "model")
        await bus.request(
            CREATE_SESSION, CreateSession(session_id="s1", tenant="acme", model=DEFAULT_MODEL), SessionInfo
        )
        with pytest.raises(WireError) as other:
            await bus.request(GET_SESSION, GetSession(session_id="s1", tenant="other"), SessionInfo)
        assert other.value.code is ErrorCode.NOT_FOUND
        await bus.enqueue(START_TURN, start_turn("t1", "word " * 3000), dedup_id="t1")
        (failed,) = [event.body for event in await reader.end_of("t1") if isinstance(event.body, TurnFailed)]
        assert failed.error.code is ErrorCode.CONTEXT_LENGTH
        await bus.enqueue(START_TURN, start_turn("t2", "hi", session_id="nobody"), dedup_id="t2")
        (missing,) = [event.body for event in await reader.end_of("t2") if isinstance(event.body, TurnFailed)]
        assert (missing.error.code, missing.error.field) == (ErrorCode.NOT_FOUND, "session_id")


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_turn_that_another_replica_ended_is_let_go(
    bus: Bus, worker: Worker, reader: Reader, run_loop: Callable[[], object], is_read: bool
) -> None:
    """A loop that was cut off wakes up: it must write nothing more, also when a read has shown it the new records."""
    worker.cuts = [3]
    async with run_loop():  # type: ignore[attr-defined]
        create = CreateSession(session_id="s1", tenant="acme", model=DEFAULT_MODEL)
        await bus.request(CREATE_SESSION, create, SessionInfo)
        await bus.enqueue(START_TURN, start_turn("t1", "What is the capital of France?"), dedup_id="t1")
        while sum(isinstance(event.body, TextDelta) for event in reader.events) < 3:
            await asyncio.sleep(0.01)
        answer = (*worker.tokenizer.encode_content(ANSWER), worker.asked[0].eos_token_ids[0])
        step = StepGenerated(
            turn_id="t1", step=0, tokens=answer, text=ANSWER, finish_reason=FinishReason.STOP,
            receipt=StepReceipt(step=0, worker_id="decode-1", prompt_tokens=1, generated_tokens=len(answer)),
        )  # fmt: skip
        closed = TurnClosed(turn_id="t1", steps=1, finish_reason=FinishReason.STOP, closed_at=1.0)
        for expected, body in ((2, step), (3, closed)):
            await bus.append(SESSION_LOG, Record(body=body), expected=expected, session_id="s1")
        if is_read:
            await bus.request(GET_SESSION, GetSession(session_id="s1", tenant="acme"), SessionInfo)
        events = await reader.end_of("t1")
        await bus.enqueue(START_TURN, start_turn("t2", "And of Italy?"), dedup_id="t2")
        assert isinstance((await reader.end_of("t2"))[-1].body, TurnDone)
        records = await bus.read_log(SESSION_LOG, Record, session_id="s1")
    assert isinstance(events[-1].body, TurnDone) and len(worker.asked) == 2
    assert [entry.record.body.kind for entry in records[2:4]] == ["generated", "turn_closed"]
    assert [entry.record.body.kind for entry in records[4:]] == ["turn_opened", "turn_closed"]
