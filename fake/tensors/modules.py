"""``module.to(...)``, ``.half()``, ``.cuda()``: modules with fake parameters convert as modules with data do.

In eager a conversion gives each parameter new data (``parameter.data = ...``): the parameter stays the same
object, in optimizers, in tied layers and under weak references. For fake parameters ``nn.Module._apply``
instead swaps whole tensors, and refuses if anything else refers to them, which is nearly always the case.
While a mode of this package exists, a wrapper of ``_apply`` does for fake parameters what eager does; modules
without any go straight to torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fake.seam.dispatch import has_compatible_data
from fake.seam.patches import LEDGER, Patch, When

Conversion = Callable[[torch.Tensor], torch.Tensor]


def _wrap_apply(torchs: Any) -> Any:
    @functools.wraps(torchs)
    def _apply(self: torch.nn.Module, fn: Conversion, recurse: bool = True) -> torch.nn.Module:
        fakes = {key: p for key, p in self._parameters.items() if p is not None and _is_ours(p)}
        if not fakes or torch.__future__.get_swap_module_params_on_conversion():
            return torchs(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        converted: dict[str, Any] = {key: _convert(parameter, fn) for key, parameter in fakes.items()}
        try:
            for key in fakes:
                self._parameters[key] = None
            return torchs(self, fn, False)  # buffers, and parameters with data
        finally:
            self._parameters.update(converted)

    return _apply


def _is_ours(parameter: torch.Tensor) -> bool:
    """Return whether a mode of this package made it: those of torch's own modes keep torch's behavior."""
    return hasattr(getattr(parameter, "fake_mode", None), "dispatch_outside")


def _convert(parameter: Any, fn: Conversion) -> Any:
    """Convert a parameter and its gradient; keep the object unless eager makes a new one (on ``meta``)."""
    gradient = parameter.grad
    with torch.no_grad():
        made = fn(parameter)
        made_gradient = None if gradient is None else fn(gradient)
    kept = _replace_data(parameter, made)
    result = parameter if kept else torch.nn.Parameter(made, parameter.requires_grad)
    if made_gradient is not None and not (kept and _replace_data(gradient, made_gradient)):
        result.grad = made_gradient.requires_grad_(gradient.requires_grad)
    return result


def _replace_data(tensor: torch.Tensor, made: torch.Tensor) -> bool:
    """Replace a tensor's data in place, if it can hold the new data and no option asks for new objects.
    Returns whether it did."""
    if torch.__future__.get_overwrite_module_params_on_conversion():
        return False
    if not has_compatible_data(tensor, made):
        return False
    tensor.data = made
    return True


PATCHES = LEDGER.add(
    Patch(
        torch.nn.Module,
        "_apply",
        _wrap_apply,
        when=When.MODE,
        versions=None,
        lost="module.to(), .half() and the like are refused for modules whose parameters are fake",
    )
)
