"""THE SHELL of retrieval: follows the documents log into its library and answers searches. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from proto.retrieval import DocumentOp, Passages, Search
from proto.subjects import DOCUMENTS, SEARCH
from services.retrieval.library import Library
from services.retrieval.settings import RetrievalSettings
from shared.log import get_logger
from shared.metrics import counter, gauge, histogram
from shared.service import Service

R = TypeVar("R")

# Searches that may wait for the one thread; beyond, callers are told to come later.
SEARCHES_WAITING_MAX = 64
# The vector files are a cache of the catalog: saved when so many documents changed and nobody waits.
SAVE_EVERY = 256

DOCUMENTS_APPLIED = counter("roost_retrieval_documents_total", "Entries of the documents log that were applied.")
SEARCH_SECONDS = histogram("roost_retrieval_search_seconds", "Time of one search, waiting included.")
LAG = gauge("roost_retrieval_applied_sequence", "How far the documents log is applied here.")

log = get_logger()


class RetrievalService(Service[RetrievalSettings]):
    """Shell of retrieval. One thread owns embedder, SQLite and index."""

    name = "retrieval"
    settings_type = RetrievalSettings

    async def start(self) -> None:
        """See Service."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="library")
        self._library = await self._on_thread(self._open)
        await self.bus.serve(SEARCH, Search, self._search, limit=SEARCHES_WAITING_MAX)
        self.spawn(self._follow())

    def _folder(self) -> Path:
        return self.settings.home_path / "retrieval" / self.instance_id

    def _open(self) -> Library:
        return Library(self._folder(), self.settings)

    async def _on_thread(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _search(self, search: Search) -> Passages:
        with SEARCH_SECONDS.time():
            return await self._on_thread(lambda: self._library.search(search))

    async def _follow(self) -> None:
        changed = 0
        applied = await self._on_thread(lambda: self._library.applied)
        async for entry in self.bus.follow_log(DOCUMENTS, DocumentOp, after=applied):
            sequence, op = entry.sequence, entry.record
            await self._on_thread(lambda sequence=sequence, op=op: self._library.apply(sequence, op))  # type: ignore[misc]
            DOCUMENTS_APPLIED.inc()
            LAG.set(sequence)
            changed += 1
            if changed >= SAVE_EVERY:
                await self._on_thread(self._library.save)
                changed = 0

    async def stop(self) -> None:
        """See Service."""
        if hasattr(self, "_library"):
            await self._on_thread(self._library.close)
        if hasattr(self, "_thread"):
            self._thread.shutdown(wait=False)
