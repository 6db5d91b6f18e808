"""List the benchmarks, or run one: ``python -m benchmarks NAME [its arguments]``."""

import importlib
import pkgutil
import sys

import benchmarks


def main() -> int:
    names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_"))
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print("usage: python -m benchmarks NAME, where NAME is one of: " + ", ".join(names))
        return 2
    module = importlib.import_module(f"benchmarks.{sys.argv[1]}")
    return module.main(sys.argv[2:]) or 0


if __name__ == "__main__":
    sys.exit(main())
