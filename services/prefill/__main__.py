"""`python -P -m services.prefill`."""

import sys

from services.prefill.service import PrefillService
from shared.service import main

if __name__ == "__main__":
    sys.exit(main(PrefillService))
