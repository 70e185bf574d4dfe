"""The official `openai` client, unchanged, against the gateway."""

from __future__ import annotations

import json

import openai
import pytest

from shared.settings import DEFAULT_MODEL
from tests.e2e.system import System

WEATHER: openai.types.chat.ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


@pytest.fixture
def client(system: System) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=100)


def test_models(client: openai.OpenAI) -> None:
    assert DEFAULT_MODEL in [model.id for model in client.models.list()]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "") and choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_with_usage_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    stream = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=32, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None and chunks[-1].choices == []


def test_a_stateless_client_finds_its_history_cached(client: openai.OpenAI) -> None:
    """The whole list every time, mapped back to the log: turn 2 reports every full block of turn 1, answer included."""
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "system", "content": "You know a lot about fruit. " * 8},
        {"role": "user", "content": "Name a red fruit."},
    ]
    first = client.chat.completions.create(model=DEFAULT_MODEL, messages=messages, temperature=0, max_tokens=24)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And a yellow one?"},
    ]
    second = client.chat.completions.create(model=DEFAULT_MODEL, messages=messages, temperature=0, max_tokens=24)
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= known // 16 * 16 > 0


def test_a_forced_tool_call_comes_back_and_is_answered(client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the weather in Paris?"}
    ]
    asked = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=messages, tools=[WEATHER], temperature=0, max_tokens=64,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )  # fmt: skip
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    messages += [
        choice.message.model_dump(exclude_none=True),  # type: ignore[list-item]
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
    ]
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=messages, tools=[WEATHER], temperature=0, max_tokens=48, tool_choice="none"
    )
    assert answer.choices[0].message.content


def test_errors_have_the_client_s_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert unknown.value.param == "model" and unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=DEFAULT_MODEL, messages=[], temperature=0)
    assert wrong.value.param == "messages"
    long: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(openai.BadRequestError) as beyond:
        client.chat.completions.create(model=DEFAULT_MODEL, messages=long)
    assert beyond.value.code == "context_length_exceeded"
