"""Documents, passages, BM25 and embeddings in one SQLite file: the truth of a replica, rebuilt from the documents log.

Every change is one transaction that also stores how far the log was applied, so a killed replica goes on where it was.
Used from one thread only.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proto.retrieval import PutDocument
from shared.errors import RoostError

SCHEMA_VERSION: Final = 1
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    tenant TEXT NOT NULL, document_id TEXT NOT NULL, title TEXT NOT NULL, metadata TEXT NOT NULL,
    PRIMARY KEY (tenant, document_id)
);
CREATE TABLE IF NOT EXISTS passages (
    passage INTEGER PRIMARY KEY, tenant TEXT NOT NULL, document_id TEXT NOT NULL, chunk INTEGER NOT NULL,
    text TEXT NOT NULL, vector BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS passages_by_document ON passages (tenant, document_id, chunk);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (text, title, tokenize = 'porter unicode61');
"""

WORD: Final = re.compile(r"\w+", re.UNICODE)
# Words of a question that BM25 looks at.
WORDS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Row:
    """A passage as it is stored."""

    passage: int
    document_id: str
    chunk: int
    title: str
    text: str


class CatalogError(RoostError):
    """The file is not one of ours, or of another version."""


class Catalog:
    """One replica's documents."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # WAL with FULL: a commit is on disk; the log could rebuild it, but not for free.
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + SCHEMA)
        version = self._state("schema")
        if version == 0:
            self._set_state("schema", SCHEMA_VERSION)
        elif version != SCHEMA_VERSION:
            raise CatalogError(f"{path} has schema {version}, this is {SCHEMA_VERSION}; move it away to rebuild it")

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _state(self, name: str) -> int:
        row = self._database.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def _set_state(self, name: str, value: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO state (name, value) VALUES (?, ?)", (name, value))

    @property
    def applied(self) -> int:
        """Sequence number of the last log entry that is in here."""
        return self._state("applied")

    def put(
        self, document: PutDocument, parts: Sequence[str], vectors: NDArray[np.float32], sequence: int
    ) -> tuple[list[int], list[int]]:
        """Add or replace a document. Returns the passages that went and those that came."""
        assert len(parts) == len(vectors)
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            gone = self._drop(document.tenant, document.document_id)
            self._database.execute(
                "INSERT INTO documents (tenant, document_id, title, metadata) VALUES (?, ?, ?, ?)",
                (document.tenant, document.document_id, document.title, json.dumps(document.metadata, sort_keys=True)),
            )
            come = [
                self._add(document, chunk, text, vector)
                for chunk, (text, vector) in enumerate(zip(parts, vectors, strict=True))
            ]
            self._set_state("applied", sequence)
        return gone, come

    def _add(self, document: PutDocument, chunk: int, text: str, vector: NDArray[np.float32]) -> int:
        added = self._database.execute(
            "INSERT INTO passages (tenant, document_id, chunk, text, vector) VALUES (?, ?, ?, ?, ?)",
            (document.tenant, document.document_id, chunk, text, np.ascontiguousarray(vector, dtype="<f4").tobytes()),
        )
        passage = int(added.lastrowid or 0)
        self._database.execute(
            "INSERT INTO words (rowid, text, title) VALUES (?, ?, ?)", (passage, text, document.title)
        )
        return passage

    def delete(self, tenant: str, document_id: str, sequence: int) -> list[int]:
        """Remove a document; one that is not there is fine. Returns the passages that went."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            gone = self._drop(tenant, document_id)
            self._set_state("applied", sequence)
        return gone

    def skip(self, sequence: int) -> None:
        """Remember that a log entry was looked at and holds nothing for us."""
        self._set_state("applied", sequence)

    def _drop(self, tenant: str, document_id: str) -> list[int]:
        where = (tenant, document_id)
        rows = self._database.execute("SELECT passage FROM passages WHERE tenant = ? AND document_id = ?", where)
        gone = [int(row[0]) for row in rows]
        self._database.executemany("DELETE FROM words WHERE rowid = ?", [(passage,) for passage in gone])
        self._database.execute("DELETE FROM passages WHERE tenant = ? AND document_id = ?", where)
        self._database.execute("DELETE FROM documents WHERE tenant = ? AND document_id = ?", where)
        return gone

    def tenants(self) -> list[str]:
        """Tenants that have passages."""
        return [str(row[0]) for row in self._database.execute("SELECT DISTINCT tenant FROM passages ORDER BY tenant")]

    def document_count(self, tenant: str) -> int:
        """Documents of this tenant."""
        row = self._database.execute("SELECT COUNT(*) FROM documents WHERE tenant = ?", (tenant,)).fetchone()
        return int(row[0])

    def vectors(self, tenant: str, dimension: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Passage numbers [n] and their vectors [n, dimension] of one tenant."""
        rows = self._database.execute(
            "SELECT passage, vector FROM passages WHERE tenant = ? ORDER BY passage", (tenant,)
        ).fetchall()
        numbers = np.array([row[0] for row in rows], dtype=np.int64)
        joined = np.frombuffer(b"".join(row[1] for row in rows), dtype="<f4")
        return numbers, joined.reshape(len(rows), dimension)

    def best_by_words(self, tenant: str, question: str, limit: int) -> list[int]:
        """Passages by BM25 over text and title, best first. The question's words are data, never query syntax."""
        words = WORD.findall(question)[:WORDS_MAX]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        rows = self._database.execute(
            "SELECT words.rowid FROM words JOIN passages ON passages.passage = words.rowid "
            "WHERE words MATCH ? AND passages.tenant = ? ORDER BY bm25(words), document_id, chunk LIMIT ?",
            (match, tenant, limit),
        )
        return [int(row[0]) for row in rows]

    def rows(self, passages: Sequence[int]) -> dict[int, Row]:
        """The passages by number."""
        marks = ",".join("?" for _ in passages)
        found = self._database.execute(
            "SELECT passage, p.document_id, chunk, title, text FROM passages p JOIN documents d "
            f"ON d.tenant = p.tenant AND d.document_id = p.document_id WHERE passage IN ({marks})",
            tuple(passages),
        )
        return {int(row[0]): Row(int(row[0]), row[1], row[2], row[3], row[4]) for row in found}
