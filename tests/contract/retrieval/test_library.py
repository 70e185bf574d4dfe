"""Documents in, passages out, with the real embedder, SQLite and usearch, through the real bus."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proto.errors import WireError
from proto.retrieval import DeleteDocument, DocumentOp, Passages, PutDocument, Search
from proto.subjects import DOCUMENTS, SEARCH
from services.retrieval.library import Library
from services.retrieval.service import RetrievalService
from services.retrieval.settings import RetrievalSettings
from shared.bus import Bus
from tests.nats_server import NatsServer

SEVERAL = {
    "paris": "Paris is the capital of France and lies on the Seine.",
    "rust": "Rust has an ownership model that rules out data races at compile time.",
    "lmdb": "LMDB is a memory-mapped key-value store with one writer and many readers.",
}


def put(document_id: str, text: str, tenant: str = "t") -> DocumentOp:
    return DocumentOp(put=PutDocument(document_id=document_id, tenant=tenant, text=text))


def found(library: Library, query: str, tenant: str = "t") -> list[str]:
    return [passage.document_id for passage in library.search(Search(tenant=tenant, query=query)).passages]


@pytest.fixture
def settings(tmp_path: Path) -> RetrievalSettings:
    return RetrievalSettings(home=tmp_path)


def test_a_question_finds_its_document_by_meaning_and_by_word(tmp_path: Path, settings: RetrievalSettings) -> None:
    """The answer's words need not be in the question, and a rare word is enough."""
    library = Library(tmp_path, settings)
    for sequence, (name, text) in enumerate(SEVERAL.items(), start=1):
        library.apply(sequence, put(name, text))
    assert found(library, "Which city is the French seat of government?")[0] == "paris"
    assert found(library, "LMDB")[0] == "lmdb"
    assert found(library, 'words" OR NEAR( * ^')[:1] != []
    library.close()


def test_a_restart_keeps_everything_and_a_damaged_index_is_rebuilt(tmp_path: Path, settings: RetrievalSettings) -> None:
    """kill -9 loses the vector files at most; they are made again from the catalog."""
    library = Library(tmp_path, settings)
    for sequence, (name, text) in enumerate(SEVERAL.items(), start=1):
        library.apply(sequence, put(name, text))
    library.close()
    for damage in (b"", b"not an index"):
        for file in (tmp_path / "vectors").glob("*.usearch"):
            file.write_bytes(damage)
        again = Library(tmp_path, settings)
        assert again.applied == 3
        assert found(again, "data races")[0] == "rust"
        again.close()


def test_replacing_and_deleting_leave_no_trace(tmp_path: Path, settings: RetrievalSettings) -> None:
    """An edited document is found by its new text only, a deleted one not at all, and applying twice changes nothing."""
    library = Library(tmp_path, settings)
    library.apply(1, put("a", SEVERAL["paris"]))
    library.apply(2, put("a", SEVERAL["rust"]))
    library.apply(2, put("a", SEVERAL["rust"]))
    answer = library.search(Search(tenant="t", query="Seine"))
    assert [passage.text for passage in answer.passages] == [SEVERAL["rust"]]
    library.apply(3, DocumentOp(delete=DeleteDocument(document_id="a", tenant="t")))
    assert library.search(Search(tenant="t", query="Seine")) == Passages(passages=(), document_count=0)
    library.close()


def test_tenants_see_only_their_own(tmp_path: Path, settings: RetrievalSettings) -> None:
    """F-SEC-08: another tenant's document with the very words of the question does not exist for us."""
    library = Library(tmp_path, settings)
    library.apply(1, put("secret", "The code word is heron.", tenant="a"))
    assert found(library, "code word heron", tenant="b") == []
    assert found(library, "code word heron", tenant="a") == ["secret"]
    library.close()


async def test_the_service_follows_the_log_and_goes_on_after_a_restart(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """Documents that were put while no replica ran are there when one starts."""
    await bus.append_any(DOCUMENTS, put("paris", SEVERAL["paris"]))
    for name in ("rust", "lmdb"):
        settings = RetrievalSettings(nats_url=nats_server.url, home=tmp_path, instance="retrieval-0")
        service = RetrievalService(settings)
        running = asyncio.ensure_future(service.run())
        await bus.append_any(DOCUMENTS, put(name, SEVERAL[name]))
        passages: tuple[object, ...] = ()
        for _ in range(600):
            try:
                answer = await bus.request(SEARCH, Search(tenant="t", query=name), Passages)
                passages = tuple(passage.document_id for passage in answer.passages)
            except WireError:
                passages = ()
            if name in passages and "paris" in passages:
                break
            await asyncio.sleep(0.05)
        assert name in passages and "paris" in passages
        service.request_stop()
        assert await running == 0
