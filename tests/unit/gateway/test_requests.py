"""From bodies to messages: what is taken, what it means, what is refused and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proto.chat import Role
from proto.errors import ErrorCode, WireError
from proto.fleet import Heartbeat, ModelCard, ServiceState
from services.gateway import chat_requests, requests
from services.gateway.auth import KeyRing
from services.gateway.bodies import parse_body, refuse_unknown, unknown_fields
from services.gateway.chat_requests import ChatBody
from services.gateway.identity import find_turn_id, is_turn_of, request_id_from, session_id_from, turn_id_from
from services.gateway.models import ModelBook
from services.gateway.requests import SessionBody, TurnBody
from services.gateway.turn_context import DEADLINE_HEADER, TurnContext
from shared.limits import TURN_DEADLINE_S

NONCE = "0" * 24
# The machine is shared: how long an example takes says nothing.
SLOW_MACHINE = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
USER = [{"role": "user", "content": "Hi"}]


def context(**changes: Any) -> TurnContext:
    made: dict[str, Any] = {
        "turn_id": "t1", "session_id": "s1", "request_id": "r1", "tenant": "a", "model": "m",
        "max_tokens_default": 100, "fresh_seed": 77, "now": 1000.0,
    } | changes  # fmt: skip
    return TurnContext(**made)


def chat(**fields: Any) -> Any:
    body = parse_body(json.dumps({"model": "m", "messages": USER, **fields}).encode(), ChatBody)
    return chat_requests.to_start_turn(body, context())


def turn(**fields: Any) -> Any:
    body = parse_body(json.dumps({"content": "Hi", **fields}).encode(), TurnBody)
    refuse_unknown(body)
    return requests.to_start_turn(body, context())


def test_what_unset_means() -> None:
    """Greedy, the default length, and the seed of a greedy stream is nothing."""
    start = chat()
    assert (start.sampling.temperature, start.sampling.max_tokens, start.sampling.seed) == (0.0, 100, 0)
    assert start.stateless and start.sampling.logprobs is None and start.grammar is None
    assert start.deadline_at == 1000.0 + TURN_DEADLINE_S


def test_a_random_answer_gets_a_seed_that_can_be_repeated() -> None:
    assert chat(temperature=0.7).sampling.seed == 77
    assert chat(temperature=0.7, seed=5).sampling.seed == 5


def test_lengths_have_two_names() -> None:
    """max_completion_tokens is the newer one and counts first."""
    assert chat(max_completion_tokens=7, max_tokens=9).sampling.max_tokens == 7
    assert chat(max_tokens=9).sampling.max_tokens == 9


def test_messages_become_ours() -> None:
    start = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "x"},
        ]
    )  # fmt: skip
    assert [message.role for message in start.messages] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL]
    assert start.messages[1].content == "a\nb" and start.messages[2].tool_calls[0].call_id == "c1"


def test_ways_to_ask_for_a_form() -> None:
    assert chat(response_format={"type": "text"}).grammar is None
    assert chat(response_format={"type": "json_object"}).grammar.kind == "json_object"
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    made = chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}).grammar
    assert made.kind == "json_schema" and list(json.loads(made.text)["properties"]) == ["b", "a"], (
        "keys keep their order"
    )
    assert chat(structured_outputs={"choice": ["yes", "no"]}).grammar.text == 'start: "yes" | "no"'
    assert turn(grammar={"kind": "regex", "text": "a+"}).grammar.text == "a+"


def test_forced_calls_may_bring_their_arguments() -> None:
    choice = turn(tool_choice={"name": "python", "arguments": {"code": "1"}}).tool_choice
    assert (choice.mode, choice.name, json.loads(choice.arguments)) == ("named", "python", {"code": "1"})


def test_deadlines() -> None:
    """The body's own counts before the header's."""
    assert context(deadline_header="2000").deadline_at() == 1002.0
    assert context(deadline_header="2000").deadline_at(500) == 1000.5
    for wrong in ("soon", "0", "-5", "99999999999", "١٢"):
        with pytest.raises(WireError) as refused:
            context(deadline_header=wrong).deadline_at()
        assert refused.value.reply.field == DEADLINE_HEADER


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 3}, "n"),
    "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "alternatives": ({"top_logprobs": 3}, "top_logprobs"),
    "schema without schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "two forms": (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs",
    ),
    "no form": ({"structured_outputs": {}}, "structured_outputs"),
    "min above max": ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    "empty stop": ({"stop": [""]}, "stop"),
    "seventeen stops": ({"stop": ["x"] * 17}, "stop"),
    "user calls": (
        {"messages": [{"role": "user", "content": "", "tool_calls": [
            {"id": "c", "function": {"name": "f", "arguments": ""}}]}]}, "messages.0.tool_calls",
    ),
    "assistant without content": ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
    "required of none": ({"tool_choice": "required"}, "tool_choice"),
    "parameters of a list": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools.0.function.parameters.type",
    ),
    "huge integer": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 2**70}}}]},
        "tools.0.function.parameters.x",
    ),
    "bad name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    "bool as number": ({"temperature": True}, "temperature"),
    "number as text": ({"max_tokens": "5"}, "max_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_field(case: str) -> None:
    fields, field = REFUSED[case]
    with pytest.raises(WireError) as refused:
        chat(**fields)
    assert refused.value.reply.field == field
    assert refused.value.code in (ErrorCode.BAD_MESSAGE, ErrorCode.BAD_REQUEST)


def test_native_bodies_refuse_what_they_do_not_know() -> None:
    with pytest.raises(WireError) as refused:
        turn(response_format={"type": "text", "colour": 1})
    assert refused.value.reply.field == "response_format.colour"
    body = parse_body(b'{"model": "m", "messages": [{"role": "user", "content": "x", "z": 1}], "y": 1}', ChatBody)
    assert unknown_fields(body) == ["y", "messages.0.z"]


@SLOW_MACHINE
@given(st.binary(max_size=200))
def test_no_bytes_are_anything_but_a_request_or_a_typed_refusal(data: bytes) -> None:
    """Whatever is sent, the answer is ours and names a field."""
    for kind in (ChatBody, TurnBody, SessionBody):
        try:
            parse_body(data, kind)
        except WireError as refused:
            assert refused.code is ErrorCode.BAD_MESSAGE and refused.reply.field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*ChatBody.model_fields, "n", "logit_bias"])


@SLOW_MACHINE
@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_no_values_are_anything_but_a_turn_or_a_typed_refusal(fields: dict[str, Any]) -> None:
    """Known names with any JSON: a StartTurn, or a refusal that names a field."""
    try:
        start = chat(**fields)
    except WireError as refused:
        assert refused.reply.field
        return
    assert start.messages


def test_turn_ids_tell_whose_they_are() -> None:
    """Without asking anyone; another tenant's id stands for a turn that does not exist."""
    mine = turn_id_from("a", NONCE)
    assert is_turn_of("a", mine) and not is_turn_of("b", mine)
    assert find_turn_id("a", "s1", mine) == mine and find_turn_id("b", "s1", mine) != mine
    assert find_turn_id("a", "s1", "my name") == find_turn_id("a", "s1", "my name")
    assert find_turn_id("a", "s1", "my name") != find_turn_id("a", "s2", "my name")


def test_names_of_callers_become_ids() -> None:
    assert request_id_from("abc", NONCE) == "abc" and request_id_from(None, NONCE) == f"r{NONCE}"
    assert request_id_from("a b", NONCE) == request_id_from("a b", "1" * 24) != "a b"
    assert session_id_from({}, "a", NONCE) == f"s{NONCE}"
    assert session_id_from({"X-Roost-Session-ID": "mine"}, "a", NONCE) == "mine"
    other = {"session-id": "x"}
    assert session_id_from(other, "a", NONCE) != session_id_from(other, "b", NONCE)


def test_keys() -> None:
    keys = KeyRing({"k1": "a"})
    assert keys.tenant_of({"Authorization": "Bearer k1"}) == keys.tenant_of({"x-api-key": "k1"}) == "a"
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic k1"}, {"x-api-key": "k2"}):
        with pytest.raises(WireError) as refused:
            keys.tenant_of(headers)
        assert refused.value.code is ErrorCode.UNAUTHORIZED
    assert KeyRing({}).tenant_of({}) == "default"


def beat(service: str, model: str | None = None) -> Heartbeat:
    card = None
    if model is not None:
        card = ModelCard(
            worker_id=service, epoch=1, model=model, fingerprint="f", tokenizer_digest="t", kv_dtype="float32",
            layout_version=1, block_tokens=16, context_tokens=512, block_bytes=1,
        )  # fmt: skip
    return Heartbeat(
        service=service, instance_id=f"{service}-0", epoch=1, state=ServiceState.READY, host="h", pid=1,
        metrics_port=0, started_at=0.0, sent_at=0.0, model_card=card,
    )  # fmt: skip


def test_models_are_remembered_while_their_worker_restarts() -> None:
    """A turn that comes while the only worker is down waits for it; the gateway says that it is not ready."""
    book = ModelBook({"alias": "m1"}, preferred="m1")
    with pytest.raises(WireError) as early:
        book.resolve("m1")
    assert early.value.code is ErrorCode.UNAVAILABLE
    book.hear(beat("decode", "m1"), 0.0)
    assert book.lacks() == ("no loop is heard",)
    book.hear(beat("loop"), 0.0)
    assert book.lacks() == () and book.names() == ["alias", "m1"]
    book.forget_silent(60.0)
    assert book.resolve("alias") == book.resolve(None) == "m1" and len(book.lacks()) == 2
    with pytest.raises(WireError) as unknown:
        book.resolve("m2")
    assert unknown.value.code is ErrorCode.MODEL_NOT_FOUND and "m1" in unknown.value.reply.message
    assert book.max_tokens("m1", 1024) == 512
    assert book.model_json("alias", 5)["root"] == "m1"
