"""Data-dependent sizes: what is known about them, and the checks that a graph makes at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fake.seam import symbolic_shapes as _t
from fake.symbols.reasons import Reason, reasons_of
from fake.wrong_arguments import check_type


@dataclass(frozen=True)
class SizeFacts:
    """The facts that an environment knows about a symbolic number.

    Attributes:
        expression: the number in the environment's symbols, after all replacements.
        unbacked: whether it is data-dependent, without an example value.
        min: the least value, ``None`` if unknown.
        max: the greatest value, ``None`` if unknown.
        size_like: whether it is used as a size, and so not negative.
        divisors: numbers known to divide it.
    """

    expression: sympy.Basic
    unbacked: bool
    min: int | None
    max: int | None
    size_like: bool
    divisors: tuple[int, ...]


_ENVIRONMENT = "a ShapeEnv, such as mode.shape_env"


def facts_of(number: int | torch.SymInt) -> SizeFacts:
    """Return the facts about a symbolic integer.

    Raises:
        ArgumentTypeError: ``number`` is not an integer.

    >>> import fake
    >>> mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    >>> with mode:
    ...     rows = torch.ones(4, 3).nonzero().shape[0]
    >>> facts = facts_of(rows)
    >>> facts.unbacked, facts.min, facts.max, facts.size_like
    (True, 0, 12, True)
    """
    check_type("facts_of", "number", number, (int, torch.SymInt), "an integer, such as a size of a tensor")
    if not _t.is_symbolic(number):
        value = int(number)
        return SizeFacts(sympy.Integer(value), False, value, value, value >= 0, ())
    shape_env, expression = number.node.shape_env, number.node.expr  # type: ignore[union-attr]
    bounds = shape_env.bound_sympy(expression)
    divisors = sorted(
        int(mod.args[1])
        for mod in shape_env.divisible
        if shape_env.replace(mod.args[0]) == expression and mod.args[1].is_Integer
    )
    return SizeFacts(
        expression,
        bool(_t.free_unbacked_symbols(expression)),
        int(bounds.lower) if bounds.lower.is_Integer else None,
        int(bounds.upper) if bounds.upper.is_Integer else None,
        expression in shape_env.size_like,
        tuple(divisors),
    )


@dataclass(frozen=True)
class RuntimeAssertion:
    """A condition on data that a graph has to check at run time.

    Attributes:
        condition: the condition in the environment's symbols.
        message: the text of the error.
        reason: who asked; ``None`` in an environment of torch's that did not record it.
    """

    condition: sympy.Basic
    message: str
    reason: Reason | None

    def __str__(self) -> str:
        asked = "" if self.reason is None else f", asked by {self.reason.asked_by}"
        where = "" if self.reason is None or self.reason.where is None else f" at {self.reason.where}"
        return f"{self.condition}{asked}{where}"


def runtime_assertions(shape_env: Any) -> list[RuntimeAssertion]:
    """Return an environment's runtime assertions that its ranges do not prove, in order of origin.

    Raises:
        ArgumentTypeError: ``shape_env`` is not an environment.
    """
    check_type("runtime_assertions", "shape_env", shape_env, _t.TorchShapeEnv, _ENVIRONMENT)
    # torch stores a canonical form of what was asked.
    reasons = {
        _t.canonicalize_bool_expr(r.condition): r for r in reasons_of(shape_env) if r.kind == "assertion"
    }
    return [
        RuntimeAssertion(asserted.expr, asserted.msg, reasons.get(asserted.expr))
        for group in shape_env.deferred_runtime_asserts.values()
        for asserted in group
    ]


def insert_runtime_assertions(
    graph_module: torch.fx.GraphModule, shape_env: Any, name: str = "graph"
) -> None:
    """Insert the runtime assertions of an environment into a graph traced in it, each as early as possible.

    Args:
        graph_module: the graph; changed in place, and recompiled.
        shape_env: the environment.
        name: the graph's name, for the log.

    Raises:
        ArgumentTypeError: ``graph_module`` is not a graph, or ``shape_env`` is not an environment.
    """
    wanted = "a torch.fx.GraphModule"
    check_type("insert_runtime_assertions", "graph_module", graph_module, torch.fx.GraphModule, wanted)
    check_type("insert_runtime_assertions", "shape_env", shape_env, _t.TorchShapeEnv, _ENVIRONMENT)
    _t.insert_deferred_runtime_asserts(graph_module, shape_env, name)
    graph_module.recompile()
