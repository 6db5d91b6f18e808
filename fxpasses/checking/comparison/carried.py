"""Values of nodes on fixed inputs, carried from the graph before one pass to the graph before the next.

Only what a pass changed runs: if everything that the rest of the graph takes from it has the same bits, so do
the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fake.error_text import describe_error
from fxpasses.checking.comparison.rounding import same_bits
from fxpasses.checking.comparison.values import has_nan_or_inf
from fxpasses.checking.comparison.windows import can_be_cut, changed_nodes, changed_values, compared_pairs
from fxpasses.checking.execution.inputs import Unsupported, cloned
from fxpasses.checking.execution.interpret import Run
from fxpasses.graphs.aliasing import is_mutating
from fxpasses.graphs.numbers import computable

_SEED = 20


class Step:
    """What a rewrite changed; computed once for all inputs.

    Args:
        before: the graph before.
        after: the graph after.
        bitwise: whether 0.0 and -0.0 are different values.
        last: the previous rewrite of a graph of the same kind.
    """

    def __init__(
        self, before: fx.GraphModule, after: fx.GraphModule, bitwise: bool, last: Step | None = None
    ) -> None:
        self.before, self.after, self.bitwise = before, after, bitwise
        self.changed = changed_values(before, after)
        self.follows = last is not None and not any(changed_nodes(last.after, before))
        writes = any(n.users for gm in (before, after) for n in gm.graph.nodes if is_mutating(n))
        is_pure = not writes and can_be_cut(before, after, self.changed)
        self.compared_pairs = compared_pairs(before, after, self.changed) if is_pure else None


class CarriedValues:
    """The values of a graph on one set of inputs.

    Args:
        inputs: of the graph.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = inputs
        self._have_nan_or_inf = has_nan_or_inf(inputs)
        self.before: dict[str, Any] | None = None
        """The values of the graph before the latest step, by name; ``None`` if unknown."""
        self._values: dict[str, Any] | None = None
        """Those of the graph after it, with what the rest of the graph takes as before the step."""

    def agrees(self, step: Step) -> bool:
        """Whether a rewritten graph is known to give the same bits. Call this for the steps in order.

        Raises:
            Unsupported: the graph before cannot run on the inputs.
        """
        if self._values is None or not step.follows:
            self._values = _node_values(step.before, self._inputs)
        self.before, self._values = self._values, None
        if step.compared_pairs is None:
            self.before = None
            return False
        try:
            made = Run(step.after).run_calls(step.changed[1], self.before, _SEED)
        except Exception:  # noqa: BLE001  (the whole graph is run then, and shows whether it raises)
            self.before = None
            return False
        new = {**self.before, **made}
        agree = all(self._agree(self.before[a], new[b], step.bitwise) for a, b in step.compared_pairs)
        # Later steps use the values of the graph before. The check of this step decides whether it may
        # differ.
        self._values = new | {b: self.before[a] for a, b in step.compared_pairs}
        return agree

    def _agree(self, old: Any, new: Any, bitwise: bool) -> bool:
        if _equal_bits(old, new, bitwise):
            return True
        if bitwise or not self._have_nan_or_inf or not isinstance(old, Tensor) or not isinstance(new, Tensor):
            return False
        if old.shape != new.shape or old.dtype != new.dtype or not old.is_floating_point():
            return False
        old, new = computable(old), computable(new)
        # NaN and infinities may be lost on such inputs.
        return bool(((old == new) | (~old.isfinite() & (new.isfinite() | (old.isnan() & new.isnan())))).all())


def _node_values(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    run = Run(gm, keep=True)
    try:
        run(cloned(inputs), _SEED)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"the graph itself raises {describe_error(error)}") from error
    return run.values


def _equal_bits(a: Any, b: Any, signs: bool) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_equal_bits(x, y, signs) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and same_bits(a, b, signs)
    return type(a) is type(b) and a == b
