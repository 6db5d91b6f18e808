"""List the benchmarks, or run one: ``python -m benchmarks NAME [arguments]``."""

import difflib
import importlib
import os
import pkgutil
import sys

import benchmarks


def main() -> int:
    names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        if len(sys.argv) > 1:
            near = difflib.get_close_matches(sys.argv[1], names, n=1)
            print(f"there is no benchmark {sys.argv[1]!r}" + (f"; did you mean {near[0]}?" if near else ""))
        print("usage: python -m benchmarks NAME, where NAME is one of: " + ", ".join(names))
        return 2
    # Benchmarks measure compilation, unless they name a directory of plans.
    os.environ.setdefault("FXPASSES_CACHE_DIR", "off")
    module = importlib.import_module(f"benchmarks.{sys.argv[1]}")
    return module.main(sys.argv[2:]) or 0


if __name__ == "__main__":
    sys.exit(main())
