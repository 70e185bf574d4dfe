"""Nearest passages by cosine, one usearch index a tenant; a file that can always be rebuilt from the catalog.

usearch's save is not atomic, so it goes to a temporary file that is renamed; at start the count is compared with the catalog
and an index that does not fit is built again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from services.retrieval.catalog import Catalog
from shared.log import get_logger

log = get_logger()


class VectorIndexes:
    """All tenants' indexes. Used from one thread only."""

    def __init__(self, folder: Path, dimension: int, *, exact_below: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._dimension, self._exact_below = folder, dimension, exact_below
        self._indexes: dict[str, Any] = {}

    def load(self, catalog: Catalog) -> None:
        """Open what was saved, build what is missing or does not fit the catalog."""
        for tenant in catalog.tenants():
            numbers, vectors = catalog.vectors(tenant, self._dimension)
            index = self._restored(tenant)
            if index is None or len(index) != len(numbers):
                log.info("index_rebuilt", passages=len(numbers))
                index = self._empty()
                index.add(numbers, vectors)
            self._indexes[tenant] = index

    def _empty(self) -> Any:
        return Index(ndim=self._dimension, metric="cos", dtype="f32")

    def _path(self, tenant: str) -> Path:
        # A digest, so that no two tenants and no odd character can meet in a file name (F-SEC-02).
        return self._folder / f"{blake2b(tenant.encode(), digest_size=16).hexdigest()}.usearch"

    def _restored(self, tenant: str) -> Any | None:
        path = self._path(tenant)
        if not path.is_file():
            return None
        try:
            return Index.restore(str(path), view=False)
        except (RuntimeError, ValueError, OSError) as broken:
            log.warning("index_not_readable", path=str(path), error=str(broken))
            return None

    def change(self, tenant: str, gone: Sequence[int], come: Sequence[int], vectors: NDArray[np.float32]) -> None:
        """Follow a change of the catalog."""
        index = self._indexes.setdefault(tenant, self._empty())
        for passage in gone:
            index.remove(passage)
        if come:
            index.add(np.array(come, dtype=np.int64), vectors)

    def save(self) -> None:
        """Write every index beside its file and rename it into place."""
        for tenant, index in self._indexes.items():
            path = self._path(tenant)
            partial = path.with_suffix(".partial")
            index.save(str(partial))
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(path)

    def nearest(self, tenant: str, vector: NDArray[np.float32], limit: int) -> list[int]:
        """Passages by cosine, nearest first; equal distances by number."""
        index = self._indexes.get(tenant)
        if index is None or len(index) == 0:
            return []
        found = index.search(vector, min(limit, len(index)), exact=len(index) < self._exact_below)
        pairs = sorted(zip(found.distances.tolist(), found.keys.tolist(), strict=True))
        return [int(key) for _, key in pairs]
