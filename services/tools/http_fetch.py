"""http_fetch: GET through the policy, hop by hop, each hop connected to the very address that was checked."""

from __future__ import annotations

import asyncio
import socket
from typing import Final
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from proto.tools import ToolOutcome
from services.tools.http_policy import Allowed, Refused, Target, pinned, target
from services.tools.output import HeadTail
from services.tools.settings import ToolsSettings

READ_BYTES: Final = 16 * 1024
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
Answer = tuple[ToolOutcome, str, int]


class _Pinned(AbstractResolver):
    """Answers with one address, so that the name is not looked up a second time."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """See AbstractResolver."""
        kind = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        flags = socket.AI_NUMERICHOST
        return [
            ResolveResult(hostname=host, host=self._address, port=port, family=kind, proto=0, flags=flags),
        ]

    async def close(self) -> None:
        """See AbstractResolver."""


async def fetch(url: str, allowed: Allowed, settings: ToolsSettings, limit_s: float) -> Answer:
    """Outcome, text for the model, bytes left out. Raises nothing for what the network does."""
    body = HeadTail(settings.tools_content_bytes)
    try:
        async with asyncio.timeout(limit_s):
            return await _follow(url, allowed, settings, body)
    except Refused as refused:
        return ToolOutcome.REFUSED, f"Refused: {refused}.", 0
    except TimeoutError:
        return ToolOutcome.TIMEOUT, f"{body.text()}\n[No whole answer within {limit_s:g} s.]".lstrip(), 0
    except (aiohttp.ClientError, OSError, ValueError) as failed:
        return ToolOutcome.ERROR, f"Failed: {failed!r}"[:1000], 0


async def _follow(url: str, allowed: Allowed, settings: ToolsSettings, body: HeadTail) -> Answer:
    for _ in range(settings.tools_http_redirects_max + 1):
        found = target(url, allowed)
        address = pinned(found, await _addresses(found), allowed)
        connector = aiohttp.TCPConnector(resolver=_Pinned(address), use_dns_cache=False, limit=1)
        # No proxy or .netrc of the machine, no cookies, nothing unpacked behind our back.
        async with aiohttp.ClientSession(
            connector=connector, trust_env=False, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session:  # fmt: skip
            headers = {"Accept-Encoding": "identity", "User-Agent": "roost"}
            async with session.get(url, allow_redirects=False, headers=headers) as response:
                if response.status in REDIRECTS and "Location" in response.headers:
                    url = urljoin(url, response.headers["Location"])
                    continue
                return await _read(response, settings, body)
    raise Refused(f"more than {settings.tools_http_redirects_max} redirects")


async def _addresses(found: Target) -> list[str]:
    answers = await asyncio.get_running_loop().getaddrinfo(found.host, found.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


async def _read(response: aiohttp.ClientResponse, settings: ToolsSettings, body: HeadTail) -> Answer:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        return ToolOutcome.ERROR, "Failed: the answer is compressed, which was not asked for.", 0
    while chunk := await response.content.read(READ_BYTES):
        body.add(chunk)
        if body.seen_bytes > settings.tools_http_bytes:
            why = f"\n[Cut: the answer has more than {settings.tools_http_bytes} bytes.]"
            return ToolOutcome.OUTPUT_LIMIT, body.text() + why, body.dropped_bytes
    status = f"[HTTP {response.status}, {response.headers.get('Content-Type', 'no type')[:100]}]"
    outcome = ToolOutcome.OK if response.status < 400 else ToolOutcome.ERROR
    return outcome, f"{status}\n{body.text()}", body.dropped_bytes
