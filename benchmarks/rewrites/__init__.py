"""Correct and wrong rewrites of many kinds: no correct one may be rejected, no wrong one be ``EQUAL``.

Each program is captured as ``torch.compile`` would (as a joint or inference graph), in float32, bfloat16 and
float16, with fixed and symbolic sizes. It then undergoes the value check of a pass: the exact verdict,
rounding, and made-up inputs at edges.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from torch import fx

import fxpasses
from benchmarks.rewrites.pairs import REWRITES, Program, Rewriting
from fxpasses.checking.checked_calls import Rewrite
from fxpasses.checking.comparison.values import Mismatch
from fxpasses.checking.findings import findings
from fxpasses.errors import CaptureError
from fxpasses.exact import equivalent
from fxpasses.graphs.rewriting import outputs_of
from fxpasses.pass_manager.pass_base import graph_pass
from fxpasses.testing.proof import _joint_inputs

__all__ = ["REWRITES", "main", "verdicts"]


def _captured(
    program: Program, inputs: Sequence[Any], gradients: bool, dynamic: bool
) -> tuple[fx.GraphModule, list[Any]]:
    def call(*args: Any) -> Any:
        # Use the inputs in order, because graphs order their inputs by first use.
        return program(*(a.view_as(a) for a in args))

    with torch.enable_grad() if gradients else torch.no_grad():
        captured = fxpasses.capture(call, *inputs, dynamic=dynamic)
    if captured.joint is None:
        return captured.forward, list(captured.inputs)
    return captured.joint, _joint_inputs(captured, captured.joint)


def _origins(gm: fx.GraphModule) -> dict[Any, fx.Node]:
    """Identify a graph's inputs: tensors by number, sizes by the first tensor and dimension that has them."""
    found: dict[Any, fx.Node] = {}
    nodes = gm.graph.find_nodes(op="placeholder")
    tensors = [n for n in nodes if isinstance(n.meta["val"], torch.Tensor)]
    sizes = {
        str(size): (i, d)
        for i, n in reversed(list(enumerate(tensors)))
        for d, size in reversed(list(enumerate(n.meta["val"].shape)))
    }
    for node in nodes:
        found[tensors.index(node) if node in tensors else sizes[str(node.meta["val"])]] = node
    return found


@graph_pass
def _rewrite(gm: fx.GraphModule) -> bool:
    """A placeholder for the pass."""
    return True


def verdicts(item: Rewriting, program: Program, dtype: torch.dtype, dynamic: bool) -> tuple[str, str]:
    """Return the exact verdict on rewriting ``item.before`` to ``program``, and the value check's message.

    The message is "" if the value check has no objection.

    Args:
        item: the rewriting.
        program: one of its two rewrites.
        dtype: the dtype of floating-point inputs.
        dynamic: whether sizes are symbolic.
    """
    torch.manual_seed(0)
    made = item.inputs()
    inputs = [
        v.to(dtype).requires_grad_(item.gradients and v.dim() > 0) if v.is_floating_point() else v
        for v in made
    ]
    inputs = [v.detach() if i in item.state else v for i, v in enumerate(inputs)]
    before, values = _captured(item.before, inputs, item.gradients, dynamic)
    after, _ = _captured(program, inputs, item.gradients, dynamic)
    if [*_origins(before)] != [*_origins(after)] or len(outputs_of(before.graph)) != len(
        outputs_of(after.graph)
    ):
        return "SPECIALIZED", ""  # captured separately, they have other sizes as symbols
    exact = equivalent(before, after, values)
    kind = "joint" if any(str(n.target).startswith("tangents") for n in before.graph.nodes) else "inference"
    strides: list[str] = []

    def counts(mismatch: Mismatch) -> bool:
        # Passes that change strides restore them; these rewrites do not.
        if "with strides" in mismatch.problem:
            strides.append("strides")
        return "with strides" not in mismatch.problem

    found, why = findings(Rewrite(_rewrite, kind, before, after), values, counts)
    return str(exact), "; ".join(map(str, [*found, *why])) or "".join(strides[:1])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks rewrites", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all by default")
    parser.add_argument("--dtypes", nargs="*", default=["float32"], help="float32, bfloat16, float16")
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes")
    parser.add_argument("--say", action="store_true", help="print every verdict")
    arguments = parser.parse_args(argv)
    console = Console(width=180, highlight=False, soft_wrap=True)
    counts: Counter[str] = Counter()
    for name, item in REWRITES.items():
        if arguments.names and not any(part in name for part in arguments.names):
            continue
        for dtype in arguments.dtypes:
            for label, program in (("right", item.right), ("wrong", item.wrong)):
                start = time.process_time()
                try:
                    exact, checked = verdicts(item, program, getattr(torch, dtype), arguments.dynamic)
                except CaptureError as error:
                    counts["not captured"] += 1
                    console.print(f"{name}, {dtype}, {label}: not captured: {str(error)[:300]}", markup=False)
                    continue
                seconds = time.process_time() - start
                said = exact.partition(" ")[0].rstrip(":")
                counts[f"{label}: {said}"] += 1
                if said == "SPECIALIZED":
                    continue
                alarm = checked not in ("", "strides") if label == "right" else not checked
                counts[f"{label}: {'FALSE ALARM' if label == 'right' else 'ESCAPED'}"] += alarm
                odd = alarm or (said != "EQUAL" if label == "right" else said in ("EQUAL", "UNPROVED"))
                if odd or arguments.say:
                    console.print(
                        f"{name}, {dtype}, {label}, {seconds:.1f} s:\n  exact: {exact}\n  check: {checked}",
                        markup=False,
                    )
    console.print(dict(counts))
    return int(bool(counts["right: FALSE ALARM"] or counts["wrong: ESCAPED"]))
