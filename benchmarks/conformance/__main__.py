"""``python -m benchmarks.conformance``: run the sweep and print the table. ``--help`` lists the options."""

import sys

from benchmarks.conformance.command import main

if __name__ == "__main__":
    sys.exit(main())
