"""A closer comparison of rewritten calls, for graphs in low precision.

In a deep graph in bfloat16 the rounding of all that surrounds a rewrite hides a mistake of some percent. So both graphs
run once more: what comes before the rewritten calls in the graph's own precision (it is the same in both, bit by bit),
the rewritten calls in their own precision, and what comes after them in float64. What differs now is due to the rewrite, and
the tolerance is what the rounding of the rewritten calls alone amounts to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from fxpasses._torch import OpOverload
from fxpasses.checking.collectives import simulated
from fxpasses.checking.inputs import cloned
from fxpasses.checking.interpret import (
    Run,
    as_float64,
    as_recorded_dtype,
    call_in_float64,
    call_with_rounding_noise,
)
from fxpasses.checking.rounding import perturbed_by_ulp
from fxpasses.checking.tolerance import Deviation, deviation
from fxpasses.graphs.aliasing import is_random
from fxpasses.graphs.rewriting import value_of

__all__ = ["FocusedRun", "Rewritten", "focused_deviations", "has_low_precision"]

_SAMPLES, _MORE_SAMPLES = 4, 24
_SEED = 20
Precision = Literal["own", "exact", "rounded"]
"""How the rewritten calls run: as they are, in float64, or with their rounding resampled."""


@dataclass(frozen=True)
class Rewritten:
    """The names of the calls that differ between two graphs.

    Attributes:
        before: the calls of the first graph that the second has not, or has otherwise.
        after: those of the second.
    """

    before: frozenset[str]
    after: frozenset[str]


def has_low_precision(gm: fx.GraphModule) -> bool:
    """Whether the graph computes in bfloat16 or float16."""
    return any(
        isinstance(value_of(n), Tensor) and value_of(n).dtype in (torch.bfloat16, torch.float16)
        for n in gm.graph.nodes
    )


class FocusedRun(Run):
    """Runs a graph with float64 behind the rewritten calls.

    Args:
        gm: the graph.
        rewritten: names of the rewritten calls.
        borders: names of the nodes whose values rewritten calls of either graph read: in a rounded run, they are rounded
            once more, since a rewrite may do that.
        precision: of the rewritten calls.
        seed: of the rounding.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        rewritten: frozenset[str],
        borders: frozenset[str] = frozenset(),
        precision: Precision = "own",
        seed: int = 0,
    ) -> None:
        super().__init__(gm, "huge" if precision == "rounded" else "nan")
        self._rewritten, self._borders, self._precision = rewritten, borders, precision
        self._generator = torch.Generator().manual_seed(seed)
        self._behind = _behind(gm, rewritten)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self._precision == "rounded" and n.name in self._borders and n.op != "output":
            return tree_map(lambda v: self._rounded(v, n), result)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a call in the precision that is asked for. Args: those of :meth:`torch.fx.Interpreter.call_function`."""
        node = self.current
        assert node is not None
        mine = node.name in self._rewritten
        if not mine and node.name not in self._behind:
            return super().call_function(target, args, kwargs)
        if is_random(node) or (mine and self._precision != "exact"):
            args, kwargs = map_arg(
                (node.args, node.kwargs), lambda a: as_recorded_dtype(self.env[a], value_of(a))
            )
            if mine and self._precision == "rounded" and isinstance(target, OpOverload):
                return call_with_rounding_noise(target, args, kwargs, self._generator)
            return simulated(target)(*args, **kwargs)
        return call_in_float64(target, args, kwargs)

    def _rounded(self, value: Any, node: fx.Node) -> Any:
        fake = value_of(node)
        if not isinstance(value, Tensor) or not isinstance(fake, Tensor) or not fake.is_floating_point():
            return value
        return perturbed_by_ulp(value, fake, self._generator)


def _behind(gm: fx.GraphModule, rewritten: frozenset[str]) -> set[str]:
    """The nodes that depend on a rewritten one."""
    found: set[str] = set()
    for node in gm.graph.nodes:
        if any(v.name in found or v.name in rewritten for v in node.all_input_nodes):
            found.add(node.name)
    return found


def focused_deviations(
    before: fx.GraphModule,
    after: fx.GraphModule,
    rewritten: Rewritten,
    inputs: Sequence[Any],
    types: Sequence[Any],
) -> dict[int, Deviation]:
    """The deviations of the outputs of two graphs because of rewritten calls, by position.

    Args:
        before: the graph before.
        after: the graph after.
        rewritten: what differs between them.
        inputs: what to run them on.
        types: for each output of the graph, its value in an ordinary run.
    """
    borders = frozenset(
        value.name
        for gm, names in ((before, rewritten.before), (after, rewritten.after))
        for node in gm.graph.nodes
        if node.name in names
        for value in node.all_input_nodes
    )

    def run(gm: fx.GraphModule, names: frozenset[str], precision: Precision, seed: int = 0) -> list[Any]:
        outputs = FocusedRun(gm, names, borders, precision, seed)(cloned(inputs), _SEED)
        return [as_float64(value) for value in outputs]

    try:
        exact = run(before, rewritten.before, "exact")
        own = run(before, rewritten.before, "own")
        got = run(after, rewritten.after, "own")
        samples = [run(before, rewritten.before, "rounded", seed) for seed in range(_SAMPLES)]
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return {}  # an operator that does not know float64: the ordinary comparison has to do
    found: dict[int, Deviation] = {}
    for position, value in enumerate(types):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        # Infinities were compared in the graph's own types; where these runs have some, there is no distance to judge.
        known = own[position].isfinite() & exact[position].isfinite()
        judged = torch.where(known, got[position], own[position])
        for count in (_SAMPLES, _MORE_SAMPLES):
            samples += [run(before, rewritten.before, "rounded", seed) for seed in range(len(samples), count)]
            how = deviation(
                own[position],
                exact[position],
                [sample[position] for sample in samples],
                judged,
                dtype=value.dtype,
            )
            if how is None or how.is_clear:
                break
        if how is not None:
            found[position] = how
    return found
