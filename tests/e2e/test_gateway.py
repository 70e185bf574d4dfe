"""The gateway goes away in the middle of a stream; its client comes back with the id of the last event it has."""

from __future__ import annotations

import time

import httpx2

from tests.e2e.client import TURN_S_MAX, Answer, Session, sse
from tests.e2e.system import System, call

QUESTION = "Tell me a story about a fox and a crow."


def resume(system: System, session: Session, turn_id: str, answer: Answer) -> None:
    """Read on behind the last event, as an EventSource does."""
    url = f"{system.url}/v1/sessions/{session.session_id}/turns/{turn_id}/events?return_token_ids=true"
    headers = {"Last-Event-ID": answer.events[-1][0]}
    with httpx2.stream("GET", url, headers=headers, timeout=TURN_S_MAX) as response:
        assert response.status_code == 200, response.read()
        answer.events += sse(response.iter_lines())


def test_kill_the_gateway_and_go_on_from_the_last_event(system: System) -> None:
    unfaulted = Session(system.url).turn(QUESTION, max_tokens=48)
    session, answer = Session(system.url), Answer()
    url = f"{system.url}/v1/sessions/{session.session_id}/turns"
    body = {"content": QUESTION, "max_tokens": 48, "temperature": 0, "return_token_ids": True}
    try:
        with httpx2.stream("POST", url, json=body, timeout=TURN_S_MAX) as response:
            for event in sse(response.iter_lines()):
                answer.events.append(event)
                if sum(kind == "text" for _, kind, _ in answer.events) == 5:
                    system["gateway-0"].kill()
    except httpx2.TransportError:
        time.sleep(1.0)
    assert answer.events[-1][1] != "done", "the stream was cut"
    system["gateway-0"].start()
    system.wait_ready()
    resume(system, session, answer.events[0][2]["turn_id"], answer)
    assert answer.text == unfaulted.text and answer.token_ids == unfaulted.token_ids
    ids = [name for name, _, _ in answer.events]
    assert len(ids) == len(set(ids)), "every event once"
    assert answer.done["finish_reason"] == unfaulted.done["finish_reason"]


def test_nats_goes_away_and_comes_back_in_the_middle_of_a_stream(system: System) -> None:
    """A pause, and then the rest: what was recorded is on disk, and everyone reconnects."""
    unfaulted = Session(system.url).turn(QUESTION, max_tokens=48)

    killed: list[bool] = []

    def kill_once(answer: Answer) -> None:
        if not killed and sum(kind == "text" for _, kind, _ in answer.events) == 5:
            killed.append(True)
            system.nats.kill()
            time.sleep(1.0)
            system.nats.start()

    answer = Session(system.url).turn(QUESTION, max_tokens=48, on_event=kill_once)
    assert killed and answer.text == unfaulted.text and answer.token_ids == unfaulted.token_ids
    system.wait_ready()


def test_cancel_stops_the_turn_and_keeps_what_was_said(system: System) -> None:
    session = Session(system.url)

    def cancel(answer: Answer) -> None:
        if sum(kind == "text" for _, kind, _ in answer.events) == 5:
            turn_id = answer.events[0][2]["turn_id"]
            status, _ = call("POST", f"{system.url}/v1/sessions/{session.session_id}/turns/{turn_id}/cancel")
            assert status == 202

    answer = session.turn(QUESTION, max_tokens=400, ignore_eos=True, on_event=cancel)
    assert answer.done["finish_reason"] == "cancelled" and 5 <= len(answer.token_ids) < 200
    after = session.turn("Go on.", max_tokens=8)
    assert after.done["finish_reason"] in ("stop", "length")
