"""Roost's own routes: sessions, turns as streams that can be continued, documents."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from proto.errors import ErrorCode, ErrorReply, WireError
from proto.retrieval import DocumentOp
from proto.sessions import GetSession, SessionInfo
from proto.subjects import CREATE_SESSION, DOCUMENTS, GET_SESSION
from proto.turns import BEFORE_EVERYTHING, Place, TurnEvent, TurnFailed
from services.gateway import sse
from services.gateway.answers import event_json, session_json, turn_json
from services.gateway.bodies import refuse_unknown
from services.gateway.delivery import Delivery
from services.gateway.events import stream_id
from services.gateway.identity import check_id, find_turn_id, turn_id_from
from services.gateway.requests import (
    DocumentBody,
    SessionBody,
    TurnBody,
    grammar_field,
    to_create_session,
    to_delete_document,
    to_put_document,
    to_start_turn,
)
from services.gateway.web import TENANT, Kit, json_response, nonce, read_body

TRUE_WORDS = ("1", "true")


class NativeRoutes:
    """Handlers; they hold nothing."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def add_to(self, app: web.Application) -> None:
        """Register the routes."""
        turns = "/v1/sessions/{session_id}/turns"
        app.router.add_post("/v1/sessions", self.create_session)
        app.router.add_get("/v1/sessions/{session_id}", self.get_session)
        app.router.add_post(turns, self.turn)
        app.router.add_get(turns + "/{turn_id}/events", self.events)
        app.router.add_post(turns + "/{turn_id}/cancel", self.cancel)
        app.router.add_post("/v1/documents", self.put_document)
        app.router.add_delete("/v1/documents/{document_id}", self.delete_document)

    async def create_session(self, request: web.Request) -> web.Response:
        """`POST /v1/sessions`."""
        body = await read_body(request, SessionBody, empty=b"{}")
        refuse_unknown(body)
        create = to_create_session(
            body,
            session_id=body.session_id or f"s{nonce()}",
            tenant=request[TENANT],
            model=self._kit.models.resolve(body.model),
        )
        info = await self._kit.bus.request(CREATE_SESSION, create, SessionInfo)
        return json_response(session_json(info), 201)

    async def get_session(self, request: web.Request) -> web.Response:
        """`GET /v1/sessions/{session_id}`."""
        return json_response(session_json(await self._session(request)))

    async def _session(self, request: web.Request) -> SessionInfo:
        ask = GetSession(session_id=_session_id(request), tenant=request[TENANT])
        return await self._kit.bus.request(GET_SESSION, ask, SessionInfo)

    async def turn(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/sessions/{session_id}/turns`."""
        kit, tenant, session_id = self._kit, request[TENANT], _session_id(request)
        body = await read_body(request, TurnBody)
        refuse_unknown(body)
        is_named = body.turn_id is not None
        turn_id = find_turn_id(tenant, session_id, body.turn_id) if body.turn_id else turn_id_from(tenant, nonce())
        model = kit.models.resolve(None)
        start = to_start_turn(body, kit.turn_context(request, turn_id=turn_id, session_id=session_id, model=model))
        await kit.grammars.check(start.grammar, grammar_field(body))
        delivery = Delivery(kit, request, turn_id, _failure_of)
        leave = body.on_disconnect == "cancel"
        async with kit.turns.run(start, is_named=is_named, cancel_on_leave=leave) as events:
            if body.stream:
                return await delivery.stream(events, _to_bytes(with_tokens=body.return_token_ids))
            return await delivery.whole(
                events, lambda said: json_response(turn_json(said, with_tokens=body.return_token_ids))
            )

    async def events(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/sessions/{session_id}/turns/{turn_id}/events`."""
        tenant, session_id = request[TENANT], _session_id(request)
        turn_id = find_turn_id(tenant, session_id, request.match_info["turn_id"])
        with_tokens = request.query.get("return_token_ids", "") in TRUE_WORDS
        delivery = Delivery(self._kit, request, turn_id, _no_failure)
        async with self._kit.turns.attach(tenant, session_id, turn_id, _after(request)) as events:
            return await delivery.stream(events, _to_bytes(with_tokens=with_tokens))

    async def cancel(self, request: web.Request) -> web.Response:
        """`POST /v1/sessions/{session_id}/turns/{turn_id}/cancel`. Idempotent."""
        await self._session(request)
        turn_id = find_turn_id(request[TENANT], _session_id(request), request.match_info["turn_id"])
        await self._kit.turns.cancel(turn_id, "cancelled by the caller")
        return json_response({"turn_id": turn_id, "status": "cancelling"}, 202)

    async def put_document(self, request: web.Request) -> web.Response:
        """`POST /v1/documents`."""
        body = await read_body(request, DocumentBody)
        refuse_unknown(body)
        document_id = body.document_id or f"d{nonce()}"
        return await self._logged(document_id, to_put_document(body, document_id=document_id, tenant=request[TENANT]))

    async def delete_document(self, request: web.Request) -> web.Response:
        """`DELETE /v1/documents/{document_id}`."""
        document_id = check_id(request.match_info["document_id"], "document_id")
        return await self._logged(document_id, to_delete_document(document_id=document_id, tenant=request[TENANT]))

    async def _logged(self, document_id: str, operation: DocumentOp) -> web.Response:
        sequence = await self._kit.bus.append_any(DOCUMENTS, operation)
        return json_response({"document_id": document_id, "sequence": sequence}, 202)


def _session_id(request: web.Request) -> str:
    return check_id(request.match_info["session_id"], "session_id")


def _after(request: web.Request) -> Place:
    """What the client has already. Raises BAD_REQUEST for something that is no event id."""
    text = request.headers.get("Last-Event-ID") or request.query.get("after")
    if not text:
        return BEFORE_EVERYTHING
    try:
        return Place.parse(text)
    except ValueError as wrong:
        raise WireError(ErrorCode.BAD_REQUEST, str(wrong), field="Last-Event-ID") from None


def _failure_of(event: TurnEvent) -> ErrorReply | None:
    return event.body.error if isinstance(event.body, TurnFailed) else None


def _no_failure(_: TurnEvent) -> ErrorReply | None:
    """A stream that is continued has begun: its failure is an event like any other."""
    return None


def _to_bytes(*, with_tokens: bool) -> Callable[[TurnEvent], bytes]:
    return lambda event: sse.event(event.body.kind, event_json(event, with_tokens=with_tokens), stream_id(event))
