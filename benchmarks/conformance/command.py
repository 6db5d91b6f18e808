"""The command line of the conformance program: run the sweep and print the table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.conformance.compare import Verdict
from benchmarks.conformance.engines import ENGINES
from benchmarks.conformance.errors import ConformanceOptionsError
from benchmarks.conformance.layouts import LAYOUTS
from benchmarks.conformance.refusals import sweep_refusals
from benchmarks.conformance.report import Tally
from benchmarks.conformance.sweep import TABLES, Options, sweep

FINDINGS = (Verdict.MISMATCH, Verdict.UNSUPPORTED, Verdict.ERROR, Verdict.ACCEPTED, Verdict.OTHER_TYPE)


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 1 if there is a mismatch, an unsupported operator or an error, else 0.

    If the options select nothing, exit with 2.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__)
    parser.add_argument(
        "patterns", nargs="*", help="names of entries, as shell patterns ('fft.*'); default: all"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, default="fake", help="torch's, torch's with our rules, or ours"
    )
    parser.add_argument(
        "--refusals", action="store_true", help="compare what is refused: samples with one thing made wrong"
    )
    parser.add_argument("--symbolic", action="store_true", help="mark all dimensions dynamic")
    parser.add_argument("--tables", default=",".join(TABLES), help=f"of {','.join(TABLES)}")
    parser.add_argument("--layouts", default="given", help=f"of {','.join(LAYOUTS)}, or 'all'")
    parser.add_argument(
        "--dtypes", default="float32", help="comma-separated; where none is supported, another is taken"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are")
    parser.add_argument("--databases", default="op,custom,module", help="of op,custom,module")
    parser.add_argument("--samples", type=int, default=8, help="at most so many samples an entry; 0 for all")
    parser.add_argument("--shard", default="0/1", help="INDEX/COUNT: every COUNT-th entry from INDEX on")
    parser.add_argument(
        "--repeat", type=int, default=1, help="run the engine so often, judge the last (cached) run"
    )
    parser.add_argument("--show", action="append", choices=[*map(str, Verdict), "findings"], default=[])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="print the union of results written before; run nothing"
    )
    parser.add_argument("--progress", action="store_true", help="print each entry's name to standard error")
    choice = parser.parse_args(arguments)

    try:
        if choice.merge:
            tally = Tally()
            for path in choice.merge:
                tally.merge(Tally.read(path))
        else:
            options = _options(choice)
            progress = (lambda name: print(name, file=sys.stderr)) if choice.progress else (lambda name: None)
            tally = (sweep_refusals if choice.refusals else sweep)(options, progress)
    except (ConformanceOptionsError, OSError, json.JSONDecodeError) as error:
        parser.error(str(error))
    if not tally.count(*Verdict):
        parser.error("nothing was compared: no sample has these tables, layouts and dtypes")
    if choice.json:
        tally.write(choice.json)
    shown = [v for name in choice.show for v in (FINDINGS if name == "findings" else (Verdict(name),))]
    tally.print(Console(width=150), details=shown, title=f"{choice.engine} against eager")
    return 1 if tally.count(*FINDINGS) else 0


def _options(choice: argparse.Namespace) -> Options:
    index, slash, count = choice.shard.partition("/")
    if not (slash and index.isdigit() and count.isdigit()):
        raise ConformanceOptionsError(
            f"shard: {choice.shard!r} is not INDEX/COUNT, such as 0/4", argument="shard"
        )
    return Options(
        engine=choice.engine,
        symbolic=choice.symbolic,
        tables=_listed(choice.tables),
        layouts=list(LAYOUTS) if choice.layouts == "all" else _listed(choice.layouts),
        dtypes=[_dtype(name) for name in _listed(choice.dtypes)],
        patterns=choice.patterns,
        databases=_listed(choice.databases),
        samples=choice.samples,
        shard=(int(index), int(count)),
        repeat=choice.repeat,
        device=choice.device,
    )


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConformanceOptionsError(
            f"dtypes: there is no torch.{name}, or it is no dtype", argument="dtypes"
        )
    return found
