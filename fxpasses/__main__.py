"""``python -m fxpasses``: see :mod:`fxpasses.cli`."""

import sys

from fxpasses.cli import main

if __name__ == "__main__":
    sys.exit(main())
