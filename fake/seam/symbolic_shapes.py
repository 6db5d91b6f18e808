"""``torch.fx.experimental.symbolic_shapes`` and related modules: symbols, their functions,
environments, input sources."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
import torch._dynamo.output_graph as dynamo_output_graph
import torch._export.non_strict_utils as export_non_strict
from torch._dynamo.source import (
    AttrSource as AttrSource,
    CallMethodItemSource,
    FloatTensorSource,
    GetItemSource as GetItemSource,
    LocalSource as LocalSource,
    RandomValueSource,
    TensorProperty,
    TensorPropertySource,
)
from torch._guards import Source as Source
from torch.fx.experimental import _config as config
from torch.fx.experimental.sym_node import SymNode, magic_methods
from torch.fx.experimental.symbolic_shapes import (
    SYMPY_INTERP,
    ConstraintViolationError,
    DimDynamic,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
    ShapeEnv as TorchShapeEnv,
    StatelessSymbolicContext,
    SymbolicContext as SymbolicContext,
    canonicalize_bool_expr,
    free_unbacked_symbols,
    guard_or_false,
    is_symbolic,
    statically_known_true,
    uninteresting_files,
)
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.symbol import SymT, symbol_is_type

from fake.seam.dispatch import OpOverload
from fake.seam.dynamo import builder as dynamo_builder
from fake.seam.guards import TracingContext
from fake.seam.pytree import tree_leaves

guards_log = logging.getLogger("torch._guards")

torch_directory = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def text_of_size(size: Any) -> str:
    """Return the code of a size: a number, or an expression of symbols."""
    return PythonPrinter().doprint(size) if isinstance(size, sympy.Basic) else str(int(size))


def concrete_bounds(shape_env: TorchShapeEnv, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
    """Return the least and greatest value of a symbol, ``None`` for a missing bound."""
    found = shape_env.var_to_range.get(symbol)
    if found is None or not symbol.is_integer:
        return None, None
    lower, upper = found.lower, found.upper
    return (int(lower) if lower.is_Integer else None, int(upper) if upper.is_Integer else None)


def assume_divisible(shape_env: TorchShapeEnv, symbol: sympy.Symbol, divisor: int) -> None:
    """Tell an environment what already follows from its guards, but what its own reasoning does not find.

    Args:
        shape_env: the environment.
        symbol: the divisible symbol.
        divisor: the divisor.
    """
    remainder = Mod(symbol, divisor)
    shape_env._add_divisible(remainder)
    shape_env.axioms.update(dict(shape_env.get_implications(sympy.Eq(remainder, 0))))


def hints_of(shape_env: TorchShapeEnv) -> dict[sympy.Symbol, Any]:
    """Return the example values of the backed symbols (2.11 uses another name for them)."""
    found = shape_env.__dict__.get("backed_var_to_val")
    return shape_env.__dict__["var_to_val"] if found is None else found


def user_stack() -> Sequence[Any]:
    """Return the frames of the user's program that Dynamo is interpreting, outermost first;
    empty if there are none."""
    return TracingContext.extract_stack()


def current_node_stack() -> str | None:
    """Return the stack trace, as text, of the graph node that AOTAutograd or an interpreter is replaying."""
    if not torch.fx.traceback.has_preserved_node_meta():
        return None
    return torch.fx.traceback.get_current_meta().get("stack_trace")


def tracked_inputs(shape_env: TorchShapeEnv) -> Iterator[tuple[Source, Any]]:
    """Yield the inputs of the program that Dynamo fakified, with their sources."""
    for tracked in shape_env.tracked_fakes or ():
        yield tracked.source, tracked.fake


def evaluate_by_ranges(shape_env: TorchShapeEnv, guard: Any) -> Any:
    """Return what the ranges of symbols alone say about a guard's condition;
    ``None`` if they do not decide it."""
    return shape_env._maybe_evaluate_static(guard.expr, axioms=(), size_oblivious=guard.size_oblivious)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tell Dynamo that a size must stay symbolic."""
    torch._dynamo.mark_dynamic(tensor, dim)


def copy_node(node: SymNode) -> SymNode:
    """Return a new node that shares all attributes with ``node``:
    what is learned about one holds for the other."""
    copied = object.__new__(node.__class__)
    copied.__dict__ = node.__dict__
    return copied


# Shows that a symbol may have been replaced. Until 2.11 one counter covered everything that is known.
replacements_version = operator.attrgetter(
    "_replacements_version_counter"
    if "_replacements_version_counter" in TorchShapeEnv._init.__code__.co_names
    else "_version_counter"
)


def backed_size_oblivious() -> bool:
    """Return torch's setting that makes backed sizes behave like unbacked ones."""
    return config.backed_size_oblivious


def guards_are_suppressed() -> bool:
    """Return whether this thread evaluates symbolic conditions without recording guards."""
    return TorchShapeEnv._suppress_guards_tls()


class _HiddenFiles:
    """Files whose frames torch skips when it records which line of code asked for a guard.

    Our frames are between torch's symbols and its kernels. torch's list of such files is extended once it
    exists (computing it imports a lot, which the first symbol triggers anyway).
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._reported = False

    def add(self, name: str) -> None:
        """Hide a file, now or as soon as torch has symbols."""
        self._names.add(name)
        if self._reported:
            uninteresting_files().add(name)

    def update_torch(self) -> None:
        """Extend torch's list; call this once there are symbols."""
        if not self._reported:
            uninteresting_files().update(self._names)
            self._reported = True


HIDDEN_FILES = _HiddenFiles()

shape_env_changes = tuple(
    name
    for name in (
        "_constrain_is_bounded", "_constrain_range", "_constrain_range_for_size", "_constrain_unify",
        "_eliminate_unbacked", "_rename_unbacked_to", "constrain_symbol_range", "create_symbol",
        "create_unbacked_symbool", "create_unbacked_symfloat", "create_unbacked_symint",
        "create_unspecified_symbol", "set_real_tensor_prop_unbacked_vals", "set_unbacked_var_to_val",
    )
    if hasattr(TorchShapeEnv, name)
)  # fmt: skip
"""Methods, other than queries, that change what a shape environment knows."""


def hint(value: Any) -> Any:
    """Return the example value of a symbolic number without recording a guard;
    ``None`` for an unbacked one."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def has_unbacked(tree: Any) -> bool:
    """Return whether a size among tensors and numbers is data-dependent."""
    return any(
        bool(free_unbacked_symbols(leaf))
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor | torch.SymInt)
    )
