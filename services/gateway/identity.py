"""Pure: the ids that the gateway makes, and which of a caller's own names they stand for.

    turn id     "t" + 24 hex digits + 16 hex digits that are a digest of tenant and the first 24

The second part tells any gateway whose turn it is without asking anyone, so that a stream can be continued on another
replica while the loop is away, and never by another tenant. Nothing secret is in it: the tenant comes from the key.

Names that callers choose (an idempotency key, a session header) are mapped by a digest over tagged, length-prefixed
parts: two names never become one id, and no name of one tenant becomes an id of another's (F-SEC-02, F-SEC-04).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from blake3 import blake3

from proto.errors import ErrorCode, WireError
from proto.ids import ID_REGEX

NONCE_HEX: Final = 24
TAG_HEX: Final = 16
TURN_ID_CHARACTERS: Final = 1 + NONCE_HEX + TAG_HEX
NAME_CHARACTERS_MAX: Final = 512

# A generation's id is its turn's id with a step number behind it; both must fit an Id of 64 characters.
assert TURN_ID_CHARACTERS + len("-9999999999") <= 64

# In this order; the first one that is there counts.
SESSION_HEADERS: Final = (
    "X-Roost-Session-ID",
    "X-Dynamo-Session-ID",
    "x-claude-code-session-id",
    "session-id",
    "x-session-id",
    "x-session-affinity",
)


def digest_of(kind: str, *parts: str) -> str:
    """64 hex digits that stand for exactly this kind and these parts."""
    hasher = blake3(b"roost-gateway-id-v1")
    for part in (kind, *parts):
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def turn_id_from(tenant: str, nonce: str) -> str:
    """The turn id of this tenant with this nonce, `NONCE_HEX` hex digits."""
    assert len(nonce) == NONCE_HEX
    return f"t{nonce}{digest_of('turn-tag', tenant, nonce)[:TAG_HEX]}"


def named_turn_id(tenant: str, session_id: str, name: str) -> str:
    """The turn id that a caller's own name for a turn stands for, in this session."""
    if not 0 < len(name) <= NAME_CHARACTERS_MAX:
        raise WireError(
            ErrorCode.BAD_REQUEST, f"a turn's name has 1 to {NAME_CHARACTERS_MAX} characters", field="turn_id"
        )
    return turn_id_from(tenant, digest_of("turn-name", tenant, session_id, name)[:NONCE_HEX])


def is_turn_of(tenant: str, text: str) -> bool:
    """Whether this is a turn id that belongs to the tenant."""
    if len(text) != TURN_ID_CHARACTERS or not ID_REGEX.match(text):
        return False
    return text == turn_id_from(tenant, text[1 : 1 + NONCE_HEX])


def find_turn_id(tenant: str, session_id: str, text: str) -> str:
    """The turn that a caller means: by the id we gave it, or by the caller's own name for it.

    Another tenant's turn id is taken for a name, and stands for a turn that does not exist.
    """
    return text if is_turn_of(tenant, text) else named_turn_id(tenant, session_id, text)


def check_id(text: str, field: str) -> str:
    """The text, if it can be an id. Raises BAD_REQUEST naming the field."""
    if not ID_REGEX.match(text):
        raise WireError(
            ErrorCode.BAD_REQUEST, "an id has 1 to 64 characters out of letters, digits, '_' and '-'", field=field
        )
    return text


def request_id_from(header: str | None, nonce: str) -> str:
    """The request id for logs and messages: the caller's if it can be one, else a digest of it, else a new one."""
    if not header:
        return f"r{nonce}"
    return header if ID_REGEX.match(header) else f"r{digest_of('request', header)[:32]}"


def session_id_from(headers: Mapping[str, str], tenant: str, nonce: str) -> str:
    """The session id that a stateless request proposes for a conversation that the loop has not seen before.

    It does not select a log: the loop finds the history by its messages, and may answer under another id.
    """
    for header in SESSION_HEADERS:
        value = headers.get(header)
        if not value:
            continue
        if header == SESSION_HEADERS[0]:
            return check_id(value, header)
        return f"s{digest_of('session-header', tenant, value)[:40]}"
    return f"s{nonce}"
