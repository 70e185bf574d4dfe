"""`python -P -m services.loop`."""

import sys

from services.loop.service import LoopService
from shared.service import main

if __name__ == "__main__":
    sys.exit(main(LoopService))
