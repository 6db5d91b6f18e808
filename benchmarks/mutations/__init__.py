"""Single changes to the graphs of real models: each must be detected or shown to change nothing.

This tests thousands of wrong rewrites that nobody chose. In the joint graphs (with ``--forward``, inference
graphs) of small transformers models, it changes one operator, constant, dimension, index, order or operand at
a time. The exact verdict on each is compared with float64, which runs both graphs on other inputs: ``EQUAL``
must hold there, too. Prints the counts, the missed changes, and the cost of an evaluation, per node and
sample and relative to floats.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, fx

import fxpasses
from benchmarks._transformers import NAMES, build
from benchmarks.mutations.changes import Mutation, mutations
from fxpasses.checking.comparison.rounding import less_precise
from fxpasses.checking.comparison.same_function import differences_in_float64
from fxpasses.checking.execution.inputs import cloned, made_up
from fxpasses.checking.execution.interpret import ExactRun, Run
from fxpasses.exact import Original
from fxpasses.exact.samples import EDGES, Family
from fxpasses.testing.proof import _joint_inputs

__all__ = ["MODELS", "Judged", "graph_of", "judge", "main"]

MODELS = ("llama", "gpt2", "bert", "t5", "vit", "resnet", "mixtral", "mamba", "deberta", "wav2vec2")
_SEED = 20
_NEAR = 1e-9


@dataclass(frozen=True)
class Judged:
    """The verdict on a mutation.

    Attributes:
        said: ``DIFFERENT``, ``AT AN EDGE``, ``LESS PRECISE``, ``EQUAL`` or ``UNPROVED``.
        other: whether float64 on other inputs shows another function; ``None`` if it does not run.
        seconds: the time for the verdict.
        text: the verdict in words.
        blamed: whether the first reported node is the changed one or depends on it directly.
    """

    said: str
    other: bool | None
    seconds: float
    text: str
    blamed: bool = True

    @property
    def is_missed(self) -> bool:
        """Whether float64 sees a difference that the exact check does not."""
        return bool(self.other) and self.said in ("EQUAL", "UNPROVED")


def graph_of(
    name: str, dtype: torch.dtype, dynamic: bool, forward: bool = False, training: bool = False
) -> tuple[fx.GraphModule, list[Any]]:
    """Return a model's joint graph as passes see it (or its inference graph), and inputs.

    Args:
        name: the model's name.
        dtype: the dtype of its parameters.
        dynamic: whether sizes are symbolic.
        forward: whether to capture without gradients.
        training: whether dropout and batch statistics are on.
    """
    torch.manual_seed(0)
    built = build(name, training=training, attention="sdpa" if name in ("gpt2", "vit") else "eager")
    inputs = [v.to(dtype) if v.is_floating_point() else v for v in built.inputs]
    with torch.no_grad() if forward else torch.enable_grad():
        captured = fxpasses.capture(built.model.to(dtype), *inputs, dynamic=dynamic)
    if captured.joint is None:
        return captured.forward, list(captured.inputs)
    return captured.joint, _joint_inputs(captured, captured.joint)


class Float64:
    """The original graph in float64, on a few inputs that the exact check does not use."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._gm = gm
        seeded: list[tuple[Family, torch.Generator]] = [
            ("random", torch.Generator().manual_seed(77)),
            ("random", torch.Generator().manual_seed(78)),
            ("ties", torch.Generator().manual_seed(79)),
            ("zeros", torch.Generator().manual_seed(80)),
        ]
        self._inputs = [list(inputs), *(made_up(inputs, family, seed) for family, seed in seeded)]
        self._expected = [self._results(gm, values) for values in self._inputs]

    def _results(self, gm: fx.GraphModule, values: Sequence[Any]) -> list[Any] | None:
        run = ExactRun(gm)
        try:
            return [*run(cloned(values), _SEED), *run.inputs]
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None

    def shows(self, gm: fx.GraphModule) -> bool | None:
        """Return whether a graph gives another result on any of the inputs; ``None`` if none can be run."""
        known = None
        for values, expected in zip(self._inputs, self._expected, strict=True):
            if expected is None:
                continue
            got = self._results(gm, values)
            if got is None:
                return True
            known = False
            floats = [v for v in expected if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
            scale = max((float(v.nan_to_num(0.0, 0.0, 0.0).abs().max()) for v in floats), default=1.0)
            if any(_differ(a, b, scale) for a, b in zip(expected, got, strict=True)):
                return True
        return known


def _differ(a: Any, b: Any, scale: float) -> bool:
    """Return whether two results differ by more than rounding, given the ``scale`` of all results."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a != b)
    if not a.numel():
        return False
    if not a.is_floating_point():
        return not torch.equal(a, b)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return True
    largest = max(float(torch.where(finite, a.abs(), 0.0).max()), 1e-5 * scale)
    return float(torch.where(finite, (a - b).abs(), 0.0).max()) > _NEAR * largest


def judge(original: Original, oracle: Float64, mutation: Mutation) -> Judged | None:
    """Return the verdict on a mutation; ``None`` if it gives no graph with such results."""
    mutant = mutation.made(original.gm)
    if mutant is None:
        return None
    start = time.process_time()
    verdict = original.equivalent(mutant)
    said: str = verdict.kind
    if said == "EQUAL" and mutation.kind == "type":
        said = "LESS PRECISE" if less_precise(original.gm, mutant, original.inputs) else said
    elif said == "EQUAL" and _differs_at_edges(original, mutant):
        said = "AT AN EDGE"
    seconds = time.process_time() - start
    other = oracle.shows(mutant)
    return Judged(said, other, seconds, str(verdict), _is_blamed(mutant, mutation, verdict))


def _differs_at_edges(original: Original, mutant: fx.GraphModule) -> bool:
    """Return whether made-up inputs of the value check show another function where random ones do not."""
    generator = torch.Generator().manual_seed(5)
    families = (made_up(original.inputs, family, generator) for family in EDGES if family != "index bounds")
    return any(differences_in_float64(original.gm, mutant, values) for values in families)


def _is_blamed(mutant: fx.GraphModule, mutation: Mutation, verdict: Any) -> bool:
    """Return whether the reported node is the changed one or one of its users."""
    node = verdict.finding.node if verdict.finding is not None else mutation.node
    changed = next((n for n in mutant.graph.nodes if n.name == mutation.node), None)
    if node in ("", mutation.node) or changed is None or changed.op == "output":
        return True
    return node in {user.name for user in changed.users}


def _cost(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[float, float, int]:
    """Return the seconds of an exact sample (the second, with warm rules), of a float run, and the calls."""
    original = Original(gm, inputs)
    original.run("random", 0)
    start = time.process_time()
    original.run("random", 2)  # same chain as the first sample
    exact = time.process_time() - start
    Run(gm)(cloned(inputs), _SEED)
    start = time.process_time()
    for _ in range(3):
        Run(gm)(cloned(inputs), _SEED)
    floats = (time.process_time() - start) / 3
    return exact, floats, sum(n.op == "call_function" for n in gm.graph.nodes)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks mutations", description=__doc__)
    parser.add_argument(
        "models", nargs="*", help=f"by default {', '.join(MODELS)}; any of {', '.join(NAMES)}"
    )
    parser.add_argument("--count", type=int, default=60, help="mutations of each graph; 0 for all")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes")
    parser.add_argument("--forward", action="store_true", help="graphs of inference")
    parser.add_argument("--training", action="store_true", help="dropout and batch statistics")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--say", action="store_true", help="print every verdict")
    arguments = parser.parse_args(argv)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(
        logging.CRITICAL
    )  # about changes that make no graph
    console = Console(width=180, highlight=False, soft_wrap=True)
    total: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: list[float] = []
    missed = 0
    for name in arguments.models or MODELS:
        dtype = getattr(torch, arguments.dtype)
        gm, inputs = graph_of(name, dtype, arguments.dynamic, arguments.forward, arguments.training)
        exact, floats, calls = _cost(gm, inputs)
        listed = list(mutations(gm))
        random.Random(arguments.seed).shuffle(listed)
        original, oracle = Original(gm, inputs), Float64(gm, inputs)
        counts: Counter[str] = Counter()
        begun = time.process_time()
        for mutation in listed:
            if arguments.count and counts.total() >= arguments.count:
                break
            judged = judge(original, oracle, mutation)
            if judged is None:
                continue
            said = "MISSED" if judged.is_missed else judged.said
            counts[said] += 1
            total[mutation.kind][said] += 1
            seconds.append(judged.seconds)
            missed += judged.is_missed
            odd = judged.is_missed or judged.said == "UNPROVED" or not judged.blamed
            odd |= judged.said == "DIFFERENT" and judged.other is False
            if odd or arguments.say:
                blame = "" if judged.blamed else " (blames another node)"
                console.print(
                    f"  {said}{blame} float64: {judged.other} {name}: {mutation.kind} of {mutation.node}: {mutation.told}: {judged.text}",
                    markup=False,
                )
        console.print(
            f"{name:10} {calls:5} calls, {exact * 1e3:.0f} ms a sample ({exact / calls * 1e6:.0f} us a call, {exact / floats:.1f} x floats); "
            f"{time.process_time() - begun:.0f} s: {dict(counts)}",
            markup=False,
        )
    for kind, counts in total.items():
        console.print(f"{kind:15} {dict(counts)}", markup=False)
    if seconds:
        every = sum(sum(c.values()) for c in total.values())
        console.print(
            f"{every} mutations, {missed} missed; a verdict takes {statistics.median(seconds):.2f} s of CPU (median; at most {max(seconds):.1f})"
        )
    return int(missed > 0)
