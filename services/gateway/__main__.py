"""`python -P -m services.gateway`."""

from __future__ import annotations

import sys

from services.gateway.service import GatewayService
from shared.service import main

if __name__ == "__main__":
    sys.exit(main(GatewayService))
