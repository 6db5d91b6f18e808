"""``python -m fxpasses``: run the ``fxpasses`` command."""

import sys

from fxpasses.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
