"""Checks of matmuls and of attention."""

from __future__ import annotations

from typing import Any

import torch

from fake.kernels.checks.check_registry import OpOverload, check_for, is_refused, refuse
from fake.kernels.outputs import is_symbolic


@check_for("_scaled_mm", "_scaled_mm_v2")
def check_scaled_mm_shapes(func: OpOverload, bound: dict[str, Any]) -> None:
    """Factors must be matrices whose inner sizes agree; ``_scaled_mm_v2`` skips that check for empty ones."""
    self, mat2 = bound["self"], bound["mat2"]
    second = func._schema.name.endswith("v2")
    for name, value in (("self", self), ("mat2", mat2)):
        refuse(
            second and value.dim() != 2, func,
            f"argument {name!r} must be a matrix, but has {value.dim()} dimensions", ValueError,
        )  # fmt: skip
    of_nothing = second and not is_symbolic((self, mat2), {}) and self.numel() * mat2.numel() == 0
    refuse(
        not of_nothing and self.dim() == 2 and mat2.dim() == 2 and self.shape[1] != mat2.shape[0], func,
        f"mat_a and mat_b shapes cannot be multiplied ({list(self.shape)} and {list(mat2.shape)})",
        ValueError if second else RuntimeError,
    )  # fmt: skip


@check_for("_scaled_mm", "_scaled_mm_v2")
def check_scaled_mm_dtypes(func: OpOverload, bound: dict[str, Any]) -> None:
    """On CPU, factors must be float8 and scales float32."""
    factors = [bound[name] for name in ("self", "mat2")]
    scales = bound["scale_a"], bound["scale_b"]
    if factors[0].device.type != "cpu" or any(factor.dim() != 2 for factor in factors):
        return
    for name, value in zip(("self", "mat2"), factors, strict=True):
        refuse(
            value.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2), func,
            f"Invalid scaling configuration: argument {name!r} should be float8, but is {value.dtype}", ValueError,
        )  # fmt: skip
    for scale in (
        s for scaling in scales for s in (scaling if isinstance(scaling, list | tuple) else (scaling,))
    ):
        refuse(
            scale.dtype is not torch.float32, func,
            f"Invalid scaling configuration: scales should be float32, but one is {scale.dtype}", ValueError,
        )  # fmt: skip


@check_for("addmm")
def check_addmm(func: OpOverload, bound: dict[str, Any]) -> None:
    """The tensor that is added to a matmul must broadcast to it and have at most two dimensions."""
    result = (bound["mat1"].shape[0], bound["mat2"].shape[-1])
    shape = bound["self"].shape
    fits = len(shape) <= 2 and all(
        a in (b, 1) for a, b in zip(reversed(shape), reversed(result), strict=False)
    )
    refuse(
        not fits,
        func,
        f"argument 'self' of shape {list(shape)} cannot be expanded to the matmul's {list(result)}",
    )


@check_for("scaled_dot_product_attention")
def check_attention_mask(func: OpOverload, bound: dict[str, Any]) -> None:
    """The mask is added to the scores in place, so it must not broadcast them to a larger shape."""
    query, key, mask = bound["query"], bound["key"], bound["attn_mask"]
    if mask is None or query.device.type != "cpu" or min(query.dim(), key.dim()) < 2:
        return
    ranks = max(query.dim(), key.dim())
    if query.dim() == key.dim() == 3 and not is_refused(_call_with_4d_mask):
        ranks = 4
    refuse(
        mask.dim() > ranks, func,
        f"output with {ranks} dimensions doesn't match the broadcast shape of argument 'attn_mask', {list(mask.shape)}",
    )  # fmt: skip
    batches = zip(_reversed_batch_sizes(query, ranks), _reversed_batch_sizes(key, ranks), strict=True)
    scores = (key.shape[-2], query.shape[-2], *(b if _is_known_equal(a, 1) else a for a, b in batches))
    for place, (score, size) in enumerate(zip(scores, reversed(mask.shape), strict=False)):
        refuse(
            _is_known_equal(score, 1) and isinstance(size, int) and size != 1, func,
            f"scores have size 1 in dimension {-1 - place}, but argument 'attn_mask' has shape {list(mask.shape)}",
        )  # fmt: skip


def _call_with_4d_mask() -> torch.Tensor:
    query, key = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
    return torch.nn.functional.scaled_dot_product_attention(query, key, key, torch.ones(1, 1, 1, 5))


def _reversed_batch_sizes(tensor: torch.Tensor, ranks: int) -> list[Any]:
    """Return the batch sizes (before the last two), last first, padded with 1."""
    sizes = list(reversed(tensor.shape[:-2]))
    return [*sizes, *[1] * (ranks - 2 - len(sizes))]


def _is_known_equal(size: Any, value: int) -> bool:
    """Return whether a size is this number. Symbolic sizes are not compared: that would add a guard."""
    return isinstance(size, int) and size == value
