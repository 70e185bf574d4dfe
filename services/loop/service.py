"""THE SHELL of the loop: takes turns from the queue, runs each beside the others, answers questions about sessions."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakValueDictionary

from proto.chat import ChatMessage, ToolSpec
from proto.errors import ErrorCode, WireError
from proto.fleet import Heartbeat, ModelCard
from proto.generate import GenerateEvent
from proto.sessions import CreateSession, GetSession, SessionInfo, SessionOpened
from proto.subjects import (
    CANCEL_TURN,
    CREATE_SESSION,
    DIGESTS,
    GENERATE_EVENT,
    GET_SESSION,
    START_TURN,
    TURN_EVENT,
)
from proto.turns import CancelTurn, StartTurn, TextDelta, TurnEvent, TurnFailed
from services.loop.context import ContextBuilder
from services.loop.generation import Target
from services.loop.opening import TurnOpener, orphaned
from services.loop.runner import Kit, TurnRunner
from services.loop.session import Session
from services.loop.settings import LoopSettings
from services.loop.step_text import StepText
from services.loop.store import SessionStore
from services.loop.template import ChatTemplate
from services.loop.tool_parsing import ToolCallParser
from services.loop.tool_runner import ToolRunner
from services.loop.trail import PART_TEXT, terminal_event
from services.loop.turn import TurnMachine
from services.loop.turn_events import BusRestored, Cancelled, Heard, Ticked
from shared.block_hash import Namespace
from shared.bus import WorkItem
from shared.cards import CardBook
from shared.errors import SequenceConflict
from shared.limits import REQUEST_TIMEOUT_S
from shared.log import context as log_context
from shared.log import get_logger
from shared.metrics import Health, counter, gauge
from shared.model_dir import find_tokenizer
from shared.service import Service
from shared.settings import WORKER_SERVICES
from shared.tokenizer import IncrementalDecoder, Tokenizer

TICK_S: Final = 0.25
# How long a turn waits before it asks for its session again when another replica has it.
BUSY_RETRY_S: Final = 0.3
# A cancel may come before its turn does; so many are remembered.
EARLY_CANCELS_MAX: Final = 4_096
# Times a stateless turn looks for its log again when the one it found moved on meanwhile.
FINDS_MAX: Final = 5
CARD_WAIT_S: Final = 0.1

TURNS = counter("roost_loop_turns_total", "Turns that ended here, by how.", ("outcome",))
RUNNING = gauge("roost_loop_turns_running", "Turns in hand.")
TOKENIZER_MISMATCH = counter("roost_tokenizer_mismatch_total", "Workers whose tokenizer is not the loop's.")

log = get_logger()


class LoopService(Service[LoopSettings]):
    """Shell of the loop. Decides nothing about a turn: services/loop/turn.py does."""

    name = "loop"
    settings_type = LoopSettings

    async def start(self) -> None:
        """See Service."""
        directory = find_tokenizer(self.settings.model, self.settings.home_path)
        self._model, self._tokenizer_digest = directory.name, directory.tokenizer_digest
        self._tokenizer = Tokenizer.load(directory.path)
        template = ChatTemplate(self._tokenizer.chat_template, bos_token=self._tokenizer.bos_token)
        self._context = ContextBuilder(template, self._tokenizer)
        self._store = SessionStore(
            self.bus, sessions_max=self.settings.loop_sessions_cached, tokens_max=self.settings.loop_tokens_cached
        )
        digests = await self.bus.bucket(DIGESTS)
        self._opener = TurnOpener(self.bus, self._store, digests, self._context, self.clock)
        tools = ToolRunner(self.bus, self.clock)
        self._kit = Kit(self.bus, self.clock, self._store, self._opener, self._context, tools, self.spawn)
        self._cards = CardBook()
        self._runners: dict[str, TurnRunner] = {}
        # A lock lives as long as a turn holds or awaits it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._last_card: ModelCard | None = None
        self._early_cancels: OrderedDict[str, str] = OrderedDict()
        self._any_running = asyncio.Event()
        await self.hear_fleet(self._heard_heartbeat, *WORKER_SERVICES)
        await self.bus.subscribe(CANCEL_TURN, CancelTurn, self._heard_cancel)
        events = GENERATE_EVENT.at(loop_id=self.instance_id, generation_id="x")[:-1] + "*"
        await self.bus.subscribe_to(events, GenerateEvent, self._heard_generate)
        await self.bus.serve(CREATE_SESSION, CreateSession, self._create_session)
        await self.bus.serve(GET_SESSION, GetSession, self._get_session)
        self.bus.on_reconnect(self._restored)
        self.spawn(self._ticks())
        self._puller = await self.bus.work(START_TURN, StartTurn, self._take, limit=self.settings.loop_turns)

    async def drain(self) -> None:
        """Take no more turns and finish those in hand; what is cut off goes back to the queue and on elsewhere."""
        await self._puller.stop()
        await self._puller.idle()

    def load(self) -> dict[str, float]:
        """See Service."""
        return {"turns": float(len(self._runners)) if hasattr(self, "_runners") else 0.0}

    def health(self) -> Health:
        """Ready, and degraded while no worker is heard that serves its model."""
        base = super().health()
        if base.ready and not self._cards.model_cards():
            return Health(ready=True, degraded=True, reasons=("no worker is heard",))
        return base

    # -- what is heard

    def _heard_heartbeat(self, heartbeat: Heartbeat) -> None:
        if self._cards.hear(heartbeat, self.clock.monotonic()) and heartbeat.model_card is not None:
            card = heartbeat.model_card
            if card.model == self._model and card.tokenizer_digest != self._tokenizer_digest:
                TOKENIZER_MISMATCH.inc()
                log.error("tokenizer_mismatch", worker=card.worker_id, model=card.model)

    def _heard_cancel(self, cancel: CancelTurn) -> None:
        runner = self._runners.get(cancel.turn_id)
        if runner is not None:
            runner.tell(Cancelled(self.clock.now(), cancel.reason))
            return
        self._early_cancels[cancel.turn_id] = cancel.reason
        while len(self._early_cancels) > EARLY_CANCELS_MAX:
            self._early_cancels.popitem(last=False)

    def _heard_generate(self, event: GenerateEvent) -> None:
        turn_id = event.generation_id.rpartition("-")[0]
        runner = self._runners.get(turn_id)
        if runner is not None:
            runner.tell(Heard(self.clock.now(), event))

    def _restored(self) -> None:
        for runner in self._runners.values():
            runner.tell(BusRestored(self.clock.now()))

    async def _ticks(self) -> None:
        while True:
            await self._any_running.wait()
            await self.clock.sleep(TICK_S)
            for runner in self._runners.values():
                runner.tell(Ticked(self.clock.now()))

    # -- turns

    async def _take(self, start: StartTurn, item: WorkItem) -> None:
        with log_context(session=start.session_id, turn=start.turn_id, request=start.request_id):
            try:
                await self._run(start, item)
            except SequenceConflict as lost:
                log.info("turn_taken_elsewhere", error=str(lost))
                TURNS.labels(outcome="lost").inc()
                await item.later(BUSY_RETRY_S)
            except WireError as refused:
                if refused.code is ErrorCode.UNAVAILABLE and self.clock.now() < start.deadline_at:
                    log.warning("turn_put_back", error=str(refused))
                    await item.later(refused.reply.retry_after_s or BUSY_RETRY_S)
                    return
                log.info("turn_refused", error=str(refused))
                TURNS.labels(outcome="refused").inc()
                await self._refuse(start, refused)
            except asyncio.CancelledError:
                # Drain was cut: somebody else goes on from the log.
                await item.later(0.0)
                raise

    async def _refuse(self, start: StartTurn, error: WireError) -> None:
        """A turn that never came into a log gets its terminal event all the same."""
        event = TurnEvent(
            turn_id=start.turn_id,
            session_id=start.session_id,
            step=0,
            offset=0,
            part=0,
            body=TurnFailed(error=error.reply),
        )
        await self.bus.publish(TURN_EVENT, event, turn_id=start.turn_id)

    async def _run(self, start: StartTurn, item: WorkItem) -> None:
        target = await self._target(start)
        for _ in range(FINDS_MAX):
            session_id, session, new = await self._opener.find(start, item.delivery)
            head = session.head
            async with self._only_turn_of(session_id):
                if start.stateless and session.head != head:
                    # Another turn of this log ended while this one waited; the history may now go on elsewhere.
                    continue
                if not await self._opened(session_id, session, start, new):
                    return
                await self._run_opened(session_id, session, start, target, item)
                return
        raise WireError(
            ErrorCode.CONFLICT, "the conversation is being continued by too many turns at once", field="messages"
        )

    @asynccontextmanager
    async def _only_turn_of(self, session_id: str) -> AsyncIterator[None]:
        """One turn of a session at a time in this replica; the next one waits a bounded while (F-CAN-02)."""
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        try:
            await asyncio.wait_for(lock.acquire(), self.settings.loop_session_wait_s)
        except TimeoutError as busy:
            raise _busy() from busy
        try:
            yield
        finally:
            lock.release()

    async def _opened(self, session_id: str, session: Session, start: StartTurn, new: Sequence[ChatMessage]) -> bool:
        """Make sure that the turn is the open one of its session. False if it has ended already; its end is said again."""
        if start.turn_id in session.closed:
            event = terminal_event(session_id, session.closed[start.turn_id])
            await self.bus.publish(TURN_EVENT, event, turn_id=start.turn_id)
            return False
        waited_until = self.clock.monotonic() + self.settings.loop_session_wait_s
        while session.turn is None or session.turn.opened.turn_id != start.turn_id:
            late = orphaned(session, self.clock.now())
            if late is not None:
                await self._store.append(
                    session_id, session, late, give_up_at=self._opener.give_up_at(start.deadline_at)
                )
            if session.turn is None:
                try:
                    await self._opener.open(session_id, session, start, new)
                    continue
                except SequenceConflict:
                    log.info("session_moved_on", session=session_id)
            elif self.clock.monotonic() > waited_until:
                raise _busy()
            else:
                # A turn of another replica, or of a life that ended: its delivery comes back to someone.
                await self.clock.sleep(BUSY_RETRY_S)
            await self._store.refresh(session_id, session)
            if start.turn_id in session.closed:
                return await self._opened(session_id, session, start, new)
        return True

    async def _run_opened(
        self, session_id: str, session: Session, start: StartTurn, target: Target, item: WorkItem
    ) -> None:
        machine = TurnMachine(
            session,
            target,
            reply_subject=self._reply_subject,
            make_text=lambda step_id: self._step_text(step_id, session, start),
            delivery=item.delivery,
        )
        runner = TurnRunner(start, session_id, session, machine, self._kit)
        seen = await self._seen(session) if item.delivery > 1 else ()
        self._runners[start.turn_id] = runner
        RUNNING.set(len(self._runners))
        self._any_running.set()
        try:
            if start.turn_id in self._early_cancels:
                runner.tell(Cancelled(self.clock.now(), self._early_cancels.pop(start.turn_id)))
            await runner.run(seen)
            TURNS.labels(outcome="ended").inc()
        finally:
            del self._runners[start.turn_id]
            RUNNING.set(len(self._runners))
            if not self._runners:
                self._any_running.clear()

    def _reply_subject(self, generation_id: str) -> str:
        return GENERATE_EVENT.at(loop_id=self.instance_id, generation_id=generation_id)

    def _step_text(self, step_id: str, session: Session, start: StartTurn) -> StepText:
        assert session.opened is not None
        expects_calls = bool(session.opened.tools) and start.tool_choice.mode != "none"
        parser = ToolCallParser(step_id, expects_calls=expects_calls)
        return StepText(IncrementalDecoder(self._tokenizer), start.sampling.stop, parser)

    async def _seen(self, session: Session) -> tuple[int, ...]:
        """Tokens of the step that comes next which an earlier life has already shown on the trail."""
        assert session.turn is not None
        step = session.turn.next_step
        seen: list[int] = []
        for entry in await self.bus.read_log(TURN_EVENT, TurnEvent, turn_id=session.turn.opened.turn_id):
            event = entry.record
            if event.step == step and event.part == PART_TEXT and isinstance(event.body, TextDelta):
                first = event.offset - len(event.body.token_ids)
                if first <= len(seen):
                    seen.extend(event.body.token_ids[len(seen) - first :])
        return tuple(seen)

    async def _target(self, start: StartTurn) -> Target:
        """The model as a live worker serves it. Waits for one; raises MODEL_NOT_FOUND for a model that is not ours."""
        if start.model != self._model:
            raise WireError(
                ErrorCode.MODEL_NOT_FOUND, f"no model {start.model!r} here, only {self._model!r}", field="model"
            )
        while (card := self._card()) is None:
            if self.clock.now() >= start.deadline_at:
                raise WireError(ErrorCode.DEADLINE, f"no worker served {self._model!r} before the turn's deadline")
            await self.clock.sleep(CARD_WAIT_S)
        salt = self.settings.loop_shared_salts.get(start.tenant, start.tenant).encode()
        return Target(
            namespace=Namespace.of_card(card, salt).digest(),
            salt=salt,
            block_tokens=card.block_tokens,
            context_tokens=card.context_tokens,
            eos_token_ids=tuple(sorted(self._tokenizer.eos_token_ids)),
        )

    def _card(self) -> ModelCard | None:
        """The card that is remembered outlives its worker: a turn may begin while the only worker restarts."""
        cards = [
            card for card in self._cards.model_cards(self._model) if card.tokenizer_digest == self._tokenizer_digest
        ]
        if cards:
            self._last_card = cards[0]
        return self._last_card

    # -- sessions

    async def _create_session(self, create: CreateSession) -> SessionInfo:
        if create.model != self._model:
            raise WireError(
                ErrorCode.MODEL_NOT_FOUND, f"no model {create.model!r} here, only {self._model!r}", field="model"
            )
        session = await self._store.load(create.session_id, refresh=True)
        if session.opened is None:
            tools = (*create.tools, *await self._opener.server_tools(create.server_tools))
            _distinct(tools)
            body = SessionOpened(
                session_id=create.session_id,
                tenant=create.tenant,
                model=create.model,
                created_at=self.clock.now(),
                system=create.system,
                tools=tools,
                server_tools=create.server_tools,
            )
            try:
                give_up_at = asyncio.get_running_loop().time() + REQUEST_TIMEOUT_S
                await self._store.append(create.session_id, session, body, give_up_at=give_up_at)
            except SequenceConflict as taken:
                raise WireError(ErrorCode.CONFLICT, "this session id is taken", field="session_id") from taken
            return session.describe()
        if session.opened.tenant != create.tenant or session.opened.system != create.system:
            raise WireError(ErrorCode.CONFLICT, "this session id is taken", field="session_id")
        return session.describe()

    async def _get_session(self, get: GetSession) -> SessionInfo:
        session = await self._store.load(get.session_id, refresh=True)
        session.require(get.tenant)
        return session.describe()


def _busy() -> WireError:
    return WireError(
        ErrorCode.CONFLICT, "another turn of this session is running", field="session_id", retry_after_s=1.0
    )


def _distinct(tools: Sequence[ToolSpec]) -> None:
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise WireError(ErrorCode.BAD_REQUEST, f"tool {name!r} is given twice", field="tools")
