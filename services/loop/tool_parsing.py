"""Tool calls in generated text, read while it streams. Uses the response parser of transformers (which needs no torch).

Markup never leaves as content (F-TCP-03). A call whose markup is closed but whose JSON is wrong becomes a call of the name
`malformed`, which the loop answers with a typed result, so the model can mend it. Arguments are kept as the text that was
generated: never parsed and written again, which would change the next prompt's tokens (and "020" into 20, F-TCP-02).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers.utils.chat_parsing import ResponseParser

from proto.chat import ToolCall

# Hermes form, which SmolLM2 and Qwen speak. The anchor is required by the format and never occurs in generated text.
HERMES: Final[dict[str, Any]] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "text", "repeats": True},
    },
}

MALFORMED: Final = "malformed"


@dataclass(frozen=True, slots=True)
class Parsed:
    """What one more piece of text brought: text to show, and calls that are complete."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser:
    """One step's stream. Call ids are made from the step's id and the call's number, so a resumed step makes the same ones."""

    def __init__(self, step_id: str, *, expects_calls: bool) -> None:
        self._step_id = step_id
        # Without tools nothing is markup: an answer that explains the call format is content (F-TCP-06).
        self._parser = ResponseParser(HERMES, prefix="") if expects_calls else None
        self._count = 0
        self._is_after_call = False
        # White space after a call that was not shown yet.
        self._blank = ""

    def feed(self, text: str) -> Parsed:
        """Take text in."""
        if self._parser is None:
            return Parsed(text)
        return self._take(self._parser.feed(text)) if text else Parsed()

    def flush(self) -> Parsed:
        """The stream has ended. A call that is still open is not a call: it is reported as malformed."""
        if self._parser is None:
            return Parsed()
        _, events = self._parser.finalize()
        return self._take(events)

    def _take(self, events: Sequence[dict[str, Any]]) -> Parsed:
        shown, calls = "", []
        for event in events:
            if event["field"] == "content" and event["type"] == "region_chunk":
                shown += self._shown(event["text"])
            elif event["field"] == "tool_calls" and event["type"] == "region_close":
                self._is_after_call, self._blank = True, ""
                calls.append(self._call(event["value"]))
        return Parsed(shown, tuple(calls))

    def _shown(self, text: str) -> str:
        """Right after a call, blanks wait for the text that gives them a meaning, however the stream was cut."""
        if not self._is_after_call:
            return text
        self._blank += text
        if not self._blank.strip():
            return ""
        self._is_after_call = False
        shown, self._blank = self._blank, ""
        return shown

    def _call(self, raw: str) -> ToolCall:
        call_id = f"call-{self._step_id}-{self._count}"
        self._count += 1
        name, arguments = read_call(raw)
        return ToolCall(call_id=call_id, name=name, arguments=arguments)


def read_call(raw: str) -> tuple[str, str]:
    """Name and the arguments' own text of `{"name": ..., "arguments": {...}}`. Malformed input is named so, whole."""
    raw = raw.strip()
    try:
        parsed = json.loads(raw)
    except ValueError:
        return MALFORMED, raw
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str) or not parsed["name"]:
        return MALFORMED, raw
    if "arguments" not in parsed:
        return parsed["name"], "{}"
    text = _value_text(raw, "arguments")
    return parsed["name"], text if text is not None else json.dumps(parsed["arguments"], ensure_ascii=False)


def _value_text(raw: str, key: str) -> str | None:
    """The verbatim text of a top-level value, found with the standard decoder."""
    decoder = json.JSONDecoder()
    position = raw.index("{") + 1
    while position < len(raw):
        while position < len(raw) and raw[position] in " \t\r\n,":
            position += 1
        if position >= len(raw) or raw[position] == "}":
            return None
        name, position = decoder.raw_decode(raw, position)
        position = raw.index(":", position) + 1
        while raw[position] in " \t\r\n":
            position += 1
        start = position
        _, position = decoder.raw_decode(raw, position)
        if name == key:
            return raw[start:position]
    return None
