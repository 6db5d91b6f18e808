"""Patches that acceleration applies to torch's own classes of symbolic numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from fake.seam.dispatch import has_symbols
from fake.seam.fake_tensor import FunctionalTensor, is_functional_tensor
from fake.seam.patches import LEDGER, Patch, When, always
from fake.seam.proxy_tensor import (
    build_proxy_for_sym_expr,
    is_traced,
    make_symbolic_functional,
    proxy_tensor,
    trace_binary,
)
from fake.seam.symbolic_shapes import SymNode
from fake.symbols.node import lean_methods

_FUNCTIONAL_NEW = FunctionalTensor.__new__


def _functional_new(cls: type, elem: Any, mode: Any) -> Any:
    """Construct a FunctionalTensor; given the storage size,
    torch asks fewer questions of a symbolic tensor."""
    if (
        not has_symbols(elem)
        or torch.is_inference_mode_enabled()
        or not is_functional_tensor(elem)
        or elem.layout is not torch.strided
    ):
        return _FUNCTIONAL_NEW(cls, elem, mode)
    return make_symbolic_functional(cls, elem)


def _build_proxy(tracer: Any, expr: Any, out: Any = None) -> Any:
    """Find a number that a trace has not seen, as torch does, but with long products and sums taken two terms
    at a time.

    The storage size that :func:`_functional_new` passes is such a product: torch calls ``operator.mul`` with
    all its factors.
    """
    if not isinstance(expr, (sympy.Add, sympy.Mul)) or len(expr.args) < 3 or is_traced(tracer, expr):
        return build_proxy_for_sym_expr(tracer, expr, out)
    *others, last = expr.args
    first, second = _build_proxy(tracer, expr.func(*others)), _build_proxy(tracer, last)
    return None if first is None or second is None else trace_binary(tracer, expr.func, first, second, out)


def _wrap_set_proxy_slot(torchs_set_proxy_slot: Callable[..., None]) -> Callable[..., None]:
    """Keep a symbol's first proxy when another number is the same symbol (the larger of it and 1, which
    DTensor asks for): otherwise that number would be computed from itself."""

    def set_proxy_slot(number: Any, tracer: Any, proxy: Any) -> None:
        """Replaces torch's function of that name. Args: the symbolic number, the tracer,
        and the number's proxy."""
        symbol = number.node.expr if isinstance(number, torch.SymInt) else None
        first = tracer.sympy_expr_tracker.get(symbol) if isinstance(symbol, sympy.Symbol) else None
        torchs_set_proxy_slot(number, tracer, proxy)
        if first is not None:
            tracer.sympy_expr_tracker[symbol] = first

    return set_proxy_slot


_LOST = "time: symbolic sizes are computed and compared anew each time they occur"

PATCHES = LEDGER.add(
    *(
        Patch(SymNode, name, always(value), adds=True, when=When.COMPILATION, lost=_LOST)
        for name, value in lean_methods().items()
    ),
    Patch(
        FunctionalTensor, "__new__", always(staticmethod(_functional_new)), when=When.COMPILATION, lost=_LOST
    ),
    Patch(proxy_tensor, "_build_proxy_for_sym_expr", always(_build_proxy), when=When.COMPILATION, lost=_LOST),
    Patch(
        proxy_tensor,
        "set_proxy_slot",
        _wrap_set_proxy_slot,
        when=When.COMPILATION,
        lost="tensor parallel models of symbolic sizes: torch's trace of them does not end (RecursionError)",
    ),
)
