"""Growth of compile time with depth: a deep model against a shallow one with the same layers, in turns.

Reports the seconds that compilation adds to the first training step (first step minus a later one), as wall
time and as CPU time including the compilers that are started. Both processes of a pair run at the same time,
so that they meet the same machine load (shared machines vary by a quarter within minutes). Run nothing else,
and use at least two cores. Results are medians; those of ratios are over pairs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table

from benchmarks.regions import WHO, in_a_process

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks region_depth", description=__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[4, 48], metavar=("SHALLOW", "DEEP"))
    parser.add_argument("--shapes", nargs="+", choices=["static", "dynamic"], default=["static", "dynamic"])
    parser.add_argument("--who", choices=WHO, default="regions")
    parser.add_argument(
        "--rounds", type=int, default=3, help="processes for each depth, of which medians are shown"
    )
    arguments = parser.parse_args(argv)
    shallow, deep = arguments.layers
    console = Console(width=120)
    table = Table(
        "shapes", f"{shallow} layers (s)", f"{deep} layers (s)", "ratio", "CPU (s)", "CPU (s)", "ratio"
    )
    for shapes in arguments.shapes:
        runs: dict[int, list[tuple[float, float]]] = {shallow: [], deep: []}
        for number in range(arguments.rounds):
            with ThreadPoolExecutor() as pool:
                pair = (shallow, deep) if number % 2 == 0 else (deep, shallow)
                for layers, seconds in zip(
                    pair, pool.map(functools.partial(_run, arguments.who, shapes), pair), strict=True
                ):
                    runs[layers].append(seconds)
                    console.log(shapes, layers, "{:.2f} s, {:.2f} s of CPU".format(*seconds))
        cells = [shapes]
        for kind in range(2):
            a, b = (statistics.median(run[kind] for run in runs[layers]) for layers in (shallow, deep))
            pairs = zip(runs[shallow], runs[deep], strict=True)
            ratio = statistics.median(after[kind] / before[kind] for before, after in pairs)
            cells += [f"{a:.2f}", f"{b:.2f}", f"{ratio:.2f}"]
        table.add_row(*cells)
    console.print(table)
    return 0


def _run(who: str, shapes: str, layers: int) -> tuple[float, float]:
    """Return the wall and CPU seconds that compilation adds to the first training step of a process."""
    settings = argparse.Namespace(
        who=who, layers=layers, dynamic=shapes == "dynamic", width=128, heads=4, batch=2, tokens=64, steps=5
    )
    found = in_a_process(settings, None)
    return found["first"] - found["later"], found["cpu"] - found["later"]
