"""`python -P -m services.console` is `roost`."""

from __future__ import annotations

from services.console.cli import main

if __name__ == "__main__":
    main()
