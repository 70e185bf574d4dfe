"""Cores of tools: argument checks, output, verdicts, claims, the http policy, and the seccomp filter."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.message import decode, encode
from proto.tools import RunTool, ToolOutcome
from services.tools.cage import AUDIT_ARCH, DENIED_CALLS, X32_BIT, Cage, Limits, Rung, bwrap_arguments, seccomp_filter
from services.tools.claims import CLAIM_GRACE_S, Claim, Step, digest_of, key_of, step, unknown
from services.tools.http_policy import Refused, parse_allowed, pinned, target
from services.tools.output import HeadTail
from services.tools.registry import TOOLS, BadCall, checked_arguments
from services.tools.verdict import End, content, verdict

CALL = RunTool(
    session_id="s", turn_id="t", request_id="r", call_id="c", tenant="x", name="python", arguments="{}", deadline_at=9.0
)


def test_tools_are_in_canonical_order_and_their_schemas_are_stable() -> None:
    """The list stands at the front of shared prompts: one order, one text (F-TOK-05)."""
    assert list(TOOLS) == sorted(TOOLS) == ["http_fetch", "python", "retrieve", "shell"]
    assert [tool.spec.name for tool in TOOLS.values() if not tool.rerun_safe] == ["python", "shell"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("nothing", "{}", "no tool 'nothing'"),
        ("python", "{", "not JSON"),
        ("python", "[" * 100_000, "not JSON"),
        ("python", "[]", "field arguments"),
        ("python", "{}", "'code' is a required property"),
        ("python", '{"code": 1}', "field code"),
        ("python", '{"code": ""}', "field code"),
        ("python", '{"code": "1", "extra": 1}', "'extra'"),
        ("python", json.dumps({"code": "a\x00b"}), "field code: holds a NUL"),
        ("shell", '{"command": "\\ud800"}', "field command: holds a NUL or half"),
        ("retrieve", '{"query": "q", "limit": 99}', "field limit"),
        ("python", json.dumps({"code": "x" * 40_000}), "field code"),
    ],
)
def test_a_bad_call_names_the_field(name: str, arguments: str, says: str) -> None:
    with pytest.raises(BadCall) as bad:
        checked_arguments(name, arguments)
    assert says in str(bad.value)


def test_defaults_are_filled_in() -> None:
    assert checked_arguments("retrieve", '{"query": "q"}')[1] == {"query": "q", "limit": 5}


@given(st.lists(st.binary(max_size=50)), st.integers(2, 64))
def test_head_and_tail_and_a_count_of_the_rest(chunks: list[bytes], limit: int) -> None:
    """Whatever the chunks, what is held is a prefix and a suffix, and nothing is lost uncounted."""
    held = HeadTail(limit)
    for chunk in chunks:
        held.add(chunk)
    whole = b"".join(chunks)
    assert held.seen_bytes == len(whole) and held.dropped_bytes == max(0, len(whole) - limit)
    if len(whole) <= limit:
        assert held.text() == whole.decode(errors="replace")
    else:
        assert held.text().startswith(whole[: limit // 2].decode(errors="replace"))


@pytest.mark.parametrize("end", list(End))
def test_every_end_has_a_verdict(end: End) -> None:
    found = verdict(end, 0, 1.0)
    assert (found.outcome is ToolOutcome.OK) == (end is End.EXIT)
    assert found.why or end is End.EXIT


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(0, "ok"), (1, "error"), (152, "killed"), (153, "killed"), (137, "killed"), (139, "error"), (255, "error")],
)
def test_exit_statuses(status: int, outcome: str) -> None:
    assert verdict(End.EXIT, status, 1.0).outcome == outcome


def test_content_is_never_empty() -> None:
    assert content("", "", "") == "[no output]"
    assert content("a\n", "b\n", "Exit status 1.") == "a\n[stderr]\nb\n[Exit status 1.]"


def claim(**changes: object) -> Claim:
    return Claim(instance_id="tools-0", epoch=1, digest=digest_of(CALL), until=5.0).model_copy(update=changes)


@pytest.mark.parametrize(
    ("found", "is_owner_gone", "rerun_safe", "now", "expected"),
    [
        (claim(), False, False, 0.0, Step.WAIT),
        (claim(), True, False, 0.0, Step.GIVE_UP),
        (claim(), True, True, 0.0, Step.RUN_AGAIN),
        (claim(), False, False, 5.0 + CLAIM_GRACE_S, Step.GIVE_UP),
        (claim(result=unknown(CALL)), True, True, 99.0, Step.REPLAY),
        (claim(digest=b"other"), True, True, 0.0, Step.CONFLICT),
    ],
)
def test_what_a_claim_means(found: Claim, is_owner_gone: bool, rerun_safe: bool, now: float, expected: Step) -> None:
    assert step(found, CALL, is_owner_gone=is_owner_gone, rerun_safe=rerun_safe, now=now) is expected


def test_a_claim_survives_the_wire_and_keeps_its_key() -> None:
    done = claim(result=unknown(CALL))
    assert decode(encode(done), Claim) == done
    assert key_of(CALL) == "s.t.c"


@pytest.mark.parametrize(
    ("url", "listed", "says"),
    [
        ("http://example.org/", "", "ROOST_TOOLS_HTTP_HOSTS"),
        ("http://example.org.evil.net/", "example.org", "not on the list"),
        ("http://example.org:22/", "example.org", "port 22"),
        ("http://user:pw@example.org/", "example.org", "user name"),
        ("file:///etc/passwd", "example.org", "http or https"),
        ("http://[::1", "example.org", "not a web address"),
        ("http://example.org:99999/", "example.org", "not a web address"),
        ("http://127.0.0.1/", "example.org", "not on the list"),
        ("http://169.254.169.254/", "example.org,10.0.0.0/8", "not on the list"),
    ],
)
def test_addresses_that_are_refused(url: str, listed: str, says: str) -> None:
    with pytest.raises(Refused) as refused:
        target(url, parse_allowed(listed))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fe80::1%eth0", "::ffff:127.0.0.1", "0.0.0.0", "224.0.0.1",
     "100.64.0.1", "fc00::1"],
)  # fmt: skip
def test_a_listed_name_does_not_open_addresses_that_are_not_public(address: str) -> None:
    allowed = parse_allowed("example.org")
    found = target("https://EXAMPLE.org./x", allowed)
    with pytest.raises(Refused, match="not a public address"):
        pinned(found, [address], allowed)
    assert pinned(found, ["93.184.215.14"], allowed) == "93.184.215.14"


def test_a_listed_address_is_open() -> None:
    allowed = parse_allowed("localhost:8080,127.0.0.1:8080,[::1]:81")
    assert pinned(target("http://localhost:8080/", allowed), ["127.0.0.1"], allowed) == "127.0.0.1"
    assert target("http://[::1]:81/", allowed).host == "::1"


@pytest.mark.parametrize("text", ["http://x/", "*.example.org", "a b/c", "x:notaport", "me@x"])
def test_a_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_allowed(text)


def run_filter(program: bytes, arch: int, number: int) -> int:
    """A tiny interpreter of the four instructions the filter is made of."""
    lines = list(struct.iter_unpack("=HBBI", program))
    place, value = 0, 0
    while True:
        code, yes, no, operand = lines[place]
        place += 1
        if code == 0x20:
            value = {0: number, 4: arch}[operand]
        elif code == 0x15:
            place += yes if value == operand else no
        elif code == 0x35:
            place += yes if value >= operand else no
        else:
            return operand


@pytest.mark.parametrize("machine", list(DENIED_CALLS))
def test_the_filter_denies_what_the_table_says_and_nothing_else(machine: str) -> None:
    program, arch = seccomp_filter(machine), AUDIT_ARCH[machine]
    denied = set(DENIED_CALLS[machine].values())
    for number in range(500):
        assert (run_filter(program, arch, number) != 0x7FFF0000) == (number in denied), number
    assert run_filter(program, arch, X32_BIT + 1) == 0x00050001
    assert run_filter(program, 0x40000003, 1) == 0x80000000
    assert seccomp_filter("unknown") == b""


def test_hidden_folders_inside_readable_ones_are_covered() -> None:
    cage = Cage(Rung.BWRAP, "/usr/bin/python3", ("/usr",), ("/usr/lib/roost", "/home/x/.roost"), True)
    line = bwrap_arguments("bwrap", cage, Limits(1, 1, 1 << 28, 8, 1 << 20, 1 << 20), {})
    assert line[line.index("/usr/lib/roost") - 1] == "--tmpfs" and "/home/x/.roost" not in line
