"""The claims as they are in the bucket: take one, finish it, or learn what became of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from proto.errors import ErrorCode, WireError
from proto.fleet import Heartbeat
from proto.message import decode, encode
from proto.tools import RunTool, ToolResult
from services.tools.claims import Claim, Step, digest_of, key_of, step, unknown
from shared.bus import KvBucket
from shared.clock import Clock
from shared.limits import SILENT_AFTER_S
from shared.log import get_logger

POLL_S: Final = 0.25
SAVE_S_MAX: Final = 30.0

log = get_logger()


class ClaimBook:
    """`instance_id` and `epoch` are this life's; `name` the service's."""

    def __init__(self, bucket: KvBucket, clock: Clock, instance_id: str, epoch: int) -> None:
        self._bucket, self._clock = bucket, clock
        self._instance_id, self._epoch = instance_id, epoch
        self._opened_at = clock.monotonic()
        # instance -> epoch of its newest life and when it was last heard; replicas are few.
        self._heard: dict[str, tuple[int, float]] = {}

    def hear(self, heartbeat: Heartbeat) -> None:
        """A replica is alive."""
        known = self._heard.get(heartbeat.instance_id, (0, 0.0))[0]
        if heartbeat.service == "tools" and heartbeat.epoch >= known:
            self._heard[heartbeat.instance_id] = (heartbeat.epoch, self._clock.monotonic())

    def forget_silent(self) -> None:
        """Keep the table as small as the fleet."""
        now = self._clock.monotonic()
        self._heard = {name: life for name, life in self._heard.items() if now - life[1] < 12 * SILENT_AFTER_S}

    def _is_gone(self, claim: Claim) -> bool:
        if claim.instance_id == self._instance_id:
            return claim.epoch != self._epoch
        epoch, heard_at = self._heard.get(claim.instance_id, (0, self._opened_at))
        return epoch > claim.epoch or self._clock.monotonic() - heard_at > SILENT_AFTER_S

    async def settled(
        self, call: RunTool, rerun_safe: bool, until: float, run: Callable[[], Awaitable[ToolResult]]
    ) -> ToolResult:
        """The one result of this call: made by `run` if the claim is ours, else the one that is or will be in the bucket.

        Raises WireError CONFLICT for other arguments under the same ids, DEADLINE if another replica does not finish.
        """
        key, claim = key_of(call), self._claim(call, until)
        revision = await self._bucket.create(key, encode(claim))
        while revision is None:
            entry = await self._bucket.get(key)
            if entry is None:  # deleted or too old: free again
                revision = await self._bucket.create(key, encode(claim))
                continue
            found = decode(entry[0], Claim)
            now = self._clock.now()
            match step(found, call, is_owner_gone=self._is_gone(found), rerun_safe=rerun_safe, now=now):
                case Step.CONFLICT:
                    raise WireError(ErrorCode.CONFLICT, f"call {call.call_id} was made with other arguments")
                case Step.REPLAY:
                    assert found.result is not None
                    return found.result
                case Step.RUN_AGAIN:
                    log.info("call_runs_again", key=key, tool=call.name)
                    revision = await self._bucket.update(key, encode(claim), entry[1])
                case Step.GIVE_UP:
                    log.warning("call_interrupted", key=key, tool=call.name)
                    result = unknown(call)
                    done = claim.model_copy(update={"result": result})
                    if await self._bucket.update(key, encode(done), entry[1]) is not None:
                        return result
                case Step.WAIT:
                    await self._wait(call)
        return await self._finish(key, claim, revision, await run())

    async def _wait(self, call: RunTool) -> None:
        if self._clock.now() > call.deadline_at:
            raise WireError(ErrorCode.DEADLINE, "another replica runs this call and has not finished")
        await self._clock.sleep(POLL_S)

    def _claim(self, call: RunTool, until: float) -> Claim:
        return Claim(instance_id=self._instance_id, epoch=self._epoch, digest=digest_of(call), until=until)

    async def _finish(self, key: str, claim: Claim, revision: int, result: ToolResult) -> ToolResult:
        """Write the result. If others gave the call up meanwhile, theirs stands: a call has one result."""
        done = encode(claim.model_copy(update={"result": result}))
        give_up_at = self._clock.monotonic() + SAVE_S_MAX
        while True:
            try:
                if await self._bucket.update(key, done, revision) is not None:
                    return result
                entry = await self._bucket.get(key)
                there = decode(entry[0], Claim).result if entry is not None else None
                return there if there is not None else result
            except WireError as away:
                log.warning("result_not_saved", key=key, error=str(away))
                if self._clock.monotonic() > give_up_at:
                    return result
                await self._clock.sleep(POLL_S)
