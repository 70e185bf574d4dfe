"""`python -P -m services.retrieval`."""

import sys

from services.retrieval.service import RetrievalService
from shared.service import main

if __name__ == "__main__":
    sys.exit(main(RetrievalService))
