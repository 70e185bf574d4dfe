"""Documents in, passages out: embedder, catalog and vector index together. Blocking; used from one thread only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from proto.retrieval import DocumentOp, Passage, Passages, Search
from services.retrieval.catalog import Catalog
from services.retrieval.chunker import passages
from services.retrieval.fusion import fuse
from services.retrieval.index import VectorIndexes
from services.retrieval.settings import RetrievalSettings
from shared.engine.embed import Embedder

# How deep each ranking goes before they are fused: deeper than the answer, so that a passage that is fair in both wins.
DEPTH = 50


class Library:
    """One replica's memory."""

    def __init__(self, folder: Path, settings: RetrievalSettings) -> None:
        self._settings = settings
        self._embedder = Embedder(threads=settings.retrieval_threads)
        self._catalog = Catalog(folder / "catalog.sqlite")
        self._indexes = VectorIndexes(
            folder / "vectors", self._embedder.dimension, exact_below=settings.retrieval_exact_below
        )
        self._indexes.load(self._catalog)

    @property
    def applied(self) -> int:
        """How far the documents log is in here."""
        return self._catalog.applied

    def apply(self, sequence: int, op: DocumentOp) -> None:
        """One entry of the documents log. Applying it again changes nothing."""
        if op.put is not None:
            parts = passages(op.put.text, self._settings.retrieval_passage_chars)
            titled = [f"{op.put.title}\n{part}" if op.put.title else part for part in parts]
            vectors = self._embedder.embed(titled)
            gone, come = self._catalog.put(op.put, parts, vectors, sequence)
            self._indexes.change(op.put.tenant, gone, come, vectors)
        elif op.delete is not None:
            gone = self._catalog.delete(op.delete.tenant, op.delete.document_id, sequence)
            self._indexes.change(op.delete.tenant, gone, [], np.zeros((0, self._embedder.dimension), dtype=np.float32))
        else:
            self._catalog.skip(sequence)

    def search(self, search: Search) -> Passages:
        """Hybrid: BM25 and vectors fused by reciprocal rank; total order, so that the same question gives the same bytes."""
        vector = self._embedder.embed([search.query])[0]
        by_vector = self._indexes.nearest(search.tenant, vector, DEPTH)
        by_words = self._catalog.best_by_words(search.tenant, search.query, DEPTH)
        ranked = fuse([by_words, by_vector])
        rows = self._catalog.rows([key for key, _ in ranked])
        ordered = sorted(
            ((score, rows[key]) for key, score in ranked),
            key=lambda pair: (-pair[0], pair[1].document_id, pair[1].chunk),
        )
        found = tuple(
            Passage(document_id=row.document_id, chunk=row.chunk, title=row.title, text=row.text, score=round(score, 6))
            for score, row in ordered[: search.limit]
        )
        return Passages(passages=found, document_count=self._catalog.document_count(search.tenant))

    def save(self) -> None:
        """Write the vector indexes."""
        self._indexes.save()

    def close(self) -> None:
        """Save and let go of the files."""
        self.save()
        self._catalog.close()
