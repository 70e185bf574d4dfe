"""Pure: the claim on a call, and what a claim that is found already there means.

    (nothing) --claim--> running --finish--> done
                            |  owner gone --> done with UNKNOWN, or claimed again when the tool is rerun safe

Every arrow is a compare-and-set on the bucket's revision, so two replicas never both take one.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Final

from proto.message import Message
from proto.tools import RunTool, ToolOutcome, ToolResult

# After its bound a claim's owner has this long to write the result before others call it interrupted.
CLAIM_GRACE_S: Final = 20.0


class Claim(Message):
    """Value in the TOOL_CLAIMS bucket. `until`: when its owner must have finished, in seconds since 1970."""

    instance_id: str
    epoch: int
    digest: bytes
    until: float
    result: ToolResult | None = None


class Step(StrEnum):
    """What to do about a claim that is there."""

    REPLAY = "replay"
    WAIT = "wait"
    RUN_AGAIN = "run_again"
    GIVE_UP = "give_up"
    CONFLICT = "conflict"


def key_of(call: RunTool) -> str:
    """Key in the bucket. The ids come from us, never from the model (F-SBX-03)."""
    return f"{call.session_id}.{call.turn_id}.{call.call_id}"


def digest_of(call: RunTool) -> bytes:
    """16 bytes over tenant, tool and arguments: another call under the same ids is a conflict, not a repetition."""
    text = "\x00".join((call.tenant, call.name, call.arguments))
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def step(found: Claim, call: RunTool, *, is_owner_gone: bool, rerun_safe: bool, now: float) -> Step:
    """What to do."""
    if found.digest != digest_of(call):
        return Step.CONFLICT
    if found.result is not None:
        return Step.REPLAY
    if not is_owner_gone and now < found.until + CLAIM_GRACE_S:
        return Step.WAIT
    return Step.RUN_AGAIN if rerun_safe else Step.GIVE_UP


def unknown(call: RunTool) -> ToolResult:
    """The result of a call whose owner is gone (F-RST-01)."""
    return ToolResult(
        call_id=call.call_id,
        name=call.name,
        outcome=ToolOutcome.UNKNOWN,
        content="The call was interrupted; whether it had an effect is not known.",
        seconds=0.0,
    )
