"""`python -P -m services.kvstore`."""

from __future__ import annotations

import sys

from services.kvstore.service import KvStoreService
from shared.service import main

if __name__ == "__main__":
    sys.exit(main(KvStoreService))
