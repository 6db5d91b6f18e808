"""``python -m fake.native``: compile the optional function."""

import sys

from fake.errors import NativeBuildError
from fake.native import build

if __name__ == "__main__":
    try:
        print(build())
    except NativeBuildError as error:
        sys.exit(str(error))
