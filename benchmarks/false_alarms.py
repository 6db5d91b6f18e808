"""False alarms of the value check: correct passes over transformers models, one training step each.

The default passes and the whole library run with ``check="values"``. Dropout is on where a configuration has
it. Prints one line per model: the seconds of the step, the number of compared rewrites, and the alarm, if
any. Every alarm here is false.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import torch
from rich.console import Console

import fxpasses
from benchmarks._transformers import NAMES, build
from fxpasses.errors import StageError
from fxpasses.passes import library


def first_step(name: str, dtype: torch.dtype, dynamic: bool, training: bool) -> str:
    """Train one model for a step with the check on. Return what was reported, or ""."""
    torch._dynamo.reset()
    fxpasses.reset_stats()
    torch.manual_seed(0)
    built = build(name, training=training)
    inputs = [v.to(dtype) if v.is_floating_point() else v for v in built.inputs]
    options: dict[str, Any] = {
        "compiler": "eager",
        "check": "values",
        "passes": ["default", *(p for p in library() if p != "bucket_collectives"), "default"],
    }
    compiled = torch.compile(built.model.to(dtype), backend="fxpasses", options=options, dynamic=dynamic)
    try:
        for _ in range(2):
            compiled(*inputs).float().square().mean().backward()
    except Exception as error:  # noqa: BLE001  (whatever is raised is told)
        cause = getattr(error, "inner_exception", error)
        kind = "ALARM" if isinstance(cause, StageError) else "does not run"
        return f"{kind}: {type(cause).__name__}: {str(cause)[:1500]}"
    return ""


class _Unchecked(logging.Handler):
    """Collects warnings about what the check cannot look at."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks false_alarms", description=__doc__)
    parser.add_argument("models", nargs="*", help="all by default: " + ", ".join(NAMES))
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--evaluation", action="store_true", help="without dropout and batch statistics")
    arguments = parser.parse_args(argv)
    console = Console(width=150)
    dtype = torch.bfloat16 if arguments.bfloat16 else torch.float32
    unchecked = _Unchecked()
    logging.getLogger("fxpasses.checking").addHandler(unchecked)
    alarms = failed = 0
    names = arguments.models or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in names:
        unchecked.said.clear()
        start = time.process_time()
        said = first_step(name, dtype, arguments.dynamic, not arguments.evaluation)
        alarms += said.startswith("ALARM")
        failed += said.startswith("does not run")
        changes = sum(fxpasses.stats().pass_changes.values())
        failed += not changes and not said.startswith("does not run")
        console.print(
            f"{name:14} {time.process_time() - start:6.1f} s CPU {changes:3} rewrites  {said}"
            + (f"  ({len(unchecked.said)} not checked: {unchecked.said[0]})" if unchecked.said else ""),
            markup=False,
            highlight=False,
        )
    console.print(
        f"{alarms} false alarms on {len(names) - failed} models; {failed} do not run, or nothing was rewritten"
    )
    return int(bool(alarms or failed))
