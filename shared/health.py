"""`python -P -m shared.health`: exit 0 when the service in this container is ready. The health check of compose.yaml."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

from shared.settings import RoostSettings

TIMEOUT_S = 2.0


def main() -> int:
    """Ask this machine's metrics port, given by ROOST_METRICS_PORT. 0 ready, 1 not, 2 no port is set."""
    settings = RoostSettings()
    if settings.metrics_port == 0:
        sys.stderr.write("ROOST_METRICS_PORT is not set: the port of the service is not known\n")
        return 2
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{settings.metrics_port}/readyz", timeout=TIMEOUT_S) as answer:
            return 0 if answer.status == 200 else 1
    except (urllib.error.URLError, TimeoutError) as not_ready:
        sys.stderr.write(f"{not_ready}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
