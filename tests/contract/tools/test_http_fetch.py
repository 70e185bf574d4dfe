"""http_fetch against a real HTTP server on the loopback."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator

import pytest

from proto.tools import ToolOutcome
from services.tools.http_fetch import fetch
from services.tools.http_policy import parse_allowed
from services.tools.settings import ToolsSettings


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


ANSWERS = {
    "/good": answer("200 OK", "grüß".encode(), "Content-Type: text/plain"),
    "/missing": answer("404 Not Found", b"nope"),
    "/hop": answer("302 Found", b"", "Location: /good"),
    "/round": answer("302 Found", b"", "Location: /round"),
    "/out": answer("302 Found", b"", "Location: http://169.254.169.254/latest/"),
    "/scheme": answer("302 Found", b"", "Location: file:///etc/passwd"),
    "/bomb": answer("200 OK", gzip.compress(bytes(10_000_000)), "Content-Encoding: gzip"),
    "/garbage": b"SSH-2.0-OpenSSH\r\n",
}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        try:
            if path == "/endless":
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()
            if path == "/slow":
                await reader.read()
            writer.write(ANSWERS.get(path, b""))
            await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize(
    ("path", "outcome", "says"),
    [
        ("/good", ToolOutcome.OK, "grüß"),
        ("/hop", ToolOutcome.OK, "grüß"),
        ("/missing", ToolOutcome.ERROR, "HTTP 404"),
        ("/round", ToolOutcome.REFUSED, "more than 3 redirects"),
        ("/out", ToolOutcome.REFUSED, "169.254.169.254"),
        ("/scheme", ToolOutcome.REFUSED, "http or https"),
        ("/bomb", ToolOutcome.ERROR, "compressed"),
        ("/garbage", ToolOutcome.ERROR, "Failed"),
        ("/endless", ToolOutcome.OUTPUT_LIMIT, "Cut"),
        ("/slow", ToolOutcome.TIMEOUT, "No whole answer"),
    ],
)
async def test_answers(port: int, path: str, outcome: ToolOutcome, says: str) -> None:
    allowed = parse_allowed(f"127.0.0.1:{port}")
    settings = ToolsSettings()
    limit_s = 0.5 if path == "/slow" else 5.0
    found, text, _ = await fetch(f"http://127.0.0.1:{port}{path}", allowed, settings, limit_s)
    assert found is outcome and says in text, (found, text[:300])
    assert len(text) < settings.tools_content_bytes + 200


async def test_a_listed_name_that_leads_home_is_refused_unless_the_address_is_listed(port: int) -> None:
    url, settings = f"http://localhost:{port}/good", ToolsSettings()
    outcome, text, _ = await fetch(url, parse_allowed(f"localhost:{port}"), settings, 5.0)
    assert outcome is ToolOutcome.REFUSED and "ROOST_TOOLS_HTTP_HOSTS" in text
    both = parse_allowed(f"localhost:{port},127.0.0.1:{port}")
    assert (await fetch(url, both, settings, 5.0))[0] is ToolOutcome.OK
