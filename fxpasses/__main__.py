"""``python -m fxpasses``: the command ``fxpasses``."""

import sys

from fxpasses.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
