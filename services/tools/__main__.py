"""`python -P -m services.tools`."""

import sys

from services.tools.service import ToolsService
from shared.service import main

if __name__ == "__main__":
    sys.exit(main(ToolsService))
