"""Pure: finding the log of a stateless client's conversation again, by the digest of its messages.

An OpenAI client sends the whole history with each request. `chain` gives one digest a message; the one after an assistant's
answer was stored when that answer was made, beside where it was logged. So the history maps to the tokens as they were
generated, and the prefix of an ordinary client does not drift either (design.md section 4).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from blake3 import blake3

from proto.chat import ChatMessage, Role, ToolSpec

DIGEST_SPEC = "roost-conversation-v1"


def _fold(before: bytes, *parts: str) -> bytes:
    hasher = blake3(before)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return bytes(hasher.digest())


def chain(
    tenant: str, model: str, tools: Sequence[ToolSpec], server_tools: Sequence[str], messages: Sequence[ChatMessage]
) -> list[str]:
    """Hex digests d[0..n]: d[i] stands for the front (tenant, model, tools) and the first i messages."""
    listed = json.dumps([tool.model_dump(mode="json") for tool in tools], sort_keys=True)
    digest = _fold(DIGEST_SPEC.encode(), tenant, model, listed, json.dumps(list(server_tools)))
    digests = [digest.hex()]
    for message in messages:
        calls = json.dumps([[call.call_id, call.name, call.arguments] for call in message.tool_calls])
        digest = _fold(digest, message.role.value, message.content, calls, message.tool_call_id or "")
        digests.append(digest.hex())
    return digests


def answered_lengths(messages: Sequence[ChatMessage], limit: int) -> list[int]:
    """Lengths of the prefixes that end in an assistant's answer and have something after it, longest first."""
    lengths = [n for n in range(len(messages) - 1, 0, -1) if messages[n - 1].role is Role.ASSISTANT]
    return lengths[:limit]
