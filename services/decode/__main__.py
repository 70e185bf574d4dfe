"""`python -P -m services.decode`."""

import sys

from services.decode.service import DecodeService
from shared.service import main

if __name__ == "__main__":
    sys.exit(main(DecodeService))
