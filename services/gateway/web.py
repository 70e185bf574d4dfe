"""What all routes share: who asks, request ids, errors in one shape, counters, and reading bodies. Around every handler."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiohttp import web

from proto.errors import ErrorCode, ErrorReply, WireError
from services.gateway.auth import KeyRing
from services.gateway.bodies import Body, parse_body
from services.gateway.grammar_check import GrammarChecker
from services.gateway.http_errors import HTTP_ERRORS, REASONS, HttpError, envelope, headers_of, status_of
from services.gateway.identity import NONCE_HEX, request_id_from
from services.gateway.metrics import HTTP_REQUESTS
from services.gateway.models import ModelBook
from services.gateway.settings import GatewaySettings
from services.gateway.turn_context import DEADLINE_HEADER, TurnContext
from services.gateway.turns import Turns
from shared.bus import Bus
from shared.clock import Clock
from shared.limits import HTTP_BODY_BYTES_MAX
from shared.log import context, get_logger

API_PREFIX: Final = "/v1/"
TENANT: Final = web.RequestKey("tenant", str)
REQUEST_ID: Final = web.RequestKey("request_id", str)
BEGAN_AT: Final = web.RequestKey("began_at", float)
BODY_WITHIN_S: Final = web.RequestKey("body_within_s", float)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=Body)

log = get_logger()


@dataclass(frozen=True, slots=True)
class Kit:
    """What routes work with."""

    settings: GatewaySettings
    bus: Bus
    clock: Clock
    keys: KeyRing
    models: ModelBook
    turns: Turns
    grammars: GrammarChecker

    def turn_context(self, request: web.Request, *, turn_id: str, session_id: str, model: str) -> TurnContext:
        """What a turn gets from its HTTP request beside the body."""
        return TurnContext(
            turn_id=turn_id,
            session_id=session_id,
            request_id=request[REQUEST_ID],
            tenant=request[TENANT],
            model=model,
            max_tokens_default=self.models.max_tokens(model, self.settings.gateway_max_tokens),
            fresh_seed=secrets.randbits(63),
            now=self.clock.now(),
            deadline_header=request.headers.get(DEADLINE_HEADER),
        )


def nonce() -> str:
    """Fresh hex digits for an id."""
    return secrets.token_hex(NONCE_HEX // 2)


def make_app(kit: Kit) -> web.Application:
    """The application without its routes."""

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request_id_from(request.headers.get("X-Request-Id"), nonce())
        request[BEGAN_AT] = kit.clock.monotonic()
        request[BODY_WITHIN_S] = kit.settings.gateway_stall_s
        with context(request=request[REQUEST_ID]):
            response = await _answered(kit, request, handler)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "none"
        HTTP_REQUESTS.labels(route=route, status_class=f"{response.status // 100}xx").inc()
        return response

    app = web.Application(middlewares=[around], client_max_size=HTTP_BODY_BYTES_MAX)
    app.on_response_prepare.append(_name_request)
    return app


async def _answered(kit: Kit, request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if request.path.startswith(API_PREFIX):
            request[TENANT] = kit.keys.tenant_of(request.headers)
        return await handler(request)
    except WireError as refused:
        return error_response(refused.reply)
    except web.HTTPException as refused:
        return _http_response(refused)


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """JSON with its length."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


def error_response(reply: ErrorReply, headers: dict[str, str] | None = None) -> web.Response:
    """An error that comes before any other answer."""
    status = status_of(reply)
    log.info("refused", code=reply.code.value, status=status, field=reply.field, message=reply.message)
    response = json_response(envelope(reply), status, (headers or {}) | headers_of(reply))
    if status in REASONS:
        response.set_status(status, REASONS[status])
    return response


def _http_response(refused: web.HTTPException) -> web.Response:
    """aiohttp's own refusals: no such route, wrong method, body too large."""
    if isinstance(refused, web.HTTPRequestEntityTooLarge):
        message = f"the body has more than {HTTP_BODY_BYTES_MAX} bytes"
        return error_response(ErrorReply(code=ErrorCode.TOO_LARGE, message=message, field="body"))
    row = HTTP_ERRORS[ErrorCode.NOT_FOUND] if refused.status == 404 else _ROW_OTHER
    error = {"message": refused.reason, "type": row.type, "param": None, "code": row.code}
    allow = {name: value for name, value in refused.headers.items() if name == "Allow"}
    return json_response({"error": error}, refused.status, allow)


_ROW_OTHER: Final = HttpError(400, "invalid_request_error", "bad_request")


async def read_body(request: web.Request, kind: type[B], *, empty: bytes = b"") -> B:
    """The body as a typed request. `empty` stands for no body. Raises WireError naming the field, or HTTPRequestTimeout."""
    try:
        async with asyncio.timeout(request[BODY_WITHIN_S]):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason="The body did not arrive in time") from None
    return parse_body(body or empty, kind)
