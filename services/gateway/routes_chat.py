"""OpenAI's routes: chat completions and models."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from proto.turns import TurnEvent
from services.gateway import sse
from services.gateway.bodies import unknown_fields, unknown_warnings
from services.gateway.chat_requests import ChatBody, grammar_field, is_known, to_start_turn
from services.gateway.delivery import Delivery
from services.gateway.http_errors import envelope
from services.gateway.identity import session_id_from, turn_id_from
from services.gateway.openai_answers import ChatShape, chunks, completion, failure_of, role_chunk
from services.gateway.web import TENANT, Kit, json_response, nonce, read_body


class ChatRoutes:
    """Handlers; they hold nothing."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._began_at = int(kit.clock.now())

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        kit, tenant = self._kit, request[TENANT]
        body = await read_body(request, ChatBody)
        start = to_start_turn(
            body,
            kit.turn_context(
                request,
                turn_id=turn_id_from(tenant, nonce()),
                session_id=session_id_from(request.headers, tenant, nonce()),
                model=kit.models.resolve(body.model),
            ),
        )
        await kit.grammars.check(start.grammar, grammar_field(body))
        if start.tool_choice.mode in ("required", "named"):
            await kit.grammars.check_tools(start.tools, "tools")
        shape = self._shape(body, start.turn_id)
        delivery = Delivery(kit, request, start.turn_id, failure_of)
        async with kit.turns.run(start, is_named=False, cancel_on_leave=True) as events:
            if body.stream:
                return await delivery.stream(
                    events, lambda event: _to_bytes(shape, event), head=sse.data(role_chunk(shape)), tail=sse.DONE
                )
            return await delivery.whole(events, lambda said: _whole(shape, said))

    def _shape(self, body: ChatBody, turn_id: str) -> ChatShape:
        options = body.stream_options
        return ChatShape(
            turn_id=turn_id,
            model=body.model,
            created=int(self._kit.clock.now()),
            with_usage=options is not None and bool(options.include_usage),
            with_tokens=bool(body.return_token_ids),
            with_logprobs=bool(body.logprobs),
            warnings=unknown_warnings([path for path in unknown_fields(body) if not is_known(path)]),
        )

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`."""
        models = self._kit.models
        return json_response(
            {"object": "list", "data": [models.model_json(name, self._began_at) for name in models.names()]}
        )

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{model}`."""
        return json_response(self._kit.models.model_json(request.match_info["model"], self._began_at))


def _to_bytes(shape: ChatShape, event: TurnEvent) -> bytes:
    failure = failure_of(event)
    if failure is not None:
        return sse.data(envelope(failure))
    return b"".join(map(sse.data, chunks(shape, event)))


def _whole(shape: ChatShape, said: Sequence[TurnEvent]) -> web.Response:
    return json_response(completion(shape, said))
