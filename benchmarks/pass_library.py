"""Gain of each library pass: a model with and without it through Inductor, in turns, one line per pass.

``step`` is the median processor time of a step with the pass, relative to that without it. ``saved`` compares
the bytes that the forward pass saves for the backward pass, ``compile`` the processor time of a first step
(without caches). Below 1.00, the pass helps. ``Inductor's`` is the step without the pass but with Inductor's
equivalent switched on, if there is one. ``--real`` measures models of transformers and published
architectures.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fxpasses
from benchmarks._library_models import CASES, Case
from benchmarks._library_real_models import REAL_CASES
from benchmarks._library_recipes import RECIPES
from benchmarks._timing import interleaved

_EQUIVALENTS: dict[str, dict[str, object]] = {
    "chunk_logits": {"auto_chunker.enable": True},  # since 2.14
    "concat_matmuls": {
        "pre_grad_fusion_options": {"batch_linear": {}, "batch_linear_lhs": {}, "cat_linear": {}},
        "post_grad_fusion_options": {"batch_linear_post_grad": {}},
        "cpp.enable_concat_linear": True,
    },
}
"""Options of Inductor that are equivalent to a pass and off by default. Its attention patterns are on."""


@dataclass(frozen=True)
class Measured:
    """Ratios of one case: with the pass over without it, and Inductor's equivalent over without it."""

    milliseconds: float
    step: float
    compile: float
    saved: float | None
    fired: bool
    equivalent: float | None


def measure(name: str, case: Case, rounds: int) -> Measured:
    """Compile the case with and without the pass, twice each, and time both in turns.

    The second compilation counts: the first one loads and compiles what torch and Inductor need only once.
    """
    steps: dict[str, Callable[[], object]] = {}
    first: dict[str, list[float]] = {"without": [], "with": []}
    saved: dict[str, int] = {}
    last = [case.partner, "default"] if case.partner else []
    pipelines = {"without": ["default", *last], "with": ["default", name, "default", *last]}
    if case.training:
        for label, passes in pipelines.items():
            model, inputs = _seeded(case)
            saved[label] = fxpasses.capture(model, *inputs, passes=passes, decompose=True).saved_bytes
    valid = torch._inductor.config.get_config_copy()
    own = {key: value for key, value in _EQUIVALENTS.get(name, {}).items() if key in valid}
    for label in ("without", "with", "with", "without", *(["equivalent"] if own else [])):
        torch._dynamo.reset()
        model, inputs = _seeded(case)
        options = {"passes": pipelines.get(label, pipelines["without"]), **case.options}
        if label == "equivalent":
            options["inductor"] = own
        compiled = torch.compile(_own_function(model), backend="fxpasses", options=options, dynamic=False)
        steps[label] = _step(compiled, model, inputs, case.training)
        start = _processor_seconds()
        steps[label]()
        first.setdefault(label, []).append(_processor_seconds() - start)
        steps[label]()
    changes = fxpasses.stats().pass_changes.get(name, 0)
    medians = interleaved(steps, rounds, time.process_time)  # ignores other load on the machine
    return Measured(
        medians["without"] * 1e3,
        medians["with"] / medians["without"],
        first["with"][-1] / first["without"][-1],
        saved["with"] / saved["without"] if saved.get("without") else None,
        bool(changes),
        medians["equivalent"] / medians["without"] if own else None,
    )


def _processor_seconds() -> float:
    """Return the CPU seconds of this process and of the compilers that it has started."""
    return sum(os.times()[:4])


def _seeded(case: Case) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return case.build()


def _own_function(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the model in its own function, because Dynamo stores its compilations there."""
    return lambda *inputs: model(*inputs)


def _step(
    compiled: Callable[..., Tensor], model: Callable[..., Tensor], inputs: tuple[Tensor, ...], training: bool
) -> Callable[[], object]:
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []

    def train() -> None:
        for tensor in (*parameters, *inputs):
            tensor.grad = None
        output = compiled(*inputs)
        (output if output.dim() == 0 else output.float().pow(2).mean()).backward()

    def infer() -> None:
        with torch.no_grad():
            compiled(*inputs)

    return train if training else infer


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pass_library", description=__doc__)
    parser.add_argument("names", nargs="*", help="passes to measure; all by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--real", action="store_true", help="models of transformers and published architectures"
    )
    arguments = parser.parse_args(argv)
    measured = {**REAL_CASES, **RECIPES} if arguments.real else CASES
    unknown = [name for name in arguments.names if name not in measured]
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(measured)}")
    console = Console(width=150)
    table = Table(title="With the pass / without it (CPU, Inductor)")
    for heading in ("pass", "model", "ms without", "step", "Inductor's", "saved", "compile", "fired"):
        table.add_column(heading, justify="left" if heading in ("pass", "model") else "right")
    torch.compile(lambda x: x.sin().sum(), backend="fxpasses")(torch.ones(3, requires_grad=True)).backward()
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        for name, cases in measured.items():
            if arguments.names and name not in arguments.names:
                continue
            for case in cases:
                torch._dynamo.reset()
                fxpasses.reset_stats()
                result = measure(name, case, arguments.rounds)
                saved = "" if result.saved is None else f"{result.saved:.2f}"
                console.print(f"{name}, {case.description}: step {result.step:.2f}", highlight=False)
                table.add_row(
                    name, case.description, f"{result.milliseconds:.2f}", f"{result.step:.2f}",
                    "" if result.equivalent is None else f"{result.equivalent:.2f}", saved,
                    f"{result.compile:.2f}", "yes" if result.fired else "NO",
                )  # fmt: skip
    console.print(table)
    return 0
