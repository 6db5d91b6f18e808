"""Compare a compiled model with eager: outputs, gradients and buffers, with tolerances from float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def cast(value: Any, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Copies of the tensors in ``value`` on ``device``, floating ones as ``dtype``, leaves as leaves."""

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        copied = x.detach().clone().to(device)
        if copied.is_floating_point():
            copied = copied.to(dtype)
        return copied.requires_grad_(x.requires_grad)

    return tree_map(one, value)


def results(model: nn.Module, call: Callable[..., Any], inputs: tuple, backward: bool) -> dict[str, Tensor]:
    """All that a step of the model leaves behind, by name."""
    model.zero_grad()
    outputs = [t for t in tree_leaves(call(*inputs)) if isinstance(t, Tensor)]
    found = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    if backward:
        # Weight the elements, so that a gradient that is wrongly summed or permuted shows.
        loss = sum((t.double() * _weights(t)).sum() for t in outputs if t.requires_grad)
        loss.backward()
        found |= {
            f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        tensors = [t for t in inputs if isinstance(t, Tensor) and t.grad is not None]
        found |= {f"gradient of input {i}": t.grad.clone() for i, t in enumerate(tensors)}
    return found | {f"buffer {n}": b.clone() for n, b in model.named_buffers()}


def _weights(t: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.3, t.numel(), dtype=torch.float64, device=t.device).reshape(t.shape)


def assert_agrees(
    model: nn.Module,
    compile: Callable[[nn.Module], Callable[..., Any]],
    batches: list[tuple],
    dtype: torch.dtype = torch.float32,
    backward: bool = True,
    device: str = "cpu",
) -> None:
    """Run the batches through eager and compiled copies of ``model``; fail where they differ.

    The compiled result may be at most four times as far from float64 as eager's is, plus eight roundings
    of the largest value of the tensor (for a gradient: or of a hundredth of the largest gradient, since one that
    is zero by cancellation, as a key bias has, is all rounding of larger terms).
    """
    exact, eager, ours = (
        copy.deepcopy(model).to(device, torch.float64),
        copy.deepcopy(model).to(device, dtype),
        copy.deepcopy(model).to(device, dtype),
    )
    compiled = compile(ours)
    for batch in batches:
        wanted = results(exact, exact, cast(batch, torch.float64, device), backward)
        usual = results(eager, eager, cast(batch, dtype, device), backward)
        got = results(ours, compiled, cast(batch, dtype, device), backward)
        assert got.keys() == usual.keys()
        largest = max((_largest(v) for n, v in wanted.items() if n.startswith("gradient")), default=0.0)
        for name, theirs in usual.items():
            mine, reference = got[name], wanted[name]
            assert mine.shape == theirs.shape, name
            assert mine.dtype is theirs.dtype, name
            assert mine.stride() == theirs.stride() or not name.startswith("output"), name
            if not theirs.is_floating_point():
                assert torch.equal(mine, theirs), name
                continue
            scale = max(_largest(reference), largest / 100 if name.startswith("gradient") else 0.0)
            precision = (
                torch.bfloat16
                if name.startswith("output") and theirs.dtype is torch.bfloat16
                else theirs.dtype
            )
            allowed = 4 * _distance(theirs, reference) + 8 * torch.finfo(precision).eps * scale
            assert _distance(mine, reference) <= allowed, (
                f"{name}: {_distance(mine, reference):.2e} > {allowed:.2e}"
            )


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
