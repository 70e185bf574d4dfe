"""Pure: loop and gateway <-> retrieval."""

from __future__ import annotations

from pydantic import Field

from proto.ids import Id
from proto.message import Message


class PutDocument(Message):
    """gateway -> retrieval, through a durable stream: add or replace a document of this tenant."""

    document_id: Id
    tenant: str
    title: str = ""
    text: str
    metadata: dict[str, str] = Field(default_factory=dict)


class DeleteDocument(Message):
    """gateway -> retrieval, through the same stream."""

    document_id: Id
    tenant: str


class DocumentOp(Message):
    """One entry of the documents stream: exactly one of the two."""

    put: PutDocument | None = None
    delete: DeleteDocument | None = None


class Search(Message):
    """loop or tools -> retrieval. Scope is the tenant, never something in the text."""

    tenant: str
    query: str = Field(min_length=1)
    limit: int = Field(default=5, ge=1, le=50)


class Passage(Message):
    """A piece of a document. Ordered by score, then document id, then chunk, so that equal questions give equal bytes."""

    document_id: str
    chunk: int
    title: str
    text: str
    score: float


class Passages(Message):
    """retrieval -> asker."""

    passages: tuple[Passage, ...]
    # Documents known here when the answer was made.
    document_count: int
