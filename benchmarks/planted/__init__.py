"""Planted faults: how many the checks find, whom they blame, and how soon they give a repro of what size.

Each plant is a wrong pass (or partition) on one program, trained for one step with ``check="values"``. Prints
one line per plant: which check found it (structure or value check), whether it blames the right culprit (the
pass, and the site, line or module if only that is wrong), CPU seconds from the start of compilation to the
repro file, and the number of calls in the repro.

The modules of ``FAMILIES`` hold plants of one kind each. ``right`` holds correct passes that look similar.
``programs`` holds the programs that they run on.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_leaves

import fxpasses
from benchmarks.planted import (
    edges,
    gradients,
    layers,
    memory,
    models,
    numbers,
    outside,
    precision,
    rarely,
    right,
    situations,
    sizes,
    stages,
    strangers,
)
from benchmarks.planted.plant import Plant
from fxpasses.errors import StageError, StructureError

__all__ = ["FAMILIES", "Verdict", "judge", "main"]

FAMILIES: dict[str, dict[str, Plant]] = {
    module.__name__.rpartition(".")[2]: module.PLANTS
    for module in (
        gradients,
        sizes,
        memory,
        numbers,
        precision,
        stages,
        edges,
        outside,
        models,
        situations,
        layers,
        rarely,
        strangers,
    )
}


@dataclass(frozen=True)
class Verdict:
    """The result for a plant.

    Attributes:
        found: ``"structure"``, ``"values"``, ``"error"`` (it raised), or "" if the plant escaped.
        blamed: whether the right culprit was blamed.
        seconds: CPU seconds up to the repro.
        calls: the size of the repro in calls; 0 if there is none.
        shows: whether the repro shows the fault in its own process; ``None`` if that was not tried.
        text: what was reported.
    """

    found: str
    blamed: bool
    seconds: float
    calls: int
    shows: bool | None
    text: str


def judge(plant: Plant, run_repro: bool = False) -> Verdict:
    """Compile and train the plant's program for one step, and judge the report."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.process_time()
        try:
            train(plant, directory)
        except Exception as error:  # noqa: BLE001  (whatever is raised is judged)
            seconds = time.process_time() - start
            cause: Any = getattr(error, "inner_exception", error)
            if not isinstance(cause, StageError):
                return Verdict("", False, seconds, 0, None, f"{type(cause).__name__}: {cause}")
            repro = getattr(cause, "repro", "")
            shows = None
            if run_repro and repro:
                shows = (
                    subprocess.run([sys.executable, repro], capture_output=True, check=False).returncode == 1
                )
            kind = "structure" if isinstance(cause, StructureError) else "values"
            if not isinstance(cause, (StructureError, fxpasses.ValueMismatchError)):
                kind = "error"
            return Verdict(
                kind, _is_right(plant, cause), seconds, getattr(cause, "repro_calls", 0), shows, str(cause)
            )
        idle = [p.name for p in plant.passes if not fxpasses.stats().pass_changes.get(p.name)]
        text = f"the plant has changed nothing: {', '.join(idle)}" if idle else ""
        return Verdict("", False, time.process_time() - start, 0, None, text)


def train(plant: Plant, directory: str) -> None:
    """Run one step of the plant's program with the value check on.

    Raises:
        Exception: what the checks find, possibly wrapped by Dynamo.
    """
    torch._dynamo.reset()
    fxpasses.reset_stats()
    torch.manual_seed(0)
    model, inputs = plant.workload()
    options = {
        "compiler": "eager",
        "check": "values",
        "report": directory,
        "passes": ["default", *plant.passes],
        **plant.options,
    }
    with plant.surroundings(), torch.enable_grad() if plant.training else torch.no_grad():
        outputs = torch.compile(model, backend="fxpasses", options=options, dynamic=plant.dynamic)(*inputs)
        if plant.training:
            wanted = [v for v in tree_leaves(outputs) if isinstance(v, torch.Tensor) and v.requires_grad]
            sum(v.float().square().sum() for v in wanted).backward()  # type: ignore[union-attr]


def _is_right(plant: Plant, error: StageError) -> bool:
    partners = getattr(error, "partners", ())
    named = error.pass_name == plant.guilty and tuple(partners) == plant.partners
    sites = getattr(error, "sites", ())
    where = f"{error.location} {[f'{site.index}: {site}' for site in sites]}"
    return named and plant.at in where and (not plant.alone or len(sites) == 1)


def false_alarms(console: Console) -> list[str]:
    """Run the correct passes. Return the names of those that raise an alarm, or that change nothing."""
    alarms = []
    for name, plant in right.PLANTS.items():
        with tempfile.TemporaryDirectory() as directory:
            try:
                train(plant, directory)
            except Exception as error:  # noqa: BLE001  (whatever is raised is an alarm)
                cause = getattr(error, "inner_exception", error)
                console.print(f"FALSE ALARM {name}: {type(cause).__name__}: {cause}", markup=False)
                alarms.append(name)
            else:
                changed = fxpasses.stats().pass_changes
                missing = [p.name for p in plant.passes if not changed.get(p.name)]
                if missing:
                    console.print(f"right: {name}: {', '.join(missing)} changed nothing", markup=False)
                    alarms.append(name)
    return alarms


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks planted", description=__doc__)
    parser.add_argument("families", nargs="*", help="of: " + ", ".join(FAMILIES) + ", right; all by default")
    parser.add_argument("--only", default="", help="plants whose name contains this")
    parser.add_argument("--run", action="store_true", help="run each repro in a process of its own")
    parser.add_argument("--say", action="store_true", help="print what the error says")
    arguments = parser.parse_args(argv)
    console = Console(width=160, highlight=False)
    verdicts: dict[str, Verdict] = {}
    for family, plants in FAMILIES.items():
        if arguments.families and family not in arguments.families:
            continue
        for name, plant in plants.items():
            if arguments.only not in name:
                continue
            verdict = verdicts[f"{family}: {name}"] = judge(plant, arguments.run)
            _print_line(console, f"{family}: {name}", verdict, arguments.say)
    _print_summary(console, verdicts)
    alarms: list[str] = []
    if not arguments.only and (not arguments.families or "right" in arguments.families):
        alarms = false_alarms(console)
        console.print(f"{len(alarms)} false alarms on {len(right.PLANTS)} right passes")
    return int(bool(alarms) or not all(v.found and v.blamed for v in verdicts.values()))


def _print_line(console: Console, name: str, verdict: Verdict, say: bool) -> None:
    found = verdict.found or "ESCAPED"
    blamed = "" if not verdict.found else "right" if verdict.blamed else "WRONG BLAME"
    shown = {None: "", True: ", shown", False: ", NOT SHOWN"}[verdict.shows]
    repro = f"{verdict.calls:2} calls{shown}" if verdict.calls else "no repro" if verdict.found else ""
    console.print(f"{name:45} {found:10} {blamed:12} {verdict.seconds:6.1f} s  {repro}", markup=False)
    if say or not verdict.blamed:
        console.print(verdict.text, markup=False)


def _print_summary(console: Console, verdicts: dict[str, Verdict]) -> None:
    if not verdicts:
        return
    found = [v for v in verdicts.values() if v.found]
    sizes = [v.calls for v in found if v.calls]
    console.print(
        f"{len(found)} of {len(verdicts)} found, {sum(v.blamed for v in found)} blamed right, {len(sizes)} repros of "
        f"{statistics.median(sizes or [0]):g} calls (median; at most {max(sizes, default=0)}), {statistics.median(v.seconds for v in found or verdicts.values()):.1f} s "
        f"(median; at most {max((v.seconds for v in found), default=0):.1f})"
    )
