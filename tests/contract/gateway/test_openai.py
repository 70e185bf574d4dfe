"""The official `openai` client, unchanged, against a real gateway; the loop is played by a script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from proto.chat import ToolChoice
from proto.errors import ErrorCode
from proto.turns import StartTurn
from tests.contract.gateway.conftest import Api
from tests.contract.gateway.scripted_loop import MODEL, WORDS, ScriptedLoop, call_of_caller, never_ends

TEXT = "".join(WORDS)
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI, loop: ScriptedLoop) -> None:
    """One object: text, usage as OpenAI counts it, the receipt beside it."""
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.role) == (TEXT, "stop", "assistant")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (45, 32)
    assert answer.model_extra is not None
    assert answer.model_extra["roost"]["receipt"]["tokens_by_source"] == {"resident": 32, "computed": 8}
    assert loop.started[0].stateless and loop.cancelled == []


async def test_stream(client: openai.AsyncOpenAI) -> None:
    """Role first, a chunk a token, one finish reason; usage in a last chunk without choices, if asked for."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == TEXT
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].model_extra is not None and "receipt" in chunks[-1].model_extra["roost"]


async def test_a_stream_ends_with_done(api: Api) -> None:
    """What clients that read lines wait for."""
    body = {"model": MODEL, "messages": QUESTION, "stream": True}
    async with api.stream("POST", "/v1/chat/completions", body) as stream:
        data = [event.data async for event in stream]
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    assert data[-2]["choices"][0]["finish_reason"] == "stop" and "usage" not in data[-2]


async def test_tools(client: openai.AsyncOpenAI, loop: ScriptedLoop) -> None:
    """A call comes back whole and in a stream, and its answer is taken."""
    loop.script = call_of_caller
    whole = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )  # fmt: skip
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function" and (call.id, call.function.name) == ("call_1", "get_weather")
    assert loop.started[0].tool_choice == ToolChoice(mode="named", name="get_weather")
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], stream=True)
    calls = [
        c for chunk in [c async for c in stream] for choice in chunk.choices for c in choice.delta.tool_calls or ()
    ]
    assert [(c.index, c.id, c.function.arguments if c.function else "") for c in calls] == [
        (0, "call_1", '{"city":"Paris"}')
    ]
    messages: Any = [
        *QUESTION,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], tool_choice="none")
    assert [message.role for message in loop.started[-1].messages] == ["user", "assistant", "tool"]


async def test_logprobs_and_structured_output(client: openai.AsyncOpenAI, loop: ScriptedLoop) -> None:
    """The chosen tokens' log-probabilities, and a schema that becomes a grammar."""
    schema: Any = {"name": "a", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    answer = await client.chat.completions.create(
        model=MODEL, messages=QUESTION, logprobs=True, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert [entry.token for entry in answer.choices[0].logprobs.content] == list(WORDS)
    grammar = loop.started[0].grammar
    assert grammar is not None and grammar.kind == "json_schema"
    bad: Any = {"name": "a", "schema": {"type": "no such type"}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model=MODEL, messages=QUESTION, response_format={"type": "json_schema", "json_schema": bad}
        )
    assert refused.value.param == "response_format" and refused.value.code == "bad_grammar"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


async def test_errors_have_the_client_s_own_types(client: openai.AsyncOpenAI, loop: ScriptedLoop) -> None:
    """Before the queue, from the loop, and in the middle of a stream."""
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=QUESTION)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as empty:
        await client.chat.completions.create(model=MODEL, messages=[])
    assert empty.value.param == "messages"

    async def too_long(scripted: ScriptedLoop, start: StartTurn) -> None:
        await scripted.begin(start)
        await scripted.fail(start, ErrorCode.CONTEXT_LENGTH, "messages")

    async def break_off(scripted: ScriptedLoop, start: StartTurn) -> None:
        await scripted.words(start, 0, 2)
        await scripted.fail(start, ErrorCode.LOST)

    loop.script = too_long
    with pytest.raises(openai.BadRequestError) as beyond:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    assert beyond.value.code == "context_length_exceeded"
    loop.script = break_off
    with pytest.raises(openai.APIError) as broken:
        async for _ in await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True):
            pass
    assert broken.value.code == "lost"


async def test_a_client_that_goes_away_cancels_its_turn(client: openai.AsyncOpenAI, loop: ScriptedLoop) -> None:
    """Streaming or waiting: nobody can come back for the answer, so it stops."""
    loop.script = never_ends
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await loop.until(lambda: loop.cancelled == [loop.started[0].turn_id])
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model=MODEL, messages=QUESTION, timeout=0.2)
    await loop.until(lambda: loop.cancelled == [start.turn_id for start in loop.started] and len(loop.started) == 2)
