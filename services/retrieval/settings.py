"""Settings of the retrieval service."""

from __future__ import annotations

from pydantic import Field

from shared.settings import RoostSettings


class RetrievalSettings(RoostSettings):
    """ROOST_RETRIEVAL_*."""

    # Characters of a passage; MiniLM reads 256 tokens, about four characters each.
    retrieval_passage_chars: int = Field(default=900, ge=100, le=4000)
    # Bytes of one document's text; larger ones are refused by the gateway's body bound long before.
    retrieval_document_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    # Threads of the embedder.
    retrieval_threads: int = Field(default=1, ge=1, le=64)
    # Below so many passages of a tenant the vector search is exact; above, approximate (usearch HNSW).
    retrieval_exact_below: int = Field(default=50_000, ge=0)
