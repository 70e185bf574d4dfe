"""Pure: keeps the block index true to what holders say. Sequence-numbered deltas, and a paged snapshot on a gap.

    unknown holder, new epoch, gap   -> PAGING: ask page after page of each tier; deltas wait in a bounded buffer
    a heartbeat counts more          -> the missing deltas come soon, or PAGING
    last page                        -> LIVE: what no page had goes; buffered deltas after the oldest page are applied

Pages are taken at different moments. A key's last change in the unbroken run of deltas after the oldest page gives its
state, and a key without one is as its page said, so replaying that run over the pages ends in the holder's truth. If
a page was newer than the last delta that came, the missing ones must still arrive, or the holder is paged again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from proto.ids import BlockKey
from proto.residency import ResidencyDelta, ResidencySnapshot, SnapshotRequest, Tier
from services.router.events import AskSnapshot, Count, Counted, Instruction
from services.router.index import BlockIndex
from shared.limits import SILENT_AFTER_S

# Deltas kept while pages come; more, and the holder is paged again later (it changes faster than it can be read).
DELTAS_BUFFERED_MAX: Final = 1_024
# A failed page is asked for again after this, doubled each time up to the maximum, for as long as the holder lives.
RETRY_S: Final = 0.1
RETRY_S_MAX: Final = 10.0
# Deltas that a page or a heartbeat says exist arrive within this, or they were lost.
CATCH_UP_S: Final = 2.0

WORKER_TIERS: Final = (Tier.DEVICE,)
SHARD_TIERS: Final = (Tier.RAM, Tier.NVME)


class FeedState(StrEnum):
    """How well a holder is known."""

    PAGING = "paging"
    LIVE = "live"


@dataclass(slots=True)
class _Feed:
    """One life of one holder."""

    holder_id: str
    epoch: int
    tiers: tuple[Tier, ...]
    heard_at: float
    state: FeedState = FeedState.PAGING
    # Last change that is in the index; meaningful when LIVE.
    seq: int = 0
    # A page or a heartbeat said that changes up to here exist; they must be in by `catch_up_by`.
    must_reach: int = 0
    catch_up_by: float = 0.0
    # -- of the paging
    tier_number: int = 0
    after_key: bytes = b""
    oldest_seq: int | None = None
    newest_seq: int = 0
    paged: dict[Tier, set[BlockKey]] = field(default_factory=dict)
    buffer: list[ResidencyDelta] = field(default_factory=list)
    # The page that is being waited for, None between a failure and the next try.
    asked: int | None = None
    ask_at: float = 0.0
    failures: int = 0
    # Whether the index was once complete for this life; a gap later leaves an old picture, not none.
    was_live: bool = False


class Holders:
    """All holders and the index they fill. Mutable; owned by the router's core."""

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self._feeds: dict[str, _Feed] = {}
        self._asks = 0

    @property
    def count(self) -> int:
        """Holders that are known."""
        return len(self._feeds)

    def knows(self, holder_id: str) -> bool:
        """Whether the index has at least an old complete picture of this holder's present life."""
        feed = self._feeds.get(holder_id)
        return feed is not None and feed.was_live

    def is_live(self, holder_id: str) -> bool:
        """Whether the index has all that this holder has said."""
        feed = self._feeds.get(holder_id)
        return feed is not None and feed.state is FeedState.LIVE

    @property
    def has_shard(self) -> bool:
        """Whether a kvstore shard is alive."""
        return any(feed.tiers == SHARD_TIERS for feed in self._feeds.values())

    # -- events

    def hear_life(
        self, holder_id: str, epoch: int, tiers: tuple[Tier, ...], now: float, seq: int | None = None
    ) -> list[Instruction]:
        """A heartbeat or pull: the holder lives, and has said `seq` changes. The last may be lost, and none follow it."""
        feed = self._feeds.get(holder_id)
        if feed is not None and epoch <= feed.epoch:
            if epoch == feed.epoch:
                feed.heard_at = now
                is_waiting = feed.seq < feed.must_reach
                if seq is not None and feed.state is FeedState.LIVE and not is_waiting and seq > feed.seq:
                    feed.must_reach, feed.catch_up_by = seq, now + CATCH_UP_S
            return []
        return self._begin(holder_id, epoch, tiers, now)

    def hear_delta(self, delta: ResidencyDelta, now: float) -> list[Instruction]:
        """A change; applied, kept for later, or the sign of a gap."""
        feed = self._feeds.get(delta.holder_id)
        if feed is None or delta.epoch > feed.epoch:
            is_worker = any(change.tier is Tier.DEVICE for change in delta.changes)
            instructions = self._begin(delta.holder_id, delta.epoch, WORKER_TIERS if is_worker else SHARD_TIERS, now)
            self._keep(self._feeds[delta.holder_id], delta)
            return instructions
        if delta.epoch < feed.epoch:
            return []
        feed.heard_at = now
        if feed.state is FeedState.PAGING:
            self._keep(feed, delta)
            return []
        if delta.seq <= feed.seq:
            return []
        if delta.seq > feed.seq + 1:
            instructions = self._page(feed, now)
            self._keep(feed, delta)
            return instructions
        self._apply(feed, delta)
        return []

    def hear_snapshot(
        self, holder_id: str, ask_number: int, page: ResidencySnapshot | None, now: float
    ) -> list[Instruction]:
        """A page came, or did not."""
        feed = self._feeds.get(holder_id)
        if feed is None or feed.asked != ask_number:
            return []
        feed.asked = None
        if page is not None and page.epoch > feed.epoch:
            return self._begin(holder_id, page.epoch, feed.tiers, now)
        if page is None or not self._fits(feed, page):
            feed.ask_at = now + min(RETRY_S * 2**feed.failures, RETRY_S_MAX)
            feed.failures = min(feed.failures + 1, 16)
            return []
        feed.heard_at, feed.failures = now, 0
        # Shown at once: a key that has gone since is put right at the end.
        self.index.store(holder_id, page.tier, page.keys)
        feed.paged.setdefault(page.tier, set()).update(page.keys)
        feed.oldest_seq = page.seq if feed.oldest_seq is None else min(feed.oldest_seq, page.seq)
        feed.newest_seq = max(feed.newest_seq, page.seq)
        if not page.is_last:
            feed.after_key = page.keys[-1]
            return [self._ask(feed)]
        feed.tier_number, feed.after_key = feed.tier_number + 1, b""
        if feed.tier_number < len(feed.tiers):
            return [self._ask(feed)]
        return self._finish(feed, now)

    def forget(self, holder_id: str, epoch: int) -> None:
        """The holder said that this life is over."""
        feed = self._feeds.get(holder_id)
        if feed is not None and feed.epoch <= epoch:
            del self._feeds[holder_id]
            self.index.forget(holder_id)

    def tick(self, now: float) -> list[Instruction]:
        """Forget the silent, ask again for what failed, page again who did not catch up."""
        instructions: list[Instruction] = []
        for feed in list(self._feeds.values()):
            if now - feed.heard_at > SILENT_AFTER_S:
                self.forget(feed.holder_id, feed.epoch)
            elif feed.state is FeedState.LIVE:
                if feed.seq < feed.must_reach and now >= feed.catch_up_by:
                    instructions += self._page(feed, now)
            elif feed.asked is None and now >= feed.ask_at:
                instructions.append(self._ask(feed))
        return instructions

    def wake_at(self) -> float | None:
        """When `tick` has something to do, None if only silence could come."""
        times = [feed.ask_at for feed in self._feeds.values() if feed.state is FeedState.PAGING and feed.asked is None]
        times += [feed.catch_up_by for feed in self._feeds.values() if feed.seq < feed.must_reach]
        return min(times, default=None)

    # -- inside

    def _begin(self, holder_id: str, epoch: int, tiers: tuple[Tier, ...], now: float) -> list[Instruction]:
        """A life begins: nothing of an older one counts."""
        self.index.forget(holder_id)
        feed = self._feeds[holder_id] = _Feed(holder_id, epoch, tiers, now)
        return [Counted(Count.SNAPSHOT), self._ask(feed)]

    def _page(self, feed: _Feed, now: float) -> list[Instruction]:
        """Read the holder from the beginning; what is known of it stays as a hint until then."""
        feed.state, feed.heard_at = FeedState.PAGING, max(feed.heard_at, now)
        feed.tier_number, feed.after_key, feed.must_reach = 0, b"", 0
        feed.oldest_seq, feed.newest_seq = None, 0
        feed.paged, feed.buffer = {}, []
        return [Counted(Count.SNAPSHOT), self._ask(feed)]

    def _ask(self, feed: _Feed) -> AskSnapshot:
        self._asks += 1
        feed.asked = self._asks
        request = SnapshotRequest(after_key=feed.after_key, tier=feed.tiers[feed.tier_number])
        return AskSnapshot(feed.holder_id, self._asks, request)

    def _fits(self, feed: _Feed, page: ResidencySnapshot) -> bool:
        """Whether this is the page that was asked for, and paging gets on by it."""
        if (page.holder_id, page.epoch, page.tier) != (feed.holder_id, feed.epoch, feed.tiers[feed.tier_number]):
            return False
        return page.is_last or (bool(page.keys) and page.keys[-1] > feed.after_key)

    def _keep(self, feed: _Feed, delta: ResidencyDelta) -> None:
        feed.buffer.append(delta)
        if len(feed.buffer) > DELTAS_BUFFERED_MAX:
            # The oldest goes; if it was needed, the run will not begin at the oldest page and paging starts over.
            del feed.buffer[0]

    def _finish(self, feed: _Feed, now: float) -> list[Instruction]:
        assert feed.oldest_seq is not None
        for tier in feed.tiers:
            stale = self.index.keys_of(feed.holder_id, tier) - feed.paged.get(tier, set())
            self.index.drop(feed.holder_id, tier, stale)
        feed.state, feed.was_live, feed.seq = FeedState.LIVE, True, feed.oldest_seq
        feed.must_reach, feed.catch_up_by = feed.newest_seq, now + CATCH_UP_S
        waiting, feed.buffer, feed.paged = feed.buffer, [], {}
        for delta in sorted(waiting, key=lambda kept: kept.seq):
            if delta.seq == feed.seq + 1:
                self._apply(feed, delta)
            elif delta.seq > feed.seq + 1:
                return self._page(feed, now)
        return []

    def _apply(self, feed: _Feed, delta: ResidencyDelta) -> None:
        for change in delta.changes:
            self.index.store(feed.holder_id, change.tier, change.stored)
            self.index.drop(feed.holder_id, change.tier, change.dropped)
        feed.seq = delta.seq
