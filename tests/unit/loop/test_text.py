"""What a step shows depends on its tokens only, not on how they were cut (invariant 10)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.loop.step_text import StepText
from services.loop.stops import StopMatcher
from services.loop.tool_parsing import MALFORMED, ToolCallParser, read_call


class Characters:
    """A detokenizer whose tokens are code points."""

    def feed(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def shown(text: str, stops: tuple[str, ...] = (), *, tools: bool = False) -> tuple[str, list[tuple[str, str]], int]:
    """Text, calls and tokens taken of a step that says `text`."""
    step = StepText(Characters(), stops, ToolCallParser("t-0", expects_calls=tools))
    taken, pieces = 0, ""
    for character in text:
        out = step.feed([ord(character)]).pieces
        taken += len(out)
        pieces += "".join(out)
        if step.is_stopped:
            break
    pieces += step.flush()
    assert pieces == step.text
    return pieces, [(call.name, call.arguments) for call in step.calls], taken


def test_a_stop_string_over_two_tokens_leaks_nothing() -> None:
    """F-STR-01: "\\nUser" and ":" arrive apart; the caller sees neither."""
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.feed(piece) for piece in ("Hello", "\nUser", ":", "more")] == ["Hello", "", "", ""]
    assert matcher.is_stopped and matcher.flush() == ""


def test_a_false_start_is_given_out_in_full() -> None:
    """F-STR-04: a lone newline looks like a stop's beginning; when the stop does not come, it is text."""
    matcher = StopMatcher(["\n\nEND"])
    assert matcher.feed("a\n") + matcher.feed("b\n\n") + matcher.feed("EN") + matcher.flush() == "a\nb\n\nEN"
    assert not matcher.is_stopped


@given(
    st.text(alphabet="ab\n", max_size=40),
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stops_do_not_depend_on_the_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    """Any split of the stream shows what the whole text shows."""
    cut_at = min((position for stop in stops if (position := _first_end(text, stop)) is not None), default=None)
    matcher, position, out = StopMatcher(stops), 0, ""
    while position < len(text):
        size = data.draw(st.integers(1, 5))
        out += matcher.feed(text[position : position + size])
        position += size
    out += matcher.flush()
    assert matcher.is_stopped == (cut_at is not None)
    if cut_at is None:
        assert out == text
    else:
        assert text.startswith(out) and not any(stop in out for stop in stops)


def _first_end(text: str, stop: str) -> int | None:
    position = text.find(stop)
    return None if position < 0 else position + len(stop)


CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)", "zip":  "020"}}\n</tool_call>'


def test_calls_are_read_and_their_markup_is_not_shown() -> None:
    """The arguments' text is kept as generated, blanks and all: re-serializing would change the next prompt's tokens."""
    text, calls, _ = shown(f"Let me see. {CALL}", tools=True)
    assert text == "Let me see. "
    assert calls == [("python", '{"code": "print(1)", "zip":  "020"}')]


def test_parallel_calls_are_all_read() -> None:
    """F-TCP-04: four calls in a row come out as four, with ids of their own."""
    step = StepText(Characters(), (), ToolCallParser("t-0", expects_calls=True))
    step.feed([ord(character) for character in "\n".join([CALL] * 4)])
    assert step.flush() == ""
    assert [call.call_id for call in step.calls] == [f"call-t-0-{number}" for number in range(4)]


def test_a_broken_call_is_reported_and_never_text() -> None:
    """F-TCP-03: truncated JSON or a missing end is a malformed call, not an answer."""
    for broken in (
        "<tool_call>{bad}</tool_call>",
        '<tool_call>{"name": "python", "argum',
        "<tool_call>[1]</tool_call>",
    ):
        text, calls, _ = shown(f"a {broken}", tools=True)
        assert (text, [name for name, _ in calls]) == ("a ", [MALFORMED])


def test_without_tools_markup_is_prose() -> None:
    """F-TCP-06: an answer that explains the call format is content."""
    assert shown(f"Write {CALL}")[0] == f"Write {CALL}"


def test_a_call_without_arguments_gets_an_empty_object() -> None:
    """F-TCP-05: clients parse the arguments as JSON."""
    assert read_call('{"name": "now"}') == ("now", "{}")


def test_a_stop_string_ends_the_step_at_its_token() -> None:
    """Tokens after the stop are not part of the session."""
    text, _, taken = shown("one two STOP three", ("STOP",))
    assert (text, taken) == ("one two ", len("one two STOP"))


@given(
    st.lists(st.sampled_from([CALL, "text ", "\n", "<tool", "_call>", "</tool_call>", "{", '"name"']), max_size=8),
    st.integers(1, 7),
)
def test_calls_do_not_depend_on_the_cut(parts: list[str], size: int) -> None:
    """Invariant 10: fed by characters or by larger runs, text and calls are the same."""
    text = "".join(parts)
    whole = ToolCallParser("t-0", expects_calls=True)
    runs = [whole.feed(text[start : start + size]) for start in range(0, len(text), size)] + [whole.flush()]
    expected, calls, _ = shown(text, tools=True)
    assert "".join(run.text for run in runs) == expected
    assert [(call.name, call.arguments) for run in runs for call in run.calls] == calls
