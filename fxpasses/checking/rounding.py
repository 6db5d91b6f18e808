"""Rounding of one tensor: the distance between neighbouring numbers, and random amounts of the size of a rounding error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["perturbed", "spacing"]


def perturbed(result: Any, exact: Any, generator: torch.Generator) -> Any:
    """The result of an operator, moved by a random amount of the size of its rounding error; what is no floating tensor stays.

    Args:
        result: what the operator gave.
        exact: what it gives in float64; anything else if that is not known.
        generator: of the random amounts.
    """
    if isinstance(result, Tensor) and result.is_complex():
        exact = torch.view_as_real(exact.resolve_conj()) if isinstance(exact, Tensor) else None
        return torch.view_as_complex(perturbed(torch.view_as_real(result.resolve_conj()), exact, generator))
    if not isinstance(result, Tensor) or not result.is_floating_point() or not result.numel():
        return result
    got = result.double()
    if isinstance(exact, Tensor) and exact.shape == got.shape:
        error = (got - exact).abs().nan_to_num(0, 0, 0)
        if not error.any():
            return result
    else:
        error = torch.full_like(got, torch.finfo(torch.float64).tiny)
    amount = torch.rand(got.shape, generator=generator, dtype=torch.float64).to(got.device)
    half = spacing(got, result.dtype) / 2
    # Correct rounding is off by anything between none and half a unit, a quarter in the mean. So much is assumed at least, since
    # a result that is nearly exact by luck would not move at all. Half a unit more is what the rounding of the moved number eats up.
    elsewhere = got + (2 * amount - 1) * (error.clamp(half / 2) + half)
    # What is exact stays, and zero is exact nearly always: a mask, a clamp, a product with zero.
    elsewhere = torch.where((got == 0) | (error == 0) | ~got.isfinite(), got, elsewhere)
    return torch.empty_like(result).copy_(elsewhere)


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from each (float64) value to the next one of ``dtype``: one unit in the last place.

    >>> spacing(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64), torch.bfloat16)[:2]
    tensor([0.0078, 0.0156], dtype=torch.float64)
    """
    info = torch.finfo(dtype)
    magnitude = value.abs().clamp(info.smallest_normal, info.max)
    _, exponent = torch.frexp(magnitude)
    return torch.ldexp(torch.full_like(magnitude, info.eps / 2), exponent)
