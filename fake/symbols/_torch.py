"""Every private name of torch that shape environments, guards and contracts rely on, and version differences."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
import torch._dynamo.output_graph as dynamo_output_graph
import torch._export.non_strict_utils as export_non_strict
from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
from torch._guards import Source
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import (
    SYMPY_INTERP,
    ConstraintViolationError,
    DimDynamic,
    ShapeEnv as TorchShapeEnv,
    StatelessSymbolicContext,
    canonicalize_bool_expr,
    free_unbacked_symbols,
    guard_or_false,
    is_symbolic,
    statically_known_true,
)
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Min, ModularIndexing, PythonMod
from torch.utils._sympy.printers import PythonPrinter

from fake.seam.dispatch import OpOverload
from fake.seam.dynamo import builder as dynamo_builder
from fake.seam.guards import TracingContext
from fake.seam.symbolic_shapes import Max, Mod, int_oo

guards_log = logging.getLogger("torch._guards")

torch_directory = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def concrete_bounds(shape_env: TorchShapeEnv, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
    """The least and the greatest value of a symbol, ``None`` where there is no bound."""
    found = shape_env.var_to_range.get(symbol)
    if found is None or not symbol.is_integer:
        return None, None
    lower, upper = found.lower, found.upper
    return (int(lower) if lower.is_Integer else None, int(upper) if upper.is_Integer else None)


def assume_divisible(shape_env: TorchShapeEnv, symbol: sympy.Symbol, divisor: int) -> None:
    """Tell an environment what follows from its guards already, but not to its own reasoning."""
    remainder = Mod(symbol, divisor)
    shape_env._add_divisible(remainder)
    shape_env.axioms.update(dict(shape_env.get_implications(sympy.Eq(remainder, 0))))


def hints_of(shape_env: TorchShapeEnv) -> dict[sympy.Symbol, Any]:
    """The example values of the backed symbols (2.11 has them under another name)."""
    found = shape_env.__dict__.get("backed_var_to_val")
    return shape_env.__dict__["var_to_val"] if found is None else found


def user_stack() -> Sequence[Any]:
    """The frames of the user's program that Dynamo is interpreting (outermost first), or nothing."""
    return TracingContext.extract_stack()


def current_node_stack() -> str | None:
    """The stack trace of the graph node that AOTAutograd or an interpreter is replaying, as text."""
    if not torch.fx.traceback.has_preserved_node_meta():
        return None
    return torch.fx.traceback.get_current_meta().get("stack_trace")


def tracked_inputs(shape_env: TorchShapeEnv) -> Iterator[tuple[Source, Any]]:
    """The inputs of the program that Dynamo fakified, with how to reach them."""
    for tracked in shape_env.tracked_fakes or ():
        yield tracked.source, tracked.fake


def answer_without_guards(shape_env: TorchShapeEnv, guard: Any) -> Any:
    """What the ranges of symbols alone say of a guard's condition; ``None`` where they do not."""
    return shape_env._maybe_evaluate_static(guard.expr, axioms=(), size_oblivious=guard.size_oblivious)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tell Dynamo that a size must stay symbolic."""
    torch._dynamo.mark_dynamic(tensor, dim)


torchs_build_proxy = proxy_tensor._build_proxy_for_sym_expr
"""Finds the numbers of a trace that make up an expression; with a symbolic number, has it stand for them."""


def is_traced(tracer: Any, expr: sympy.Basic) -> bool:
    """Whether a trace has met an expression."""
    return tracer.sympy_expr_tracker.get(expr) is not None


def trace_two(tracer: Any, kind: type, first: Any, second: Any, out: Any = None) -> Any:
    """The sum or product (``kind``: of sympy) of two traced numbers, in the trace; as the symbolic number ``out``, if given."""
    combine: Any = proxy_tensor._sympy_handlers()[kind]
    if out is None:
        return combine(first, second)
    proxy_tensor._sym_register(tracer, combine, (first, second), out)
    return out
