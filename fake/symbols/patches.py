"""What acceleration replaces on torch's own classes of symbolic numbers."""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch as _t
from .node import lean_methods, remembering_evaluation

__all__ = ["patches"]


def patches() -> list[tuple[Any, str, Any]]:
    """Attributes of torch and what to put there (owner, name, value), while torch's own are in place."""
    return [
        *((_t.SymNode, name, value) for name, value in lean_methods().items()),
        (_t.ShapeEnv, "evaluate_sym_node", remembering_evaluation(_t.ShapeEnv.evaluate_sym_node)),
        (_t.FunctionalTensor, "__new__", staticmethod(_functional_new)),
    ]


_FUNCTIONAL_NEW = _t.FunctionalTensor.__new__


def _functional_new(cls: type, elem: Any, mode: Any) -> Any:
    """FunctionalTensor's constructor; with the storage size given, torch asks a symbolic tensor fewer questions."""
    if (
        not _t.has_symbols(elem)
        or torch.is_inference_mode_enabled()
        or not torch._is_functional_tensor(elem)
        or elem.layout is not torch.strided
    ):
        return _FUNCTIONAL_NEW(cls, elem, mode)
    return _t.make_symbolic_functional(cls, elem)
