"""`python -P -m services.router`."""

import sys

from services.router.service import RouterService
from shared.service import main

if __name__ == "__main__":
    sys.exit(main(RouterService))
