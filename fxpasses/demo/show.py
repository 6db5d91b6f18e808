"""The demo on the terminal: progress during training, tables at the end."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fxpasses.counters import stats
from fxpasses.demo.close_results import FACTOR, Verdict, judge, step_gradient_distance
from fxpasses.demo.training import DemoSettings, Run, train


@dataclass(frozen=True)
class Demo:
    """A finished demo.

    Attributes:
        settings: the settings of the model and the training.
        runs: the contestants: float64, eager, fxpasses, Inductor.
        verdict: fxpasses compared with eager.
        theirs: Inductor compared with eager.
    """

    settings: DemoSettings
    runs: tuple[Run, ...]
    verdict: Verdict
    theirs: Verdict

    def summary(self) -> dict[str, Any]:
        """Return the figures, without gradients."""
        contestants = {
            run.name: {
                "losses": run.losses,
                "seconds": run.seconds,
                "compile_seconds": run.compile_seconds,
                "step_seconds": run.step_seconds,
                "graphs": run.graphs,
                "recompiles": run.recompiles,
            }
            for run in self.runs
        }
        return {
            "agrees": self.verdict.agrees,
            "settings": self.settings,
            "runs": contestants,
            "fxpasses": self.verdict,
            "inductor": self.theirs,
        }


def run_demo(settings: DemoSettings) -> Demo:
    """Train all contestants, with a progress bar on standard error."""
    console = Console(stderr=True)
    console.print(
        f"Training a {settings.layers}-layer GPT on the standard library's source for {settings.steps} steps: "
        "in eager (float64 and float32), with fxpasses and with Inductor."
    )
    # Compilations are timed with torch's caches off, which torch warns about.
    warnings.filterwarnings("ignore", message=".*force_disable_caches")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    runs: list[Run] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=settings.steps)
        for runs in train(settings):
            progress.update(task, advance=1, description=f"loss {runs[2].losses[-1]:.3f}")
    reference, eager, ours, inductor = runs
    return Demo(settings, tuple(runs), judge(ours, eager, reference), judge(inductor, eager, reference))


def show_demo(demo: Demo, console: Console | None = None) -> None:
    """Print losses, times and the verdict."""
    console = console or Console()
    _, eager, ours, inductor = demo.runs
    console.print(_loss_table(eager, ours))
    console.print(_summary_table(eager, ours, inductor, demo.verdict, demo.theirs))
    _print_verdict(console, demo.verdict, demo.settings)


def _loss_table(eager: Run, ours: Run) -> Table:
    table = Table(title="Loss per step (nats)")
    for heading in (
        "step",
        "batch x length",
        "eager",
        "fxpasses",
        "difference",
        "gradient difference (relative)",
    ):
        table.add_column(heading, justify="right")
    for step, (batch, length) in enumerate(ours.sizes):
        a, b = eager.losses[step], ours.losses[step]
        gradient = step_gradient_distance(ours, eager, step)
        table.add_row(
            str(step + 1),
            f"{batch} x {length}",
            f"{a:.6f}",
            f"{b:.6f}",
            f"{abs(a - b):.1e}",
            f"{gradient:.1e}",
        )
    return table


def _summary_table(eager: Run, ours: Run, inductor: Run, verdict: Verdict, theirs: Verdict) -> Table:
    table = Table(title="Summary")
    for heading in ("", "eager", "fxpasses", "inductor"):
        table.add_column(heading, justify="left" if not heading else "right")
    row = table.add_row
    row("last loss", *(f"{run.losses[-1]:.6f}" for run in (eager, ours, inductor)))
    row(
        "largest loss difference from eager",
        "",
        f"{verdict.loss_difference:.1e}",
        f"{theirs.loss_difference:.1e}",
    )
    row(
        "largest gradient difference from eager (relative)",
        "",
        f"{verdict.gradient_difference:.1e}",
        f"{theirs.gradient_difference:.1e}",
    )
    row("compile seconds", "", f"{ours.compile_seconds:.1f}", f"{inductor.compile_seconds:.1f}")
    row("graphs", "", str(ours.graphs), str(inductor.graphs))
    row("recompiles", "", str(ours.recompiles), str(inductor.recompiles))
    row(
        "milliseconds per step (median)",
        *(f"{run.step_seconds * 1e3:.1f}" for run in (eager, ours, inductor)),
    )
    return table


def _print_verdict(console: Console, verdict: Verdict, settings: DemoSettings) -> None:
    changes = ", ".join(f"{name} {count}" for name, count in sorted(stats().pass_changes.items()))
    console.print(f"graphs changed by passes: {changes or 'none'}")
    if settings.report:
        console.print(f"captured graphs: {settings.report}")
    console.print(
        f"Distance from float64: loss {verdict.loss_error:.1e} (tolerance {verdict.loss_tolerance:.1e}), "
        f"gradients {verdict.gradient_error:.1e} (tolerance {verdict.gradient_tolerance:.1e}); "
        f"the tolerance is {FACTOR:g} x what eager float32 is away from float64."
    )
    if verdict.agrees:
        console.print("[green]fxpasses agrees with eager.[/green]")
    else:
        console.print("[red]fxpasses DISAGREES with eager beyond the tolerance.[/red]")
